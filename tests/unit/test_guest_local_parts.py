"""Parts of the local provider that need no display: what is missing is said, what is left is found, what is denied."""

from __future__ import annotations

import io
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sandbox_cluster.guest.home import home_files, window_manager_config
from sandbox_cluster.guest.screen import Framebuffer
from sandbox_cluster.providers import limits
from sandbox_cluster.providers.preflight import MachineFacts, check_machine, explain, gather
from sandbox_cluster.providers.records import Records, start_ticks
from sandbox_cluster.providers.seccomp import denylist_program
from slime_cua.config.sandbox import DesktopConfig, SandboxConfig
from slime_cua.core.errors import ConfigError, PreflightError, SandboxError

GOOD = {"system": "Linux", "missing_programs": (), "trial_error": None}


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"system": "Darwin"}, "need Linux"),
        ({"missing_programs": ("bwrap",)}, "apt-get install -y --no-install-recommends bubblewrap"),
        ({"missing_programs": ("Xvfb", "xkbcomp")}, "xvfb x11-xkb-utils"),
        ({"has_font": False}, "fonts-dejavu-core"),
        (
            {"trial_error": "no", "apparmor_restricts": True},
            "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0",
        ),
        ({"trial_error": "no", "clone_forbidden": True}, "sysctl -w kernel.unprivileged_userns_clone=1"),
        ({"trial_error": "no", "max_user_namespaces": 0}, "sysctl -w user.max_user_namespaces"),
        ({"trial_error": "Creating new namespace failed"}, "Creating new namespace failed"),
    ],
)
def test_each_missing_thing_is_named_with_the_line_that_brings_it(
    facts: dict[str, object], line: str
) -> None:
    explained = explain(MachineFacts(**{**GOOD, **facts}))  # type: ignore[arg-type]
    assert explained is not None and line in explained


def test_a_fit_machine_has_nothing_to_explain() -> None:
    assert explain(MachineFacts(**GOOD)) is None  # type: ignore[arg-type]


def test_an_empty_path_has_no_programs(tmp_path: Path) -> None:
    assert {"bwrap", "Xvfb", "openbox"} <= set(gather(path=str(tmp_path)).missing_programs)


def test_an_impossible_screen_size_is_refused_before_anything_starts() -> None:
    with pytest.raises(PreflightError, match="64"):
        check_machine(DesktopConfig(screen_wh_px=(10, 10)))


def test_a_sandbox_config_is_a_desktop_config() -> None:
    assert isinstance(SandboxConfig(maximise=True), DesktopConfig)


def test_reap_ends_the_recorded_process_and_leaves_a_reused_pid_alone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(command) as mine, subprocess.Popen(command) as other:
        first = Records(tmp_path, "host-1")
        first.own()
        first.write(0, mine.pid, ())
        first.write(1, other.pid, ())
        file = tmp_path / "desktops" / "host-1" / "slot-1.json"
        file.write_text(file.read_text().replace(str(start_ticks(other.pid)), "12345"))
        first.release()
        second = Records(tmp_path, "host-1")
        assert second.reap() == 1
        second.release()
        assert mine.wait(5) == -9 and other.poll() is None
        other.kill()
    assert not list(tmp_path.rglob("slot-*.json"))


def test_a_record_of_another_label_is_left_alone(tmp_path: Path) -> None:
    one, two = Records(tmp_path, "a"), Records(tmp_path, "b")
    one.own()
    one.write(0, os.getpid(), ())
    assert two.reap() == 0 and list(tmp_path.rglob("slot-0.json"))
    one.release()
    two.release()


@pytest.mark.parametrize("label", ["", "../x", "a/b", ".x", "a b"])
def test_a_label_that_is_no_plain_name_is_refused(tmp_path: Path, label: str) -> None:
    with pytest.raises(ValueError, match="label"):
        Records(tmp_path, label)


def run_filter(program: bytes, arch: int, number: int, argument: int = 0) -> int:
    """A slow reading of the classic BPF instructions that the filter uses."""
    data = struct.pack("<IIQ", number, arch, 0) + struct.pack("<Q", argument)
    code = [struct.unpack_from("<HBBI", program, offset) for offset in range(0, len(program), 8)]
    position, value = 0, 0
    while True:
        op, if_true, if_false, constant = code[position]
        position += 1
        if op == 0x06:
            return constant
        if op == 0x20:
            value = struct.unpack_from("<I", data, constant)[0]
            continue
        is_true = {0x15: value == constant, 0x35: value >= constant, 0x45: bool(value & constant)}[op]
        position += if_true if is_true else if_false


ALLOW, REFUSE, MISSING, KILL = 0x7FFF0000, 0x00050001, 0x00050026, 0x80000000
X86, ARM = 0xC000003E, 0xC00000B7


@pytest.mark.parametrize(
    ("machine", "arch", "number", "argument", "verdict"),
    [
        ("x86_64", X86, 0, 0, ALLOW),
        ("x86_64", X86, 101, 0, REFUSE),
        ("x86_64", X86, 272, 0, REFUSE),
        ("x86_64", X86, 425, 0, REFUSE),
        ("x86_64", X86, 443, 0, REFUSE),
        ("x86_64", X86, 56, 0x01200011, ALLOW),
        ("x86_64", X86, 56, 0x10000011, REFUSE),
        ("x86_64", X86, 435, 0, MISSING),
        ("x86_64", X86, 0x40000000, 0, KILL),
        ("x86_64", 0x40000003, 11, 0, KILL),
        ("aarch64", ARM, 117, 0, REFUSE),
        ("aarch64", ARM, 220, 0x10000000, REFUSE),
        ("aarch64", ARM, 63, 0, ALLOW),
    ],
)
def test_the_call_filter_decides_as_written(
    machine: str, arch: int, number: int, argument: int, verdict: int
) -> None:
    assert run_filter(denylist_program(machine), arch, number, argument) == verdict


