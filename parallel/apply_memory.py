"""Activation recomputation: full, or selective (matrix products and collectives are kept, the rest is computed again)."""

from __future__ import annotations

import functools
from typing import Any, Literal, cast

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from regrow.parallel.apply_layers import LayeredModel

Recompute = Literal["none", "selective", "full"]

_COLLECTIVES = torch.ops._c10d_functional  # noqa: SLF001 - the namespace that DTensor's collectives live in
_KEPT = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.addmm.default,
        _COLLECTIVES.reduce_scatter_tensor.default,
        _COLLECTIVES.all_gather_into_tensor.default,
        _COLLECTIVES.all_reduce.default,
        _COLLECTIVES.wait_tensor.default,
    }
)


def recompute_layers(model: nn.Module, mode: Recompute) -> None:
    """Make every layer of `model` compute its activations again in the backward pass, in place. Names stay as they are.

    Keyed dropout makes this exact without saving random state: the mask is a function of the key, which is an argument.
    """
    if mode == "none":
        return
    context = {"context_fn": functools.partial(create_selective_checkpoint_contexts, _policy)} if mode == "selective" else {}
    for layer in cast("LayeredModel", model).layers.values():
        layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False, **context)


def _policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
    del context
    return CheckpointPolicy.MUST_SAVE if operator in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE
