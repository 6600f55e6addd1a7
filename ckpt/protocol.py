"""What is said on the checkpoint writer's socket: JSON lines, tagged by `type`; arenas travel as file descriptors.

    producer (worker) -> writer     ProducerHello, Prepare, Submit, Skip
    writer -> producer              Ready (with two memfds), Released, Rejected
    restoring worker -> writer      Borrow, Gather; answered by Held (with a memfd) for each file, then HeldAll
                                    Recall; answered by Remembered for each snapshot that was not written, then HeldAll
    dying worker -> writer          Bequeath; answered by Ready (with one memfd) or Rejected; then Bequeathed
    its successor -> writer         Inherit; answered by Bequest (with a memfd) where there is one, then HeldAll; later Inherited
    controller (agent) -> writer    ControllerHello, Acknowledged, QueryStatus, CopyTo, Located
    writer -> controller            wire.ShardsDurable, wire.ShardsFailed (kept until acknowledged), WriterStatus, Listening, Locate

An arena is free from `Ready` on, in use from the producer's `Submit` until the writer's `Released`. The producer fills
only free arenas, so a lease needs no round trip; the writer takes all back when the producer's connection closes.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from regrow.ckpt.manifest import Metric, Note, Parent, RankManifest, RankPlan
from regrow.ids import MeshShape
from regrow.wire import ShardsDurable, ShardsFailed

ARENAS_PER_PRODUCER = 2
CELL_BYTES = 1 << 20


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    pass


class ProducerHello(_Message, frozen=True, kw_only=True, tag="producer"):
    """First line of a worker. A token lower than one seen for the job is rejected."""

    job: str
    node: str
    epoch: int
    generation: int
    rank: int
    world_size: int
    local_ranks: tuple[int, ...]
    """All ranks of this node that take part in saves: a step is durable when all of them are."""
    folder: str
    """The job's checkpoint folder, absolute."""
    node_file: bool = False
    """The ranks of this node share one file on storage. The same for all of them."""


class Prepare(_Message, frozen=True, kw_only=True, tag="prepare"):
    """The layout of this rank's file. Answered by `Ready`."""

    plan: RankPlan
    storage_bytes: int = 0
    """What this rank's restore read from storage alone, in `storage_seconds`; 0: it did not."""
    storage_seconds: float = 0.0


class Submit(_Message, frozen=True, kw_only=True, tag="submit"):
    """An arena holds a complete snapshot: write it, or keep it in memory."""

    arena: int
    step: int
    samples: int
    directory: str
    """Name of the checkpoint's directory below the folder."""
    parent: Parent | None = None
    private: dict[str, Any] = {}
    facts: dict[str, Any] = {}
    metrics: dict[str, Metric] = {}
    """The newest of each name that this rank was told, of this step or an earlier one."""
    memory: MeshShape | None = None
    """Given: nothing is written; the snapshot, of a job on this mesh, stays in memory until its arena is filled anew."""


class Skip(_Message, frozen=True, kw_only=True, tag="skip"):
    """This rank took no snapshot of a step that the others may have taken: the step is void."""

    step: int
    reason: str


