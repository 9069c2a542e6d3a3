"""A judge is a program of somebody else's: whatever it does, the answer is an honest score or a reason."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from sandbox_cluster.judge.jail import Jail, JailConfig, Verdict

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
HEAD = "def call_rule_judge_1(result, expected):\n"


async def judge(
    body: str, files: dict[str, bytes] | None = None, timeout_s: float = 10.0, **job: object
) -> Verdict:
    """The verdict on a judge whose function has `body`."""
    code = HEAD + "".join(f"    {line}\n" for line in body.splitlines())
    given = {
        "kind": "code",
        "func": "call_rule_judge_1",
        "code": code,
        "arguments": [{"value": "r"}, {"value": None}],
    }
    return await Jail(JailConfig(memory_bytes=256 << 20)).run({**given, **job}, files or {}, timeout_s)


@pytest.mark.parametrize(("returned", "score"), [("0", 0.0), ("1", 1.0), ("True", 1.0), ("0.25", 0.25)])
async def test_a_number_from_0_to_1_is_the_score(returned: str, score: float) -> None:
    assert (await judge(f"return {returned}")).score == score


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        ("float('nan')", "nan"),
        ("float('inf')", "inf"),
        ("7.0", "7.0"),
        ("-0.1", "-0.1"),
        ("'1.0'", "str '1.0'"),
        ("None", "NoneType"),
        ("[1.0]", "list"),
    ],
)
async def test_anything_else_is_invalid_and_named(returned: str, reason: str) -> None:
    verdict = await judge(f"return {returned}")
    assert verdict.score is None and verdict.reason is not None and reason in verdict.reason


async def test_a_judge_that_raises_is_invalid_and_never_zero() -> None:
    verdict = await judge("raise ValueError('no such cell')")
    assert verdict.score is None and "ValueError: no such cell" in str(verdict.reason)


async def test_what_was_accumulated_before_the_exception_is_the_score() -> None:
    verdict = await judge("score = 0.0\nscore += 0.25\nopen('/missing')\nscore += 0.75\nreturn score")
    assert verdict.score == 0.25 and "FileNotFoundError" in str(verdict.raised)


async def test_what_was_accumulated_counts_when_a_helper_raised() -> None:
    verdict = await judge("def helper():\n    score = 1.0\n    raise KeyError('x')\nscore = 0.5\nhelper()")
    assert verdict.score == 0.5


@pytest.mark.parametrize(
    "fault",
    ["import no_such_library", "undefined_name + 1", "x = []\nwhile True: x.append(bytearray(1 << 24))"],
)
async def test_faults_that_say_nothing_of_the_result_are_invalid_although_a_score_was_accumulated(
    fault: str,
) -> None:
    verdict = await judge(f"score = 0.5\n{fault}")
    assert verdict.score is None and verdict.reason


async def test_an_accumulated_score_out_of_range_is_invalid() -> None:
    assert (await judge("score = 7.0\nraise ValueError")).score is None


async def test_a_judge_that_hangs_is_killed_in_time() -> None:
    start = time.monotonic()
    verdict = await judge("while True: pass", timeout_s=0.5)
    assert verdict.score is None and "did not end within 0.5 s" in str(verdict.reason)
    assert time.monotonic() - start < 5.0


async def test_a_judge_that_floods_is_killed() -> None:
    verdict = await judge("while True: print('x' * 1000)")
    assert verdict.score is None and "printed more than" in str(verdict.reason)


async def test_a_judge_that_forks_is_invalid() -> None:
    verdict = await judge("import os\nscore = 1.0\nos.fork()\nreturn 1.0")
    assert verdict.score is None and "start a process" in str(verdict.reason)


async def test_a_fork_bomb_through_libc_leaves_no_process() -> None:
    mark = f"bomb-{os.getpid()}"
    bomb = f"import ctypes\nlibc = ctypes.CDLL(None)\nlibc.prctl(15, b{mark!r})\nwhile True: libc.fork()"
    verdict = await judge(bomb, timeout_s=0.5)
    assert verdict.score is None
    assert not [pid for pid in _processes() if _name(pid) == mark and not _has_ended(pid)]


async def test_a_judge_that_is_killed_while_its_jail_is_made_leaves_no_process() -> None:
    """bubblewrap's inner process asks to die with the outer one only when all is mounted. It is stopped before that."""
    stopped: list[int] = []

    def stop_inner() -> None:
        end = time.monotonic() + 20
        while not stopped and time.monotonic() < end:
            stopped.extend(inner for outer in _children(os.getpid()) for inner in _children(outer))
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)

    watching = asyncio.create_task(asyncio.to_thread(stop_inner))
    try:
        verdict = await judge("while True: pass", timeout_s=2.0)
        await watching
        assert verdict.score is None
        assert stopped and all(_has_ended(pid) for pid in stopped)
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def test_a_judge_that_leaves_without_an_answer_is_invalid() -> None:
    verdict = await judge("import os\nos._exit(0)")
    assert verdict.score is None and "without an answer" in str(verdict.reason)


