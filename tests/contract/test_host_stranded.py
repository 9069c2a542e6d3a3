"""A sandbox whose parent was killed before it had asked to die with it: ended by the living host, or by its next life."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from sandbox_cluster.host.orphans import adopting_orphans, collect_orphans, stranded_children
from sandbox_cluster.providers.marks import VARIABLE, end_marked, marked, set_mark

pytestmark = pytest.mark.desktop
STRAND = """
import os, subprocess, sys, time
read, write = os.pipe()
box = subprocess.Popen(["bwrap", "--unshare-user", "--unshare-pid", "--as-pid-1", "--dev-bind", "/", "/", "--",
    "/bin/sh", "-c", "echo up >&%d; exec sleep 300" % write], pass_fds=(write,),
    stdout=subprocess.DEVNULL)
os.read(read, 3)
print(open("/proc/%d/task/%d/children" % (box.pid, box.pid)).read().split()[0], flush=True)
box.kill(); box.wait()
"""
"""A first process of a namespace that outlives bubblewrap's outer process, as one does that was killed too early."""


def strand(environment: dict[str, str]) -> int:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STRAND)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=environment,
    )
    return int(done.stdout)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def test_a_living_host_ends_what_it_adopts_and_leaves_its_own_programs_alone() -> None:
    with adopting_orphans():
        collecting = asyncio.create_task(collect_orphans())
        own = await asyncio.to_thread(subprocess.Popen, ["sleep", "300"])
        try:
            pid = await asyncio.to_thread(strand, dict(os.environ))
            for _ in range(200):
                if not is_running(pid):
                    break
                await asyncio.sleep(0.05)
            assert not is_running(pid) and own.poll() is None and stranded_children() == []
        finally:
            collecting.cancel()
            own.kill()
            await asyncio.to_thread(own.wait)


def test_the_next_life_of_a_host_ends_what_carries_its_mark_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    plain = marked({"PATH": os.environ["PATH"]})
    mark = set_mark("host-1", tmp_path)
    monkeypatch.setenv(VARIABLE, mark)
    ours = strand(marked({"PATH": os.environ["PATH"]}))
    other = strand({**plain, VARIABLE: set_mark("host-2", tmp_path)})
    try:
        assert end_marked(mark) == 1
        for _ in range(200):
            if not is_running(ours):
                break
            time.sleep(0.05)
        assert not is_running(ours) and is_running(other)
    finally:
        os.kill(other, signal.SIGKILL)
