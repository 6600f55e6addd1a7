"""What kind of line is this, and which line of a log is the cause?

Total on any bytes: a line that no rule knows is benign. The verdict of a file is its *first cause*, not its loudest
line: symptoms (victims, teardown, clean-up, details of another line) never are a cause, a broken part outranks the
program errors that it leads to, and what is only to be watched is a cause only when there is nothing else.
"""

from __future__ import annotations

import functools
import re
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from regrow.agent.health import xid as xids
from regrow.agent.health.needles import Gated

_TABLE = Path(__file__).with_name("loglines.toml")
_MAX_LINE = 2048

_TALK = re.compile(r"^\W*(?:\S+ ){0,6}?\W?\b(INFO|DEBUG|TRACE|NOTICE)\b\W|\b\w+Warning: ")
_KERNEL_TIME = re.compile(r"^\s*(?:<\d+>)?\[\s*(\d+\.\d+)\]")
_XID = re.compile(r"\bXid\b\s*\((?:PCI:)?([0-9a-f:.]+)\)\s*:\s*(\d+)", re.IGNORECASE)
_XID_TOLD = re.compile(r"\bXid\b(?=.*\b(?:error|detected|critical|fault|fatal)\b|.*\berror\b)[^0-9(]{0,16}\b(\d{1,3})\b", re.IGNORECASE)
"""How monitoring programs speak of XIDs: "XID error 79 detected"."""
_SXID = re.compile(r"\bSXid\b\s*\((?:PCI:)?([0-9a-f:.]+)\)\s*:\s*(\d+)(.*)", re.IGNORECASE)
_MCE_STATUS = re.compile(r"\b(?:CPU \d+: )?Machine Check(?: Exception| Event)?: \d+ Bank \d+: ([0-9a-f]{8,16})\b", re.IGNORECASE)
_NVLINK5 = re.compile(r"\b([A-Z]+)_?\w* +(Fatal|Nonfatal|Non-fatal)\b", re.IGNORECASE)
_APPLICATION_UNITS = ("RLW", "TLW")
_MCE_UNCORRECTED = 1 << 61
"""Bit UC of IA32_MCi_STATUS (Intel SDM volume 3, chapter 16)."""

BROKEN_PART, PROGRAM, WATCH = 3, 2, 1
PROGRAM_ACTIONS = frozenset(
    {"restart_app", "fix_code", "replay_step", "restart_app_track_node", "resume_later", "free_space", "follow_action"}
)


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One classified line; `line` counts from 1."""

    line: int
    kind: str = msgspec.field(name="class")
    action: str
    role: str
    xid: int | None = None
    source: str = ""
    text: str = ""

    @property
    def tier(self) -> int:
        """How strong a cause this line can be: 3 a broken part, 2 the program, 1 to be watched, 0 none."""
        if self.role != "primary" or self.action == "none":
            return 0
        if self.action == "watch":
            return WATCH
        return PROGRAM if self.action in PROGRAM_ACTIONS else BROKEN_PART


class FileVerdict(msgspec.Struct, frozen=True, kw_only=True):
    """The first cause of a log. Class `unknown`: only symptoms; `benign`: nothing at all; first_line 0 then."""

    kind: str = msgspec.field(name="class")
    action: str
    first_line: int
    reason: str = ""


class _Rule(msgspec.Struct, frozen=True):
    kind: str
    action: str
    role: str
    source: str
    talk: bool
    any: tuple[Gated, ...]
    unless: tuple[Gated, ...]


@functools.cache
def _rules() -> tuple[_Rule, ...]:
    document: dict[str, Any] = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return tuple(_rule(raw) for raw in document["rule"])


def _rule(raw: dict[str, Any]) -> _Rule:
    any_of, unless = (tuple(Gated(pattern) for pattern in raw.get(name, ())) for name in ("any", "unless"))
    return _Rule(raw["class"], raw["action"], raw["role"], raw["source"], raw.get("talk", False), any_of, unless)


def classes() -> frozenset[str]:
    """Every class that `classify` can answer: a closed set, fit for metric labels."""
    return frozenset(rule.kind for rule in _rules()) | frozenset(one.log_class for one in xids.table().values()) | _CODED


_CODED = frozenset({"nvswitch_fatal", "nvswitch_nonfatal", "nvlink_fault", "nvlink_degraded", "gpu_unknown_xid", "benign"})


def classify(text: str, number: int = 1) -> Line:
    """Class of one line. Never raises; never slower than linear in the line (cut at 2 KiB)."""
    line = text[:_MAX_LINE].rstrip("\r\n")
    for special in (_sxid, _xid, _machine_check):
        found = special(line, number)
        if found is not None:
            return found
    talk = _TALK.search(line) is not None
    lowered = line.lower()
    for rule in _rules():
        if talk and not rule.talk:
            continue
        if any(one.found(line, lowered) for one in rule.any) and not any(one.found(line, lowered) for one in rule.unless):
            return Line(line=number, kind=rule.kind, action=rule.action, role=rule.role, source=rule.source, text=line)
    return Line(line=number, kind="benign", action="none", role="none", text=line)


def classify_lines(lines: Iterable[str]) -> list[Line]:
    """Class of each line, numbered from 1."""
    return [classify(text, number) for number, text in enumerate(lines, 1)]


def verdict(lines: Sequence[Line]) -> FileVerdict:
    """The first cause among classified lines."""
    strongest = max((one.tier for one in lines), default=0)
    if strongest:
        first = _first([one for one in lines if one.tier == strongest])
        others = sum(one.role == "secondary" for one in lines)
        return FileVerdict(
            kind=first.kind,
            action=first.action,
            first_line=first.line,
            reason=f"first cause at line {first.line}; {others} symptoms set aside",
        )
    symptoms = [one for one in lines if one.role == "secondary"]
    if symptoms:
        first = _first(symptoms)
        return FileVerdict(
            kind="unknown", action=first.action, first_line=first.line, reason=f"only symptoms ({first.kind}): the cause is elsewhere"
        )
    return FileVerdict(kind="benign", action="none", first_line=0, reason="no line speaks of a fault")


def _first(candidates: Sequence[Line]) -> Line:
    """Earliest by the kernel's clock when every candidate carries it, else by position."""
    times = [_KERNEL_TIME.match(one.text) for one in candidates]
    stamps = [float(match.group(1)) for match in times if match is not None]
    if len(stamps) < len(candidates):
        return min(candidates, key=lambda one: one.line)
    return min(zip(stamps, candidates, strict=True), key=lambda pair: (pair[0], pair[1].line))[1]


