"""What the benchmarks print: a part that fails or hangs is a line, and takes no other line along."""

from __future__ import annotations

import asyncio
import importlib
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("bench_tables")


async def test_a_part_that_fails_is_a_line_and_the_others_come(
    bench: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    async def good() -> list[Any]:
        return [bench.at_most("fast", 1.0, 2.0, "ms"), bench.at_least("many", 1.0, 2.0, "a second")]

    async def bad() -> list[Any]:
        raise OSError("no | room")

    async def hangs() -> list[Any]:
        await asyncio.sleep(60)
        return []

    table = bench.Table("all")
    await table.part("first", good())
    await table.part("second", bad())
    await table.part("third", hangs(), timeout_s=0.05)
    await table.part("fourth", good())
    assert table.end() == 1
    lines = capsys.readouterr().out.splitlines()
    verdicts = [line.split("|")[4].strip() for line in lines if line.startswith("| ")][1:-1]
    assert verdicts == ["met", "**missed**", "**failed**", "**failed**", "met", "**missed**"]
    assert "OSError: no / room" in "\n".join(lines) and "no end within 0.05 s" in "\n".join(lines)


async def test_the_exit_code_is_0_when_every_part_ran_though_goals_were_missed(bench: Any) -> None:
    assert bench.Table("all").end() == 0
