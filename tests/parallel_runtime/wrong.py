"""Faulty ways to drop out, each a mistake that is easy to make. The comparison of meshes has to catch them."""

from __future__ import annotations

import torch
from torch.nn import functional

from regrow.demo import reference
from regrow.parallel import apply, dropout


def no_sequence_offset(argv: list[str]) -> None:
    """Every rank of a sequence-parallel group draws the mask of the first one."""
    apply.place_on_mesh = lambda *_, **__: None
    reference.main(argv)


def local_sample_index(argv: list[str]) -> None:
    """Samples are numbered from 0 on each replica."""
    right = dropout.sample_keys
    reference.sample_keys = lambda seed, step, samples: right(seed, step, torch.arange(len(samples)))
    reference.main(argv)


def rank_generator(argv: list[str]) -> None:
    """Masks from each rank's own generator."""
    dropout.KeyedDropout.forward = lambda self, x, key: functional.dropout(x, self.p, self.training)
    reference.main(argv)
