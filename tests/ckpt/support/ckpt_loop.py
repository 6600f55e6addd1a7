"""Saves, commits and prunes for ever with keep=1, without torch: something to kill.

``python ckpt_loop.py FOLDER GENERATION``: continues after what it restores, prints each step when it is committed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from ckpt_synthetic import commit, shard, spec_of, write_shards

from regrow.ckpt import catalog
from regrow.ckpt.recycling import Recycler
from regrow.ckpt.retention import Retention, prune


def main(folder: Path, generation: int) -> None:
    """Never ends by itself."""
    entry = catalog.decide_restore(folder)
    step = entry.step if entry else 0
    print(f"restored {step}", flush=True)
    spec = spec_of(2, generation, entry.restore_point() if entry else None)
    held = [[shard("w", (64, 256), (2,), (0,), rank)] for rank in range(2)]
    recycler = Recycler()
    while True:
        step += 1
        report = write_shards(
            folder, step, spec, held, {"w": np.full((64, 256), step, np.float32)}, nonce=f"n{generation}", recycler=recycler
        )
        commit(spec, report)
        print(f"committed {step}", flush=True)
        prune(folder, Retention(keep_last=1), generation=generation, recycle=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
