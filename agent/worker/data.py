"""Which samples a step consumes, and who computes them: a pure function of (seed, samples consumed, batch recipe).

The order of an epoch is a permutation keyed by (seed, epoch) and nothing else: no state to save, no memory, any position
in constant time, the same on every version of every library. The position is the number of samples consumed by the whole
job, so a job goes on with any number of data-parallel replicas and every sample is used exactly once an epoch.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from regrow.errors import ConfigurationError

Indices = npt.NDArray[np.int64]

_ROUNDS = 8
"""Feistel rounds. Four give a strong permutation of large domains; small domains need more to look random."""


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea, Flood 2014), elementwise."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return values ^ (values >> np.uint64(31))


def permuted(index: Indices, size: int, seed: int, epoch: int) -> Indices:
    """The samples at places `index` of the epoch's order: a keyed permutation of 0..size-1.

    A balanced Feistel network over the next even number of bits, cycle-walked until the value is below `size`
    (Black and Rogaway 2002). The domain is below 4 x size, so the expected number of walks is below 4.
    """
    if size < 2:
        return np.zeros_like(index)
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    keys = _round_keys(seed, epoch)
    values = index.astype(np.uint64)
    pending = np.arange(values.size)
    while pending.size:
        walked = _feistel(values[pending], half, keys)
        values[pending] = walked
        pending = pending[walked >= np.uint64(size)]
    return values.astype(np.int64)


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        base = mix(np.array([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64)) + np.uint64(epoch & 0xFFFFFFFFFFFFFFFF)
        return mix(mix(base) + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _feistel(values: npt.NDArray[np.uint64], half: np.uint64, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    mask = (np.uint64(1) << half) - np.uint64(1)
    left, right = values >> half, values & mask
    with np.errstate(over="ignore"):
        for key in keys:
            left, right = right, left ^ (mix(right + key) & mask)
    return (left << half) | right


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """How the stream of samples is made. `num_samples` items in the data set; seed of the order."""

    num_samples: int
    seed: int
    global_batch: int
    micro_batch: int
    drop_last: bool = False
    """True: the samples of an epoch that do not fill a batch are left out of it (others each epoch). False: the batch that
    reaches the end of an epoch goes on into the next, so that batches are always full and every sample is used."""

    @property
    def used_per_epoch(self) -> int:
        """Samples that an epoch consumes."""
        return self.num_samples - self.num_samples % self.global_batch if self.drop_last else self.num_samples

    def samples(self, first: int, count: int) -> Indices:
        """Data set indices of the stream positions first .. first+count-1, shape (count,)."""
        positions = np.arange(first, first + count, dtype=np.int64)
        epochs, places = np.divmod(positions, self.used_per_epoch)
        chosen = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            chosen[here] = permuted(places[here], self.num_samples, self.seed, int(epoch))
        return chosen


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """What one data-parallel replica computes in one step."""

    step: int
    first: int
    """Position in the job's stream of this replica's first sample; positions are consecutive and never repeat in a run."""
    samples: Indices
    """Data set indices, shape (micro_batches * micro_batch,); may be empty."""
    micro_batch: int
    global_batch: int

    @property
    def positions(self) -> Indices:
        """Stream position of each sample: the key of what must not depend on the mesh (dropout masks, augmentation)."""
        return np.arange(self.first, self.first + self.samples.size, dtype=np.int64)

    @property
    def micro_batches(self) -> list[Indices]:
        """The samples in rows of `micro_batch`, in order."""
        return list(self.samples.reshape(-1, self.micro_batch))

    def __iter__(self) -> Iterator[Indices]:
        return iter(self.micro_batches)

    def __len__(self) -> int:
        return self.samples.size // self.micro_batch


class BatchPlan:
    """The samples of each step for one replica of a generation.

    Step s consumes stream positions ``base_samples + (s - 1 - base_step) * global_batch`` onwards. `base_step` and
    `base_samples` are what the restored checkpoint says, so an abandoned step consumes nothing.
    """

    def __init__(self, recipe: Recipe, counts: tuple[int, ...], replica: int, *, base_step: int = 0, base_samples: int = 0) -> None:
        _check(recipe, counts, replica)
        self.recipe = recipe
        self.counts = counts
        self.replica = replica
        self.base_step = base_step
        self.base_samples = base_samples

    def rebase(self, step: int, samples: int) -> None:
        """Go on after completed step `step`, with `samples` consumed."""
        self.base_step = step
        self.base_samples = samples

    def consumed_after(self, step: int) -> int:
        """Samples that the job has consumed when `step` is completed."""
        return self.base_samples + (step - self.base_step) * self.recipe.global_batch

    def epoch_of(self, step: int) -> int:
        """Epoch of the first sample of `step`, from 0."""
        return self.consumed_after(step - 1) // self.recipe.used_per_epoch

    @property
    def steps_per_epoch(self) -> float:
        """Steps that an epoch takes; not whole where a batch goes over its end."""
        return self.recipe.used_per_epoch / self.recipe.global_batch

    def step(self, step: int) -> Batch:
        """This replica's share of a step."""
        return self.share(step, self.replica)

    def share(self, step: int, replica: int) -> Batch:
        """Any replica's share of a step: the shares of all replicas are the global batch, in order."""
        recipe = self.recipe
        first = self.consumed_after(step - 1) + sum(self.counts[:replica]) * recipe.micro_batch
        count = self.counts[replica] * recipe.micro_batch
        return Batch(
            step=step,
            first=first,
            samples=recipe.samples(first, count),
            micro_batch=recipe.micro_batch,
            global_batch=recipe.global_batch,
        )


def _check(recipe: Recipe, counts: tuple[int, ...], replica: int) -> None:
    where = "run.batches()"
    if recipe.global_batch < 1:
        raise ConfigurationError(
            "the global batch is not stated", where=where, hint="regrow run --global-batch N, or attach(global_batch=N)"
        )
    if recipe.num_samples < 1:
        raise ConfigurationError(f"a data set of {recipe.num_samples} samples", where=where, hint="num_samples is the size of the data set")
    if recipe.drop_last and recipe.num_samples < recipe.global_batch:
        raise ConfigurationError(
            f"{recipe.num_samples} samples do not fill one batch of {recipe.global_batch}",
            where=where,
            hint="drop_last=False, or more data",
        )
    if sum(counts) * recipe.micro_batch != recipe.global_batch or not 0 <= replica < len(counts):
        raise ConfigurationError(
            f"micro-batch counts {counts} x {recipe.micro_batch} are not the global batch {recipe.global_batch}",
            where=where,
            hint="counts come from parallel.batch.split",
        )
