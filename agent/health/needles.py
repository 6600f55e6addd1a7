"""Literal text that every match of a regular expression contains: a cheap test before the expensive one.

Hundreds of patterns are tried on each log line; nearly all are ruled out by one substring search. A pattern for which
nothing can be derived (or on a Python whose parser is not where we look for it) is simply always tried.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable, Sequence
from typing import Any

_MIN_LENGTH = 2


class Gated:
    """A compiled pattern with its needles."""

    def __init__(self, pattern: str) -> None:
        self._regex = re.compile(pattern, re.IGNORECASE)
        self.needles = needles(pattern)

    def found(self, line: str, lowered: str) -> bool:
        """Whether the pattern matches somewhere in `line`; `lowered` is the line in lower case."""
        for words in self.needles:
            for word in words:
                if word in lowered:
                    break
            else:
                return False
        return self._regex.search(line) is not None


def needles(pattern: str) -> tuple[tuple[str, ...], ...]:
    """Groups of lower-case strings: every match of `pattern` contains at least one string of each group."""
    try:
        parser = importlib.import_module("re._parser")
        groups = _groups(parser.parse(pattern, re.IGNORECASE))
    except (ImportError, AttributeError, ValueError):
        return ()
    return tuple(tuple(sorted(words)) for words in sorted(groups, key=lambda one: (len(one), -min(len(word) for word in one))))


def _groups(items: Iterable[Any]) -> list[frozenset[str]]:
    """What a sequence of parsed items must contain, all of it."""
    groups: list[frozenset[str]] = []
    run = ""
    for operator, argument in items:
        name = str(operator)
        if name == "LITERAL":
            run += chr(argument).lower()
            continue
        if len(run) >= _MIN_LENGTH:
            groups.append(frozenset({run}))
        run = ""
        groups.extend(_inner_groups(name, argument))
    if len(run) >= _MIN_LENGTH:
        groups.append(frozenset({run}))
    return groups


def _inner_groups(name: str, argument: Any) -> list[frozenset[str]]:
    if name == "SUBPATTERN":
        return _groups(argument[-1])
    if name == "BRANCH":
        return _of_branches(argument[1])
    if name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT") and argument[0] >= 1:
        return _groups(argument[2])
    return []


def _of_branches(branches: Sequence[Any]) -> list[frozenset[str]]:
    """One of the branches must match: the best group of each, together; nothing when a branch has none."""
    found = [_groups(branch) for branch in branches]
    if not all(found):
        return []
    best = [max(groups, key=lambda one: (min(len(word) for word in one), -len(one))) for groups in found]
    return [frozenset[str]().union(*best)]
