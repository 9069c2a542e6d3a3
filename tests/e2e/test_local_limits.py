"""Limits of local desktops for CPU time and disk, and what an earlier life left in a profile."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_cluster.providers import limits
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.local import LocalProvider
from slime_cua.config.sandbox import DesktopConfig

pytestmark = pytest.mark.desktop
SPIN = """import os, time
started = time.monotonic()
child = os.fork()
while time.monotonic() < started + 3: pass
if child == 0: os._exit(0)
os.wait()
used = sum(os.times()[:4])
print(used / (time.monotonic() - started))
"""
FILL = """import errno, os
for folder in ("/tmp", os.path.expanduser("~")):
    written = 0
    try:
        with open(folder + "/big", "wb") as file:
            while True:
                written += file.write(bytes(1 << 20))
                file.flush()
    except OSError as error:
        print(folder, written >> 20, errno.errorcode[error.errno])
"""


@contextlib.asynccontextmanager
async def booted(folder: Path, **config: object) -> AsyncIterator[Desktop]:
    settings = DesktopConfig.model_validate({"screen_wh_px": (640, 384), "boot_timeout_s": 90, **config})
    provider = LocalProvider(settings, folder, "limits")
    try:
        yield await provider.boot(0)
    finally:
        await provider.close()


@pytest.mark.skipif(not limits.find_backend().has_cpu, reason="this machine's groups do not limit CPU time")
async def test_a_desktop_gets_no_more_cpu_time_than_configured(tmp_path: Path) -> None:
    async with booted(tmp_path, num_cpus=0.3) as desktop:
        reply = await desktop.run_script("python", SPIN, timeout_s=60)
        assert 0 < float(reply.stdout) < 0.45


async def test_a_full_disk_is_the_programs_error_and_the_desktop_lives(tmp_path: Path) -> None:
    async with booted(tmp_path, disk_mb=24) as desktop:
        reply = await desktop.run_script("python", FILL, timeout_s=60)
        rows = [line.split() for line in reply.stdout.splitlines()]
        assert [row[0] for row in rows] == ["/tmp", "/home/user"]
        for _, written_mb, error in rows:
            assert 0 < int(written_mb) <= 24 and error in ("ENOSPC", "EFBIG")
        assert (await desktop.screenshot()).png
        with pytest.raises(OSError):
            await desktop.put_file("more", bytes(4 << 20))


async def test_locks_of_an_earlier_life_do_not_come_with_a_golden_home(tmp_path: Path) -> None:
    """Case R41: profile locks of browser and office count, too; every display is :0 in a /tmp of its own."""
    golden = tmp_path / "golden"
    (golden / ".config/libreoffice/4").mkdir(parents=True)
    (golden / ".config/chromium").mkdir(parents=True)
    (golden / ".config/libreoffice/4/.lock").write_text("oldhost")
    (golden / ".config/libreoffice/4/registrymodifications.xcu").write_text("<kept/>")
    (golden / ".config/chromium/SingletonLock").symlink_to("oldhost-77")
    (golden / ".~lock.a.odt#").write_text(",oldhost")
    async with booted(tmp_path / "state", golden_home=str(golden)) as desktop:
        found = await desktop.run(
            "find . -name '.lock' -o -name 'Singleton*' -o -name '.~lock*' -o -name '*.xcu'", is_shell=True
        )
        assert found.stdout == "./.config/libreoffice/4/registrymodifications.xcu\n"
        assert (await desktop.run(["sh", "-c", "echo $DISPLAY"])).stdout == ":0\n"
        assert (await desktop.screenshot()).png
