"""Checkpoint figures: ours, the limits of the machine and torch.distributed.checkpoint, interleaved in one run.

    .venv/bin/python benchmarks/checkpoint.py [--quick] --json

Four gloo ranks (--ranks) hold about 1.3 GB (0.3 with --quick) in 224 tensors, sharded over the ranks. Each repeat measures, one
after the other: a warm memcpy of the same tensors (limit of a stall), an O_DIRECT write with fsync of the same bytes
(limit of a save), dcp.async_save with a cached stager and plan cache (the best of the stock tools), ours until the
record is written, and the training time that a window of steps (--step-seconds each) loses to each, and to a late copy: its stall
is the call and the wait before the optimizer. Names that end in _cpu are CPU-seconds of all ranks, of a stall those of the rank with the
most (stall_cpu_over_best_dcp: what other work on the machine does not change). Then loads, warm: the same layout, 4 -> 2
ranks, rows -> columns, 2-D, two pipeline stages -> one, each by dcp.load and by us with every block verified: as a restart on the same
node does it (from the writer's arenas), and from the page cache as dcp.load does (names with "cached"). And cold, from the disk alone.
Ratios are taken within a repeat; medians with min and max are printed.

--parts: saves (a save by itself), window (with saves: what a window of steps loses), loads, memory (resident memory of ranks and
writer over 200 saves). torchsnapshot's async_take is a further column where it can be imported. nvidia-resiliency-ext (0.4.1) cannot
be one on a CPU: `FileSystemWriterAsync.preload_tensors` and its fork call torch.cuda.synchronize() without asking.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import importlib
import importlib.util
import json
import mmap
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
warnings.filterwarnings("ignore")

# ruff: noqa: E402
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed._state_dict_utils import _copy_state_dict, _create_cpu_state_dict
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from regrow.ckpt import catalog, exchange
from regrow.ckpt.client import WriterControl
from regrow.ckpt.commit import Collector, write_record
from regrow.ckpt.place import Place
from regrow.ckpt.state import TrainState
from regrow.ckpt.storing import write_file
from regrow.ids import MeshShape
from regrow.wire import GenerationSpec, RestorePoint, ShardsDurable

TENSORS = 224
COLUMNS = 1024
LAYOUTS = ("same", "4_to_2", "fsdp_to_tp", "two_d", "pp2_to_pp1")


def layouts_of(ranks: int) -> tuple[str, ...]:
    """What is loaded with so many ranks."""
    return LAYOUTS if ranks == 4 else ("same", "fsdp_to_tp")


class Holder(torch.nn.Module):
    """Parameters under names, nothing else."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, value in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))


class CachedStager(AsyncStager):
    """Stages into the same buffers at every save: the fastest use of dcp.async_save on a CPU."""

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._cache: Any = None

    def stage(self, state_dict: Any) -> Any:
        if self._cache is None:
            self._cache = _create_cpu_state_dict(state_dict)
        return _copy_state_dict(state_dict, self._cache)

    def synchronize_staging(self) -> None:
        """Nothing: stage() is synchronous."""

    def close(self) -> None:
        """Nothing is held."""