@pytest.mark.parametrize(
    "attempt",
    [
        "import socket\nsocket.create_connection(('127.0.0.1', 22), 1)\nreturn 1.0",
        "import socket\nsocket.create_connection(('192.0.2.1', 80), 1)\nreturn 1.0",
        "open('/etc/passwd').read()\nreturn 1.0",
        "import os\nos.listdir('/root')\nreturn 1.0",
        f"open({str(Path(__file__).resolve())!r}).read()\nreturn 1.0",
        "open('/usr/bin/owned', 'w')\nreturn 1.0",
        "open('/job/job.json', 'w')\nreturn 1.0",
        "open('/tmp/big', 'wb').write(bytes(200 << 20))\nreturn 1.0",
        "import os\nos.setuid(0)\nreturn 1.0",
        "for n in range(40): open(f'/dev/shm/{n}', 'wb').write(bytes(60 << 20))\nreturn 1.0",
        "for n in range(40): open(f'/job/in/{n}', 'wb').write(bytes(60 << 20))\nreturn 1.0",
        "open('/dev/owned', 'w')\nreturn 1.0",
        "import os\nos.memfd_create('unseen')\nreturn 1.0",
        "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')\nreturn 1.0",
        "open('/proc/sysrq-trigger', 'w').write('b')\nreturn 1.0",
        "open('/proc/2/mem', 'rb')\nreturn 1.0",
        "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0/tmp/.X11-unix/X0')\nreturn 1.0",
        *(
            f"import ctypes\nif ctypes.CDLL(None).{call} == -1: raise OSError\nreturn 1.0"
            for call in (
                "ptrace(0, 0, 0, 0)",
                "unshare(0x10000000)",
                "mount(b'none', b'/tmp', b'tmpfs', 0, 0)",
                "fork()",
                "shmget(0, 1 << 28, 0o1600)",
                "syscall(321, 0, 0, 0)",
            )
        ),
    ],
)
async def test_the_jail_holds(attempt: str) -> None:
    verdict = await judge(attempt)
    assert verdict.score is None, verdict.output


async def test_a_judge_may_have_threads() -> None:
    body = "import threading\nseen = []\nt = threading.Thread(target=seen.append, args=(1,))\nt.start()\nt.join()\nreturn len(seen)"
    assert (await judge(body)).score == 1.0


async def test_a_judge_sees_no_other_process_and_no_environment() -> None:
    verdict = await judge(
        "import os\nn = len([p for p in os.listdir('/proc') if p.isdigit()])\n"
        "print(n, sorted(os.environ))\nreturn float(n <= 3 and 'SSH_AUTH_SOCK' not in os.environ and 'USER' not in os.environ)"
    )
    assert verdict.score == 1.0, verdict.output


async def test_files_come_in_with_their_names_and_output_comes_back() -> None:
    verdict = await judge(
        "print(result)\nreturn float(open(result, 'rb').read() == b'abc' and result.endswith('.xlsx'))",
        files={"0/a.xlsx": b"abc"},
        arguments=[{"file": "/job/in/0/a.xlsx"}, {"value": None}],
    )
    assert verdict.score == 1.0 and "/job/in/0/a.xlsx" in verdict.output


async def test_no_descriptor_is_left_open() -> None:
    await judge("return 1")
    before = _num_descriptors()
    for body in ("return 1", "raise ValueError", "import os\nos._exit(1)"):
        await judge(body)
    assert _num_descriptors() <= before


def _num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _processes() -> list[int]:
    return [int(one.name) for one in Path("/proc").iterdir() if one.name.isdigit()]


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, children.read_text().split())
    return found


def _has_ended(pid: int) -> bool:
    """True for a process that is gone or only waits to be collected (an orphan's new parent does that)."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""
