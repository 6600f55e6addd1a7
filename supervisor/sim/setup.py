"""What is simulated: one value that, with a seed, determines a run to the byte."""

from __future__ import annotations

import math

import msgspec

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.supervisor.sim.constants import Constants

LLAMA3_RATE = 419 / (16384 * 54 * 24)
"""Unplanned interruptions a GPU-hour of Llama 3 405B, all causes (arXiv:2407.21783, section 3.3.4)."""
LEAN_NODES = 192
"""From this size on, phases of a start are told by one member for all, and maps of the view are owned (see leader.py)."""


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """How the job answers losses."""

    name: str
    elastic: bool = True
    """False: the job needs all its nodes and waits for the scheduler's replacement."""
    replan: bool = True
    """False: only the data-parallel axis shrinks."""
    spares: int = 0
    """Nodes that are reserved beside those that train."""


def strategy(name: str) -> Strategy:
    """fixed-world, dp-shrink, replan or spares:N.

    Raises:
        ConfigurationError: another name.
    """
    match name.split(":"):
        case ["fixed-world"]:
            return Strategy(name=name, elastic=False, replan=False)
        case ["dp-shrink"]:
            return Strategy(name=name, replan=False)
        case ["replan"]:
            return Strategy(name=name)
        case ["spares", number] if number.isdigit():
            return Strategy(name=name, spares=int(number))
        case _:
            raise ConfigurationError(
                f"unknown policy {name!r}", where="--policy", hint="fixed-world, dp-shrink, replan or spares:N (as in spares:8)"
            )


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes and times of a simulation. Seconds unless the name says otherwise."""

    constants: Constants
    nodes: int = 2048
    """Nodes that train when nothing is broken; spares come on top."""
    gpus_per_node: int = 8
    days: float = 54.0
    policy: str = "replan"
    rate_per_gpu_hour: float = LLAMA3_RATE
    """Prior of the interval controller, and the rate of generated faults."""
    save_seconds: float = 30.0
    """From a snapshot to durable."""
    stall_seconds: float = 1.0
    """What a save holds training up."""
    interval_seconds: float = 0.0
    """Fixed interval; 0: ckpt.interval chooses."""
    max_interval_seconds: float = 3600.0
    step_seconds: float = 6.2
    """Of the full mesh, without saves."""
    mesh: MeshShape | None = None
    """In places (see `places`); None: chosen by size."""
    sequences: int = 0
    """Global batch in micro-batches; 0: 16 a replica of the full mesh."""
    places: int = 1
    """Workers of the core a node: a place is a tensor-parallel group; 1: it fills the node."""
    keep: int = 3
    """Committed checkpoints that are kept."""
    fence_faults: bool = False
    """Chaos: leaders, agents, store, storage and networks fail, too."""

    @property
    def strategy(self) -> Strategy:
        """The policy, read."""
        return strategy(self.policy)

    @property
    def reserved(self) -> int:
        """Nodes that are paid for."""
        return self.nodes + self.strategy.spares

    @property
    def gpus(self) -> int:
        """GPUs that are paid for."""
        return self.reserved * self.gpus_per_node

    @property
    def seconds(self) -> float:
        """Length of the run."""
        return self.days * 86_400.0

    @property
    def lean(self) -> bool:
        """True: a large cluster."""
        return self.nodes > LEAN_NODES

    @property
    def home(self) -> MeshShape:
        """The mesh of the full world, in places."""
        if self.mesh is not None:
            return self.mesh
        total = self.nodes * self.places
        pp = next((size for size in (16, 8, 4, 2) if total % size == 0 and total >= 8 * size), 1)
        return MeshShape(dp=total // pp, pp=pp)

    @property
    def global_batch(self) -> int:
        """Micro-batches of one step."""
        return self.sequences or 16 * self.home.dp


def check(setup: Setup) -> Setup:
    """The same setup when it makes sense.

    Raises:
        ConfigurationError: numbers that are not positive, a mesh that does not fit.
    """
    for name, flag, least in (
        ("nodes", "--nodes", 1),
        ("gpus_per_node", "--gpus-per-node", 1),
        ("places", "--places", 1),
        ("keep", "--keep", 1),
    ):
        if getattr(setup, name) < least:
            raise ConfigurationError(f"{name} is {getattr(setup, name)}", where=flag, hint=f"give at least {least}")
    for name, positive in (
        ("days", True),
        ("step_seconds", True),
        ("save_seconds", False),
        ("stall_seconds", False),
        ("interval_seconds", False),
        ("rate_per_gpu_hour", False),
        ("max_interval_seconds", True),
    ):
        value = getattr(setup, name)
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            hint = "give a finite number above 0" if positive else "give a finite number of at least 0"
            raise ConfigurationError(f"{name} is {value}", where=f"--{name.replace('_', '-')}", hint=hint)
    strategy(setup.policy)
    if setup.home.world_size > setup.nodes * setup.places:
        raise ConfigurationError(
            f"mesh {setup.home} needs {setup.home.world_size} places, {setup.nodes} nodes have {setup.nodes * setup.places}",
            where="--mesh",
            hint="a place is a tensor-parallel group that fills a node: give DP x PP of at most the number of nodes",
        )
    if setup.global_batch < setup.home.dp:
        raise ConfigurationError(
            f"{setup.global_batch} micro-batches for {setup.home.dp} replicas", where="--micro-batches", hint="give one a replica at least"
        )
    return setup
