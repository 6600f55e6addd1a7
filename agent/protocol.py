"""Lines between the agent and its shim, over the Unix socket S/shim.sock.

The agent asks (`ShimRequest`, with an id), the shim answers (`Reply`, with the same id) and tells what happens (`ShimEvent`).
All clients that are connected get all events. Nothing that a client must know is told by events alone: `ListWorkers`
gives the whole state, so an agent that was restarted misses nothing.
"""

from __future__ import annotations

import msgspec

from regrow.wire import decode, encode

__all__ = ["decode", "encode"]


class WorkerStart(msgspec.Struct, frozen=True, kw_only=True):
    """One worker to start."""

    rank: int
    local_rank: int
    argv: tuple[str, ...]
    """Script path (or, with `module`, module name) first."""
    module: bool = False
    cwd: str
    env: dict[str, str]
    """The whole environment of the worker."""
    log: str
    """File that gets stdout and stderr, appended."""
    nice: int = 0


class WorkerState(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the shim knows it. `status` is what waitpid returned; None while the process lives."""

    rank: int
    local_rank: int
    pid: int
    start_time: int
    """Field 22 of /proc/<pid>/stat: with the pid it names one process of one boot."""
    log: str
    status: int | None = None
    torn_down: bool = False
    """True when we had killed its group before it ended."""
    method: str = "warm"


class GenerationState(msgspec.Struct, frozen=True, kw_only=True):
    """One generation's workers on this node, in local rank order."""

    job: str
    epoch: int
    generation: int
    workers: tuple[WorkerState, ...] = ()
    method: str = "warm"
    method_reason: str = ""
    """Why a warm start was not possible, when it was asked for."""
    seconds: float = 0.0
    """Time that starting took."""


class StoreState(msgspec.Struct, frozen=True, kw_only=True):
    """A TCPStore server in a child of the shim. Generation 0: spare, nobody has used it."""

    address: str
    pid: int
    job: str = ""
    generation: int = 0


class _Line(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", omit_defaults=True):
    pass


class StartWorkers(_Line, frozen=True, kw_only=True, tag="start"):
    """Start the workers of a generation. Asked again for a generation that was started, the answer is its state."""

    id: int
    job: str
    epoch: int
    generation: int
    workers: tuple[WorkerStart, ...]
    method: str = "warm"
    keep: dict[int, int] = {}
    """{rank: pid} of workers of an older generation that go on in this one; those that died meanwhile are forked anew."""
    store: str = ""
    """Address of the store of this generation; when it is ours it belongs to the generation from now on."""


class StopWorkers(_Line, frozen=True, kw_only=True, tag="stop"):
    """Signal the process groups of this and all older generations of the job (job "" means all jobs)."""

    id: int
    job: str
    generation: int
    signal: int = 9


class ReplaceWorkers(_Line, frozen=True, kw_only=True, tag="replace"):
    """Kill what runs as these ranks of a generation, and fork them anew: they did not change their generation in time."""

    id: int
    job: str
    generation: int
    workers: tuple[WorkerStart, ...]


class ForgetGeneration(_Line, frozen=True, kw_only=True, tag="forget"):
    """Drop generations of the job up to this one whose workers have all ended, and their stores."""

    id: int
    job: str
    generation: int


class ListWorkers(_Line, frozen=True, kw_only=True, tag="list"):
    """Ask for everything."""

    id: int


class OpenStore(_Line, frozen=True, kw_only=True, tag="store"):
    """Give the spare TCPStore to a generation and make a new spare."""

    id: int
    job: str
    generation: int


class Preload(_Line, frozen=True, kw_only=True, tag="preload"):
    """Import more modules before the next start."""

    id: int
    modules: tuple[str, ...]


class ExitShim(_Line, frozen=True, kw_only=True, tag="exit"):
    """Stop all workers and stores, then exit."""

    id: int


ShimRequest = StartWorkers | StopWorkers | ReplaceWorkers | ForgetGeneration | ListWorkers | OpenStore | Preload | ExitShim


class Ready(_Line, frozen=True, kw_only=True, tag="ready"):
    """First line on a connection: the shim's whole state."""

    pid: int
    start_time: int
    safe: bool
    """True when forking warm workers is safe now."""
    problems: tuple[str, ...] = ()
    """Why not."""
    import_seconds: float = 0.0
    resident_bytes: int = 0
    preloaded: tuple[str, ...] = ()
    fixed_env: dict[str, str] = {}
    """Variables that act at interpreter start or import only, as this shim has them."""
    generations: tuple[GenerationState, ...] = ()
    stores: tuple[StoreState, ...] = ()


class Reply(_Line, frozen=True, kw_only=True, tag="reply"):
    """Answer to one request. `error` is empty when it was done."""

    id: int
    error: str = ""
    state: Ready | None = None
    generation: GenerationState | None = None
    store: StoreState | None = None
    pids: tuple[int, ...] = ()


class WorkerEnded(_Line, frozen=True, kw_only=True, tag="exited"):
    """A worker ended and was reaped."""

    job: str
    generation: int
    worker: WorkerState


class StoreChanged(_Line, frozen=True, kw_only=True, tag="store_changed"):
    """A store came up as the spare, was given to a generation, or ended (`ended`)."""

    store: StoreState
    ended: bool = False


ShimEvent = Ready | Reply | WorkerEnded | StoreChanged