def _xid(line: str, number: int) -> Line | None:
    match = _XID.search(line)
    told = None if match is not None or _TALK.search(line) else _XID_TOLD.search(line)
    if match is None and told is None:
        return None
    code = int(match.group(2)) if match is not None else int(told.group(1)) if told is not None else 0
    if match is None and code not in xids.table():
        return None
    known = xids.table().get(code)
    if known is None:
        return Line(line=number, kind="gpu_unknown_xid", action="watch", role="primary", xid=code, source="kernel", text=line)
    role = "secondary" if known.role == "cascade" or known.log_class == "gpu_cleanup_secondary" else "primary"
    kind, action = known.log_class, known.log_action
    if kind == "nvlink_fault":
        kind, action = _nvlink(line, code, action)
    if kind == "benign":
        role = "none"
    return Line(line=number, kind=kind, action=action, role=role, xid=code, source="kernel", text=line)


def _nvlink(line: str, code: int, action: str) -> tuple[str, str]:
    """NVLink 5 says its severity: a nonfatal error in the units that carry a request costs that program, else nothing yet."""
    match = _NVLINK5.search(line)
    if code not in xids.NVLINK5 or match is None or match.group(2).lower() == "fatal":
        return "nvlink_fault", action
    if match.group(1).upper() in _APPLICATION_UNITS:
        return "nvlink_fault", "restart_app"
    return "nvlink_degraded", "watch"


def _sxid(line: str, number: int) -> Line | None:
    match = _SXID.search(line)
    if match is None:
        return None
    rest = match.group(3).lower()
    nonfatal = re.search(r"non-?\s?fatal", rest) is not None
    fatal = not nonfatal and "fatal" in rest
    detail = not fatal and not nonfatal
    fatal = fatal or "severity 1" in rest
    kind, action = ("nvswitch_fatal", "reboot_node") if fatal else ("nvswitch_nonfatal", "watch")
    return Line(line=number, kind=kind, action=action, role="secondary" if detail else "primary", source="kernel", text=line)


def _machine_check(line: str, number: int) -> Line | None:
    match = _MCE_STATUS.search(line)
    if match is None:
        return None
    uncorrected = int(match.group(1), 16) & _MCE_UNCORRECTED or "exception" in match.group(0).lower()
    kind, action = ("host_mce_uncorrected", "replace_node") if uncorrected else ("host_mce_corrected", "watch")
    return Line(line=number, kind=kind, action=action, role="primary", source="kernel", text=line)
