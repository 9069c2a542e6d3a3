"""Starter tasks: short generated desktop tasks that a tiny policy can learn, with judges and a scripted solution."""
