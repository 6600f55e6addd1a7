"""A sampled micro-step is done again, in place or on another replica, before its gradient is used.

A wrong gradient before the reduction poisons all replicas alike, so digests of state cannot see it. Here the same work with
the same inputs and random numbers is repeated and the gradients are compared; after a mismatch it is repeated more often on
all ranks. What was wrong once and right in all repetitions is replaced by the right gradient, so the update is not poisoned.

    replay = run.replay(model)                       # once
    loss = replay(compute, inputs, targets)          # instead of compute(inputs, targets)

where `compute` does one micro-step forward and backward and leaves this rank's own gradients, before any reduction over
replicas. Sampled steps are the same on all ranks, so `compute` may hold collectives of its own (tensor or pipeline parallelism).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from regrow.agent.worker import replay_judge as judging
from regrow.agent.worker.buddy import Ring
from regrow.agent.worker.chaos import Faults
from regrow.agent.worker.digest import Digester, Digests, local_part
from regrow.agent.worker.producer import traced
from regrow.agent.worker.replay_judge import Evidence, Seen
from regrow.ckpt import rng
from regrow.ckpt.exchange import Exchange
from regrow.ckpt.rng import Streams
from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.wire import ReplayVerdict

_log = logging.getLogger("regrow.worker")

Compute = Callable[..., Any]
REPEATS = 3
"""Runs in place after a mismatch, on every rank."""


class Replay:
    """Repeats sampled micro-steps of one rank. Made by `Run.replay`."""

    def __init__(
        self,
        modules: list[nn.Module],
        *,
        rate: float,
        seed: int,
        rank: int,
        mesh: MeshShape,
        units: int,
        digester: Digester,
        exchange: Exchange,
        ring: Ring | None,
        faults: Faults,
        step: Callable[[], int],
    ) -> None:
        """`units`: calls that every rank makes in a step, at least; `step`: the step that was started.

        Raises:
            ConfigurationError: a rate that is no share.
        """
        if not 0.0 <= rate <= 1.0:
            raise ConfigurationError(f"rate {rate} is no share of steps", where="run.replay()", hint="from 0 (never) to 1 (every step)")
        self._modules = modules
        self._rate, self._seed, self._rank, self._mesh, self._units = rate, seed, rank, mesh, units
        self._digester, self._exchange, self._ring, self._faults, self._step = digester, exchange, ring, faults, step
        self._at = (-1, 0)
        self._sample: judging.Sample | None = None
        self._floor = 0.0
        self._clean = 0
        self._verdict: ReplayVerdict | None = None
        self._recorded: list[tuple[Compute, tuple[Any, ...], Streams]] = []
        self._refusal = _refusal(modules)
        self.producer = ""
        """Who made the first number that was not finite when a step's work was done again for that."""
        self.num_repeated = 0
        """Runs of micro-steps that were done only for the comparison."""

    @property
    def floor(self) -> float:
        """Noise floor in norms of a gradient; 0: gradients repeat to the bit."""
        return self._floor

    def take_verdict(self) -> ReplayVerdict | None:
        """Of the check in this step, once; None: none was due."""
        found, self._verdict = self._verdict, None
        return found

    def __call__(self, compute: Compute, *inputs: Any) -> Any:
        """Do one micro-step; returns what `compute` returns. Repeats it when it is this one's turn."""
        step, unit = self._step(), self._at[1]
        if step != self._at[0]:
            unit = 0
            self._recorded.clear()
            self._sample = judging.sample(self._seed, step, self._rate, self._units) if self._rate else None
        self._at = (step, unit + 1)
        if self._rate and self._mesh.replica_size == 1 and not self._refusal:
            self._recorded.append((compute, inputs, _randomness(inputs)))
        if self._sample is None or self._sample.unit != unit:
            return self._run(compute, inputs)
        refusal = self._refusal or _reduces(self._modules)
        if refusal:
            self._verdict = ReplayVerdict(verdict="skipped", reason=refusal)
            return self._run(compute, inputs)
        return self._check(compute, inputs, buddy=self._sample.buddy)

    def non_finite_again(self) -> bool | None:
        """The gradient of this step is not finite: do the step's work again on this rank and see. When it is finite now, it takes
        the place of the other. None: it cannot be repeated here (other ranks take part in it, or nothing was recorded)."""
        if not self._recorded:
            return None
        buffers = self._buffers()
        broken = self._set_aside()
        now = _randomness(())
        with traced(self._modules) as producer:
            for compute, inputs, randomness in self._recorded:
                rng.put_back(randomness)
                self._run(compute, inputs)
                self.num_repeated += 1
        self.producer = producer.name
        rng.put_back(now)
        self._put_buffers(buffers)
        finite = all(bool(torch.isfinite(local_part(one.grad)).all()) for one in self._parameters() if one.grad is not None)
        if not finite:
            self._put(broken)
        return not finite

    # --- one check --------------------------------------------------------------------------------------------

    def _check(self, compute: Compute, inputs: tuple[Any, ...], *, buddy: bool) -> Any:
        before = self._set_aside()
        start, buffers = _randomness(inputs), self._buffers()
        runs = [self._once(compute, inputs)]
        after, buffers_after = _randomness(inputs), self._buffers()
        helped: dict[int, list[Seen]] = {}

        def repeat() -> None:
            rng.put_back(start)
            self._put_buffers(buffers)
            runs.append(self._once(compute, inputs))
            self.num_repeated += 1

        def help_other(shift: int) -> None:
            assert self._ring is not None
            owner, theirs, randomness = self._ring.swap(inputs, start, shift)
            rng.put_back(randomness)
            self._put_buffers(buffers)
            helped.setdefault(owner, []).append(self._once(compute, theirs)[0])
            self.num_repeated += 1

        may_help = self._ring is not None and all(isinstance(one, Tensor) for one in inputs)
        if buddy and may_help:
            help_other(1)
        else:
            repeat()
        evidence = self._tell(runs, helped)
        if not judging.calm(evidence, self._floor):
            for _ in range(REPEATS):
                repeat()
            for shift in (1, 1, 2, 2)[: 0 if not may_help else 2 if self._mesh.dp < 3 else 4]:
                help_other(shift)
            evidence = self._tell(runs, helped)
        kept = self._settle(evidence, [run[0] for run in runs])
        self._put_buffers(buffers_after)
        rng.put_back(after)
        self._put_back(before, runs[kept][1])
        return runs[kept][2]

    def _settle(self, evidence: list[Evidence], mine: list[Seen]) -> int:
        """Judge, and say which of this rank's runs counts."""
        before = self._floor
        mismatch = not judging.calm(evidence, before)
        if mismatch and self._floor == 0.0 and (judging.is_rounding(evidence) or judging.not_repeatable(evidence, 0.0)):
            self._floor = judging.noise(evidence)
        if mismatch and self._floor > 0.0 and before == 0.0:
            reason = f"gradients do not repeat to the bit: noise floor {self._floor:.1e} of a norm from now on"
            self._verdict = ReplayVerdict(verdict="skipped", reason=reason)
            return 0
        verdict = judging.judge(evidence, self._mesh, self._floor)
        right, _ = judging.settled(mine, self._floor)
        kept = 0
        if verdict.verdict == "diverged" and right is not None and not judging.same(mine[0], right, self._floor):
            kept = next(index for index, one in enumerate(mine) if judging.same(one, right, self._floor))
        if verdict.verdict == "diverged":
            _log.warning("replay step=%d verdict=diverged suspects=%s reason=%s", self._at[0], list(verdict.suspects), verdict.reason)
        self._clean += verdict.verdict == "agree"
        self._verdict = verdict
        return kept

    def _tell(self, runs: list[tuple[Seen, list[Tensor | None], Any, Digests]], helped: dict[int, list[Seen]]) -> list[Evidence]:
        first = runs[0][3]
        mine = Evidence(
            rank=self._rank,
            own=tuple(run[0] for run in runs),
            helped={owner: tuple(seen) for owner, seen in helped.items()},
            tensor=next((name for run in runs[1:] if (name := first.first_difference(run[3]))), ""),
            clean=self._clean,
        )
        return [msgspec.msgpack.decode(data, type=Evidence) for data in self._exchange(msgspec.msgpack.encode(mine))]

    def _once(self, compute: Compute, inputs: tuple[Any, ...]) -> tuple[Seen, list[Tensor | None], Any, Digests]:
        """One run from empty gradients; they are taken out again."""
        result = self._run(compute, inputs)
        named = [(name, local_part(one.grad)) for name, one in self._named() if one.grad is not None]
        digests = self._digester.digest(named)
        seen = Seen(digests.text, _sketch(gradient for _, gradient in named))
        return seen, self._set_aside(), result, digests

    def _run(self, compute: Compute, inputs: tuple[Any, ...]) -> Any:
        with self._faults.computing(self._at[0]):
            return compute(*inputs)

    # --- gradients and buffers --------------------------------------------------------------------------------

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        seen: dict[int, tuple[str, nn.Parameter]] = {}
        for module in self._modules:
            for name, parameter in module.named_parameters():
                seen.setdefault(id(parameter), (name, parameter))
        return list(seen.values())

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for _, parameter in self._named()]

    def _set_aside(self) -> list[Tensor | None]:
        parameters = self._parameters()
        gradients = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        return gradients

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._parameters(), gradients, strict=True):
            parameter.grad = gradient

    def _put_back(self, before: list[Tensor | None], gradients: list[Tensor | None]) -> None:
        """What was accumulated before this micro-step plus its own gradient, as the backward pass would have added it."""
        for old, new in zip(before, gradients, strict=True):
            if old is not None and new is not None:
                old.add_(new)
        self._put([new if old is None else old for old, new in zip(before, gradients, strict=True)])

    def _buffers(self) -> list[Tensor]:
        return [buffer.detach().clone() for module in self._modules for buffer in module.buffers()]

    @torch.no_grad()
    def _put_buffers(self, values: list[Tensor]) -> None:
        for buffer, value in zip((one for module in self._modules for one in module.buffers()), values, strict=True):
            buffer.copy_(value)


def _refusal(modules: list[nn.Module]) -> str:
    if any(isinstance(part, FSDPModule) for module in modules for part in module.modules()):
        return "parameters are sharded over replicas: gradients are reduced inside the backward pass"
    return ""


def _reduces(modules: list[nn.Module]) -> str:
    for module in modules:
        if isinstance(module, DistributedDataParallel) and (module.require_backward_grad_sync or module.gradient_as_bucket_view):
            return "DistributedDataParallel reduces inside the backward pass: call it under no_sync(), without gradient_as_bucket_view"
    return ""


def _sketch(gradients: Iterable[Tensor]) -> tuple[float, ...]:
    sums: list[Tensor] = []
    for gradient in gradients:
        flat = gradient.detach().reshape(-1).double()
        sums += [torch.linalg.vector_norm(flat), flat.sum(), flat[::2].sum() - flat[1::2].sum()]
    return tuple(torch.stack(sums).tolist()) if sums else ()


def _randomness(inputs: Iterable[Any]) -> Streams:
    return rng.now(next((one.device for one in inputs if isinstance(one, Tensor) and one.device.type == "cuda"), None))
