"""The programs a fake desktop knows: a few words of shell and of Python over a dict of files. Nothing is ever executed.

Shell lines: echo, cat, sleep, true, false, exit, rm, with `> file`, `>> file`, `1>&2`. Python: print, open().read/write,
time.sleep, sys.exit, + and * of constants. Anything else is said to be unknown to a fake desktop, returncode 127.
"""

from __future__ import annotations

import ast
import asyncio
import errno
import re
import shlex
from dataclasses import dataclass
from typing import Any

from sandbox_cluster.api import ExecuteReply
from sandbox_cluster.providers.base import HOME, Command

Files = dict[str, bytes]
_SHELLS = ("/bin/sh", "/bin/bash", "sh", "bash")
_PYTHONS = ("/usr/bin/python3", "python3", "python")
_WORDS = ("echo", "cat", "sleep", "true", "false", "exit", "rm")


class _Exit(Exception):
    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class _Run:
    files: Files
    cwd: str
    stdout: str = ""
    stderr: str = ""

    def path(self, name: str) -> str:
        name = HOME + name[1:] if name.startswith("~/") else name
        return name if name.startswith("/") else f"{self.cwd}/{name}"


async def run_program(command: Command, files: Files) -> ExecuteReply:
    """What `command` prints. FileNotFoundError for a program that a fake desktop does not know."""
    run = _Run(files, command.cwd)
    program = command.argv[0]
    if program in _SHELLS:
        coroutine = _shell(run, _source(command, "-c"))
    elif program in _PYTHONS:
        coroutine = _python(run, _source(command, "-c"))
    elif program in _WORDS:
        coroutine = _shell(run, shlex.join(command.argv))
    else:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", program)
    code: int | None
    try:
        code = await asyncio.wait_for(coroutine, None if command.is_detached else command.timeout_s)
    except TimeoutError:
        code = None
    if command.is_merged:
        run.stdout, run.stderr = run.stdout + run.stderr, ""
    limit = command.max_output_bytes
    stdout, stderr = run.stdout.encode()[:limit], run.stderr.encode()[:limit]
    return ExecuteReply(
        stdout=stdout.decode(errors="ignore"),
        stderr=stderr.decode(errors="ignore"),
        returncode=code,
        is_timeout=code is None,
        is_truncated=len(run.stdout.encode()) > limit or len(run.stderr.encode()) > limit,
    )


def _source(command: Command, flag: str) -> str:
    if command.script is not None:
        return command.script.decode(errors="replace")
    argv = command.argv
    return argv[argv.index(flag) + 1] if flag in argv[:-1] else ""


async def _shell(run: _Run, source: str) -> int:
    code = 0
    try:
        for line in re.split(r"\n|;|&&", source):
            words = shlex.split(line, comments=True)
            if words:
                code = await _line(run, words)
    except _Exit as end:
        return end.code
    except ValueError as error:
        run.stderr += f"syntax error: {error}\n"
        return 2
    return code


async def _line(run: _Run, words: list[str]) -> int:
    target, is_append = "", False
    for mark in (">>", ">"):
        if mark in words[:-1]:
            target, is_append = run.path(words[words.index(mark) + 1]), mark == ">>"
            words = words[: words.index(mark)]
    is_error = "1>&2" in words
    words = [word for word in words if word != "1>&2"]
    output, code = await _word(run, words)
    if target:
        run.files[target] = (run.files.get(target, b"") if is_append else b"") + output.encode()
    elif is_error:
        run.stderr += output
    else:
        run.stdout += output
    return code


async def _word(run: _Run, words: list[str]) -> tuple[str, int]:
    name, rest = words[0], words[1:]
    if name == "echo":
        return " ".join(rest) + "\n", 0
    if name in ("true", "false"):
        return "", int(name == "false")
    if name == "exit":
        raise _Exit(int(rest[0]) if rest else 0)
    if name == "sleep":
        await asyncio.sleep(float(rest[0]))
        return "", 0
    if name == "rm":
        removed = [run.files.pop(run.path(item), None) for item in rest]
        return "", int(None in removed)
    if name == "cat":
        missing = [item for item in rest if run.path(item) not in run.files]
        if missing:
            run.stderr += f"cat: {missing[0]}: No such file or directory\n"
            return "", 1
        return "".join(run.files[run.path(item)].decode(errors="replace") for item in rest), 0
    run.stderr += f"{name}: not known to a fake desktop\n"
    return "", 127


async def _python(run: _Run, source: str) -> int:
    try:
        for statement in ast.parse(source).body:
            if isinstance(statement, ast.Import):
                continue
            if not isinstance(statement, ast.Expr):
                raise NotImplementedError(ast.unparse(statement))
            await _value(run, statement.value)
    except _Exit as end:
        return end.code
    except SyntaxError as error:
        run.stderr += f"SyntaxError: {error}\n"
        return 1
    except FileNotFoundError as error:
        run.stderr += f"FileNotFoundError: {error}\n"
        return 1
    except NotImplementedError as error:
        run.stderr += f"{error}: not known to a fake desktop\n"
        return 127
    return 0


async def _value(run: _Run, node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        left, right = await _value(run, node.left), await _value(run, node.right)
        return left + right if isinstance(node.op, ast.Add) else left * right
    if isinstance(node, ast.Call) and not node.keywords:
        name = ast.unparse(node.func)
        if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call):
            return await _file(
                run, node.func.value, node.func.attr, [await _value(run, a) for a in node.args]
            )
        values = [await _value(run, argument) for argument in node.args]
        if name == "print":
            run.stdout += " ".join(str(value) for value in values) + "\n"
            return None
        if name == "time.sleep":
            await asyncio.sleep(float(values[0]))
            return None
        if name in ("sys.exit", "exit"):
            raise _Exit(int(values[0]) if values else 0)
    raise NotImplementedError(ast.unparse(node))


async def _file(run: _Run, call: ast.Call, method: str, values: list[Any]) -> Any:
    if ast.unparse(call.func) != "open" or method not in ("read", "write"):
        raise NotImplementedError(ast.unparse(call))
    arguments = [await _value(run, argument) for argument in call.args]
    path = run.path(arguments[0])
    if method == "write":
        run.files[path] = values[0].encode()
        return len(values[0])
    if path not in run.files:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", path)
    return run.files[path].decode()
