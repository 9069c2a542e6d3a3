"""Local desktops come and go, their owners are killed, boots fail: nothing is left behind, no neighbour is touched."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandbox_cluster.providers import limits
from sandbox_cluster.providers.local import LocalProvider
from slime_cua.core.errors import SandboxError
from tests.e2e.local_rig import (
    FIRST_UID,
    config,
    gone,
    groups,
    mounts,
    needs_root,
    num_files,
    processes_of,
)

pytestmark = pytest.mark.desktop


async def test_boot_and_kill_leak_no_file_process_mount_or_group(make: Callable[..., LocalProvider]) -> None:
    provider = make()
    await (await provider.boot(3)).kill()
    before = (num_files(), mounts())
    for _ in range(3):
        desktop = await provider.boot(3)
        assert processes_of(FIRST_UID + 3) or os.getuid() != 0
        await desktop.kill()
    assert (num_files(), mounts()) == before
    assert await gone(FIRST_UID + 3) == []
    assert not groups("e2e-*-3-*")


OWNER = """
import asyncio, os, sys
from pathlib import Path
from sandbox_cluster.providers.local import LocalProvider
from slime_cua.config.sandbox import DesktopConfig

async def main():
    config = DesktopConfig(screen_wh_px=(640, 384), first_uid=int(sys.argv[2]), boot_timeout_s=120)
    provider = LocalProvider(config, Path(sys.argv[1]), "owner")
    desktops = await asyncio.gather(provider.boot(4), provider.boot(5))
    await desktops[0].launch(["xterm"])
    print("ready", flush=True)
    await asyncio.sleep(100)

if len(sys.argv) > 3:
    import sandbox_cluster.api, sandbox_cluster.guest.agent, encodings.idna
    os.setgid(int(sys.argv[3])); os.setuid(int(sys.argv[3])); os.environ["HOME"] = "/tmp"
