"""Dumps of torch's flight recorder: read without running anything that they contain, and compared over ranks. No torch.

The format is what torch writes on a collective's timeout (`TORCH_FR_DUMP_TEMP_FILE` + rank, `torch._C._distributed_c10d.
_dump_fr_trace`): a pickle of plain containers, or JSON. Fields as in version 2.x: `entries` with `process_group`,
`collective_seq_id`, `state`, `profiling_name`, `input_sizes`; `pg_status` with the last enqueued and completed sequence.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from regrow.errors import OperationalError

MAX_BYTES = 256 << 20
"""A dump of 2,000 entries with stacks is a few megabytes; more than this is not read."""
_RANK = re.compile(r"(\d+)(?:\.(?:json|pkl|pickle))?$")
_NO_SEQUENCE = -1


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One collective as one rank recorded it."""

    group: str
    sequence: int
    name: str
    state: str
    sizes: str = ""
    place: str = ""
    """File and line of the caller, where frames were recorded."""


class Recording(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank recorded: sequence numbers by process group, and the operations that are still in the buffer."""

    rank: int
    enqueued: dict[str, int]
    completed: dict[str, int]
    operations: tuple[Operation, ...] = ()


class FlightFinding(msgspec.Struct, frozen=True, kw_only=True):
    """The odd ranks of one process group."""

    group: str
    kind: str
    """`behind`: enqueued less than the others; `mismatch`: another collective under the same number; `not_completed`: all
    enqueued it, some have not completed it; `gone`: no answer from it."""
    ranks: tuple[int, ...]
    sequence: int
    text: str
    everywhere: bool = False
    """Told by a service that knows the ranks of all hosts."""


class _NoCode(pickle.Unpickler):
    """Plain containers, numbers and strings only: a pickle that names any class or function is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"names {module}.{name}: a recording has plain data only")

    def persistent_load(self, pid: Any) -> Any:
        raise pickle.UnpicklingError(f"has a persistent id {pid!r}")


def read(path: Path, rank: int | None = None) -> Recording:
    """One dump. The rank is the number at the end of the file's name unless it is given.

    Raises:
        OperationalError: unreadable, too large, no recording, or a pickle that would run code.
    """
    if rank is None:
        match = _RANK.search(path.name)
        if match is None:
            raise OperationalError("the name does not end in a rank", where=str(path), hint="torch writes PREFIX<rank>")
        rank = int(match.group(1))
    try:
        if path.stat().st_size > MAX_BYTES:
            raise OperationalError(f"is larger than {MAX_BYTES} bytes", where=str(path), hint="name a flight recorder dump")
        data = path.read_bytes()
    except OSError as error:
        raise OperationalError(f"cannot be read: {error.strerror}", where=str(path), hint="name a flight recorder dump") from error
    return parse(data, rank, where=str(path))


def parse(data: bytes, rank: int, *, where: str = "dump") -> Recording:
    """As `read`, of bytes.

    Raises:
        OperationalError: as for `read`.
    """
    try:
        document = json.loads(data) if data.lstrip()[:1] == b"{" else _NoCode(io.BytesIO(data)).load()
        return _recording(document, rank)
    except Exception as error:  # a damaged pickle raises whatever it likes
        raise OperationalError(
            f"is no flight recorder dump: {error}", where=where, hint="dumps are written by torch at a collective's timeout"
        ) from error


def _recording(document: Any, rank: int) -> Recording:
    if not isinstance(document, dict) or "entries" not in document:
        raise ValueError("it has no entries")
    plain = cast("dict[str, Any]", document)
    operations = tuple(_operation(entry) for entry in plain["entries"] if not entry.get("is_p2p"))
    names = {str(entry.get("pg_id", "")): _group(entry) for entry in plain["entries"]}
    enqueued: dict[str, int] = {}
    completed: dict[str, int] = {}
    for number, status in dict(plain.get("pg_status") or {}).items():
        group = names.get(str(number), str(number))
        enqueued[group] = int(status.get("last_enqueued_collective", _NO_SEQUENCE))
        completed[group] = int(status.get("last_completed_collective", _NO_SEQUENCE))
    for one in operations:  # older versions have no pg_status
        enqueued[one.group] = max(enqueued.get(one.group, _NO_SEQUENCE), one.sequence)
        if one.state == "completed":
            completed[one.group] = max(completed.get(one.group, _NO_SEQUENCE), one.sequence)
    return Recording(rank=rank, enqueued=enqueued, completed=completed, operations=operations)


