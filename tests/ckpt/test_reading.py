"""Readers of one checkpoint in several threads."""

from __future__ import annotations

import os
import threading

from ckpt_synthetic import simple

from regrow.ckpt.manifest import read_manifests, read_record
from regrow.ckpt.reading import ShardReader
from regrow.ckpt.reshard import source_of


def test_two_threads_find_the_same_arena_filled_anew(tmp_path):
    """The second one comes while the first opens the file: it waits for it."""
    directory = simple(tmp_path, 1, world=1)
    source = source_of(read_manifests(directory, read_record(directory)))
    opening, go = threading.Event(), threading.Event()

    class Slow(ShardReader):
        def _open(self, name: str) -> int:
            opening.set()
            assert go.wait(60)
            return super()._open(name)

    foreign = os.memfd_create("foreign")
    os.truncate(foreign, 1 << 20)
    reader = Slow(directory, source.block_bytes, {"rank-00000.safetensors": foreign})
    read: dict[str, bytes] = {}

    def fetch(name: str) -> None:
        file, chunk = source.tensors[name][0]
        target = bytearray(chunk.nbytes)
        reader.read_run(file, chunk, 0, chunk.nbytes, memoryview(target))
        read[name] = bytes(target)

    first = threading.Thread(target=fetch, args=("model.w",))
    second = threading.Thread(target=fetch, args=("optimizer.w.exp_avg",))
    first.start()
    assert opening.wait(60)
    second.start()
    second.join(0.2)  # a reader that does not wait has failed by now
    go.set()
    first.join(60)
    second.join(60)
    reader.close()
    os.close(foreign)
    assert read.keys() == {"model.w", "optimizer.w.exp_avg"}
