"""Real text found on any machine: the Python standard library's own sources, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regrow.parallel.loss import IGNORED

VOCABULARY = 256
FILES = (
    "abc",
    "argparse",
    "ast",
    "base64",
    "bisect",
    "calendar",
    "cmd",
    "code",
    "codecs",
    "colorsys",
    "configparser",
    "contextlib",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "dis",
    "enum",
    "filecmp",
    "fractions",
    "functools",
    "getopt",
    "glob",
    "gzip",
    "hashlib",
    "heapq",
    "inspect",
    "io",
    "locale",
    "mailbox",
    "nntplib",
    "numbers",
    "operator",
    "optparse",
    "os",
    "pathlib",
    "pdb",
    "pickle",
    "pickletools",
    "platform",
    "pprint",
    "profile",
    "queue",
    "quopri",
    "random",
    "reprlib",
    "sched",
    "shelve",
    "shlex",
    "shutil",
    "socket",
    "statistics",
    "string",
    "struct",
    "subprocess",
    "tarfile",
    "tempfile",
    "textwrap",
    "threading",
    "timeit",
    "token",
    "tokenize",
    "trace",
    "traceback",
    "types",
    "typing",
    "uuid",
    "warnings",
    "wave",
    "weakref",
    "zipapp",
    "zipfile",
)
"""Modules to read, in this order; one that this Python does not have as a file is left out."""

HELD_OUT_EVERY = 16
BYTES_PER_FILE = 4096
"""Only the beginning of each file is read, so that a small corpus has many subjects."""


class Corpus:
    """Fixed windows of `seq` bytes. Sample i of the training part is always the same window.

    The first byte of a file is no target: it cannot be predicted from the end of another file. So samples differ in
    their number of valid tokens, as they do in practice.
    """

    def __init__(self, *, seq: int, num_samples: int = 512) -> None:
        windows = num_samples * HELD_OUT_EVERY // (HELD_OUT_EVERY - 1) + HELD_OUT_EVERY
        data, starts = _read((windows * seq) + 1)
        count = min(windows, (len(data) - 1) // seq)
        inputs = data[: count * seq].reshape(count, seq)
        targets = data[1 : count * seq + 1].astype(np.int64)
        targets[[start - 1 for start in starts if 0 < start <= count * seq]] = IGNORED
        held_out = np.arange(count) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        pairs = torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.reshape(count, seq))
        self._train = [part[torch.from_numpy(~held_out)][:num_samples] for part in pairs]
        self._held_out = [part[torch.from_numpy(held_out)] for part in pairs]

    def __len__(self) -> int:
        return len(self._train[0])

    def samples(self, indices: list[int] | Tensor) -> tuple[Tensor, Tensor]:
        """(inputs, targets), each int64 [len(indices), seq], of training samples."""
        return self._train[0][indices], self._train[1][indices]

    def held_out(self, count: int) -> tuple[Tensor, Tensor]:
        """The first `count` windows that training never sees (repeated from the start when there are fewer)."""
        indices = torch.arange(count) % len(self._held_out[0])
        return self._held_out[0][indices], self._held_out[1][indices]


def _read(most: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], list[int]]:
    """At most `most` bytes of the sources and the positions where files begin."""
    library = Path(sysconfig.get_paths()["stdlib"])
    parts: list[bytes] = []
    starts: list[int] = []
    size = 0
    for name in FILES:
        path = library / f"{name}.py"
        if size >= most:
            break
        if path.is_file():
            starts.append(size)
            parts.append(path.read_bytes()[:BYTES_PER_FILE])
            size += len(parts[-1])
    return np.frombuffer(b"".join(parts)[:most], dtype=np.uint8), starts
