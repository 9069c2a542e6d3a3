"""One short-lived process in bubblewrap: no network, no host files, few resources, killed as a tree.

The job and its files come in through file descriptors, the answer leaves through one: no path is shared with the host.
Files are the judge's own copies: some metrics unpack an archive beside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sandbox_cluster.judge.evaluators import INSTALL, Evaluators, find_evaluators
from sandbox_cluster.providers.marks import marked
from sandbox_cluster.providers.seccomp import jail_program
from slime_cua.core.errors import JudgeError, PreflightError

HERE = Path(__file__).parent
MAX_CHATTER_BYTES = 256 << 10
MAX_ANSWER_BYTES = 64 << 10
TREE_GONE_S = 5.0

_BWRAP = shlex.split(
    """--unshare-user --unshare-ipc --unshare-pid --unshare-net --unshare-uts --unshare-cgroup --disable-userns
    --die-with-parent --as-pid-1 --new-session --uid 1000 --gid 1000 --hostname judge
    --ro-bind /usr /usr --symlink usr/bin /bin --symlink usr/lib /lib --symlink usr/lib64 /lib64
    --ro-bind-try /etc/ld.so.cache /etc/ld.so.cache --ro-bind-try /etc/localtime /etc/localtime
    --proc /proc --dev /dev --size 1048576 --tmpfs /dev/shm --remount-ro /dev --size 67108864 --tmpfs /tmp --chdir /tmp"""
)
_FILTER = "filter"
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONDONTWRITEBYTECODE": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class JailConfig:
    """Limits of one judge process."""

    python: str = "/usr/bin/python3"
    """Interpreter, under /usr: the only part of the host that a judge sees."""
    site: str = ""
    """Folder of extra packages shown to judges, read-only, or empty."""
    first_uid: int = 62000
    """As root, judges run as host users first_uid, first_uid + 1, ..."""
    max_parallel: int = 2
    memory_bytes: int = 1 << 30
    file_bytes: int = 64 << 20
    num_processes: int = 8
    evaluators: Evaluators | None = None
    """Where desktop-env's metrics are; None: a judge that needs one is refused with the command that brings them."""


@dataclass(frozen=True)
class Verdict:
    """What a judge said. `score` is in [0, 1] or None; then `reason` says why there is none."""

    score: float | None
    reason: str | None = None
    value: Any = None
    """What a parser made of its file."""
    raised: str | None = None
    """The exception before which `score` was accumulated."""
    output: str = ""


class Jail:
    """Runs judges, `max_parallel` at a time. One for a host."""

    def __init__(self, config: JailConfig | None = None) -> None:
        self.config = config or JailConfig(site=default_site(), evaluators=find_evaluators())
        self._free = asyncio.Queue[int]()
        for number in range(self.config.max_parallel):
            self._free.put_nowait(number)

    async def check(self) -> None:
        """Raises PreflightError, with the line to run, when this machine cannot jail."""
        if shutil.which("bwrap") is None:
            raise PreflightError("judges need bubblewrap: run `apt-get install bubblewrap`")
        try:
            verdict = await self.run(
                {"kind": "code", "func": "f", "code": "def f():\n    return 1"}, {}, 20.0
            )
        except JudgeError as error:
            raise PreflightError(f"judges cannot be jailed: {error}") from None
        if verdict.score != 1.0:
            raise PreflightError(
                f"judges cannot be jailed here ({verdict.reason}; {verdict.output[-300:].strip()}): allow user namespaces, "
                "`sysctl -w kernel.apparmor_restrict_unprivileged_userns=0` on Ubuntu 24.04, "
                "`sysctl -w user.max_user_namespaces=10000` elsewhere"
            )

    async def run(self, job: Mapping[str, Any], files: Mapping[str, bytes], timeout_s: float) -> Verdict:
        """The verdict on `job` (see runner.py) with `files` by name under /job/in/. Never raises for what a judge does;
        JudgeError when the jail itself cannot be started, or has no evaluators for a metric of theirs."""
        if job["kind"] == "upstream" and self.config.evaluators is None:
            raise JudgeError(f"metric {job['func']!r} is desktop-env's: run `{INSTALL}` on the desktop host")
        try:
            async with asyncio.timeout(timeout_s):
                number = await self._free.get()
        except TimeoutError:
            return Verdict(None, f"no judge process became free within {timeout_s:.1f} s")
        try:
            return await self._run(number, job, files, timeout_s)
        finally:
            self._free.put_nowait(number)

    async def _run(
        self, number: int, job: Mapping[str, Any], files: Mapping[str, bytes], timeout_s: float
    ) -> Verdict:
        config = self.config
        upstream = config.evaluators if job["kind"] == "upstream" else None
        limits = {
            "RLIMIT_AS": upstream.memory_bytes if upstream else config.memory_bytes,
            "RLIMIT_CPU": math.ceil(timeout_s) + 1,
            "RLIMIT_FSIZE": config.file_bytes,
            "RLIMIT_NPROC": config.num_processes,
            "RLIMIT_NOFILE": 64,
            "RLIMIT_CORE": 0,
        }
        body = {"arguments": [], **job, "limits": limits, "site": bool(config.site and not upstream)}
        inside = {
            **{name: (HERE / name).read_bytes() for name in ("runner.py", "metrics.py", "parsers.py")},
            "job.json": json.dumps(body).encode(),
            _FILTER: jail_program(),
            **{f"in/{name}": data for name, data in files.items()},
        }
        with contextlib.ExitStack() as stack:
            handles = {name: stack.enter_context(_memory_file(data)) for name, data in inside.items()}
            (answer_read, answer_write), (chatter_read, chatter_write) = os.pipe(), os.pipe()
            for handle in (answer_read, chatter_read):
                stack.callback(os.close, handle)
            try:
                process = await self._start(number, upstream, handles, answer_write, chatter_write)
            finally:
                os.close(answer_write)
                os.close(chatter_write)
            return await _Watch(process, answer_read, chatter_read).verdict(timeout_s)

    async def _start(
        self,
        number: int,
        upstream: Evaluators | None,
        handles: Mapping[str, int],
        answer: int,
        chatter: int,
    ) -> asyncio.subprocess.Process:
        config = self.config
        drop: dict[str, Any] = {}
        if os.geteuid() == 0:
            uid = config.first_uid + number
            drop = {"user": uid, "group": uid, "extra_groups": []}
        shown = ["--ro-bind", config.site, "/site"] if config.site else []
        program = [config.python, "-I", "-S"]
        if upstream:
            shown = ["--ro-bind", upstream.folder, upstream.folder]
            program = [f"{upstream.folder}/bin/python", "-I"]
        arguments = [*_BWRAP, *shown, "--size", str(config.file_bytes + sum(map(_size, handles.values())))]
        arguments += ["--tmpfs", "/job/in", "--seccomp", str(handles[_FILTER])]
        for name, handle in handles.items():
            if name == _FILTER:
                continue
            how = "--file" if name.startswith("in/") else "--ro-bind-data"
            arguments += ["--perms", "0644", how, str(handle), f"/job/{name}"]
        program += ["/job/runner.py", str(answer)]
        try:
            return await asyncio.create_subprocess_exec(
                "bwrap",
                *arguments,
                *("--remount-ro", "/", "--"),
                *program,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=chatter,
                stderr=chatter,
                env=marked(_ENVIRONMENT),
                pass_fds=(*handles.values(), answer),
                start_new_session=True,
                **drop,
            )
        except OSError as error:
            raise JudgeError(
                f"the jail cannot be started ({error}): install bubblewrap on the desktop host"
            ) from None


