"""Writes `.metadata`, the index that `torch.distributed.checkpoint.load` reads. We never read one."""

from __future__ import annotations

from typing import Any

from regrow.ckpt import pickles
from regrow.ckpt.manifest import Chunk, RankManifest
from regrow.ckpt.pickles import Call, Instance, Name

_MODULE = "torch.distributed.checkpoint.metadata"
_STRIDED = Call(Name("torch.serialization", "_get_layout"), ("torch.strided",))
_CONTIGUOUS = Call(Name(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))


def metadata(ranks: list[RankManifest]) -> bytes:
    """The pickled `Metadata` of a checkpoint (torch >= 2.1 reads it)."""
    chunks: dict[str, list[tuple[RankManifest, Chunk]]] = {}
    for rank in ranks:
        for chunk in rank.chunks:
            chunks.setdefault(chunk.name, []).append((rank, chunk))
    storage = _Items()
    for placed in chunks.values():
        for number, (rank, chunk) in enumerate(placed):
            storage.add(_index(chunk, number), _location(rank, chunk))
    described = {name: _tensor(placed) for name, placed in sorted(chunks.items())}
    return pickles.dumps(
        Instance(
            Name(_MODULE, "Metadata"),
            {"state_dict_metadata": described, "planner_data": None, "storage_data": storage, "storage_meta": None, "version": None},
        )
    )


class _Items(dict[Any, Any]):
    """A dict whose keys need not be hashable here: the reader's are."""

    def __init__(self) -> None:
        super().__init__()
        self._pairs: list[tuple[Any, Any]] = []

    def add(self, key: Any, value: Any) -> None:
        self._pairs.append((key, value))

    def items(self) -> Any:
        return self._pairs


def _size(values: tuple[int, ...]) -> Call:
    return Call(Name("torch", "Size"), (values,))


def _tensor(placed: list[tuple[RankManifest, Chunk]]) -> Instance:
    first = placed[0][1]
    properties = Instance(Name(_MODULE, "TensorProperties"), (Name("torch", first.dtype), _STRIDED, False, _CONTIGUOUS, False))
    parts = [
        Instance(Name(_MODULE, "ChunkStorageMetadata"), {"offsets": _size(chunk.offsets), "sizes": _size(chunk.sizes)})
        for _, chunk in placed
    ]
    state = {"properties": properties, "size": _size(first.shape), "chunks": parts}
    return Instance(Name(_MODULE, "TensorStorageMetadata"), state)


def _index(chunk: Chunk, number: int) -> Instance:
    return Instance(Name(_MODULE, "MetadataIndex"), {"fqn": chunk.name, "offset": _size(chunk.offsets), "index": number})


def _location(rank: RankManifest, chunk: Chunk) -> Instance:
    path, start = (rank.container, rank.container_at) if rank.container else (rank.file, 0)
    state = {"relative_path": path, "offset": start + chunk.envelope[0], "length": chunk.envelope[1]}
    return Instance(Name("torch.distributed.checkpoint.filesystem", "_StorageInfo"), state)
