"""Measures local desktops: boot, step, capture, memory. Prints a Markdown table.

    PYTHONPATH=. python scripts/bench_sandbox.py --size 1504x832 --desktops 16

Wall times depend on what else the machine does: trust CPU seconds and minima. CPU counts this process (the host's share) and
all processes inside the desktops, those that have ended included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from bench_tables import START_S, Row, Table, at_least, at_most
from PIL import Image

from sandbox_cluster.api import Settle, StepRequest
from sandbox_cluster.client import SandboxClient
from sandbox_cluster.cluster import LocalCluster
from sandbox_cluster.guest.png import encode_bgrx
from sandbox_cluster.providers import limits
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.local import LocalProvider
from slime_cua.config.sandbox import DesktopConfig, SandboxConfig
from slime_cua.core.actions import GuiAction
from slime_cua.core.coordinates import Point

FIRST_UID = 63000
LABEL = "bench"
REFILL_S = 3.0
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def inside_cpu_s(slots: Sequence[int]) -> float:
    """CPU seconds of all living processes of the slots' users and of those that they collected."""
    total, uids = 0, {FIRST_UID + slot for slot in slots}
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and folder.stat().st_uid in uids:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                total += sum(int(field) for field in fields[11:15])
        except OSError:
            continue
    return total * TICK_S


def held_bytes(slot: int) -> int | None:
    """Memory of a desktop's group; None without groups."""
    return limits.memory_bytes(tuple(Path("/sys/fs/cgroup").glob(f"*/slime_cua/{LABEL}-{slot}-*")))


def p50_ms(values: Sequence[float]) -> float:
    return statistics.median(values) * 1e3


def quantiles(values: Sequence[float]) -> str:
    """Minimum, median and 95th percentile in ms."""
    ordered = sorted(values)
    last = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return f"min {ordered[0] * 1e3:.0f}, p50 {statistics.median(ordered) * 1e3:.0f}, p95 {last * 1e3:.0f} ms"


def click(x: int, settle: Settle) -> StepRequest:
    action = GuiAction(kind="left_click", point=Point(x=100 + x % 800, y=500))
    return StepRequest(action_id=uuid.uuid4().hex, actions=(action,), settle=settle)


async def bench_boot(provider: LocalProvider, num: int) -> list[Row]:
    walls, cpus = [], []
    for _ in range(num):
        cpu = time.process_time()
        desktop = await provider.boot(0)
        cpus.append(time.process_time() - cpu + inside_cpu_s([0]))
        walls.append(desktop.boot_s)
        await desktop.kill()
    return [
        at_most(
            "boot to first screenshot, one at a time, p50", p50_ms(walls), 500, "ms", f" ({quantiles(walls)})"
        ),
        Row("CPU of such a boot", f"{statistics.median(cpus):.2f} s"),
    ]


async def window(desktop: Desktop, title: str) -> None:
    async with asyncio.timeout(120):
        while title not in (await desktop.run(["wmctrl", "-l"])).stdout:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def bench_window(
    provider: LocalProvider,
    name: str,
    title: str,
    start: Callable[[Desktop], Awaitable[None]],
    num: int,
    most: tuple[float, float] | None = None,
) -> list[Row]:
    """`most`: goals, in ms and MB."""
    walls, cpus = [], []
    for _ in range(num):
        cpu, begun = time.process_time(), time.monotonic()
        desktop = await provider.boot(0)
        await start(desktop)
        await window(desktop, title)
        walls.append(time.monotonic() - begun)
        await desktop.step(StepRequest(action_id="s", settle=Settle(quiet_ms=100, max_ms=3000)))
        cpus.append(time.process_time() - cpu + inside_cpu_s([0]))
        memory = held_bytes(0)
        await desktop.kill()
    detail = f" ({quantiles(walls)}; {statistics.median(cpus):.2f} s CPU)"
    label, held = f"boot to mapped {name} window, p50", f"memory of a desktop with one {name} open"
    memory_mb = (memory or 0) / 1e6
    if most is None:
        return [Row(label, f"{p50_ms(walls):.0f} ms{detail}"), Row(held, f"{memory_mb:.0f} MB")]
    rows = [at_most(label, p50_ms(walls), most[0], "ms", detail)]
    return [*rows, at_most(held, memory_mb, most[1], "MB")] if memory else rows


async def start_editor(desktop: Desktop) -> None:
    await desktop.launch(["mousepad", "/home/user/text.txt"])


