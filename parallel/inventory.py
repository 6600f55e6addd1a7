"""What there is to compute on: nodes with their GPUs, link classes, failure domains."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from functools import cached_property
from typing import Any

import msgspec

from regrow.errors import ConfigurationError

GB = 1e9

MOST_NODES = 100_000
MOST_GPUS = 1_024
"""Far more than any cluster has; keeps a slip of the keyboard from taking all memory. Ours."""


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One class of links: latency of a message and bandwidth of one GPU in one direction."""

    bandwidth: float
    """Bytes a second."""
    latency: float
    """Seconds a message."""


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of accelerator."""

    name: str
    peak_flops: float
    """Dense 16-bit operations a second, from the data sheet."""
    memory_bandwidth: float
    """Bytes a second."""
    memory_bytes: float
    nvlink: Link


DEVICES = {
    "v100": Device(
        name="v100", peak_flops=125e12, memory_bandwidth=0.9e12, memory_bytes=32 * GB, nvlink=Link(bandwidth=150e9, latency=8e-6)
    ),
    "a100": Device(
        name="a100", peak_flops=312e12, memory_bandwidth=2.0e12, memory_bytes=80 * GB, nvlink=Link(bandwidth=300e9, latency=6e-6)
    ),
    "h100": Device(
        name="h100", peak_flops=989e12, memory_bandwidth=3.35e12, memory_bytes=80 * GB, nvlink=Link(bandwidth=450e9, latency=5e-6)
    ),
    "h800": Device(
        name="h800", peak_flops=989e12, memory_bandwidth=3.35e12, memory_bytes=80 * GB, nvlink=Link(bandwidth=200e9, latency=5e-6)
    ),
    "h200": Device(
        name="h200", peak_flops=989e12, memory_bandwidth=4.8e12, memory_bytes=141 * GB, nvlink=Link(bandwidth=450e9, latency=5e-6)
    ),
    "b200": Device(
        name="b200", peak_flops=2250e12, memory_bandwidth=8.0e12, memory_bytes=192 * GB, nvlink=Link(bandwidth=900e9, latency=5e-6)
    ),
    "cpu": Device(name="cpu", peak_flops=0.1e12, memory_bandwidth=0.01e12, memory_bytes=4 * GB, nvlink=Link(bandwidth=1e9, latency=3e-4)),
}
"""Data-sheet numbers. A100 NVLink 300 GB/s is the seed's figure. Latencies are ours; `regrow plan --calibrate` replaces them."""
INFINIBAND = Link(bandwidth=50e9, latency=1.5e-5)
"""400 Gb/s NDR, one adapter a GPU (the seed's 50 GB/s)."""
CROSS = Link(bandwidth=25e9, latency=3e-5)
"""Above a full-bisection domain. Half of InfiniBand is our assumption for 'one tier slower beyond about 256 GPUs'."""
DOMAIN_GPUS = 256
"""GPUs that reach each other at full bandwidth (seed: leaf and spine switches begin above about 256)."""


