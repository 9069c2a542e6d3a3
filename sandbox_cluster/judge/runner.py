"""The program inside the jail: runs one judge or one metric and writes one line of JSON. Standard library only.

OS-Helix' rule, "if execution raises an exception, it returns the score accumulated before the exception", is kept for a
judge that accumulates in a local variable called `score`: the value it had when the exception left the judge's own frame.
Faults that say nothing about the result (a missing library, no memory, a name that does not exist, a started process)
stay faults: no score. desktop-env's libraries and metrics try to start programs and go on without; that is no fault.
"""

import json
import os
import resource
import sys
import types
from pathlib import Path

FAULTS_OF_THE_JUDGE = (ImportError, MemoryError, SyntaxError, NameError, RecursionError)
STARTS = (
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
    "os.exec",
    "os.spawn",
    "subprocess.Popen",
    "pty.spawn",
)
UPSTREAM = "desktop_env.evaluators.metrics"
_started: list = []


def main() -> None:
    job = json.loads(Path("/job/job.json").read_text())
    out = int(sys.argv[1])
    os.set_inheritable(out, False)
    _limit(job["limits"])
    sys.path.append("/job")
    if job.get("site"):
        sys.path.append("/site")
    sys.addaudithook(_watch)
    reply = _run(job)
    if _started and job["kind"] != "upstream":
        reply = {"fault": f"the judge tried to start a process ({_started[0]})"}
    sys.stdout.flush()
    os.write(out, json.dumps(reply).encode()[:60000] + b"\n")
    os._exit(0)


def _limit(limits: dict) -> None:
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def _watch(event: str, arguments: tuple) -> None:
    if event in STARTS:
        _started.append(event)
        raise PermissionError("a judge starts no processes")


def _run(job: dict) -> dict:
    try:
        function, arguments, options = _load(job)
    except BaseException as error:
        return {"fault": f"the judge cannot be loaded: {_said(error)}"}
    try:
        value = function(*arguments, **options)
        return {"value": value} if job["kind"] == "parse" else _answer(value)
    except MemoryError:
        return {"fault": "the judge ran out of memory"}
    except Exception as error:
        fault = {"fault": f"the judge raised {_said(error)}"}
        return _accumulated(error, function, fault) if job["kind"] == "code" else fault
    except BaseException as error:
        return {"fault": f"the judge raised {_said(error)}"}


def _load(job: dict) -> tuple:
    arguments = [_value(part) for part in job["arguments"]]
    if job["kind"] == "metric":
        import metrics

        return getattr(metrics, job["func"]), arguments, job.get("options") or {}
    if job["kind"] == "upstream":
        return _upstream(job["module"], job["func"]), arguments, job.get("options") or {}
    if job["kind"] == "parse":
        import parsers

        return getattr(parsers, job["func"]), arguments, {}
    space: dict = {"__name__": "judge"}
    exec(compile(job["code"], "<judge>", "exec"), space)
    return space[job["func"]], arguments, {}


def _upstream(module: str, func: str):
    """A metric of desktop-env, without what the package imports for all its other metrics."""
    import importlib

    import desktop_env

    folder = Path(desktop_env.__file__).parent / "evaluators"
    for name, place in ((UPSTREAM.rpartition(".")[0], folder), (UPSTREAM, folder / "metrics")):
        package = types.ModuleType(name)
        package.__path__ = [str(place)]
        sys.modules[name] = package
    sys.modules.setdefault("easyocr", types.ModuleType("easyocr"))
    return getattr(importlib.import_module(f"{UPSTREAM}.{module}"), func)


def _value(part: dict):
    """A text or JSON value as it is; files as their paths in here, or what a parser makes of one."""
    if "parse" in part:
        import parsers

        return getattr(parsers, part["parse"])(part["file"], **part.get("with", {}))
    return part["value"] if "value" in part else part["files"] if "files" in part else part["file"]


def _answer(value) -> dict:
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, (bool, int, float)):
        return {"score": repr(float(value))}
    return {"fault": f"the judge returned {type(value).__name__} {str(value)[:80]!r}, not a number"}


def _accumulated(error: Exception, function, fault: dict) -> dict:
    if isinstance(error, FAULTS_OF_THE_JUDGE):
        return fault
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is getattr(function, "__code__", None):
            score = trace.tb_frame.f_locals.get("score")
            if isinstance(score, (int, float)) and not isinstance(score, bool):
                return {**_answer(score), "raised": _said(error)}
        trace = trace.tb_next
    return fault


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]


if __name__ == "__main__":
    main()
