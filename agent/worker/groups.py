"""Process groups of one generation: rendezvous through its TCPStore, the control group, the device mesh."""

from __future__ import annotations

import datetime as dt
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage] - public, but not in __all__
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from regrow.agent.worker.environment import WorkerEnvironment
from regrow.errors import OperationalError
from regrow.ids import MeshShape

RENDEZVOUS_SECONDS = 300.0
"""How long a rank waits for its peers in the store. The agent stops a generation that does not form much earlier."""
COLLECTIVE_SECONDS = 1800.0
"""A backstop only: hangs are found by lack of progress, never by this."""


def axis_names(shape: MeshShape) -> tuple[str, ...]:
    """Names of the device mesh's dimensions, outermost first, so that the flat index is the rank of `ids.MeshShape`."""
    return ("dp", "pp", "cp", "tp") if shape.cp > 1 else ("dp", "pp", "tp")


def uses_gpu() -> bool:
    """Do workers here train on GPUs? Where there are some, unless REGROW_DEVICE=cpu."""
    return os.environ.get("REGROW_DEVICE") != "cpu" and torch.cuda.is_available()


def pick_device(local_rank: int) -> torch.device:
    """The device of this worker: its GPU where there is one, else the CPU. REGROW_DEVICE=cpu overrides."""
    if uses_gpu():
        device = torch.device("cuda", local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


def forget_meshes() -> None:
    """Empty what torch's DTensor remembers of meshes. For a process that takes another rank, or a place in another mesh.

    It remembers by meshes that compare equal, and those do when they are of the same ranks; what it remembers names the process groups of
    the first of them, and these are gone ("Could not resolve the process group registered under the name 12").
    """
    if "torch.distributed.tensor._api" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor, _collective_utils, _redistribute, debug

    debug._clear_sharding_prop_cache()  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    propagator = DTensor._op_dispatcher.sharding_propagator  # noqa: SLF001  # pyright: ignore[reportPrivateUsage]
    found: tuple[Any, ...] = (
        getattr(propagator, "_propagate_tensor_meta_cached", None),
        getattr(_redistribute, "_gen_transform_infos", None),
        _collective_utils.MeshTopoInfo.build_from_mesh,
    )
    for remembered in found:
        if hasattr(remembered, "cache_clear"):
            remembered.cache_clear()


class Groups:
    """Everything of torch.distributed that a generation owns. A world of one needs none of it until a mesh is asked for."""

    def __init__(self, environment: WorkerEnvironment, device: torch.device) -> None:
        self._environment = environment
        self._device = device
        self._mesh: DeviceMesh | None = None
        self._mine = False
        self.control: dist.ProcessGroup | None = None
        """A gloo group of its own for the control vector: its messages never queue behind the user's. None in a world of one."""
        self.control_seconds = 0.0
        """Measured CPU time of one exchange on the control group."""

    def rendezvous(self) -> None:
        """Make the default group and the control group. Collective.

        Raises:
            OperationalError: the store or the peers cannot be reached.
        """
        if self._environment.world_size == 1:
            return
        if not dist.is_initialized():
            self._init_default()
        try:
            control = dist.new_group(backend="gloo", timeout=dt.timedelta(seconds=COLLECTIVE_SECONDS))
            assert isinstance(control, dist.ProcessGroup)
            self.control = control
            self._calibrate()
        except (RuntimeError, dist.DistError) as error:
            raise self._unreachable(error) from error

    def mesh(self, shape: MeshShape) -> DeviceMesh:
        """The device mesh of `shape`. Collective on first use."""
        if self._mesh is None:
            if not dist.is_initialized():
                dist.init_process_group(self._backend(), store=HashStore(), rank=0, world_size=1)
                self._mine = True
            sizes = {"dp": shape.dp, "pp": shape.pp, "cp": shape.cp, "tp": shape.tp}
            names = axis_names(shape)
            self._mesh = init_device_mesh(self._device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)
        return self._mesh

    def close(self) -> None:
        """Destroy the groups that we made."""
        if self._mine and dist.is_initialized():
            dist.destroy_process_group()
        self._mine = False
        self.control = None
        self._mesh = None

    def _init_default(self) -> None:
        environment = self._environment
        try:
            store = PrefixStore(f"regrow/{environment.generation}/{environment.spec.restart_count}", self._store())
            dist.init_process_group(
                self._backend(),
                store=store,
                rank=environment.rank,
                world_size=environment.world_size,
                timeout=dt.timedelta(seconds=COLLECTIVE_SECONDS),
                device_id=self._device if self._device.type == "cuda" else None,
            )
        except (RuntimeError, dist.DistError) as error:
            raise self._unreachable(error) from error
        self._mine = True

    def _store(self) -> TCPStore:
        environment = self._environment
        host, _, port = environment.master_address.rpartition(":")
        if not host:
            raise OperationalError(
                "MASTER_ADDR and MASTER_PORT are not set",
                where=f"rank {environment.rank}",
                hint="start the script with `regrow run` or torchrun",
            )
        serves = environment.rank == 0 and not environment.agent_store
        return TCPStore(host, int(port), None, is_master=serves, timeout=dt.timedelta(seconds=RENDEZVOUS_SECONDS), wait_for_workers=False)

    def _backend(self) -> str:
        return "cpu:gloo,cuda:nccl" if self._device.type == "cuda" else "gloo"

    def _calibrate(self) -> None:
        """CPU time of one small all-reduce, the best of a few: opens every connection of the control group too.

        CPU time, not wall time: exchanges run beside the training, what they cost is what they take from it.
        """
        best = float("inf")
        buffer = torch.zeros(8, dtype=torch.int64)
        for _ in range(4):
            begin = time.process_time()
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=self.control)
            best = min(best, time.process_time() - begin)
        self.control_seconds = best

    def _unreachable(self, error: Exception) -> OperationalError:
        environment = self._environment
        return OperationalError(
            f"the rendezvous of generation {environment.generation} failed: {str(error).splitlines()[0]}",
            where=f"rank {environment.rank} on {environment.node}, store {environment.master_address}",
            hint="the supervisor makes a new generation; started by hand, check that all ranks run and reach the store",
        )