class Node(msgspec.Struct, frozen=True, kw_only=True):
    """One host."""

    name: str
    gpus: int
    domain: str = ""
    """Failure domain: rack, power feed, switch. Empty: the node is its own."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Nodes and links."""

    nodes: tuple[Node, ...]
    device: Device
    gpu_memory_bytes: float
    nvlink_gpus: int
    """GPUs that share NVLink: a node, or a rack of NVL72."""
    infiniband: Link = INFINIBAND
    cross: Link = CROSS
    domain_gpus: int = DOMAIN_GPUS
    torus: bool = False
    """Chips linked to their neighbours (TPU): rings run at the fast link's speed at any size, there are no tiers above."""

    @cached_property
    def gpus(self) -> int:
        """GPUs of all nodes."""
        return sum(node.gpus for node in self.nodes)

    @cached_property
    def gpus_per_node(self) -> int:
        """GPUs of the fullest node."""
        return max((node.gpus for node in self.nodes), default=0)

    @cached_property
    def _islands(self) -> Counter[int]:
        """How many NVLink domains of each size there are: nodes, or racks where NVLink reaches further."""
        if self.nvlink_gpus <= self.gpus_per_node:
            return Counter(node.gpus for node in self.nodes)
        racks: Counter[str] = Counter()
        loose = 0
        for node in self.nodes:
            # Nodes without a domain stand in racks in their order, as many as the NVLink domain holds.
            if not node.domain and racks[f"\0{loose}"] + node.gpus > self.nvlink_gpus:
                loose += 1
            racks[node.domain or f"\0{loose}"] += node.gpus
        return Counter(size for size in racks.values() if size)

    def tp_groups(self, tp: int) -> int:
        """Groups of `tp` GPUs that lie inside one NVLink domain; across nodes where `tp` is larger than that."""
        if tp > self.nvlink_gpus:
            return self.gpus // tp
        return sum(number * (size // tp) for size, number in self._islands.items())

    def by_loss(self) -> tuple[Node, ...]:
        """Nodes in the order in which the worst case keeps them: the last of the fullest ones is lost first."""
        return tuple(sorted(self.nodes, key=lambda node: node.gpus))

    def without(self, lost: int) -> Inventory:
        """The inventory after losing `lost` nodes in the worst case, the rest in their order."""
        kept = {node.name for node in self.by_loss()[: max(0, len(self.nodes) - lost)]}
        return msgspec.structs.replace(self, nodes=tuple(node for node in self.nodes if node.name in kept))


def uniform(
    nodes: int,
    gpus_per_node: int | list[int],
    *,
    device: str = "h100",
    gpu_memory_gb: float | None = None,
    peak_tflops: float | None = None,
    nvlink_gpus: int | None = None,
) -> Inventory:
    """Nodes with equal GPUs, or one count a node.

    Raises:
        ConfigurationError: fewer than one node or GPU, unknown device, memory that is not a positive number.
    """
    sizes = gpus_per_node if isinstance(gpus_per_node, list) else [gpus_per_node] * max(0, min(nodes, MOST_NODES + 1))
    if nodes < 1:
        raise ConfigurationError(f"an inventory of {nodes} nodes", where="--nodes", hint="plan for at least one node")
    if nodes > MOST_NODES:
        raise ConfigurationError(f"an inventory of {nodes} nodes", where="--nodes", hint=f"at most {MOST_NODES} nodes are planned for")
    if len(sizes) != nodes:
        raise ConfigurationError(
            f"{len(sizes)} GPU counts for {nodes} nodes", where="--gpus-per-node", hint="give one number, or one per node: 8,8,7,6"
        )
    if min(sizes) < 0 or max(sizes) < 1:
        raise ConfigurationError(f"nodes with {min(sizes)} GPUs", where="--gpus-per-node", hint="every node needs at least one GPU")
    if max(sizes) > MOST_GPUS or sum(sizes) > MOST_NODES * 8:
        raise ConfigurationError(
            f"nodes with {max(sizes)} GPUs, {sum(sizes)} in all",
            where="--gpus-per-node",
            hint=f"at most {MOST_GPUS} a node and {MOST_NODES * 8} in all are planned for",
        )
    kind = _device(device, peak_tflops)
    memory = kind.memory_bytes if gpu_memory_gb is None else _positive(gpu_memory_gb, "--gpu-memory-gb") * GB
    width = max(4, len(str(nodes - 1)))
    made = tuple(Node(name=f"node{index:0{width}d}", gpus=size) for index, size in enumerate(sizes) if size)
    domain = nvlink_gpus if nvlink_gpus is not None else max(sizes)
    if domain < 1:
        raise ConfigurationError(f"an NVLink domain of {domain} GPUs", where="--nvlink-gpus", hint="give at least 1")
    return Inventory(nodes=made, device=kind, gpu_memory_bytes=memory, nvlink_gpus=domain)


def _device(name: str, peak_tflops: float | None) -> Device:
    if name not in DEVICES:
        raise ConfigurationError(f"unknown GPU type {name!r}", where="--gpu-type", hint=f"one of {', '.join(DEVICES)}")
    kind = DEVICES[name]
    if peak_tflops is None:
        return kind
    return msgspec.structs.replace(kind, peak_flops=_positive(peak_tflops, "--peak-tflops") * 1e12)


def _positive(value: float, where: str) -> float:
    if not math.isfinite(value) or value <= 0:
        raise ConfigurationError(f"{value} is not a positive number", where=where, hint="give a finite number above 0")
    return value


class _LinkFile(msgspec.Struct, forbid_unknown_fields=True):
    gb_per_second: float
    latency_us: float


class _NodeFile(msgspec.Struct, forbid_unknown_fields=True):
    gpus: int
    name: str = ""
    domain: str = ""
    count: int = 1


class _File(msgspec.Struct, forbid_unknown_fields=True):
    nodes: list[_NodeFile]
    gpu_type: str = "h100"
    gpu_memory_gb: float | None = None
    peak_tflops: float | None = None
    nvlink_gpus: int | None = None
    domain_gpus: int = DOMAIN_GPUS
    torus: bool = False
    links: dict[str, _LinkFile] = {}


def read(text: str, source: str, **overrides: Any) -> Inventory:
    """An inventory from JSON.

    ``{"nodes": [{"name", "gpus", "domain", "count"}], "gpu_type", "gpu_memory_gb", "peak_tflops", "nvlink_gpus",
    "domain_gpus", "torus", "links": {"nvlink"|"infiniband"|"cross": {"gb_per_second", "latency_us"}}}``; only nodes are needed.

    Raises:
        ConfigurationError: not this format, or impossible numbers.
    """
    try:
        file = msgspec.json.decode(text, type=_File)
    except msgspec.DecodeError as error:
        raise ConfigurationError(f"is not an inventory: {error}", where=source, hint=_nearest_key(str(error))) from error
    for key, value in overrides.items():
        if value is not None:
            file = msgspec.structs.replace(file, **{key: value})
    if sum(max(0, entry.count) for entry in file.nodes) > MOST_NODES:
        raise ConfigurationError("has too many nodes", where=source, hint=f"at most {MOST_NODES} nodes are planned for")
    listed = [(entry, index) for entry in file.nodes for index in range(entry.count)]
    made = uniform(
        len(listed),
        [entry.gpus for entry, _ in listed],
        device=file.gpu_type,
        gpu_memory_gb=file.gpu_memory_gb,
        peak_tflops=file.peak_tflops,
        nvlink_gpus=file.nvlink_gpus,
    )
    names = [_node_name(entry, index, number) for number, (entry, index) in enumerate(listed)]
    if len(set(names)) != len(names):
        raise ConfigurationError("two nodes have the same name", where=source, hint="names must be unique")
    nodes = tuple(
        Node(name=name, gpus=entry.gpus, domain=entry.domain) for name, (entry, _) in zip(names, listed, strict=True) if entry.gpus
    )
    links = {name: _link(link, name, source) for name, link in file.links.items()}
    device = msgspec.structs.replace(made.device, nvlink=links.get("nvlink", made.device.nvlink))
    return msgspec.structs.replace(
        made,
        nodes=nodes,
        device=device,
        infiniband=links.get("infiniband", INFINIBAND),
        cross=links.get("cross", CROSS),
        domain_gpus=max(1, file.domain_gpus),
        torus=file.torus,
    )


def _nearest_key(problem: str) -> str:
    """What to write instead of an unknown field, else an example."""
    unknown = re.search(r"unknown field `([^`]*)`", problem)
    known = {name for kind in (_File, _NodeFile, _LinkFile) for name in kind.__struct_fields__}
    near = difflib.get_close_matches(unknown[1], known, n=1) if unknown else []
    if near:
        return f"did you mean {near[0]}?"
    return 'write {"nodes": [{"gpus": 8, "count": 4}]}' + (f"; known are {', '.join(sorted(known))}" if unknown else "")


def _node_name(entry: _NodeFile, index: int, number: int) -> str:
    if not entry.name:
        return f"node{number:04d}"
    return entry.name if entry.count == 1 else f"{entry.name}-{index}"


def _link(link: _LinkFile, name: str, source: str) -> Link:
    if name not in ("nvlink", "infiniband", "cross"):
        raise ConfigurationError(f"unknown link class {name!r}", where=source, hint="nvlink, infiniband or cross")
    if not math.isfinite(link.latency_us) or link.latency_us < 0:
        raise ConfigurationError(f"latency {link.latency_us} us", where=source, hint="give a finite number of at least 0")
    return Link(bandwidth=_positive(link.gb_per_second, source) * GB, latency=link.latency_us * 1e-6)
