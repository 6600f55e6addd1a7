"""The state folder of a node and the surroundings of its workers: files, folders and the worker environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from regrow import wire
from regrow.agent import logs
from regrow.agent.progress import create_progress
from regrow.agent.protocol import WorkerStart
from regrow.errors import OperationalError
from regrow.processes import LIFELINE

NOT_FOR_WORKERS = (LIFELINE, "REGROW_STORE", "REGROW_SUPERVISOR")
"""Of the agent's own environment: workers hold no store credentials and do not watch the launcher."""


class NodePaths:
    """Where things are below the state folder."""

    def __init__(self, state: Path) -> None:
        self.state = state
        self.agent_socket = state / "agent.sock"
        self.shim_socket = state / "shim.sock"
        self.writer_socket = state / "writer.sock"
        self.fences = state / "agent.json"
        self.facts = state / "agent-run.json"

    def generation(self, job: str, generation: int) -> Path:
        """Folder of one generation."""
        return self.state / "jobs" / job / f"g{generation}"

    def log(self, job: str, generation: int, rank: int) -> Path:
        """stdout and stderr of a rank."""
        return self.generation(job, generation) / f"rank{rank}.out"

    def error_file(self, job: str, generation: int, rank: int) -> Path:
        """TORCHELASTIC_ERROR_FILE of a rank."""
        return self.generation(job, generation) / f"error-{rank}.json"

    def progress(self, job: str, generation: int) -> Path:
        """Progress words of the local ranks."""
        return self.generation(job, generation) / "progress"

    def stacks(self, job: str, generation: int, rank: int) -> Path:
        """File that a rank's SIGUSR2 handler appends its stacks to."""
        return self.generation(job, generation) / f"stacks-{rank}.txt"

    def order(self, job: str, generation: int) -> Path:
        """The order that started a generation here: what a restarted agent adopts by."""
        return self.generation(job, generation) / "order.json"


def earlier_peer_port(paths: NodePaths) -> int:
    """The peer port of the agent that ran here before; 0 when that is not known."""
    try:
        facts = msgspec.json.decode(paths.facts.read_bytes(), type=dict[str, Any])
        return int(str(facts.get("peer", "")).rpartition(":")[2] or 0)
    except (OSError, ValueError):
        return 0


def prepare(paths: NodePaths, order: wire.StartGeneration) -> None:
    """Make the generation's folder with everything that its workers read.

    Raises:
        OperationalError: the folder cannot be written.
    """
    spec = order.spec
    folder = paths.generation(spec.job, spec.generation)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "spec.json").write_bytes(wire.encode(spec))
        (folder / "job.json").write_bytes(wire.encode(order.job_spec))
        create_progress(paths.progress(spec.job, spec.generation), 1 + max(worker.local_rank for worker in order.workers))
        paths.order(spec.job, spec.generation).write_bytes(wire.encode(order))
        logs.prune(folder.parent)
    except OSError as error:
        raise OperationalError(
            f"cannot be written: {error.strerror}", where=str(folder), hint="free space below --state, or repair the disk"
        ) from error


def read_order(paths: NodePaths, job: str, generation: int) -> wire.StartGeneration | None:
    """The order that started a generation; None when it is not there or not readable."""
    try:
        return msgspec.json.decode(paths.order(job, generation).read_bytes(), type=wire.StartGeneration)
    except (OSError, msgspec.DecodeError):
        return None


def worker_starts(paths: NodePaths, order: wire.StartGeneration, node: str, base: Mapping[str, str]) -> tuple[WorkerStart, ...]:
    """What the shim needs to start each local worker."""
    job = order.job_spec
    return tuple(
        WorkerStart(
            rank=worker.rank,
            local_rank=worker.local_rank,
            argv=job.argv,
            module=job.module,
            cwd=str(Path(job.cwd).absolute()),
            env=worker_environment(paths, order, worker, node, base),
            log=str(paths.log(order.spec.job, order.spec.generation, worker.rank)),
            nice=job.nice,
        )
        for worker in order.workers
    )


def worker_environment(
    paths: NodePaths, order: wire.StartGeneration, worker: wire.WorkerAssignment, node: str, base: Mapping[str, str]
) -> dict[str, str]:
    """The whole environment of a worker: the agent's own, the job's, torchrun's set, ours.

    As torchrun does, OMP_NUM_THREADS becomes 1 when several workers share the node and nobody set it.
    """
    spec, job = order.spec, order.job_spec
    number, rank = spec.generation, worker.rank
    host, _, port = order.master_address.rpartition(":")
    local_world = str(len(order.workers))
    env = {name: value for name, value in base.items() if name not in NOT_FOR_WORKERS}
    env |= job.env
    if len(order.workers) > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(worker.local_rank),
        "WORLD_SIZE": str(spec.world_size),
        "LOCAL_WORLD_SIZE": local_world,
        "REGROW_FIRST_RANK": str(min(one.rank for one in order.workers)),
        "GROUP_RANK": str(order.group_rank),
        "GROUP_WORLD_SIZE": str(len(spec.nodes)),
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(spec.world_size),
        "ROLE_NAME": "default",
        "MASTER_ADDR": host.strip("[]"),
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": str(spec.restart_count),
        "TORCHELASTIC_MAX_RESTARTS": str(job.max_restarts),
        "TORCHELASTIC_RUN_ID": spec.job,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_ERROR_FILE": str(paths.error_file(spec.job, number, rank)),
        "REGROW_JOB": spec.job,
        "REGROW_NODE": node,
        "REGROW_EPOCH": str(order.epoch),
        "REGROW_GENERATION": str(number),
        "REGROW_MESH": str(spec.mesh),
        "REGROW_GLOBAL_BATCH": str(spec.global_batch),
        "REGROW_MICRO_BATCH": str(spec.micro_batch),
        "REGROW_SOCKET": str(paths.agent_socket),
        "REGROW_PROGRESS": f"{paths.progress(spec.job, number)}:{worker.local_rank}",
        "REGROW_WRITER": str(paths.writer_socket),
        "REGROW_CHECKPOINT": os.path.abspath(job.checkpoint.path) if job.checkpoint.path else "",  # noqa: PTH100  # no link is resolved
        "REGROW_SPEC": str(paths.generation(spec.job, number) / "spec.json"),
        "REGROW_JOB_SPEC": str(paths.generation(spec.job, number) / "job.json"),
    }
    if job.in_place:
        env["REGROW_IN_PLACE"] = "1" if job.in_place_gpus else "auto"
    if job.gasp:
        env["REGROW_GASP"] = "1"
    if worker.device_uuid:
        env.setdefault("REGROW_DEVICE", worker.device_uuid)
    return env