class Rank:
    """One of the four processes."""

    def __init__(self, rank: int, folder: Path, options: argparse.Namespace) -> None:
        self.rank = rank
        self.folder = folder
        self.options = options
        self.ranks: int = options.ranks
        dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=self.ranks)
        line = list(range(self.ranks))
        self.pair = dist.new_group([0, 1]) if self.ranks == 4 else None
        self.stock_group = dist.new_group(line)  # dcp.async_save talks in a thread: not on the group of training
        self.meshes = {"rows": DeviceMesh("cpu", line)}
        if self.ranks == 4:
            self.meshes["two"] = DeviceMesh("cpu", [0, 1])
            self.meshes["grid"] = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
        rows = int(options.gigabytes * 1e9 / 4 / TENSORS / COLUMNS)
        self.shape = (max(8, rows // 8 * 8), COLUMNS)
        self.samples: dict[str, list[float]] = {}
        self.generation = 0
        self.writer_pid = 0
        self.call_seconds = 0.0
        """Of the save in the newest window, until it returned."""

    def holder(self, layout: str) -> Holder:
        """This rank's parameters in a layout."""
        mesh, placements, names = self.meshes["rows"], [Shard(0)], range(TENSORS)
        if layout == "4_to_2":
            mesh = self.meshes["two"]
        elif layout == "fsdp_to_tp":
            placements = [Shard(1)]
        elif layout == "two_d":
            mesh, placements = self.meshes["grid"], [Shard(0), Shard(1)]
        elif layout == "stages":
            mesh = self.meshes["grid"]["b"]
            half = TENSORS // 2
            names = range(half) if self.rank < 2 else range(half, TENSORS)
        local = list(self.shape)
        for size, placement in zip(mesh.shape, placements, strict=True):
            local[placement.dim] //= size
        return Holder({f"t{number:03d}": DTensor.from_local(torch.randn(local), mesh, placements, run_check=False) for number in names})

    def state(
        self,
        holder: Holder,
        world: int,
        *,
        group: Any = None,
        restore: RestorePoint | None = None,
        folder: str = "ours",
        late_copy: bool = False,
        writer: str = "w.sock",
    ) -> TrainState:
        """Our state around a holder; a generation of its own. With the name of no `writer`: nothing is read from its memory."""
        self.generation += 1
        mesh = MeshShape(dp=world)
        spec = GenerationSpec(job=folder, epoch=1, generation=self.generation, mesh=mesh, world_size=world, nodes=("n0",), restore=restore)
        place = Place(spec=spec, rank=self.rank, node="n0", local_ranks=tuple(range(world)), folder=str(self.folder / folder))
        return TrainState.attach(
            place,
            writer=str(self.folder / writer),
            exchange=exchange.over(group),
            model=holder,
            back_pressure="wait",
            late_copy=late_copy,
        )

    def timed(self, name: str, work: Callable[[], object], *, group: Any = None, keep: bool = True) -> float:
        """Seconds of the slowest rank, all starting together."""
        dist.barrier(group)
        started, used = time.monotonic(), time.process_time()
        work()
        used = torch.tensor(time.process_time() - used, dtype=torch.float64)
        seconds = torch.tensor(time.monotonic() - started, dtype=torch.float64)
        dist.all_reduce(seconds, dist.ReduceOp.MAX, group=group)
        dist.all_reduce(used, dist.ReduceOp.SUM, group=group)
        if keep:
            self.samples.setdefault(name, []).append(float(seconds))
            self.samples.setdefault(f"{name}_cpu", []).append(float(used))
            if self.rank == 0 and self.options.samples:
                Path(self.options.samples).write_text(json.dumps(self.samples))
        return float(seconds)

    # --- saving ----------------------------------------------------------------------------------------------------

    def measure_saves(self) -> None:
        """Limits, stock and ours, interleaved."""
        holder = self.holder("same")
        locals_ = [value.to_local() for value in holder.parameters()]
        total = sum(value.numel() * 4 for value in locals_)
        savers = self.options.savers.split(",")
        memory = mmap.mmap(-1, -(-total // 4096) * 4096)
        if "limits" in savers:
            memory.write(b"\1" * len(memory))
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        state = self.state(holder, self.ranks)
        stager, planner = CachedStager(), DefaultSavePlanner(enable_plan_caching=True)
        for repeat in range(self.options.repeats + 1):
            keep = repeat > 0
            if "limits" in savers:
                self.timed("memcpy", lambda: self._memcpy(base, locals_), keep=keep)
                self.timed("disk", lambda: write_file(self.folder / f"raw-{self.rank}", memoryview(memory)), keep=keep)
                (self.folder / f"raw-{self.rank}").unlink()
            if "dcp" in savers:
                self._save_dcp(holder, stager, planner, repeat, keep=keep)
            if "ours" in savers:
                self._save_ours(state, repeat + 1, keep=keep)
            if "torchsnapshot" in savers and importlib.util.find_spec("torchsnapshot") is not None:
                self._save_torchsnapshot(locals_, repeat, keep=keep)
        if "window" in self.options.parts:
            self._measure_late(holder, state, stager, planner)
        state.close()

    def _measure_late(self, holder: Holder, state: TrainState, stager: CachedStager, planner: DefaultSavePlanner) -> None:
        late = self.state(holder, self.ranks, folder="late", late_copy=True)
        assert late.save(1, 1).outcome == "snapshot"
        late.join()
        self._await_record("late", 1)
        self.measure_window(holder, (state, late), stager, planner)
        late.close()

    def measure_memory(self) -> None:
        """Resident memory of this rank, and of the writer, after 20 and after 220 saves."""
        state = self.state(self.holder("same"), self.ranks)
        for step in range(1, 221):
            assert state.save(step, step).outcome == "snapshot"
            self._await_record("ours", step)
            if step in (20, 220):
                self._note_max("resident_rank", resident_bytes(os.getpid()), keep=True)
                self._note_max("resident_writer", resident_bytes(self.writer_pid), keep=True)
        state.close()

    def _save_torchsnapshot(self, tensors: list[torch.Tensor], number: int, *, keep: bool) -> None:
        library: Any = importlib.import_module("torchsnapshot")
        content = library.StateDict(**{f"t{index:03d}": value for index, value in enumerate(tensors)})
        path = self.folder / f"snapshot-{number}"
        stall: list[float] = []

        def whole() -> None:
            started = time.monotonic()
            pending = library.Snapshot.async_take(path=str(path), app_state={f"rank{self.rank}": content}, pg=self.stock_group)
            stall.append(time.monotonic() - started)
            pending.wait()

        self.timed("torchsnapshot_durable", whole, keep=keep)
        self._note_max("torchsnapshot_stall", stall[0], keep=keep)
        if self.rank == 0:
            shutil.rmtree(path)

    def _memcpy(self, base: int, tensors: list[torch.Tensor]) -> None:
        at = base
        for value in tensors:
            size = value.numel() * 4
            ctypes.memmove(at, value.data_ptr(), size)
            at += size

    def _save_dcp(self, holder: Holder, stager: CachedStager, planner: DefaultSavePlanner, number: int, *, keep: bool) -> None:
        futures: list[Any] = []

        def begin() -> None:
            futures.append(self._dcp(holder, stager, planner, f"dcp-{number}"))

        def whole() -> None:
            self_started, used = time.monotonic(), time.process_time()
            begin()
            stall.extend((time.monotonic() - self_started, time.process_time() - used))
            futures[0].result()

        stall: list[float] = []
        self.timed("dcp_durable", whole, keep=keep)
        self._note_max("dcp_stall", stall[0], keep=keep)
        self._note_max("dcp_stall_cpu", stall[1], keep=keep)
        if self.rank == 0 and number > 0:
            shutil.rmtree(self.folder / f"dcp-{number - 1}")

    def _dcp(self, holder: Holder, stager: CachedStager, planner: DefaultSavePlanner, name: str) -> Any:
        state_dict = {"model": holder.state_dict()}
        return dcp.async_save(
            state_dict, checkpoint_id=str(self.folder / name), async_stager=stager, planner=planner, process_group=self.stock_group
        )

    def _save_ours(self, state: TrainState, step: int, *, keep: bool) -> None:
        stall: list[float] = []

        def whole() -> None:
            used = time.process_time()
            report = state.save(step, step)
            assert report.outcome == "snapshot", report
            stall.extend((report.stall_seconds, time.process_time() - used))
            self._await_record("ours", step)

        self.timed("ours_durable", whole, keep=keep)
        self._note_max("ours_stall", stall[0], keep=keep)
        self._note_max("ours_stall_cpu", stall[1], keep=keep)

    def _await_record(self, folder: str, step: int) -> None:
        while not list((self.folder / folder).glob(f"step-{step:012d}-*/record.json")):
            time.sleep(0.001)

    def _note_max(self, name: str, seconds: float, *, keep: bool) -> None:
        value = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(value, dist.ReduceOp.MAX)
        if keep:
            self.samples.setdefault(name, []).append(float(value))

    def measure_window(
        self, holder: Holder, states: tuple[TrainState, TrainState], stager: CachedStager, planner: DefaultSavePlanner
    ) -> None:
        """Training time that a save costs over a whole window, not only until the call returns. `states`: at once, and late."""
        state, late = states
        left, right = torch.randn(384, 384), torch.randn(384, 384)
        locals_ = [value.to_local() for value in holder.parameters()]
        steps = 8 if self.options.quick else 16
        trial = self.timed("trial", lambda: [torch.mm(left, right) for _ in range(20)], keep=False) / 20
        products = max(1, round(self.options.step_seconds / trial))  # all ranks at once, as in the window

        def train(at: int, save: Callable[[], Any] | None) -> None:
            pending = None
            for step in range(steps):
                for _ in range(products):
                    torch.mm(left, right)  # forward and backward: nothing that is saved is written
                late.join()
                for value in locals_[step % 8 :: 8]:
                    value.add_(1e-6)
                dist.barrier()
                if step == at and save is not None:
                    called = time.monotonic()
                    pending = save()
                    self.call_seconds = time.monotonic() - called
            self.pending = pending

        for repeat in range(self.options.windows or max(2, self.options.repeats - 2)):
            number = 100 + repeat
            plain = self.timed("window_plain", lambda: train(2, None))
            stock = self.timed("window_dcp", lambda number=number: train(2, lambda: self._dcp(holder, stager, planner, f"dcp-{number}")))
            self._note_max("window_dcp_stall", self.call_seconds, keep=True)
            self.pending.result()
            again = self.timed("window_plain", lambda: train(2, None))
            ours = self.timed("window_ours", lambda number=number: train(2, lambda: state.save(number, number)))
            self._note_max("window_ours_stall", self.call_seconds, keep=True)
            self._await_record("ours", number)
            delayed = self.timed("window_late", lambda number=number: train(2, lambda: late.save(number, number)))
            self._note_max("late_stall", self.pending.stall_seconds + late.counts.join_seconds, keep=True)
            self._await_record("late", number)
            base = min(plain, again)
            self.samples.setdefault("lost_late", []).append(max(1e-4, delayed - base))
            self.samples.setdefault("lost_dcp", []).append(max(1e-4, stock - base))
            self.samples.setdefault("lost_ours", []).append(max(1e-4, ours - base))
            dist.barrier()
            if self.rank == 0:
                shutil.rmtree(self.folder / f"dcp-{number}")

    # --- loading ---------------------------------------------------------------------------------------------------

    def measure_loads(self) -> None:
        """dcp.load and ours, interleaved, layout by layout."""
        rows = self._save_pair("rows", "same")
        stages = self._save_pair("stages", "stages") if self.ranks == 4 else rows
        for layout in layouts_of(self.ranks):
            stock, ours = stages if layout == "pp2_to_pp1" else rows
            group = self.pair if layout == "4_to_2" else None
            if group is None or self.rank < 2:
                self._load(layout, stock, ours, group)
            dist.barrier()
        self._load_cold(*rows)

    def _save_pair(self, name: str, layout: str) -> tuple[str, RestorePoint]:
        holder = self.holder(layout)
        stock = str(self.folder / f"load-{name}")
        dcp.save({"model": holder.state_dict()}, checkpoint_id=stock)
        state = self.state(holder, self.ranks, folder=f"our-{name}")
        assert state.save(1, 1).outcome == "snapshot"
        self._await_record(f"our-{name}", 1)
        state.close()
        dist.barrier()
        entry = catalog.newest_restorable(self.folder / f"our-{name}")
        assert entry is not None
        return stock, entry.restore_point()

    def _load(self, layout: str, stock: str, ours: RestorePoint, group: Any) -> None:
        world = 2 if group is not None else self.ranks
        target, other = self.holder(layout), self.holder(layout)

        def by_dcp() -> None:
            dcp.load({"model": target.state_dict()}, checkpoint_id=stock, process_group=group)

        def by_us() -> None:
            assert self.state(other, world, group=group, restore=ours).restore() == 1

        def from_cache() -> None:
            one = self.state(other, world, group=group, restore=ours, writer="none")
            assert one.restore() == 1
            assert one.loaded is not None
            assert one.loaded.bytes_from_memory == 0

        for folder in (stock, ours.directory) if self.rank == 0 else ():
            for path in Path(folder).iterdir():
                path.read_bytes()  # warm: in the page cache, whoever wrote it and how
        for repeat in range(self.options.repeats + 1):
            self.timed(f"dcp_load_{layout}", by_dcp, group=group, keep=repeat > 0)
            self.timed(f"ours_load_{layout}", by_us, group=group, keep=repeat > 0)
            self.timed(f"cached_load_{layout}", from_cache, group=group, keep=repeat > 0)
        for mine, theirs in zip(other.parameters(), target.parameters(), strict=True):
            assert torch.equal(mine.to_local(), theirs.to_local()) or layout is None

    def _load_cold(self, stock: str, ours: RestorePoint) -> None:
        target, other = self.holder("same"), self.holder("same")
        own = Path(ours.directory) / f"rank-{self.rank:05d}.safetensors"
        memory = mmap.mmap(-1, own.stat().st_size)

        def read_direct() -> None:
            handle = os.open(own, os.O_RDONLY | os.O_DIRECT)
            view, at = memoryview(memory), 0
            while at < len(view):
                at += os.preadv(handle, [view[at : at + (8 << 20)]], at)
            os.close(handle)

        for repeat in range(max(2, self.options.repeats - 2)):
            for folder in (stock, ours.directory):
                self._drop(Path(folder))
            keep = repeat > 0 or self.options.repeats < 3
            self.timed("disk_read", read_direct, keep=keep)
            self.timed("ours_load_cold", lambda: self.state(other, self.ranks, restore=ours, writer="none").restore(), keep=keep)
            self.timed("dcp_load_cold", lambda: dcp.load({"model": target.state_dict()}, checkpoint_id=stock), keep=keep)

    def _drop(self, folder: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            for path in folder.iterdir():
                handle = os.open(path, os.O_RDONLY)
                os.fsync(handle)
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(handle)
        dist.barrier()


def resident_bytes(pid: int) -> float:
    """Memory of a process that is in use, shared pages included."""
    return float(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * mmap.PAGESIZE


def run_rank(rank: int, folder: Path, options: argparse.Namespace, writer_pid: int) -> None:
    """A forked rank's life."""
    torch.set_num_threads(1)
    one = Rank(rank, folder, options)
    one.writer_pid = writer_pid
    if "memory" in options.parts:
        one.measure_memory()
    if "saves" in options.parts:
        one.measure_saves()
    if "loads" in options.parts:
        one.measure_loads()
    if rank == 0:
        (folder / "samples.json").write_text(json.dumps(one.samples))
    dist.barrier()
    dist.destroy_process_group()


async def commit_all(folder: Path, ended: Callable[[], bool]) -> None:
    """The committing agent's half for every job and generation that reports."""
    control = await WriterControl.connect(str(folder / "w.sock"), "n0")
    collectors: dict[tuple[str, int], Collector] = {}

    async def follow() -> None:
        async for message in control.messages():
            assert isinstance(message, ShardsDurable), message
            spec = GenerationSpec(
                job=message.job, epoch=1, generation=message.generation, mesh=MeshShape(dp=message.world_size),
                world_size=message.world_size, nodes=("n0",),
            )  # fmt: skip
            collected = collectors.setdefault((message.job, message.generation), Collector(spec)).add(message)
            if collected.pending is not None:
                await asyncio.to_thread(write_record, collected.pending, written_at=time.time())
                for old in catalog.scan(Path(message.directory).parent)[2:]:
                    await asyncio.to_thread(shutil.rmtree, old.directory)
            await control.acknowledge(message)

    task = asyncio.create_task(follow())
    while not ended():  # noqa: ASYNC110 - children of this process, reaped by waitpid
        await asyncio.sleep(0.05)
    await control.close()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Run everything in forked ranks with a writer process; returns seconds by name."""
    writer = subprocess.Popen(
        [sys.executable, "-m", "regrow.ckpt.writer", "--socket", str(folder / "w.sock"), "--state", str(folder / "state")],
        stderr=(folder / "writer.log").open("w"),
    )
    children: set[int] = set()
    try:
        while not (folder / "w.sock").exists():
            assert writer.poll() is None, "the writer did not start"
            time.sleep(0.02)
        for rank in range(options.ranks):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    run_rank(rank, folder, options, writer.pid)
                    code = 0
                except BaseException:  # noqa: BLE001 - the exit code tells
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.add(pid)

        def ended() -> bool:
            for pid in list(children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    children.discard(pid)
                    if status:
                        raise SystemExit("a rank failed; its traceback is above")
            return not children

        asyncio.run(commit_all(folder, ended))
    finally:
        for pid in children:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
        writer.terminate()
        writer.wait()
    return json.loads((folder / "samples.json").read_text())


def ratio(samples: dict[str, list[float]], above: str, below: str) -> dict[str, float]:
    """Median, min and max of the ratios within repeats."""
    ratios = [a / b for a, b in zip(samples[above], samples[below], strict=True)]
    return {"median": round(statistics.median(ratios), 3), "min": round(min(ratios), 3), "max": round(max(ratios), 3)}


def figures(samples: dict[str, list[float]]) -> tuple[dict[str, float], dict[str, dict[str, float]]]:
    """The named figures (medians) and their spread."""
    pairs = {
        "stall_over_memcpy": ("ours_stall", "memcpy"),
        "stall_over_best_dcp": ("ours_stall", "dcp_stall"),
        "stall_cpu_over_best_dcp": ("ours_stall_cpu", "dcp_stall_cpu"),
        "dcp_stall_over_memcpy": ("dcp_stall", "memcpy"),
        "durable_over_disk": ("ours_durable", "disk"),
        "save_speedup_over_dcp": ("dcp_durable", "ours_durable"),
    }
    spread = {name: ratio(samples, *pair) for name, pair in pairs.items() if pair[0] in samples and pair[1] in samples}
    if "lost_late" in samples:
        spread |= {
            "lost_time_over_best_dcp": ratio(samples, "lost_ours", "lost_dcp"),
            "window_stall_over_best_dcp": ratio(samples, "window_ours_stall", "window_dcp_stall"),
            "late_stall_over_best_dcp": ratio(samples, "late_stall", "window_dcp_stall"),
            "late_lost_time_over_best_dcp": ratio(samples, "lost_late", "lost_dcp"),
        }
    if "torchsnapshot_stall" in samples and "ours_stall" in samples:
        spread["stall_over_torchsnapshot"] = ratio(samples, "ours_stall", "torchsnapshot_stall")
        spread["save_speedup_over_torchsnapshot"] = ratio(samples, "torchsnapshot_durable", "ours_durable")
    for who in ("rank", "writer"):
        if f"resident_{who}" in samples:
            first, last = samples[f"resident_{who}"]
            spread[f"resident_{who}_growth"] = ratio({"last": [last], "first": [first]}, "last", "first")
    if "disk_read" in samples:
        spread["load_speedup_over_dcp"] = ratio(samples, "dcp_load_same", "ours_load_same")
        spread["load_cold_over_disk"] = ratio(samples, "ours_load_cold", "disk_read")
        spread["load_cold_speedup_over_dcp"] = ratio(samples, "dcp_load_cold", "ours_load_cold")
        reshards = [layout for layout in LAYOUTS[1:] if f"dcp_load_{layout}" in samples]
        for layout in reshards:
            spread[f"load_speedup_{layout}"] = ratio(samples, f"dcp_load_{layout}", f"ours_load_{layout}")
        for layout in ("same", *reshards):  # of all ranks: says what a busy machine lets no clock say
            spread[f"load_cpu_speedup_{layout}"] = ratio(samples, f"dcp_load_{layout}_cpu", f"ours_load_{layout}_cpu")
            spread[f"load_cached_speedup_{layout}"] = ratio(samples, f"dcp_load_{layout}", f"cached_load_{layout}")
        worst = min((spread[f"load_speedup_{layout}"] for layout in reshards), key=lambda one: one["median"])
        spread["reshard_load_speedup_over_dcp"] = worst
    return {name: value["median"] for name, value in spread.items()}, spread


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller state and fewer repeats")
    parser.add_argument("--json", action="store_true", help="one JSON document")
    parser.add_argument("--gigabytes", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=4, help="other numbers than 4 measure the same layout and rows -> columns only")
    parser.add_argument("--step-seconds", type=float, default=0.25, help="forward and backward of a step in the window")
    parser.add_argument("--windows", type=int, default=0, help="so many windows; default two less than repeats, two at least")
    parser.add_argument("--parts", default="saves,window,loads", help="what to measure")
    parser.add_argument("--savers", default="limits,dcp,ours,torchsnapshot", help="of saves; fewer of them need less memory at once")
    parser.add_argument("--samples", default="", help="a file for the seconds as they come: what there is when the run is cut off")
    parser.add_argument("--folder", default=None, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    options.gigabytes = options.gigabytes or (0.33 if options.quick else 1.31)
    options.repeats = options.repeats or (3 if options.quick else 5)
    folder = Path(tempfile.mkdtemp(prefix="rgb", dir=options.folder))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that ranks, writer and files go with us
    try:
        samples = measure(options, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    medians, spread = figures(samples)
    limits = {
        "stall_over_memcpy": 1.2, "stall_over_best_dcp": 0.35, "lost_time_over_best_dcp": 0.5, "durable_over_disk": 1.5,
        "save_speedup_over_dcp": 2.0, "load_speedup_over_dcp": 3.0, "reshard_load_speedup_over_dcp": 3.0, "load_cold_over_disk": 1.4,
    }  # fmt: skip
    machine = {
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "gigabytes": options.gigabytes,
        "ranks": options.ranks,
    }
    if options.json:
        print(json.dumps({"figures": medians, "limits": limits, "spread": spread, "samples": samples, "machine": machine}))
        return
    for name, value in spread.items():
        print(f"{name:<34} {value['median']:>8} ({value['min']} to {value['max']})  must {limits.get(name, '-')}")


if __name__ == "__main__":
    main()
