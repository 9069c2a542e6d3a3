"""Set-up steps on a fake desktop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.fake import FakeProvider
from sandbox_cluster.tasks.setup import Setup
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.errors import SandboxError, TaskError


@pytest.fixture
async def desktop(tmp_path: Path) -> AsyncIterator[Desktop]:
    provider = FakeProvider(DesktopConfig(screen_wh_px=(640, 384)), tmp_path, "setup")
    yield await provider.boot(0)
    await provider.close()


def step(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"type": kind, "parameters": parameters}


def setup() -> Setup:
    return Setup(lambda _: None)


async def test_steps_run_in_order_and_screen_sizes_are_filled_in(desktop: Desktop) -> None:
    line = "echo {SCREEN_WIDTH} {SCREEN_HEIGHT} {SCREEN_WIDTH_HALF} {SCREEN_HEIGHT_HALF} {CLIENT_PASSWORD} >> /home/user/a"
    steps = [
        step("upload_file", files=[{"path": "/home/user/a", "content": "first\n"}]),
        step("execute", command=line, shell="true"),
        step("command", command=["/bin/sh", "-c", "echo last >> /home/user/a"]),
    ]
    await setup().run(desktop, steps, 5.0)
    assert await desktop.get_file("/home/user/a") == b"first\n640 384 320 192 password\nlast\n"


async def test_until_is_tried_again_and_bounded(desktop: Desktop) -> None:
    met = step("execute", command="echo x", shell=True, until={"stdout": "x"})
    assert await setup().run(desktop, [met], 5.0) < 1.0
    with pytest.raises(SandboxError, match=r"step 0 \(execute\).*did not come true"):
        await setup().run(desktop, [step("execute", command="false", until={"returncode": 0})], 10.0)


async def test_a_never_true_until_ends_at_the_deadline(desktop: Desktop) -> None:
    start = time.monotonic()
    with pytest.raises(SandboxError, match=r"did not end: the set-up has 0\.5 s"):
        await setup().run(
            desktop, [step("execute", command="echo x", shell=True, until={"stdout": "y"})], 0.5
        )
    assert time.monotonic() - start < 3.0


async def test_outputs_are_kept_by_name_for_cache_file(desktop: Desktop) -> None:
    one = setup()
    await one.run(desktop, [step("execute", command="echo kept", shell=True, stdout="out.txt")], 5.0)
    assert one.cache(desktop) == {"out.txt": b"kept\n"}


async def test_a_program_that_is_not_there_fails_the_set_up(desktop: Desktop) -> None:
    with pytest.raises(SandboxError, match=r"step 1 \(launch\) failed"):
        await setup().run(desktop, [step("sleep", seconds=0), step("launch", command=["/no/such"])], 5.0)


async def test_a_download_that_is_not_allowed_is_refused(desktop: Desktop) -> None:
    with pytest.raises(TaskError, match="not allowed"):
        await setup().run(desktop, [step("download", files=[{"url": "http://x/", "path": "/a"}])], 5.0)


async def test_a_local_path_that_was_not_made_inline_is_refused(desktop: Desktop) -> None:
    with pytest.raises(TaskError, match="inline"):
        await setup().run(
            desktop, [step("upload_file", files=[{"path": "/a", "local_path": "/etc/passwd"}])], 5.0
        )


async def _answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\nconnection: close\r\n\r\nbytes")
    await writer.drain()
    writer.close()


async def test_an_allowed_download_lands_on_the_desktop(desktop: Desktop) -> None:
    server = await asyncio.start_server(_answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/"
    files = [{"url": f"{url}a.bin", "path": "/home/user/a.bin"}]
    async with server:
        await Setup(lambda _: None, allowed_urls=(url,)).run(desktop, [step("download", files=files)], 10.0)
    assert await desktop.get_file("/home/user/a.bin") == b"bytes"
