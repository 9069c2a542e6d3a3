"""Getters that ask a Windows machine: a stand-in of WindowsAgentArena's server with probes, and a PowerShell that answers by a table.

No Windows was at hand: what the real ones answer is taken from that project's source.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from sandbox_cluster.guest.forward import application
from sandbox_cluster.judge.getters import Inputs, Scene, fetch
from sandbox_cluster.judge.jail import Jail
from sandbox_cluster.providers.desktop import Desktop
from sandbox_cluster.providers.remote import RemoteProvider
from sandbox_cluster.tasks.setup import Setup
from slime_cua.core.errors import JudgeError
from tests.contract.osworld_guest import PROBES
from tests.contract.provider_rigs import remote_machines

pytestmark = pytest.mark.desktop
KEY = r"HKCU:\Software\Microsoft\Windows\CurrentVersion"


POWER_SHELL = """#!/usr/bin/python3
import sys
script = sys.argv[sys.argv.index("-Command") + 1]
answers = {answers!r}
print(answers[script] if script in answers else "", end="")
sys.exit(script not in answers)
"""
PLACE = "import os, sys; place, text, mode = sys.argv[1:]; open(place, 'w').write(text); os.chmod(place, int(mode, 8))"
HOME = "/home/user/C:\\Users\\Docker"
"""Where the stand-in, a Linux program, finds Windows' home: a folder of that name in its own."""


@pytest.fixture
async def desktop(tmp_path: Path) -> AsyncIterator[Desktop]:
    async with remote_machines(tmp_path, windows=True) as config:
        provider = RemoteProvider(config, tmp_path, "x")
        desktop = await provider.boot(0)
        await desktop.run(["mkdir", HOME], cwd="/")
        yield desktop
        await provider.close()


async def place(desktop: Desktop, path: str, text: str, mode: str = "644") -> None:
    reply = await desktop.run(["python", "-c", PLACE, path, text, mode], cwd="/")
    assert reply.returncode == 0, reply


async def power_shell(desktop: Desktop, answers: dict[str, str]) -> None:
    await place(desktop, "/home/bin/powershell", POWER_SHELL.format(answers=answers), "755")


async def got(desktop: Desktop, kind: str, **getter: Any) -> Any:
    setup = Setup(application)
    end = time.monotonic() + 120
    view = Scene(desktop, Inputs(), {}, Jail(), setup.fetch, setup.server(desktop), time.time(), end)
    await fetch(view, {"type": kind, **getter})
    return view.inputs.arguments[0]["value"]


@pytest.mark.parametrize(
    ("kind", "asked", "body", "yes", "no"),
    [
        ("is_details_view", {"folder_path": "C:/D"}, {"path": "C:/D"}, True, False),
        ("are_files_sorted_by_modified_time", {"directory": "C:/D"}, {"directory": "C:/D"}, True, False),
        (
            "is_directory_read_only_for_user",
            {"directory": "C:/D", "user": "u"},
            {"directory": "C:/D", "user": "u"},
            True,
            False,
        ),
        (
            "check_if_timer_started",
            {"hours": 0, "minutes": 30, "seconds": 0},
            {"hours": 0, "minutes": 30, "seconds": 0},
            "True",
            "False",
        ),
        (
            "check_if_world_clock_exists",
            {"city": "Kyoto", "country": "Japan"},
            {"city": "Kyoto", "country": "Japan"},
            "True",
            "False",
        ),
    ],
)
async def test_a_probe_is_asked_with_its_own_words(
    desktop: Desktop, kind: str, asked: dict[str, Any], body: dict[str, Any], yes: object, no: object
) -> None:
    for status, right in ((200, yes), (400, no), (500, no)):
        await place(desktop, PROBES, json.dumps({f"/{kind}": [body, status]}))
        assert await got(desktop, kind, **asked) == right, status
    await place(desktop, PROBES, "{}")
    with pytest.raises(JudgeError, match=f"no probe /{kind}.*only WindowsAgentArena's server has it"):
        await got(desktop, kind, **asked)


async def test_settings_are_asked_of_power_shell(desktop: Desktop) -> None:
    answers = {
        f"Get-ItemPropertyValue -Path '{KEY}\\PushNotifications' -Name 'ToastEnabled'": "0\r\n",
        f"Get-ItemPropertyValue -Path '{KEY}\\StorageSense\\Parameters\\StoragePolicy' -Name '01'": "1\r\n",
        f"Get-ItemPropertyValue -Path '{KEY}\\StorageSense\\Parameters\\StoragePolicy' -Name '2048'": "7\r\n",
        "Get-ItemPropertyValue -Path 'HKCU:\\Control Panel\\Desktop' -Name 'WallPaper'": "\r\n",
        "Get-TimeZone | Select-Object DisplayName | ConvertTo-Json": '{\r\n "DisplayName": "(UTC) X"\r\n}\r\n',
        "Get-AppxPackage | Select-Object Name | ConvertTo-Json": '[{"Name": "A"}, {"Name": "X.PWABuilder.Y"}]',
    }
    await power_shell(desktop, answers)
    assert await got(desktop, "system_notifications") == "True"
    assert await got(desktop, "storage_sense_run_frequency") == "7"
    assert await got(desktop, "desktop_background") == "True"
    assert await got(desktop, "system_timezone") == "(UTC) X"
    assert await got(desktop, "validate_pwa_installed") == "app_installed"
    assert await got(desktop, "night_light_state") is False


async def test_untouched_settings_are_not_what_a_task_asks_for(desktop: Desktop) -> None:
    await power_shell(desktop, {})
    assert await got(desktop, "system_notifications") == "False"
    assert await got(desktop, "storage_sense_run_frequency") is None
    assert await got(desktop, "validate_pwa_installed") == "app_not_installed"
    assert await got(desktop, "system_timezone") == "Unable to get time zone"


async def test_without_power_shell_or_on_linux_there_is_no_score(desktop: Desktop, tmp_path: Path) -> None:
    with pytest.raises(JudgeError, match="PowerShell cannot be started"):
        await got(desktop, "system_timezone")
    (tmp_path / "linux").mkdir()
    async with remote_machines(tmp_path / "linux") as config:
        provider = RemoteProvider(config, tmp_path / "linux", "x")
        with pytest.raises(JudgeError, match="the task needs a Windows desktop"):
            await got(await provider.boot(0), "system_timezone")
        await provider.close()
