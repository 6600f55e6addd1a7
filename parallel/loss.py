"""Loss that does not depend on how the batch was split: summed over tokens, divided once by the global count.

A mean per micro-batch, or per replica, would weigh tokens differently as soon as replicas run unequal counts or
batches contain padding. So every micro-batch contributes a SUM, gradients are reduced by SUM, and the division by the
number of valid tokens of the whole global batch happens once, after the reduction.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

IGNORED = -100
"""Target value of a position that carries no loss."""


def summed_cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over valid positions of the cross entropy in nats.

    Args:
        logits: [batch, sequence, vocabulary].
        targets: int64 [batch, sequence]; IGNORED where there is nothing to predict.
    """
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def num_valid(targets: Tensor) -> int:
    """Positions of `targets` that carry loss."""
    return int(torch.count_nonzero(targets != IGNORED).item())