asyncio.run(main())
"""


def is_open_to_all(path: Path) -> bool:
    """Another user can read `path` and the folders above it."""
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in (path, *path.parents))


needs_open_project = pytest.mark.skipif(
    not is_open_to_all(Path.cwd()), reason="other users cannot read the project's folder"
)


@pytest.mark.parametrize("user", [None, pytest.param(FIRST_UID + 90, marks=[needs_root, needs_open_project])])
async def test_nothing_lives_on_when_the_owner_is_killed(tmp_path: Path, user: int | None) -> None:
    uids = (FIRST_UID + 4, FIRST_UID + 5) if user is None else (user,)
    state_dir = tmp_path / "state"
    state_dir.mkdir()
    if user is not None:
        os.chown(state_dir, user, user)
        for folder in (tmp_path, *tmp_path.parents[:2]):
            folder.chmod(0o755)
    command = [sys.executable, "-c", OWNER, str(state_dir), str(FIRST_UID), *([str(user)] if user else [])]
    mounted, others = mounts(), groups("owner-*")
    environment = {**os.environ, "PYTHONPATH": "."}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as owner:  # noqa: ASYNC220
        assert owner.stdout is not None and await asyncio.to_thread(owner.stdout.readline) == "ready\n"
        assert os.getuid() != 0 or any("xterm" in line for line in processes_of(*uids))
        owner.send_signal(signal.SIGKILL)
    for uid in uids if os.getuid() == 0 else ():
        assert await gone(uid) == []
    assert mounts() == mounted
    heir = LocalProvider(config(), state_dir, "owner")
    assert await heir.reap() == 0
    assert set(groups("owner-*")) <= set(others)
    assert not list(state_dir.rglob("slot-*.json"))
    await heir.close()


async def test_a_second_owner_of_the_same_label_is_refused(
    make: Callable[..., LocalProvider], tmp_path: Path
) -> None:
    provider = make()
    await provider.boot(0)
    other = LocalProvider(config(), tmp_path / "0", "e2e-0")
    with pytest.raises(SandboxError, match="another running process"):
        await other.reap()
    await other.close()


async def test_a_boot_past_its_deadline_is_an_error_and_leaves_nothing(
    make: Callable[..., LocalProvider],
) -> None:
    provider = make(boot_timeout_s=0.02)
    with pytest.raises(SandboxError, match=r"not ready in 0\.02 s"):
        await provider.boot(6)
    assert await gone(FIRST_UID + 6) == []


async def test_a_cancelled_boot_leaves_nothing_and_frees_the_slot(make: Callable[..., LocalProvider]) -> None:
    provider = make()
    for wait_s in (0.001, 0.03, 0.1):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(provider.boot(7), wait_s)
    assert await gone(FIRST_UID + 7) == []
    await provider.boot(7)


async def test_golden_home_is_copied_and_a_write_stays_in_its_desktop(
    make: Callable[..., LocalProvider], tmp_path: Path
) -> None:
    golden = tmp_path / "golden"
    (golden / "Documents").mkdir(parents=True)
    (golden / "Documents" / "report.txt").write_text("golden")
    provider = make(golden_home=str(golden))
    one, two = await asyncio.gather(provider.boot(0), provider.boot(1))
    await one.put_file("Documents/report.txt", b"changed")
    assert await two.get_file("Documents/report.txt") == b"golden"
    assert (golden / "Documents" / "report.txt").read_text() == "golden"


@needs_root
async def test_the_hosts_own_x_locks_stale_or_alive_are_nobodys_business(
    make: Callable[..., LocalProvider],
) -> None:
    """Case R41: a desktop's display is in a /tmp of its own, so neither lock stands in its way and none is removed."""
    locks = {Path("/tmp/.X7901-lock"): 2**22 - 1, Path("/tmp/.X7902-lock"): os.getpid()}
    for lock, pid in locks.items():
        lock.write_text(f"{pid:10d}\n")
    try:
        desktop = await make().boot(0)
        shown = await desktop.run("ls -a /tmp; xdpyinfo | grep 'name of display'", is_shell=True)
        assert "X790" not in shown.stdout and ":0" in shown.stdout
        assert (await desktop.screenshot()).png
        assert all(lock.exists() for lock in locks)
    finally:
        for lock in locks:
            lock.unlink(missing_ok=True)


async def test_empty_groups_of_dead_owners_are_swept_and_groups_in_use_stay() -> None:
    found = limits.find_backend()
    if found.version == 0:
        pytest.skip("no cgroups here")
    own = limits.Backend(found.version, tuple(folder / f"sweep-{os.getpid()}" for folder in found.folders))
    empty, busy = ([folder / name for folder in own.folders] for name in ("empty", "busy"))
    for group in empty + busy:
        group.mkdir(parents=True)
    sleeper = await asyncio.create_subprocess_exec("sleep", "60")
    limits.join(tuple(busy), sleeper.pid)
    assert limits.sweep(own) == 0, "too fresh to judge"
    assert limits.sweep(own, min_age_s=0) == len(empty)
    assert not any(group.exists() for group in empty) and all(group.exists() for group in busy)
    limits.remove_groups(tuple(busy))
    assert await sleeper.wait() == -9
    limits.remove_groups(own.folders)


@needs_root
async def test_two_providers_with_the_same_users_and_label_do_not_touch_each_other(
    make: Callable[..., LocalProvider], tmp_path: Path
) -> None:
    one, two = make(), LocalProvider(config(), tmp_path / "other", "e2e-0")
    first, second = await one.boot(0), await two.boot(0)
    users = [(await desktop.run(["id", "-u"])).stdout for desktop in (first, second)]
    assert users == ["1000\n", "1000\n"]
    assert processes_of(FIRST_UID) and processes_of(FIRST_UID + 1000)
    await second.kill()
    assert await gone(FIRST_UID + 1000) == []
    await first.screenshot()
    await two.close()
