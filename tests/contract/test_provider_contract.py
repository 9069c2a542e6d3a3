"""Every provider keeps the same promises. `fake` runs anywhere; `local` needs Xvfb and bubblewrap; `remote`, `docker` and
`qemu` meet a stand-in for OSWorld's control server: in a process, in containers of a real daemon, in real virtual machines.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sandbox_cluster.api import ExecuteRequest, Settle, StepRequest
from sandbox_cluster.guest.png import check_png
from sandbox_cluster.providers import make_provider
from sandbox_cluster.providers.base import SandboxProvider
from sandbox_cluster.providers.desktop import Desktop
from slime_cua.config.sandbox import DesktopConfig
from slime_cua.core.actions import CodeAction, GuiAction
from slime_cua.core.coordinates import Point
from slime_cua.core.errors import ConfigError, SandboxError, UnknownOutcomeError
from tests.contract.guest_rootfs import SIZE
from tests.contract.provider_rigs import remote_machines

CLICK = GuiAction(kind="left_click", point=Point(x=500, y=500))
KINDS = [
    "fake",
    pytest.param("local", marks=pytest.mark.desktop),
    pytest.param("remote", marks=pytest.mark.desktop),
    pytest.param("docker", marks=pytest.mark.docker),
    pytest.param("qemu", marks=[pytest.mark.vm, pytest.mark.timeout(1200)]),
]


@pytest.fixture(params=KINDS)
async def provider(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[SandboxProvider]:
    async with provider_of(request, tmp_path) as made:
        yield made


@contextlib.asynccontextmanager
async def provider_of(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[SandboxProvider]:
    """The provider of this round, checked; closed at the end."""
    async with contextlib.AsyncExitStack() as stack:
        config = DesktopConfig(screen_wh_px=SIZE, boot_timeout_s=120)
        if request.param == "remote":
            config = await stack.enter_async_context(remote_machines(folder))
        elif request.param == "docker":
            config = request.getfixturevalue("daemon").config()
        elif request.param == "qemu":
            config = request.getfixturevalue("machine")
        made = make_provider(request.param, config, folder, "contract")
        await made.check()
        stack.push_async_callback(made.close)
        yield made


@pytest.fixture
async def desktop(provider: SandboxProvider) -> Desktop:
    return await provider.boot(0)


def code(
    text: str, language: str = "bash", timeout_s: float = 10.0, max_bytes: int = 20_000
) -> ExecuteRequest:
    return ExecuteRequest(
        action_id=uuid.uuid4().hex,
        action=CodeAction(language=language, code=text),  # type: ignore[arg-type]
        timeout_s=timeout_s,
        max_output_bytes=max_bytes,
    )


async def test_a_screenshot_is_a_whole_png_of_the_configured_size(desktop: Desktop) -> None:
    capture = await desktop.screenshot()
    assert (capture.width_px, capture.height_px) == SIZE == desktop.screen_wh_px
    check_png(capture.png, SIZE)
    assert capture.sha256 == hashlib.sha256(capture.png).hexdigest()


async def test_a_step_returns_a_settled_capture(desktop: Desktop) -> None:
    capture = await desktop.step(StepRequest(action_id="a", actions=(CLICK,), settle=Settle(max_ms=2000)))
    assert capture.is_settled and not capture.is_replay


async def test_a_known_action_id_acts_once_and_returns_the_first_result(desktop: Desktop) -> None:
    request = code("echo x >> count.txt; cat count.txt")
    first, second = await desktop.execute(request), await desktop.execute(request)
    assert first.stdout == second.stdout == "x\n"
    assert (first.is_replay, second.is_replay) == (False, True)
    assert await desktop.get_file("count.txt") == b"x\n"


async def test_calls_with_one_action_id_at_the_same_time_act_once(desktop: Desktop) -> None:
    request = code("sleep 0.2; echo x >> count.txt")
    await asyncio.gather(*(desktop.execute(request) for _ in range(4)))
    assert await desktop.get_file("count.txt") == b"x\n"


async def test_an_action_goes_on_when_its_caller_goes_away(desktop: Desktop) -> None:
    request = code("sleep 0.4; echo done; echo x >> count.txt")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(desktop.execute(request), 0.1)
    assert (await desktop.execute(request)).stdout == "done\n"
    assert await desktop.get_file("count.txt") == b"x\n"


async def test_an_action_id_cannot_be_used_for_another_action(desktop: Desktop) -> None:
    await desktop.step(StepRequest(action_id="a", actions=(CLICK,)))
    with pytest.raises(ValueError, match="fresh id"):
        await desktop.step(StepRequest(action_id="a", actions=()))


async def test_an_old_action_id_is_refused_instead_of_run_again(desktop: Desktop) -> None:
    first = StepRequest(action_id="first", settle=Settle(quiet_ms=0, max_ms=0))
    await desktop.step(first)
    for index in range(70):
        await desktop.step(first.model_copy(update={"action_id": f"later-{index}"}))
    with pytest.raises(UnknownOutcomeError, match="not run again"):
        await desktop.step(first)


async def test_a_bad_action_plays_nothing_and_says_what_is_wrong(desktop: Desktop) -> None:
    bad = GuiAction(kind="key", keys=("crtl",))
    with pytest.raises(ValueError, match=r"action 1 \(key\).*did you mean ctrl"):
        await desktop.step(StepRequest(action_id="a", actions=(CLICK, bad)))
    await desktop.step(StepRequest(action_id="a", actions=(CLICK,)))


async def test_code_gives_stdout_stderr_and_return_code(desktop: Desktop) -> None:
    reply = await desktop.execute(code("echo out; echo err 1>&2; exit 3"))
    assert (reply.stdout, reply.stderr, reply.returncode) == ("out\n", "err\n", 3)
    assert not reply.is_timeout and not reply.is_truncated


async def test_python_code_runs(desktop: Desktop) -> None:
    reply = await desktop.execute(code("print(40 + 2, 'é')", "python"))
    assert (reply.stdout, reply.returncode) == ("42 é\n", 0)


async def test_code_past_its_deadline_is_ended_and_said_to_be(desktop: Desktop) -> None:
    reply = await desktop.execute(code("echo before; sleep 30", timeout_s=0.5))
    assert reply.is_timeout and reply.returncode is None
    assert reply.stdout == "before\n"


async def test_long_output_is_cut_and_said_to_be(desktop: Desktop) -> None:
    reply = await desktop.execute(code("print('x' * 5000)", "python", max_bytes=1000))
    assert reply.is_truncated and reply.stdout == "x" * 1000 and reply.returncode == 0


async def test_files_come_back_as_they_were_put(desktop: Desktop) -> None:
    data = bytes(range(256)) * 3000
    await desktop.put_file("~/new folder/ä.bin", data)
    assert await desktop.get_file("/home/user/new folder/ä.bin") == data


async def test_a_missing_file_is_file_not_found(desktop: Desktop) -> None:
    with pytest.raises(FileNotFoundError):
        await desktop.get_file("/home/user/none")


async def test_a_file_above_the_limit_is_refused(desktop: Desktop) -> None:
    await desktop.put_file("big", b"x" * 2000)
    with pytest.raises(OSError, match="more than 1000"):
        await desktop.get_file("big", max_bytes=1000)


async def test_run_splits_text_and_a_shell_reads_it(desktop: Desktop) -> None:
    assert (await desktop.run("echo 'a b' c")).stdout == "a b c\n"
    assert (await desktop.run("echo a; echo b", is_shell=True)).stdout == "a\nb\n"
    merged = await desktop.run("echo a; echo b 1>&2", is_shell=True, is_merged=True)
    assert (merged.stdout, merged.stderr) == ("a\nb\n", "")


async def test_an_unknown_program_is_file_not_found(desktop: Desktop) -> None:
    with pytest.raises(FileNotFoundError):
        await desktop.run(["no-such-program"])
    with pytest.raises(FileNotFoundError):
        await desktop.launch(["no-such-program"])


async def test_a_killed_desktop_says_so_and_its_slot_is_free_and_clean_again(
    provider: SandboxProvider,
) -> None:
    first = await provider.boot(0)
    await first.put_file("left", b"x")
    with pytest.raises(SandboxError, match="slot 0"):
        await provider.boot(0)
    await first.kill()
    await first.kill()
    assert not first.is_alive
    with pytest.raises(SandboxError):
        await first.screenshot()
    with pytest.raises(SandboxError):
        await first.execute(code("true"))
    second = await provider.boot(0)
    with pytest.raises(FileNotFoundError):
        await second.get_file("left")


async def test_desktops_do_not_see_each_other(provider: SandboxProvider) -> None:
    one, two = await asyncio.gather(provider.boot(0), provider.boot(1))
    await one.put_file("/tmp/mine", b"1")
    with pytest.raises(FileNotFoundError):
        await two.get_file("/tmp/mine")
    await one.kill()
    assert two.is_alive
    await two.screenshot()


async def test_close_ends_every_desktop(provider: SandboxProvider) -> None:
    desktops = await asyncio.gather(provider.boot(0), provider.boot(1), provider.boot(2))
    await provider.close()
    assert not any(desktop.is_alive for desktop in desktops)
    await provider.close()


def test_an_unknown_provider_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="docker, fake, local, qemu, remote"):
        make_provider("vbox", DesktopConfig(), tmp_path, "x")
