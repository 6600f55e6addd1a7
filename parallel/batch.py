"""The global batch, kept exact for any number of data-parallel replicas.

``global_batch = micro_batch x sum(micro-batch counts of the replicas)``. Replicas may run unequal counts: the loss is
normalised by the global count of valid tokens and reduced by SUM, so the gradient is that of one process.
"""

from __future__ import annotations

import itertools
import math

from regrow.errors import ConfigurationError


def num_micro_batches(global_batch: int, micro_batch: int) -> int:
    """Micro-batches of one step over all replicas.

    Args:
        global_batch: samples of one optimizer step.
        micro_batch: samples of one forward pass of one replica.

    Raises:
        ConfigurationError: a size below 1, or a micro-batch that does not divide the global batch.
    """
    if global_batch < 1 or micro_batch < 1:
        raise ConfigurationError(
            f"global batch {global_batch} and micro-batch {micro_batch} must be at least 1",
            where="--global-batch",
            hint="give positive sizes",
        )
    count, rest = divmod(global_batch, micro_batch)
    if rest:
        below, above = count * micro_batch, (count + 1) * micro_batch
        nearest = f"{above}" if below == 0 else f"{below} or {above}"
        raise ConfigurationError(
            f"global batch {global_batch} is not a multiple of micro-batch {micro_batch} (rest {rest})",
            where="--global-batch",
            hint=f"use a global batch of {nearest}, or a micro-batch of {largest_divisor(global_batch, micro_batch)}",
        )
    return count


def split(global_batch: int, micro_batch: int, dp: int) -> tuple[int, ...]:
    """Micro-batches a step for each data-parallel replica, as even as possible; the first replicas take the rest.

    The counts sum to ``global_batch / micro_batch`` exactly and differ by at most one.

    Raises:
        ConfigurationError: sizes below 1, micro-batch does not divide the batch, or a replica would get nothing.
    """
    if dp < 1:
        raise ConfigurationError(f"{dp} data-parallel replicas", where="--dp", hint="use at least 1")
    total = num_micro_batches(global_batch, micro_batch)
    if total < dp:
        raise ConfigurationError(
            f"global batch {global_batch} in micro-batches of {micro_batch} gives {total}, fewer than {dp} replicas",
            where="--dp",
            hint=f"use at most {total} replicas, or a smaller micro-batch: every replica needs one",
        )
    base, extra = divmod(total, dp)
    return (base + 1,) * extra + (base,) * (dp - extra)


def largest_equal_dp(global_batch: int, micro_batch: int, most: int) -> int:
    """The largest number of replicas, at most `most`, that can all run the same count; 0 when there is none."""
    total = num_micro_batches(global_batch, micro_batch)
    return next((dp for dp in range(min(most, total), 0, -1) if total % dp == 0), 0)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of `number` that is at most `most`."""
    return next(value for value in range(max(1, min(number, most)), 0, -1) if number % value == 0)


def elastic_batch(most: int, micro_batches: tuple[int, ...]) -> int:
    """The largest global batch, at most `most`, that suits the allowed micro-batches: a multiple of all of them if one fits
    under the cap, else of as many as possible. The cap always holds.

    Raises:
        ConfigurationError: no micro-batch fits under the cap.
    """
    for size in range(len(micro_batches), 0, -1):
        fitting = [most // math.lcm(*some) * math.lcm(*some) for some in itertools.combinations(micro_batches, size) if min(some) > 0]
        if max(fitting, default=0) > 0:
            return max(fitting)
    raise ConfigurationError(
        f"no micro-batch of {micro_batches} fits under a batch of {most}", where="--micro-batch", hint="use a smaller one"
    )