async def start_tk(desktop: Desktop) -> None:
    program = b"import tkinter as tk\nr = tk.Tk(); r.title('Form'); tk.Button(r, text='ok').pack(); tk.Entry(r).pack(); r.mainloop()"
    await desktop.put_file("form.py", program)
    await desktop.launch(["python3", "form.py"])


async def bench_steps(
    provider: LocalProvider, num_desktops: int, num_steps: int, settle: Settle
) -> list[Row]:
    desktops = await asyncio.gather(*(provider.boot(slot) for slot in range(num_desktops)))
    await asyncio.gather(*(start_editor(desktop) for desktop in desktops))
    await asyncio.gather(*(window(desktop, "Mousepad") for desktop in desktops))
    await asyncio.sleep(3)
    slots = range(num_desktops)
    walls: list[float] = []

    async def drive(desktop: Desktop) -> None:
        for index in range(num_steps):
            begun = time.monotonic()
            await desktop.step(click(37 * index, settle))
            walls.append(time.monotonic() - begun)

    own, inside, begun = time.process_time(), inside_cpu_s(slots), time.monotonic()
    await asyncio.gather(*(drive(desktop) for desktop in desktops))
    wall = time.monotonic() - begun
    total = num_desktops * num_steps
    own, inside = time.process_time() - own, inside_cpu_s(slots) - inside
    await asyncio.gather(*(desktop.kill() for desktop in desktops))
    name = f"click + lossless screenshot, {num_desktops} active, quiet {settle.quiet_ms} ms"
    cpu_ms, detail = (
        (own + inside) / total * 1e3,
        f" (host {own / total * 1e3:.1f}, inside {inside / total * 1e3:.1f})",
    )
    if num_desktops > 1:
        return [
            at_least(name, total / wall, 80, "steps/s", f" ({quantiles(walls)})"),
            Row("CPU of such a step", f"{cpu_ms:.1f} ms{detail}"),
        ]
    if settle.quiet_ms:
        return [Row(name, f"{p50_ms(walls):.1f} ms ({quantiles(walls)}); {cpu_ms:.1f} ms CPU{detail}")]
    return [
        at_most(
            f"{name}, p50", p50_ms(walls), 30, "ms", f" ({quantiles(walls)}; {total / wall:.0f} steps/s)"
        ),
        at_most("CPU of such a step", cpu_ms, 20, "ms", detail),
    ]


async def bench_process_click(provider: LocalProvider, num: int) -> list[Row]:
    """A click as OSWorld sends it, run by an interpreter inside instead of played by us, its pause switched off; then the same
    clicks our way on the same desktop."""
    desktop = await provider.boot(0)
    text = "import pyautogui; import time; pyautogui.PAUSE = 0; pyautogui.click(*(100, 100))"

    async def by_process() -> None:
        await desktop.run(["python", "-c", text])
        await desktop.screenshot()

    async def by_us() -> None:
        await desktop.step(click(0, Settle(quiet_ms=0, max_ms=1000)))

    async def measured(step: Callable[[], Awaitable[None]]) -> tuple[list[float], float]:
        walls, cpu = [], time.process_time() + inside_cpu_s([0])
        for _ in range(num):
            begun = time.monotonic()
            await step()
            walls.append(time.monotonic() - begun)
        return walls, time.process_time() + inside_cpu_s([0]) - cpu

    await by_process()
    theirs, their_cpu_s = await measured(by_process)
    ours, our_cpu_s = await measured(by_us)
    await desktop.kill()
    name = "the same with a Python process a click (OSWorld's way), p50"
    ratios = f"{p50_ms(theirs) / p50_ms(ours):.1f} of the time, {their_cpu_s / max(our_cpu_s, TICK_S):.1f} of the CPU"
    return [
        Row(name, f"{p50_ms(theirs):.0f} ms ({quantiles(theirs)}); {their_cpu_s / num * 1e3:.0f} ms CPU"),
        Row("OSWorld's way as a multiple of ours, bare desktop", ratios),
    ]


async def bench_boots(provider: LocalProvider, num: int) -> list[Row]:
    begun = time.monotonic()
    desktops = await asyncio.gather(*(provider.boot(slot) for slot in range(num)))
    booted = time.monotonic() - begun
    begun = time.monotonic()
    await asyncio.gather(*(desktop.kill() for desktop in desktops))
    killed = time.monotonic() - begun
    name = f"{num} boots, at most 2 at once; then all killed"
    return [Row(name, f"{num / booted:.1f} boots/s; {killed * 1e3:.0f} ms")]


