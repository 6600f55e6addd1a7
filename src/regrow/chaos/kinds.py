"""What can be broken, and what Regrow must then say. The ground truth of the score card: a closed table."""

from __future__ import annotations

from typing import Literal

import msgspec

Names = Literal["rank", "node", "nothing"]


class Kind(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of fault."""

    name: str
    text: str
    incidents: tuple[str, ...] = ()
    """Kinds of incident that are a right answer; empty: the job must go on without any."""
    names: Names = "nothing"
    """What the incident must name."""
    level: Literal["worker", "node", "cluster"] = "node"
    """worker: needs a rank; node: a node; cluster: neither."""
    parameters: tuple[str, ...] = ()
    needs_namespace: bool = False
    """Breaks the loopback network: the run has one of its own, made as root."""
    needs_library: bool = False
    """Only in jobs that use the worker library and run with chaos enabled."""
    within_seconds: float = 60.0
    straggler: bool = False
    """No incident, but the supervisor must name the rank as the one that became slow."""


_KINDS = (
    Kind(name="worker_kill", text="SIGKILL one worker", incidents=("worker_exit",), names="rank", level="worker", parameters=("signal",)),
    Kind(name="worker_stop", text="SIGSTOP one worker", incidents=("hang",), names="rank", level="worker"),
    Kind(
        name="worker_hang",
        text="a worker never comes back from a phase: step, save, eval, or collective (it does not enter one)",
        incidents=("hang",),
        names="rank",
        level="worker",
        parameters=("phase",),
        needs_library=True,
    ),
    Kind(
        name="worker_raise",
        text="a Python exception in one rank",
        incidents=("worker_exit",),
        names="rank",
        level="worker",
        needs_library=True,
    ),
    Kind(
        name="worker_slow",
        text="one rank is slower by a share of the step; nothing may restart; with straggler = true it must be named as slow",
        level="worker",
        parameters=("ratio", "steps"),
        needs_library=True,
    ),
    Kind(
        name="flip_bit",
        text="one bit of the optimizer state or the parameters flips",
        incidents=("sdc",),
        names="rank",
        level="worker",
        parameters=("where", "bit", "when"),
        needs_library=True,
    ),
    Kind(
        name="worker_nan",
        text="one element of one rank's gradient becomes NaN, before the reduction (all ranks get it) or after it (one diverges)",
        incidents=("non_finite", "sdc"),
        names="rank",
        level="worker",
        needs_library=True,
    ),
    Kind(
        name="checkpoint_flip",
        text="one bit of the newest checkpoint flips on storage, then a worker is killed: an older one is loaded",
        incidents=("worker_exit", "restore_refused"),
        names="node",
        level="worker",
        within_seconds=90.0,
    ),
    Kind(name="storage_gone", text="the checkpoint folder is away: saves fail, training goes on", level="cluster"),
    Kind(
        name="sick_gemm",
        text="a bit of a matrix product flips in a share of one rank's micro-steps, before the reduction (job kind small)",
        incidents=("sdc",),
        names="rank",
        level="worker",
        parameters=("ratio", "bit", "steps"),
        needs_library=True,
    ),
    Kind(name="net_cut", text="a node loses supervisor and etcd, workers still meet: training goes on"),
    Kind(name="net_one_way", text="what a node says to supervisor and etcd is not heard, what they say is: training goes on"),
    Kind(name="net_delay", text="supervisor and etcd are late for a node, both ways", parameters=("delay_seconds",)),
    Kind(name="net_slow", text="a narrow link to supervisor and etcd", parameters=("rate",)),
    Kind(
        name="net_loss",
        text="a share of all packets is lost, of workers too (own network namespace, root)",
        level="cluster",
        parameters=("ratio",),
        needs_namespace=True,
    ),
    Kind(
        name="net_rate",
        text="all traffic through a token bucket (own network namespace, root, tbf in the kernel)",
        level="cluster",
        parameters=("rate",),
        needs_namespace=True,
    ),
    Kind(
        name="data_cut",
        text="no packet of one worker's connections arrives any more: all ranks wait (own network namespace, root)",
        incidents=("hang", "worker_exit"),
        level="worker",
        needs_namespace=True,
    ),
    Kind(name="disk_full", text="writing checkpoints fails with ENOSPC: saves fail, training goes on", level="cluster"),
    Kind(name="disk_eio", text="syncing checkpoints fails with EIO: saves fail, training goes on", level="cluster"),
    Kind(
        name="disk_slow", text="each write of a checkpoint takes seconds: training goes on", level="cluster", parameters=("delay_seconds",)
    ),
    Kind(name="clock_shift", text="the wall clock of a node jumps: nothing depends on it", parameters=("shift_seconds",)),
    Kind(
        name="command",
        text="any program; the plan says what must be told",
        level="worker",
        parameters=("argv", "incidents", "names"),
    ),
    Kind(
        name="dcgm_inject",
        text="a value in the cache of NVIDIA's DCGM (dcgmi test --inject): only who reads DCGM sees it; the plan says what must be told",
        parameters=("gpu", "field", "value", "incidents", "names"),
    ),
    Kind(name="agent_pause", text="SIGSTOP the agent, SIGCONT later: silence that progress excuses"),
    Kind(name="supervisor_pause", text="SIGSTOP the supervisor, SIGCONT later: training goes on", level="cluster"),
    Kind(name="etcd_pause", text="SIGSTOP etcd, SIGCONT later: training goes on", level="cluster"),
    Kind(name="kernel_xid", text="an XID in the kernel log alone", incidents=("unhealthy",), names="node", parameters=("xid",)),
    Kind(name="kernel_noise", text="kernel lines that look bad and are not, one of a GPU that is not here: no node may go"),
    Kind(
        name="node_kill",
        text="agent, shim, workers and writer of a node vanish",
        incidents=("node_lost",),
        names="node",
        parameters=("back_after",),
    ),
    Kind(name="agent_kill", text="SIGKILL the agent: training goes on"),
    Kind(name="shim_kill", text="SIGKILL the shim: its workers die with it", incidents=("worker_exit", "node_lost"), names="node"),
    Kind(name="writer_kill", text="SIGKILL the checkpoint writer: training goes on"),
    Kind(name="preempt", text="SIGTERM to a node's agent", incidents=("leaving",), names="node"),
    Kind(name="nvml_xid", text="an XID in NVML's event log", incidents=("unhealthy",), names="node", parameters=("xid",)),
    Kind(name="nvml_noise", text="XIDs that are the program's own or clean-up: no node may go", parameters=("xid",)),
    Kind(name="nvml_lost", text="a GPU answers GPU_IS_LOST", incidents=("unhealthy",), names="node"),
    Kind(name="nvml_ecc", text="the uncorrectable ECC counter grows", incidents=("unhealthy",), names="node"),
    Kind(name="nvml_recovery", text="the driver asks for a recovery action", incidents=("unhealthy",), names="node", parameters=("value",)),
    Kind(name="nvml_hang", text="the driver does not answer any more", incidents=("unhealthy",), names="node", within_seconds=90.0),
    Kind(name="supervisor_kill", text="SIGKILL the supervisor: training goes on", level="cluster"),
    Kind(name="etcd_kill", text="SIGKILL etcd: training goes on", level="cluster"),
)

KINDS: dict[str, Kind] = {kind.name: kind for kind in _KINDS}

SEVERE_XIDS = (48, 62, 74, 79, 95, 119)
NOISE_XIDS = (13, 31, 43, 45, 63)

COSTS: dict[str, float] = {
    "miss": 5.0,
    "wrong_rank": 1.0,
    "unnamed": 1.0,
    "wrong_node": 20.0,
    "wrong_kind": 2.0,
    "false_alarm": 10.0,
    "late": 1.0,
}
"""Weights of what can go wrong. Blaming a sound node costs far more than one miss: it takes hardware away and hides the fault."""
