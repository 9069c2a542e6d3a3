"""Start a program and end when its window is there: python3 -I -S open_window.py TITLE PROGRAM [ARGUMENT...].

TITLE is a part of the window's title. The program lives on. Needs wmctrl.
"""

import os
import subprocess
import sys
import time

TIMEOUT_S = 25.0
PAUSE_S = 0.04


def main():
    title, *command = sys.argv[1:]
    surroundings = {
        **os.environ,
        "GSETTINGS_BACKEND": "memory",
        "NO_AT_BRIDGE": "1",
        "GTK_OVERLAY_SCROLLING": "0",
    }
    null = subprocess.DEVNULL
    program = subprocess.Popen(
        command, stdin=null, stdout=null, stderr=null, env=surroundings, start_new_session=True
    )
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        windows = subprocess.run(["wmctrl", "-l"], capture_output=True, text=True).stdout
        if any(title in line for line in windows.splitlines()):
            subprocess.run(["wmctrl", "-a", title])
            return
        if program.poll() not in (None, 0):
            sys.exit(f"{command[0]} ended with {program.returncode} before it had a window")
        time.sleep(PAUSE_S)
    sys.exit(f"no window with {title!r} in its title after {TIMEOUT_S:.0f} s")


if __name__ == "__main__":
    main()
