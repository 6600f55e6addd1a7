"""What NCCL itself knows of a running job: its RAS service (NCCL 2.24 and later), asked over its text protocol.

A thread in each NCCL process listens on NCCL_RAS_ADDR (localhost:28028 by default) and answers for all processes of the job,
on all hosts: which are unreachable, which reported an error, and how many collectives each rank has launched on each
communicator. From 2.28.7 on it answers in JSON, before in text; both are read. Source: NCCL user guide, "RAS".
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import msgspec

from regrow.agent.health.flight import FlightFinding

PORT = 28028
PROTOCOL = 2
_MAX_BYTES = 64 * 1024 * 1024
_DONE = (0, 7)
"""ncclSuccess and ncclInProgress: no error."""


class Process(msgspec.Struct, frozen=True):
    """Where a rank of a communicator runs."""

    host: str
    pid: int


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One rank of a communicator, as RAS tells it. None: the text form does not say."""

    rank: int
    process: Process | None = None
    launched: dict[str, int] = {}
    """{collective: number of the last one launched}."""
    missing: bool = False
    error: str = ""


class Communicator(msgspec.Struct, frozen=True, kw_only=True):
    """One communicator."""

    hash: str
    size: int
    members: tuple[Member, ...]


class Ras(msgspec.Struct, frozen=True, kw_only=True):
    """One answer."""

    version: str = ""
    communicators: tuple[Communicator, ...] = ()
    gone: tuple[Process, ...] = ()
    """Processes without an answer, where only those are told."""


async def ask(address: str, seconds: float) -> Ras:
    """Ask a service once.

    Args:
        address: host:port.
        seconds: for everything; RAS itself is told to wait for its peers half as long.

    Raises:
        OSError: nobody listens there, or the connection broke.
        TimeoutError: no answer in time.
        ValueError: something else than RAS listens there.
    """
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(seconds):
        reader, writer = await asyncio.open_connection(host.strip("[]") or "localhost", int(port), limit=_MAX_BYTES)
        try:
            await _command(reader, writer, f"CLIENT PROTOCOL {PROTOCOL}", "SERVER PROTOCOL")
            await _command(reader, writer, f"TIMEOUT {max(1, int(seconds / 2))}", "OK")
            writer.write(b"SET FORMAT json\n")  # versions before 2.28.7 say that they do not know it
            as_json = (await reader.readline()).startswith(b"OK")
            writer.write(b"VERBOSE STATUS\n")
            data = await reader.read(_MAX_BYTES)
            while chunk := await reader.read(_MAX_BYTES - len(data)):
                data += chunk
        finally:
            writer.close()
    return parse_json(data) if as_json else parse_text(data.decode("utf-8", "replace"))


async def _command(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, line: str, answer: str) -> None:
    writer.write(line.encode() + b"\n")
    said = (await reader.readline()).decode("utf-8", "replace").strip()
    if not said.upper().startswith(answer):
        raise ValueError(f"no NCCL RAS service: it answered {said[:80]!r} to {line!r}")


def parse_json(data: bytes) -> Ras:
    """The JSON form.

    Raises:
        ValueError: not that.
    """
    try:
        document: dict[str, Any] = msgspec.json.decode(data)
        found = tuple(_communicator(one) for one in document["communicators"])
        return Ras(version=str(document.get("nccl_version", "")), communicators=found)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a RAS answer: {error}") from error


def _communicator(one: Mapping[str, Any]) -> Communicator:
    present = [_member(item) for item in one["ranks"]]
    missing = [Member(rank=int(item["rank"]), process=_process(item), missing=_unheard(item)) for item in one.get("missing_ranks", [])]
    return Communicator(hash=str(one["hash"]).removeprefix("0x"), size=int(one["size"]), members=(*present, *missing))


def _member(item: Mapping[str, Any]) -> Member:
    status = cast("Mapping[str, Any]", item.get("status", {}))
    codes = {name: int(status.get(name, 0)) for name in ("init_state", "async_error")}
    error = ", ".join(f"{name} {code}" for name, code in codes.items() if code not in _DONE)
    counts = cast("Mapping[str, Any]", item.get("collective_counts", {}))
    launched = {str(name): int(count) for name, count in counts.items()}
    return Member(rank=int(item["rank"]), process=_process(item), launched=launched, error=error)