class _Watch:
    """Waits for the end; ends the process at the deadline, at a flood, and in any case. Owns neither pipe."""

    def __init__(self, process: asyncio.subprocess.Process, answer: int, chatter: int) -> None:
        self._process, self._answer, self._pipe = process, answer, chatter
        self._chatter = bytearray()
        self._flooded = asyncio.Event()

    async def verdict(self, timeout_s: float) -> Verdict:
        loop = asyncio.get_running_loop()
        os.set_blocking(self._pipe, False)
        loop.add_reader(self._pipe, self._hear)
        ends = [asyncio.ensure_future(self._process.wait()), asyncio.ensure_future(self._flooded.wait())]
        try:
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_reader(self._pipe)
            is_late = self._process.returncode is None
            if is_late:
                # The group, not the outer process alone: until all is mounted the inner one does not die with it.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            ends[1].cancel()
            await asyncio.shield(ends[0])
        await self._tree_gone()
        output = self._chatter.decode(errors="replace")[-2000:]
        if self._flooded.is_set():
            return Verdict(
                None,
                f"the judge printed more than {MAX_CHATTER_BYTES >> 10} KiB and was killed",
                output=output,
            )
        if is_late:
            return Verdict(
                None, f"the judge did not end within {timeout_s:.1f} s and was killed", output=output
            )
        os.set_blocking(self._answer, False)
        try:
            answer = os.read(self._answer, MAX_ANSWER_BYTES)
        except BlockingIOError:
            answer = b""
        return _read_answer(answer, self._process.returncode, output)

    async def _tree_gone(self) -> None:
        """The kernel ends the pid namespace after its first process: the pipe closes with the last one."""
        for _ in range(int(TREE_GONE_S / 0.005)):
            with contextlib.suppress(BlockingIOError):
                while part := os.read(self._pipe, 65536):
                    self._chatter += part[: max(0, MAX_CHATTER_BYTES - len(self._chatter))]
                return
            await asyncio.sleep(0.005)

    def _hear(self) -> None:
        with contextlib.suppress(OSError):
            self._chatter += os.read(self._pipe, 65536)
        if len(self._chatter) > MAX_CHATTER_BYTES:
            self._flooded.set()
            asyncio.get_running_loop().remove_reader(self._pipe)


def _read_answer(data: bytes, returncode: int | None, output: str) -> Verdict:
    try:
        reply = json.loads(data)
        has_score = not {"fault", "value"} & reply.keys()
        score = float(reply["score"]) if has_score else math.nan
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        return Verdict(None, f"the judge ended without an answer (exit {returncode})", output=output)
    if "fault" in reply:
        return Verdict(None, str(reply["fault"]), output=output)
    if "value" in reply:
        return Verdict(None, value=reply["value"], output=output)
    if not math.isfinite(score) or not 0.0 <= score <= 1.0:
        return Verdict(None, f"the judge returned {score}, not a number in [0, 1]", output=output)
    return Verdict(score, raised=reply.get("raised"), output=output)


def _size(handle: int) -> int:
    return os.fstat(handle).st_size


@contextlib.contextmanager
def _memory_file(data: bytes) -> Any:
    handle = os.memfd_create("judge", os.MFD_CLOEXEC)
    try:
        with os.fdopen(os.dup(handle), "wb") as file:
            file.write(data)
        os.lseek(handle, 0, os.SEEK_SET)
        yield handle
    finally:
        os.close(handle)


def default_site() -> str:
    """This environment's packages, if the jail's interpreter is of the same version and may read them."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    if not Path(f"/usr/bin/{version}").exists() or Path("/usr/bin/python3").resolve().name != version:
        return ""
    for part in sys.path:
        folder = Path(part)
        if folder.name == "site-packages" and all(
            parent.stat().st_mode & 0o005 == 0o005 for parent in (folder, *folder.parents)
        ):
            return str(folder)
    return ""
