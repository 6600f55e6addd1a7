"""Faults on order, inside the training process: only when the job runs with REGROW_CHAOS=1.

An order is `wire.Control.inject`:

    {"kind": "flip_bit", "where": "optimizer" | "parameter", "when": "rest" | "update", "bit": 62, "name": "..."}
    {"kind": "nan", "name": "..."}                 one gradient element of this rank becomes NaN
    {"kind": "hang", "phase": "step", "seconds": 60}   never comes back (or after so many seconds) in that phase; "collective": its own
                                                   compute is done and it does not enter the synchronisation
    {"kind": "slow", "ratio": 0.05, "steps": 100}  busy for that share of the step before synchronisation, for so many steps
    {"kind": "gemm", "ratio": 0.5, "steps": 100, "bit": 28}    each micro-step under `run.replay` has a wrong bit in a matrix product
                                                   with this probability (1: always the same one), for so many steps
    {"kind": "raise" | "exit" | "kill", "code": 1} ends this process

Each with optional "step" (the next one by default) and "rank" (any rank that hears it by default).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Generator, Iterable
from typing import Any

import msgspec
import torch

from regrow.agent.worker.digest import local_part

_log = logging.getLogger("regrow.worker")

Named = Callable[[], Iterable[tuple[str, torch.Tensor]]]


class Order(msgspec.Struct, kw_only=True):
    """One fault to come. Unknown keys are ignored."""

    kind: str
    step: int = 0
    """0: at the next opportunity."""
    rank: int = -1
    where: str = "optimizer"
    when: str = "rest"
    name: str = ""
    bit: int = 30
    """Bit of the chosen element, from the lowest; taken modulo the element's width."""
    element: int = 0
    phase: str = "step"
    seconds: float = 0.0
    """0: for ever."""
    ratio: float = 0.05
    steps: int = 1
    code: int = 1


class InjectedFaultError(RuntimeError):
    """Raised by the fault kind "raise"."""


class Faults:
    """Holds the orders of this rank and carries each out at its moment."""

    def __init__(self, *, enabled: bool, rank: int) -> None:
        self._enabled = enabled
        self._rank = rank
        self._orders: list[Order] = []
        self._parameters: Named = tuple
        self._optimizer: Named = tuple
        self._draws = random.Random(rank)  # noqa: S311 - repeatable, not secret
        self._sick_until = -1
        self.done: list[Order] = []
        """What was carried out: the ground truth of a test."""

    def bind(self, parameters: Named, optimizer: Named) -> None:
        """Where the tensors are."""
        self._parameters, self._optimizer = parameters, optimizer

    def accept(self, inject: dict[str, Any]) -> None:
        """Take an order; refused with a log line when chaos is off or it is not for this rank."""
        try:
            order = msgspec.convert(inject, Order)
        except msgspec.ValidationError as error:
            _log.warning("chaos order not understood error=%s", error)
            return
        if not self._enabled:
            _log.warning("chaos order ignored kind=%s reason=REGROW_CHAOS is not 1", order.kind)
        elif order.rank in (-1, self._rank):
            self._orders.append(order)

    def entered(self, phase: str, step: int) -> None:
        """This rank enters a phase: hang, or end the process."""
        for order in self._take(step, "hang", lambda order: order.phase == phase):
            _hang(order.seconds)
        if phase in ("step", "first_step"):
            for order in self._take(step, "raise"):
                raise InjectedFaultError(f"chaos: raised in step {step}, code {order.code}")
            for order in self._take(step, "exit"):
                os._exit(order.code)
            for _ in self._take(step, "kill"):
                os.kill(os.getpid(), signal.SIGKILL)

    @contextlib.contextmanager
    def computing(self, step: int) -> Generator[None]:
        """A micro-step is computed here: with a sick matrix unit, when that was ordered."""
        order = next((order for order in self._orders if order.kind == "gemm" and order.step <= step), None)
        if order is None:
            yield
            return
        if self._sick_until < 0:
            self._sick_until = step + order.steps
        if step >= self._sick_until:
            self._sick_until = -1
            self._finish(order, step)
            yield
            return
        if self._draws.random() >= order.ratio:
            yield
            return
        from regrow.agent.worker.chaos_gemm import SickProducts

        always = order.ratio >= 1.0
        with SickProducts(order.bit, random.Random(order.element) if always else self._draws):  # noqa: S311 - repeatable, not secret
            yield

    def before_sync(self, step: int, compute_seconds: float) -> None:
        """Own compute is done, gradients are local: slow down, poison a gradient."""
        for order in self._take(step, "hang", lambda order: order.phase == "collective"):
            _hang(order.seconds)
        for order in [order for order in self._orders if order.kind == "slow" and order.step <= step]:
            _busy(order.ratio * compute_seconds)
            order.steps -= 1
            if order.steps <= 0:
                self._finish(order, step)
        for order in self._take(step, "nan"):
            self._poison(order)

    def updated(self, step: int) -> None:
        """The update is applied, no digest is taken yet."""
        for order in self._take(step, "flip_bit", lambda order: order.when == "update"):
            self._flip(order)

    def at_rest(self, step: int) -> None:
        """The digest is taken; until the next update nothing may change."""
        for order in self._take(step, "flip_bit", lambda order: order.when == "rest"):
            self._flip(order)

    def _take(self, step: int, kind: str, matches: Callable[[Order], bool] = lambda _: True) -> list[Order]:
        due = [order for order in self._orders if order.kind == kind and order.step <= step and matches(order)]
        for order in due:
            self._finish(order, step)
        return due

    def _finish(self, order: Order, step: int) -> None:
        self._orders.remove(order)
        self.done.append(order)
        _log.warning("chaos fault kind=%s rank=%d step=%d where=%s name=%s", order.kind, self._rank, step, order.where, order.name)

    def _flip(self, order: Order) -> None:
        source = self._optimizer if order.where == "optimizer" else self._parameters
        for name, tensor in source():
            local = local_part(tensor).detach()
            if local.numel() > order.element and order.name in ("", name):
                flip_bit(local, order.element, order.bit)
                return

    def _poison(self, order: Order) -> None:
        for name, tensor in self._parameters():
            gradient = tensor.grad
            if gradient is not None and gradient.numel() and order.name in ("", name):
                local_part(gradient).detach().view(-1)[0] = float("nan")
                return


def flip_bit(tensor: torch.Tensor, element: int, bit: int) -> None:
    """Flip one bit of one element of a contiguous tensor in place."""
    flat = tensor.view(-1)
    width = flat.element_size()
    raw = flat[element : element + 1].view(torch.uint8)
    place = bit % (8 * width)
    raw[place // 8] ^= 1 << place % 8


def _hang(seconds: float) -> None:
    end = time.monotonic() + seconds if seconds > 0.0 else float("inf")
    while time.monotonic() < end:
        time.sleep(min(1.0, end - time.monotonic()) if seconds > 0.0 else 1.0)


def _busy(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass
