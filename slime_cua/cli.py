"""`slime-cua`: one command, subcommands by role. Heavy imports come after parsing, so `--help` answers at once."""

from __future__ import annotations

import sys
from collections.abc import Callable

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("slime_cua.train:main", "train a policy: cold start, asynchronous RL, evaluation, export"),
    "sandbox": ("sandbox_cluster.cli:main", "gateway and host agents for desktops"),
    "runs": ("slime_cua.launch.runs:main", "list runs, show one, remove what nothing references"),
    "simulate": (
        "slime_cua.launch.simulate:main",
        "replay a trace under several schedules on a virtual clock",
    ),
    "tasks": ("sandbox_cluster.tasks.cli:main", "check task files"),
    "pool": (
        "slime_cua.synthesis.pool_build:main",
        "choose training tasks of moderate difficulty for a policy",
    ),
    "convert": ("slime_cua.launch.convert:main", "Megatron checkpoints to Hugging Face and back"),
    "plan": ("slime_cua.launch.plan:main", "memory of a training layout, from the model's config alone"),
    "doctor": ("slime_cua.launch.doctor:main", "what this machine has and lacks"),
    "report": ("slime_cua.observability.report:main", "write the one-page HTML report of a run"),
}


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand; its exit code. Errors of ours end as a sentence on stderr and exit code 1 (usage: 2)."""
    arguments = sys.argv[1:] if argv is None else argv
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0
    name, rest = arguments[0], arguments[1:]
    if name not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(name, COMMANDS, n=1)
        print(
            f"slime-cua: no command {name!r}" + (f"; did you mean {near[0]}?" if near else ""),
            file=sys.stderr,
        )
        print(_usage(), file=sys.stderr)
        return 2
    return guarded(_load(COMMANDS[name][0]), rest)


def guarded(command: Callable[[list[str]], int], arguments: list[str]) -> int:
    """Run `command`; turn errors into a sentence, Ctrl-C into exit code 130. Only a bug of ours shows a traceback, too."""
    from slime_cua.core.errors import SlimeCuaError

    try:
        return command(arguments)
    except SlimeCuaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command continues where it stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Exception as error:
        import traceback

        traceback.print_exc()
        print(
            f"error: unexpected {type(error).__name__}: {error}; please report the lines above",
            file=sys.stderr,
        )
        return 1


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "usage: slime-cua COMMAND ...\n\n" + "\n".join(lines) + "\n\nslime-cua COMMAND --help says more."


def _load(target: str) -> Callable[[list[str]], int]:
    import importlib

    module, _, attribute = target.partition(":")
    command: Callable[[list[str]], int] = getattr(importlib.import_module(module), attribute)
    return command


if __name__ == "__main__":
    raise SystemExit(main())