async def bench_acquire(config: SandboxConfig, folder: Path, num: int) -> list[Row]:
    """From asking the gateway to holding a desktop of the warm pool, which refills between two askings."""
    walls = []
    async with (
        LocalCluster(config, folder, start_timeout_s=START_S) as cluster,
        SandboxClient(cluster.url, cluster.token, config) as client,
    ):
        for number in range(num):
            await asyncio.sleep(REFILL_S)
            begun = time.monotonic()
            async with client.lease(key=f"bench-{number}") as sandbox:
                walls.append(time.monotonic() - begun)
                await sandbox.screenshot()
    return [at_most("acquire from the warm pool, p50", p50_ms(walls), 100, "ms", f" ({quantiles(walls)})")]


async def bench_capture(provider: LocalProvider) -> list[Row]:
    desktop = await provider.boot(0)
    await start_editor(desktop)
    await window(desktop, "Mousepad")
    await desktop.put_file("text.txt", b"")
    capture = await desktop.step(StepRequest(action_id="c", settle=Settle(quiet_ms=200, max_ms=3000)))
    await desktop.kill()
    image = Image.open(io.BytesIO(capture.png)).convert("RGB")
    pixels = np.array(image.convert("RGBA"))[:, :, [2, 1, 0, 3]].copy()
    rows = []
    kinds: dict[str, Callable[[], bytes]] = {"PNG, ours (default)": lambda: encode_bgrx(pixels)}
    for name, options in {
        "PNG, Pillow level 1": {"format": "PNG", "compress_level": 1},
        "JPEG, Pillow quality 80": {"format": "JPEG", "quality": 80},
        "WebP lossless, Pillow method 0": {"format": "WEBP", "lossless": True, "method": 0},
    }.items():
        kinds[name] = partial(saved, image, options)
    for name, encode in kinds.items():
        size, cpu = len(encode()), time.process_time()
        for _ in range(5):
            encode()
        cpu_ms, held = (time.process_time() - cpu) / 5 * 1e3, f", {size / 1e3:.0f} kB"
        is_ours = "default" in name
        rows.append(
            at_most(f"encode: {name}, CPU", cpu_ms, 12, "ms", held)
            if is_ours
            else Row(f"encode: {name}, CPU", f"{cpu_ms:.1f} ms{held}")
        )
    return rows


def saved(image: Image.Image, options: dict[str, object]) -> bytes:
    file = io.BytesIO()
    image.save(file, **options)  # type: ignore[arg-type]
    return file.getvalue()


@contextlib.asynccontextmanager
async def fresh_provider(config: DesktopConfig) -> AsyncIterator[LocalProvider]:
    """One a part: what a part that failed left is gone before the next one."""
    with tempfile.TemporaryDirectory() as folder:
        provider = LocalProvider(config, Path(folder), LABEL)
        try:
            yield provider
        finally:
            await provider.close()


async def run(options: argparse.Namespace) -> int:
    width, height = map(int, options.size.split("x"))
    config = DesktopConfig(screen_wh_px=(width, height), first_uid=FIRST_UID)
    num, repeats, many = options.desktops, options.repeats, Settle(quiet_ms=0, max_ms=1000)
    async with fresh_provider(config) as provider:
        await provider.check()
    parts: list[tuple[str, Callable[[LocalProvider], Awaitable[list[Row]]]]] = [
        ("boot", lambda p: bench_boot(p, repeats)),
        ("a Tk window", lambda p: bench_window(p, "Tk", "Form", start_tk, repeats)),
        ("an editor", lambda p: bench_window(p, "editor", "Mousepad", start_editor, repeats, (1200, 50))),
        ("steps of one desktop", lambda p: bench_steps(p, 1, 50, many)),
        ("OSWorld's way", lambda p: bench_process_click(p, 10)),
        ("settled steps", lambda p: bench_steps(p, 1, 30, Settle())),
        ("steps of many desktops", lambda p: bench_steps(p, num, 20, many)),
        ("boots", lambda p: bench_boots(p, num)),
        ("capture", bench_capture),
    ]
    table = Table(f"local desktops of {options.size}")
    for name, part in parts:
        async with fresh_provider(config) as provider:
            await table.part(name, part(provider))
    with tempfile.TemporaryDirectory() as folder:
        cluster = SandboxConfig(**config.model_dump(), num_desktops=1, num_spares=2)
        await table.part("acquire", bench_acquire(cluster, Path(folder), repeats))
    return table.end()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="1504x832")
    parser.add_argument("--desktops", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=8)
    raise SystemExit(asyncio.run(run(parser.parse_args())))


if __name__ == "__main__":
    main()