def _unheard(item: Mapping[str, Any]) -> bool:
    """A rank that answers and is in no such communicator (it is being made or torn down) is not missing."""
    status = cast("Mapping[str, Any]", item.get("status", {}))
    return bool(status.get("unresponsive", True) or status.get("considered_dead"))


def _process(item: Mapping[str, Any]) -> Process:
    return Process(str(item.get("host", "")), int(item.get("pid", 0)))


_ROW = re.compile(r"^\s+(\d+)\s+\d+\s+\d+\s+\S+\s+(?:\d+-)?(\d+)\s+\d+\s+[A-Z]+\s+[A-Z]+\s*$")
_HEAD = re.compile(r"^#(\d+)-\d+ \(([0-9a-f]+)\) (\w+)")
_COUNTS = re.compile(r"Communicator ranks have different (\w+) operation counts")
_MANY = re.compile(r"^\s+(\d+) ranks have (?:launched up to operation (\d+)|not launched any)")
_RANK = re.compile(
    r"^\s+Rank (\d+)(?: has launched up to operation (\d+)| has (not) launched any operations)?(?: reported ([\w ]+?))? -- (.*)$"
)
_MISSING = re.compile(r"^\s+The missing ranks?: ([\d, ]+)")
_PROCESS = re.compile(r"process (\d+) on node (\S+)", re.IGNORECASE)
_GONE = re.compile(r"^\s+Process (\d+) on node (\S+) managing")


class _Text:
    """Reads the text form from top to bottom."""

    def __init__(self) -> None:
        self.members: dict[str, dict[int, Member]] = {}
        self.sizes: dict[str, int] = {}
        self._sizes: dict[str, int] = {}
        self.gone: list[Process] = []
        self._hash = self._kind = self._collective = ""
        self._value: int | None = None

    def line(self, line: str) -> None:
        """One line."""
        head = _HEAD.match(line)
        if head is not None:
            self._hash, self._kind, self._value, self._collective = head[2], head[3], None, ""
            self.members.setdefault(self._hash, {})
            self.sizes[self._hash] = self._sizes.get(head[1], 0)
            return
        if row := _ROW.match(line):
            self._sizes[row[1]] = int(row[2])
            return
        if gone := _GONE.match(line):
            self.gone.append(Process(gone[2], int(gone[1])))
            return
        if not self._hash:
            return
        if counts := _COUNTS.search(line):
            self._collective, self._value = counts[1], None
        elif many := _MANY.match(line):
            self._value = int(many[2] or 0)
            self._add(-1 - self._value, {self._collective or "collective": self._value}, int(many[1]))
        elif missing := _MISSING.match(line):
            for word in missing[1].split(","):
                self._set(Member(rank=int(word), missing=True))
        elif rank := _RANK.match(line):
            self._rank(rank)

    def _rank(self, found: re.Match[str]) -> None:
        where = _PROCESS.search(found[5])
        process = Process(where[2], int(where[1])) if where is not None else None
        own = int(found[2]) if found[2] else 0 if found[3] else self._value
        launched = {self._collective or "collective": own} if own is not None and self._kind == "MISMATCH" else {}
        if self._kind == "MISMATCH" and not launched:
            return  # ranks with another status: a communicator that is being made or torn down
        error = (found[4] or "error") if self._kind == "ERROR" else ""
        self._set(Member(rank=int(found[1]), process=process, launched=launched, missing=self._kind == "INCOMPLETE", error=error))

    def _add(self, place: int, launched: dict[str, int], times: int) -> None:
        """So many ranks that are not named one by one: they are counted, under numbers that no rank has."""
        for index in range(times):
            self.members[self._hash][place * 1_000_000 - index] = Member(rank=-1, launched=launched)

    def _set(self, member: Member) -> None:
        known = self.members[self._hash]
        if member.launched:  # it was counted among those that are not named
            (value,) = member.launched.values()
            counted = next((key for key, one in known.items() if key < 0 and one.launched == member.launched), None)
            if counted is not None and value == self._value:
                del known[counted]
        known[member.rank] = member