def test_a_machine_without_a_call_table_is_refused() -> None:
    with pytest.raises(PreflightError, match="riscv64"):
        denylist_program("riscv64")


def test_without_groups_each_process_gets_a_memory_limit() -> None:
    config = DesktopConfig(memory_mb=100)
    assert f"--data={100 << 20}" in limits.process_limits(config, limits.Backend(0), is_own_user=True)
    assert not any("data" in part for part in limits.process_limits(config, limits.Backend(2), True))


@pytest.mark.parametrize(
    ("version", "written"),
    [
        (2, {"0/x/cpu.max": "50000 100000", "0/x/memory.max": str(100 << 20)}),
        (1, {"2/x/cpu.cfs_quota_us": "50000", "2/x/cpu.cfs_period_us": "100000", "1/x/pids.max": "40"}),
    ],
)
def test_groups_limit_cpu_time_in_both_versions(
    tmp_path: Path, version: int, written: dict[str, str]
) -> None:
    folders = tuple(tmp_path / str(number) for number in range(1 if version == 2 else 3))
    config = DesktopConfig(memory_mb=100, num_processes=40, num_cpus=0.5)
    limits.make_groups(limits.Backend(version, folders, has_cpu=True), "x", config)
    assert {path: (tmp_path / path).read_text() for path in written} == written


def test_without_groups_for_cpu_time_desktops_give_way() -> None:
    config = DesktopConfig()
    assert limits.process_limits(config, limits.Backend(0), True)[:3] == ["/usr/bin/nice", "-n", "10"]
    assert limits.process_limits(config, limits.Backend(1, has_cpu=True), True)[0] == "/usr/bin/prlimit"


def test_no_group_folder_means_no_groups(tmp_path: Path) -> None:
    assert limits.find_backend(tmp_path).version == 0
    assert limits.make_groups(limits.Backend(0), "x", DesktopConfig()) == ()


def test_maximise_is_a_rule_for_normal_windows_only() -> None:
    assert 'type="normal"><maximized>yes' in window_manager_config(DesktopConfig(maximise=True))
    assert "maximized" not in window_manager_config(DesktopConfig())


def test_golden_files_keep_place_mode_and_bytes_and_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.sh").write_bytes(b"#!/bin/sh\n")
    (tmp_path / "a" / "run.sh").chmod(0o750)
    (tmp_path / "link").symlink_to("/etc/hostname")
    files = {file.path: file for file in home_files(DesktopConfig(golden_home=str(tmp_path)))}
    assert files["/home/user/a/run.sh"].mode == 0o750 and files["/home/user/a/run.sh"].data == b"#!/bin/sh\n"
    assert "/home/user/link" not in files
    with pytest.raises(ConfigError, match="not a folder"):
        home_files(DesktopConfig(golden_home=str(tmp_path / "none")))


def xwd(width: int, height: int, pixels: bytes) -> bytes:
    words = [0] * 25
    words[0], words[4], words[5], words[11], words[12], words[19] = 160, width, height, 32, 4 * width, 2
    return struct.pack(">25I", *words) + bytes(60 + 24) + pixels


def test_the_framebuffer_is_read_behind_header_and_colours_and_a_short_one_is_an_error(
    tmp_path: Path,
) -> None:
    path = tmp_path / "screen"
    path.write_bytes(xwd(2, 2, bytes(range(16))))
    screen = Framebuffer(os.open(path, os.O_RDONLY), (2, 2))
    first = screen.read()
    png = screen.last_png()
    assert screen.read() == first and screen.last_png() is png
    path.write_bytes(xwd(2, 2, bytes(16)))
    assert screen.read() != first and screen.last_png() != png
    path.write_bytes(xwd(2, 2, bytes(15)))
    with pytest.raises(SandboxError, match="too short"):
        screen.read()
    screen.close()


def test_a_framebuffer_that_programs_draw_on_is_seen_as_it_is_at_each_read(tmp_path: Path) -> None:
    path, (width, height), random = tmp_path / "screen", (9, 83), np.random.default_rng(0)
    pixels = np.zeros((height, width, 4), np.uint8)
    path.write_bytes(xwd(width, height, pixels.tobytes()))
    screen = Framebuffer(os.open(path, os.O_RDONLY), (width, height))
    for _ in range(60):
        before = screen.read()
        for _ in range(random.integers(0, 3)):
            pixels[random.integers(height), random.integers(width)] = random.integers(0, 256, 4)
        is_changed = path.read_bytes() != xwd(width, height, pixels.tobytes())
        path.write_bytes(xwd(width, height, pixels.tobytes()))
        assert (screen.read() != before) == is_changed
        shown = np.asarray(Image.open(io.BytesIO(screen.last_png())).convert("RGB"))
        assert np.array_equal(shown, pixels[:, :, [2, 1, 0]])
    screen.close()


def test_a_framebuffer_of_another_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "screen"
    path.write_bytes(xwd(2, 2, bytes(16)))
    file = os.open(path, os.O_RDONLY)
    with pytest.raises(SandboxError, match="2x2"):
        Framebuffer(file, (4, 4))
    os.close(file)
