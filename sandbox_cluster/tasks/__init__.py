"""Task files, set-up steps, and the check that no task is solved before it starts."""