class Borrow(_Message, frozen=True, kw_only=True, tag="borrow"):
    """Which files of a checkpoint are still in arenas? They are the fastest place to restore from."""

    directory: str
    """Absolute."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """A file of which a restoring rank needs parts, and who may have it in memory."""

    name: str
    size_bytes: int
    holders: tuple[str, ...]
    """Nodes: the one that wrote it, and its buddy."""
    cells: tuple[int, ...]
    """Numbers of the `CELL_BYTES` that are needed, counted from the start of the file, ascending."""


class Gather(_Message, frozen=True, kw_only=True, tag="gather"):
    """Fetch these parts from the memory of other nodes. Answered as `Borrow` is; what could not be fetched is left out."""

    directory: str
    """Absolute."""
    files: tuple[Wanted, ...]
    stored: bool = True
    """They are on storage, too: a node that is slower need not be asked."""


class Recall(_Message, frozen=True, kw_only=True, tag="recall"):
    """Which snapshots of a job are in memory here that were not written?"""

    job: str


class Remembered(_Message, frozen=True, kw_only=True, tag="remembered"):
    """A rank's snapshot that a writer has in memory, its own node's or a copy; nothing of it is on storage."""

    job: str
    epoch: int
    generation: int
    step: int
    node: str
    """Whose rank made it."""
    directory: str
    """Absolute; it names the snapshot and does not exist."""
    manifest: RankManifest
    note: Note


class Held(_Message, frozen=True, kw_only=True, tag="held"):
    """A file that an arena held when this was sent; its descriptor comes with this line. An arena may be filled anew at any
    time: whoever reads it verifies what he read."""

    name: str
    size_bytes: int


class HeldAll(_Message, frozen=True, kw_only=True, tag="held_all"):
    """The end of the answer to `Borrow`, `Gather` and `Recall`."""


class Ready(_Message, frozen=True, kw_only=True, tag="ready"):
    """Arenas 0..num_arenas-1 of `arena_bytes` each are yours and free; their descriptors come with this line."""

    num_arenas: int
    arena_bytes: int
    problem: str = ""
    """Why there are fewer than `ARENAS_PER_PRODUCER`."""


class Released(_Message, frozen=True, kw_only=True, tag="released"):
    """The arena is free again, and what became of what was in it."""

    arena: int
    step: int
    outcome: Literal["durable", "remembered", "failed"]
    reason: str = ""
    write_seconds: float = 0.0


class Rejected(_Message, frozen=True, kw_only=True, tag="rejected"):
    """The writer does not serve this producer: fenced, or no memory for arenas."""

    reason: str
    fenced: bool = False


class Bequeath(_Message, frozen=True, kw_only=True, tag="bequeath"):
    """A worker that is about to be killed wants memory for the state that it holds."""

    job: str
    generation: int
    slot: int
    """Local rank: its successor in this place of the node gets it."""
    num_bytes: int


class Bequeathed(_Message, frozen=True, kw_only=True, tag="bequeathed"):
    """The memory holds a whole state."""

    step: int
    head_bytes: int
    """At the end of the memory: what is in it, JSON (`agent.worker.bequest`)."""
    digest: str
    """xxh3-128 of all of it, hexadecimal."""


class Inherit(_Message, frozen=True, kw_only=True, tag="inherit"):
    """What did a worker of this place leave?"""

    job: str
    slot: int


class Bequest(_Message, frozen=True, kw_only=True, tag="bequest"):
    """What a dead worker left; the descriptor of the memory comes with this line."""

    generation: int
    step: int
    num_bytes: int
    head_bytes: int
    digest: str


class Inherited(_Message, frozen=True, kw_only=True, tag="inherited"):
    """It was taken up, or is not wanted: the memory is given back."""

    job: str
    slot: int


class ControllerHello(_Message, frozen=True, kw_only=True, tag="controller"):
    """First line of an agent. Reports that nobody acknowledged are sent at once."""

    node: str


class Acknowledged(_Message, frozen=True, kw_only=True, tag="acknowledged"):
    """The report of this step is safe with the committing agent: forget it."""

    job: str
    generation: int
    step: int


class CopyTo(_Message, frozen=True, kw_only=True, tag="copy_to"):
    """Where the arenas of a job are copied from this generation on, and how writers of other nodes are talked to."""

    job: str
    generation: int
    node: str
    """This node."""
    buddy: str
    """Node that keeps the copies; empty: none."""
    host: str
    """Address to listen on for copies and requests of others."""
    tls_certificate: str = ""
    tls_key: str = ""
    tls_ca: str = ""


class Locate(_Message, frozen=True, kw_only=True, tag="locate"):
    """Where does the writer of this node listen? Answered by `Located`."""

    node: str


class Located(_Message, frozen=True, kw_only=True, tag="located"):
    """host:port of a node's writer; empty when nobody knows."""

    node: str
    address: str


class Listening(_Message, frozen=True, kw_only=True, tag="listening"):
    """Writers of other nodes reach this one here."""

    port: int


class QueryStatus(_Message, frozen=True, kw_only=True, tag="query_status"):
    """Ask for `WriterStatus`."""


class WriterStatus(_Message, frozen=True, kw_only=True, tag="writer_status"):
    """What the writer has and does."""

    pid: int
    producers: int
    arenas: int
    arena_bytes: int
    writing: tuple[int, ...] = ()
    """Steps that are being written."""
    unacknowledged: tuple[int, ...] = ()
    saves_durable: int = 0
    saves_failed: int = 0
    last_write_seconds: float = 0.0
    buddy: str = ""
    """Node that keeps copies of these arenas; empty: none."""
    copies_sent: int = 0
    copies_failed: int = 0
    last_copy_seconds: float = 0.0
    copies_held: int = 0
    """Files of other nodes that are kept here, in `copies_held_bytes` of memory."""
    copies_held_bytes: int = 0
    copies_refused: int = 0
    memory_short: dict[str, int] = {}
    """What was left out because the node has no memory for it, and how often: `save`, `second_arena`, `copy` of another node."""


ToWriter = (
    ProducerHello
    | Prepare
    | Submit
    | Skip
    | Borrow
    | Gather
    | Recall
    | Bequeath
    | Bequeathed
    | Inherit
    | Inherited
    | ControllerHello
    | Acknowledged
    | QueryStatus
    | CopyTo
    | Located
)
ToProducer = Ready | Released | Rejected | Held | HeldAll | Remembered | Bequest
ToController = ShardsDurable | ShardsFailed | WriterStatus | Listening | Locate
