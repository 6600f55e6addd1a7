"""The fast path for other programs: ``dcp.load(state_dict, storage_reader=RegrowReader(directory))``.

Reads what `.metadata` would tell from our manifests instead, so nothing is unpickled, and every block is verified.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from regrow.ckpt.loading import load_pieces
from regrow.ckpt.manifest import Chunk, DamagedCheckpointError, read_manifests, read_record
from regrow.ckpt.reshard import Piece, Source, source_of
from regrow.errors import OperationalError


class RegrowReader(StorageReader):
    """A StorageReader for one checkpoint directory of Regrow."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        super().__init__()
        self._directory = Path(directory)
        self._source = Source({}, 0)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Called by dcp.load with its checkpoint_id, if it has one."""
        if checkpoint_id:
            self._directory = Path(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a directory is a checkpoint of ours."""
        return (Path(checkpoint_id) / "record.json").is_file()

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Metadata:
        """What is stored, from record and manifests.

        Raises:
            DamagedCheckpointError: they are missing or not as committed.
        """
        try:
            record = read_record(self._directory)
        except FileNotFoundError as error:
            raise DamagedCheckpointError("has no record: it is not a checkpoint", where=str(self._directory)) from error
        self._source = source_of(read_manifests(self._directory, record))
        return Metadata(
            state_dict_metadata={name: _describe([chunk for _, chunk in stored]) for name, stored in self._source.tensors.items()},
            storage_data=None,
            storage_meta=StorageMeta(checkpoint_id=self._directory),
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_args: Any, **_kwargs: Any) -> None:
        """Other ranks than the coordinator have not read the manifests yet."""
        del metadata, is_coordinator
        if not self._source.tensors:
            self.read_metadata()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """As they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill the planner's tensors.

        Raises:
            DamagedCheckpointError: bytes are not what was committed.
        """
        work: list[tuple[Piece, torch.Tensor]] = []
        done: list[tuple[Any, torch.Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise OperationalError(f"{item.storage_index.fqn} is stored as plain state, not as a pickle", where=str(self._directory))
            target = planner.resolve_tensor(item).detach()
            file, chunk = self._find(item.storage_index)
            if target.numel():
                sizes = tuple(item.lengths)
                work.append((Piece(file, chunk, tuple(item.storage_offsets), (0,) * len(sizes), sizes), target))
            done.append((item, target))
        load_pieces(self._directory, self._source, work)
        for item, target in done:
            planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _find(self, index: MetadataIndex) -> tuple[str, Chunk]:
        offset = tuple(index.offset or ())
        for file, chunk in self._source.tensors[index.fqn]:
            if chunk.offsets == offset:
                return file, chunk
        raise OperationalError(f"tensor {index.fqn} has no chunk at {offset}", where=str(self._directory))


def _describe(chunks: list[Chunk]) -> TensorStorageMetadata:
    first = chunks[0]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=getattr(torch, first.dtype)),
        size=torch.Size(first.shape),
        chunks=[ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=torch.Size(chunk.sizes)) for chunk in chunks],
    )
