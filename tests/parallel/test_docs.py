"""docs/parallelism.md: its commands run, its pictures are what the tool draws today, its JSON is read."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regrow.parallel import inventory

Regrow = Callable[..., tuple[int, Any, str]]
DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "parallelism.md").read_text()
COMMANDS = [shlex.split(block.replace("\\\n", " ")) for block in re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)]
SMALL = ("plan", "--layers", 16, "--hidden", 4096, "--heads", 32, "--vocab", 32000, "--seq", 2048)
SCHEDULE = ("--nodes", 1, "--gpus-per-node", 4, "--dp", 1, "--tp", 1, "--pp", 4, "--global-batch", 8, "--micro-batch", 1)
PICTURES: dict[str, tuple[object, ...]] = {
    "mesh.svg": (*SMALL, "--nodes", 2, "--global-batch", 64, "--tp", 4, "--pp", 2, "--picture", "mesh"),
    "schedule-1f1b.svg": (*SMALL, *SCHEDULE, "--picture", "schedule"),
    "schedule-zb-h1.svg": (*SMALL, *SCHEDULE, "--schedule", "zb-h1", "--picture", "schedule"),
    "schedule-interleaved.svg": (*SMALL, *SCHEDULE, "--schedule", "interleaved", "--picture", "schedule"),
    "regime.svg": (*SMALL, "--nodes", 16, "--global-batch", 1024, "--picture", "regime"),
    "interval.svg": ("interval", "--mtbf-hours", 24, "--save-seconds", 30),
}


@pytest.mark.parametrize("words", COMMANDS, ids=[" ".join(words[:3]) for words in COMMANDS])
def test_commands_of_the_page_run(regrow: Regrow, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert words[0] == "regrow"
    code, document, _ = regrow(*words[1:])
    assert code == 0
    assert document


@pytest.mark.parametrize("name", list(PICTURES))
def test_pictures_are_what_the_tool_draws(regrow: Regrow, name: str, tmp_path: Path) -> None:
    target = tmp_path / name
    assert regrow(*PICTURES[name], "--svg", target)[0] == 0
    assert (DOCS / "pictures" / name).read_text() == target.read_text(), f"draw again: regrow {shlex.join(map(str, PICTURES[name]))}"
    assert f"pictures/{name}" in PAGE


def test_the_inventory_of_the_page_is_read() -> None:
    block = re.search(r"```json\n(.*?)```", PAGE, re.DOTALL)
    assert block is not None
    there = inventory.read(block[1], "page")
    assert [node.gpus for node in there.nodes] == [8, 8, 6]
    assert there.infiniband.bandwidth == 25e9