def parse_text(text: str) -> Ras:
    """The text form (`VERBOSE STATUS`): communicators that something is the matter with, and processes without an answer.

    Raises:
        ValueError: not that.
    """
    version = re.search(r"^NCCL version (\S+)", text, re.MULTILINE)
    if version is None or "Communicators" not in text:
        raise ValueError("not a RAS answer: no version, no communicators")
    reader = _Text()
    for line in text.splitlines():
        reader.line(line)
    found = tuple(
        Communicator(hash=name, size=reader.sizes[name], members=tuple(members.values())) for name, members in reader.members.items()
    )
    return Ras(version=version[1], communicators=found, gone=tuple(dict.fromkeys(reader.gone)))


def findings(first: Ras, second: Ras, pids: Mapping[int, int], world_size: int) -> list[FlightFinding]:
    """What two answers say, the strongest first. Counts that moved between them are a job that moves.

    Args:
        pids: {pid: rank} of the job's ranks on this host: a rank of a communicator is no rank of the job.
        world_size: of the job; a communicator of this size numbers its ranks as the job does.
    """
    before = {one.hash: one for one in first.communicators}
    found: list[FlightFinding] = []
    for one in sorted(second.communicators, key=lambda item: -item.size):
        missing = [member for member in one.members if member.missing]
        broken = [member for member in one.members if member.error]
        if missing:
            found.append(_finding(one, "gone", missing, -1, "NCCL's service does not hear of it", pids, world_size))
        if broken:
            found.append(_finding(one, "not_completed", broken, -1, f"NCCL reports {broken[0].error}", pids, world_size))
        found += _behind(one, before.get(one.hash), pids, world_size)
    if second.gone and not any(one.kind == "gone" for one in found):
        found.append(_gone(second.gone, pids))
    order = {"gone": 0, "not_completed": 1, "behind": 2}
    return sorted(found, key=lambda one: order[one.kind])


def _behind(one: Communicator, before: Communicator | None, pids: Mapping[int, int], world_size: int) -> list[FlightFinding]:
    if before is None or _launched(before) != _launched(one):
        return []
    for collective in sorted({name for member in one.members for name in member.launched}):
        counts = Counter(member.launched[collective] for member in one.members if collective in member.launched)
        least, most = min(counts), max(counts)
        late = [member for member in one.members if member.launched.get(collective) == least]
        if least == most or 2 * len(late) > sum(counts.values()) or any(member.rank < 0 for member in late):
            continue
        text = f"has launched {collective} {least}, others {most}, and nothing moved between two looks"
        return [_finding(one, "behind", late, most, text, pids, world_size)]
    return []


def _launched(one: Communicator) -> list[tuple[int, tuple[tuple[str, int], ...]]]:
    return sorted((member.rank, tuple(sorted(member.launched.items()))) for member in one.members)


def _finding(
    one: Communicator, kind: str, members: Sequence[Member], sequence: int, text: str, pids: Mapping[int, int], world_size: int
) -> FlightFinding:
    whole = one.size == world_size
    ranks = [member.rank if whole else pids.get(member.process.pid if member.process else 0, -1) for member in members]
    places = ", ".join(f"pid {member.process.pid} on {member.process.host}" for member in members[:4] if member.process is not None)
    named = tuple(sorted(rank for rank in ranks if rank >= 0))
    told = text + (f" ({places})" if places else "")
    return FlightFinding(group=f"NCCL {one.hash}", kind=kind, ranks=named, sequence=sequence, text=told, everywhere=True)


def _gone(gone: Sequence[Process], pids: Mapping[int, int]) -> FlightFinding:
    places = ", ".join(f"pid {one.pid} on {one.host}" for one in gone[:4])
    ranks = tuple(sorted(pids[one.pid] for one in gone if one.pid in pids))
    return FlightFinding(
        group="NCCL", kind="gone", ranks=ranks, sequence=-1, text=f"NCCL's service does not hear of {places}", everywhere=True
    )
