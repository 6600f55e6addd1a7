"""What the documents tell people to type exists: commands, their flags, and the files and pages that are named."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer.main

from regrow.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/**/*.md"))]


def commands(page: Path) -> list[list[str]]:
    """Words after `regrow` of each command in blocks and tables, up to a comment, the next column or a pipe."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if re.match(r"    |regrow|\|", line)]
    found = [part for line in lines for part in re.findall(r"(?:^|[\s(;`/])regrow ([a-z].*)", line)]
    ends = re.compile(r" #|`|  | \| |;|\)| &| >")
    made: list[list[str]] = []
    for part in found:
        try:
            made.append(shlex.split(ends.split(part)[0].replace("|", " ")))
        except ValueError:  # an apostrophe in a sentence
            continue
    return made


def unknown(root: Any, words: list[str]) -> tuple[int, list[str]]:
    """How many words name a command, and flags that it does not have."""
    command, depth = root, 0
    while hasattr(command, "commands") and depth < len(words) and words[depth] in command.commands:
        command, depth = command.commands[words[depth]], depth + 1
    if depth == 0 or hasattr(command, "commands"):
        return depth, []
    flags = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {"--help"}
    given = words[depth:]
    if words[0] == "run":  # what follows the script is the script's
        script = next((number for number, word in enumerate(given) if word.endswith(".py") or word in ("-m", "--module")), len(given))
        given = given[:script]
    return depth, [word for word in given if word.startswith("--") and word.split("=")[0] not in flags]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_commands_and_flags_in_the_documents_exist() -> None:
    root = typer.main.get_command(app.build())
    assert unknown(root, ["ckpt", "verify", "--nosuch"]) == (2, ["--nosuch"]), "this test would notice"
    wrong: dict[str, list[list[str]]] = {}
    known = 0
    for page in PAGES:
        for words in commands(page):
            depth, flags = unknown(root, words)
            known += depth > 0
            if flags:
                wrong.setdefault(page.name, []).append([*words[:depth], *flags])
    assert wrong == {}
    assert known > 100


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_named_files_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        assert not anchor or target.suffix != ".md" or anchor in anchors(target), link
    for name in re.findall(r"`((?:tests|docs|examples|deploy|tools|benchmarks|dashboards)/[\w./-]+)", text):
        assert (ROOT / name).exists(), name
