"""`slime-cua sandbox`: the roles of the sandbox cluster. Options of a role: `slime-cua sandbox ROLE --help`."""

from __future__ import annotations

import sys

_USAGE = """usage: slime-cua sandbox ROLE ...

  gateway  the cluster's one port: leases, queue, OSWorld pass-through (also: python -m sandbox_cluster.gateway)
  host     the agent of one desktop machine (also: python -m sandbox_cluster.host)
  install-evaluators   desktop-env's metrics into an environment of their own, for the judges of a desktop machine

docs/sandbox.md says how they go together."""


def main(argv: list[str] | None = None) -> int:
    """Run one role until it is told to stop; its exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE)
        return 0
    role, rest = arguments[0], arguments[1:]
    if role == "gateway":
        from sandbox_cluster.gateway.__main__ import main as run
    elif role == "host":
        from sandbox_cluster.host.__main__ import main as run
    elif role == "install-evaluators":
        from sandbox_cluster.judge.evaluators import main as run
    else:
        print(f"slime-cua sandbox: no role {role!r}\n{_USAGE}", file=sys.stderr)
        return 2
    return run(rest)