def _operation(entry: Mapping[str, Any]) -> Operation:
    frames = entry.get("frames") or []
    caller = next((one for one in frames if "torch/distributed/" not in str(one.get("filename", ""))), None)
    return Operation(
        group=_group(entry),
        sequence=int(entry.get("collective_seq_id", _NO_SEQUENCE)),
        name=str(entry.get("profiling_name", "")),
        state="completed" if entry.get("retired") and entry.get("state") == "scheduled" else str(entry.get("state", "")),
        sizes=json.dumps(entry.get("input_sizes", [])),
        place=f"{caller['filename']}:{caller['line']}" if caller else "",
    )


def _group(entry: Mapping[str, Any]) -> str:
    name = entry.get("process_group")
    if isinstance(name, list | tuple) and name:
        return " ".join(dict.fromkeys(str(part) for part in cast("Iterable[Any]", name)))
    return str(name if name is not None else entry.get("pg_id", ""))


def compare(recordings: Iterable[Recording]) -> list[FlightFinding]:
    """The odd ranks of each process group, strongest evidence first. Only ranks that recorded a group are compared in it."""
    known = sorted(recordings, key=lambda one: one.rank)
    found: list[FlightFinding] = []
    for group in dict.fromkeys(name for one in known for name in one.enqueued):
        members = [one for one in known if group in one.enqueued]
        if len(members) > 1:
            found += _mismatch(group, members) or _behind(group, members) or _pending(group, members)
    return sorted(found, key=lambda one: ("mismatch", "behind", "not_completed").index(one.kind))


def _mismatch(group: str, members: list[Recording]) -> list[FlightFinding]:
    """The first number under which ranks recorded different collectives or sizes of an all-reduce."""
    recorded = [{one.sequence: one for one in member.operations if one.group == group} for member in members]
    shared = sorted(set.intersection(*(set(one) for one in recorded)))
    for sequence in shared:
        kinds = [(one[sequence].name, one[sequence].sizes if "reduce" in one[sequence].name else "") for one in recorded]
        counts = Counter(kinds)
        if len(counts) == 1:
            continue
        usual, times = counts.most_common(1)[0]
        odd = tuple(member.rank for member, kind in zip(members, kinds, strict=True) if kind != usual) if 2 * times > len(kinds) else ()
        words = "; ".join(f"rank {member.rank}: {' '.join(kind).strip()}" for member, kind in zip(members, kinds, strict=True))
        return [FlightFinding(group=group, kind="mismatch", ranks=odd, sequence=sequence, text=f"collective {sequence} differs: {words}")]
    return []


def _behind(group: str, members: list[Recording]) -> list[FlightFinding]:
    least, most = (choose(one.enqueued[group] for one in members) for choose in (min, max))
    if least == most:
        return []
    odd = tuple(one.rank for one in members if one.enqueued[group] == least)
    text = f"enqueued {least} collectives, the others up to {most}"
    ahead = next((one for member in members for one in member.operations if one.group == group and one.sequence == least + 1), None)
    if ahead is not None:
        text += f"; the next would be {ahead.name}" + (f" at {ahead.place}" if ahead.place else "")
    return [FlightFinding(group=group, kind="behind", ranks=odd, sequence=least, text=text)]


def _pending(group: str, members: list[Recording]) -> list[FlightFinding]:
    open_ = [one for one in members if 0 <= one.completed.get(group, _NO_SEQUENCE) < one.enqueued[group]]
    if not open_:
        return []
    sequence = min(one.completed[group] for one in open_) + 1
    odd = tuple(one.rank for one in open_) if len(open_) < len(members) else ()
    text = f"collective {sequence} was enqueued by all and not completed by {len(open_)} of {len(members)} ranks"
    return [FlightFinding(group=group, kind="not_completed", ranks=odd, sequence=sequence, text=text)]
