"""Python stacks of many ranks as data: where each one is, in a word, and which of them stand together. Pure but for source lines."""

from __future__ import annotations

import linecache
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

Kind = Literal["collective", "data", "save", "rendezvous", "lock", "sleep", "io", "python", "unknown"]

_COLLECTIVE_FILES = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "regrow/agent/worker/control.py",
)
_FILES: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("rendezvous", ("torch/distributed/rendezvous.py", "torch/distributed/elastic/rendezvous")),
    ("data", ("torch/utils/data/", "datasets/iterable_dataset")),
    ("save", ("torch/distributed/checkpoint/", "torch/serialization.py", "regrow/ckpt/", "safetensors/")),
)
_COLLECTIVE_LINE = re.compile(
    r"\.wait\(|all_reduce|all_gather|reduce_scatter|all_to_all|broadcast|barrier|\.recv\(|\.send\(|synchronize\(|\.item\(\)|\.backward\("
)
_SLEEP_LINE = re.compile(r"\bsleep\(")
_IO_LINE = re.compile(r"\.read\(|\.write\(|\.recv_bytes|\.accept\(|fsync|urlopen|requests\.|\bopen\(")
_BACKWARD = ("_engine_run_backward", "_run_backward")
_RENDEZVOUS = ("init_process_group", "_store_based_barrier", "rendezvous")
_WRAPPERS = ("wrapper", "func_wrapper", "inner")
_LIBRARY = re.compile(r"/site-packages/|/dist-packages/|/lib/python\d|^<frozen|/regrow/(?:agent|ckpt|parallel)/|^<string>")


class Frame(msgspec.Struct, frozen=True):
    """One frame."""

    name: str
    file: str
    line: int


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """The main thread of a process, innermost frame first, and what it does there."""

    frames: tuple[Frame, ...] = ()
    kind: Kind = "unknown"
    operation: str = ""
    """The collective's function, or the innermost function otherwise."""

    @property
    def place(self) -> str:
        """Where in the user's own code, else the innermost frame."""
        if not self.frames:
            return "no Python stack"
        own = next((one for one in self.frames if not _LIBRARY.search(one.file)), self.frames[0])
        return f"{own.name} ({_short(own.file)}:{own.line})"

    @property
    def signature(self) -> str:
        """Equal for ranks that are at the same place."""
        return f"{self.kind} {self.operation} in {self.place}"


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Ranks that stand at the same place."""

    ranks: tuple[int, ...]
    kind: Kind
    where: str
    frames: tuple[str, ...] = ()


def main_thread(document: Sequence[Mapping[str, Any]]) -> Stack:
    """The main thread of `py-spy dump --json`."""
    threads = [one for one in document if one.get("frames")]
    if not threads:
        return Stack()
    chosen = next((one for one in threads if one.get("thread_name") == "MainThread"), threads[-1])
    return stack_of([Frame(str(one.get("name", "")), str(one.get("filename", "")), int(one.get("line") or 0)) for one in chosen["frames"]])


_FAULTHANDLER = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.+)$')


def from_faulthandler(text: str) -> Stack:
    """The main thread of a `faulthandler` dump: the last one that it prints."""
    frames: list[Frame] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            frames = []
        match = _FAULTHANDLER.match(line)
        if match is not None:
            frames.append(Frame(match["name"], match["file"], int(match["line"])))
    return stack_of(frames)


def stack_of(frames: Sequence[Frame]) -> Stack:
    """Judge frames, innermost first."""
    kind, operation = _judge(frames)
    return Stack(frames=tuple(frames), kind=kind, operation=operation)


def _judge(frames: Sequence[Frame]) -> tuple[Kind, str]:
    if not frames:
        return "unknown", ""
    for one in frames:
        if one.name in _RENDEZVOUS:
            return "rendezvous", one.name
    for kind, files in _FILES:
        for one in frames:
            if any(file in one.file for file in files):
                return kind, one.name
    collective = [one for one in frames if one.file.endswith(_COLLECTIVE_FILES) and one.name not in _WRAPPERS]
    if collective:
        return "collective", collective[-1].name
    inner = frames[0]
    if inner.name in _BACKWARD:
        return "collective", "backward"
    if inner.file.endswith("/threading.py") and inner.name in ("acquire", "wait", "join", "_wait_for_tstate_lock", "__enter__"):
        return "lock", inner.name
    return _by_line(inner)


def _by_line(inner: Frame) -> tuple[Kind, str]:
    """A call into C leaves the caller as the innermost frame: its source line says what is called."""
    line = linecache.getline(inner.file, inner.line)
    if match := _COLLECTIVE_LINE.search(line):
        return "collective", match.group().strip(".(")
    if _SLEEP_LINE.search(line):
        return "sleep", inner.name
    if "acquire(" in line or re.search(r"\bwith \w*lock", line):
        return "lock", inner.name
    if _IO_LINE.search(line):
        return "io", inner.name
    return "python", inner.name


def group(stacks: Mapping[int, Stack]) -> list[Group]:
    """Ranks by place, the largest group first."""
    members: dict[str, list[int]] = {}
    for rank in sorted(stacks):
        members.setdefault(stacks[rank].signature, []).append(rank)
    groups = [
        Group(
            ranks=tuple(ranks),
            kind=stacks[ranks[0]].kind,
            where=signature,
            frames=tuple(f"{one.name} ({_short(one.file)}:{one.line})" for one in stacks[ranks[0]].frames[:12]),
        )
        for signature, ranks in members.items()
    ]
    return sorted(groups, key=lambda one: (-len(one.ranks), one.ranks))


def _short(file: str) -> str:
    return "/".join(file.rsplit("/", 2)[-2:]) if "/site-packages/" in file else file.rsplit("/", 1)[-1]
