"""Pipeline schedules: bubble, micro-batches in flight, and the timeline of each stage. Units: one forward pass = 1.

Backward counts 2 forwards: 1 for the gradient of activations (B) and 1 for that of weights (W), the usual model.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

from regrow.errors import ConfigurationError

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe")


def bubble_ratio(schedule: str, pp: int, micro_batches: float, virtual: int = 1) -> float:
    """Idle time of a stage against its ideal busy time.

    GPipe, 1F1B: (P-1)/M (seed texts; https://arxiv.org/abs/1811.06965). Interleaved: (P-1)/(V M)
    (https://arxiv.org/abs/2104.04473, section 2.2.2). ZB-H1: a third of 1F1B, ZBV: none beyond the optimizer's
    synchronisation (https://arxiv.org/abs/2401.10241). DualPipe: (P/2-1)(FB + B - 3W), which is 0 when F = B = W
    (https://arxiv.org/abs/2412.19437, table 2).
    """
    if pp <= 1:
        return 0.0
    plain = (pp - 1) / micro_batches
    if schedule == "interleaved":
        return plain / virtual
    if schedule == "zb-h1":
        return plain / 3.0
    return 0.0 if schedule in ("zbv", "dualpipe") else plain


def bubble_fraction(schedule: str, pp: int, micro_batches: float, virtual: int = 1) -> float:
    """Idle time of a stage as a part of the whole step: ratio / (1 + ratio), (P-1)/(M+P-1) for 1F1B. Never the ratio."""
    ratio = bubble_ratio(schedule, pp, micro_batches, virtual)
    return ratio / (1.0 + ratio)


def micro_batches_for(fraction: float, pp: int) -> int:
    """Fewest micro-batches that keep a 1F1B bubble at or below `fraction` of the step (10 % takes about 9 P)."""
    return math.ceil((pp - 1) * (1.0 - fraction) / fraction - 1e-9) if pp > 1 else 1


def in_flight(schedule: str, pp: int, micro_batches: int, virtual: int = 1, stage: int = 0) -> float:
    """Micro-batches whose activations `stage` holds at its peak, in units of the stage's whole share of layers.

    GPipe holds all M; 1F1B and ZB-H1 hold P - stage; interleaved P (1 + (P-1)/(P V)) on the first stage and 2/V less on each
    further one (https://arxiv.org/abs/2205.05198, section 4.2.3); ZBV P on every stage; DualPipe P + 1.
    """
    if schedule == "gpipe":
        return float(micro_batches)
    if schedule == "interleaved" and virtual > 1:
        return min(float(micro_batches), pp + (pp - 1 - 2 * stage) / virtual) if pp > 1 else 1.0
    if schedule == "zbv":
        return float(min(micro_batches, pp))
    if schedule == "dualpipe":
        return float(min(micro_batches, pp + 1))
    return float(min(micro_batches, pp - stage))


def weight_copies(schedule: str) -> int:
    """Copies of a stage's parameters: DualPipe runs the pipeline from both ends and keeps two."""
    return 2 if schedule == "dualpipe" else 1


def problem(schedule: str, pp: int, virtual: int, layers: int, counts: tuple[int, ...]) -> str:
    """Why this schedule cannot run; empty when it can."""
    if virtual < 1:
        return f"{virtual} virtual stages"
    if schedule == "interleaved" and pp > 1:
        if virtual < 2:
            return "interleaving needs at least 2 virtual stages"
        if layers and pp * virtual > layers:
            return f"{layers} layers cannot fill PP {pp} x {virtual} virtual stages"
        uneven = [count for count in counts if count % pp]
        if uneven:
            return f"interleaving needs micro-batches in multiples of PP {pp}, a replica has {uneven[0]}"
    if schedule in ("zbv", "dualpipe") and pp > 1:
        if layers and 2 * pp > layers:
            return f"{layers} layers cannot fill the {2 * pp} chunks of {schedule} on PP {pp}"
        if schedule == "dualpipe" and pp % 2:
            return f"DualPipe needs an even number of stages, not {pp}"
        least = 2 * pp if schedule == "dualpipe" else pp
        if counts and min(counts) < least:
            return f"{schedule} on PP {pp} needs at least {least} micro-batches, a replica has {min(counts)}"
    return ""


def check_name(schedule: str) -> str:
    """The schedule's name in our spelling.

    Raises:
        ConfigurationError: unknown.
    """
    name = {"zero-bubble": "zb-h1", "zb": "zb-h1", "zb-v": "zbv", "interleaved-1f1b": "interleaved"}.get(schedule.lower(), schedule.lower())
    if name not in (*SCHEDULES, "auto"):
        raise ConfigurationError(f"unknown schedule {schedule!r}", where="--schedule", hint=f"one of {', '.join(SCHEDULES)}, or auto")
    return name


class Slot(msgspec.Struct, frozen=True):
    """One piece of work on a stage's timeline."""

    stage: int
    kind: Literal["F", "B", "W"]
    micro_batch: int
    start: float
    end: float
    chunk: int = 0
    """Which of the stage's groups of layers, where it has several (interleaved)."""


Work = tuple[Literal["F", "B", "W"], int, int]
"""Kind, chunk, micro-batch."""
DRAWN = ("gpipe", "1f1b", "interleaved", "zb-h1")


def timeline(schedule: str, pp: int, micro_batches: int, virtual: int = 1) -> list[Slot]:
    """When each stage works on what, for the schedules in `DRAWN`: simulated, so that the bubble can be measured.

    A B slot is the whole backward (length 2) but in zb-h1, which splits it into B and W of length 1. A chunk of an interleaved
    stage is 1 / `virtual` of its layers and takes that share of the time.

    Raises:
        ConfigurationError: a schedule that is not drawn, or an interleaved one that cannot run.
    """
    if schedule not in DRAWN:
        raise ConfigurationError(f"{schedule} is not drawn", where="--schedule", hint=f"{', '.join(DRAWN)} are")
    chunks = virtual if schedule == "interleaved" and pp > 1 else 1
    wrong = problem(schedule, pp, virtual, 0, (micro_batches,)) if chunks > 1 else ""
    if wrong:
        raise ConfigurationError(wrong, where="--schedule", hint="see `regrow plan`")
    orders = [_order(schedule, pp, stage, micro_batches, chunks) for stage in range(pp)]
    length = {"F": 1.0 / chunks, "B": (1.0 if schedule == "zb-h1" else 2.0) / chunks, "W": 1.0}
    ready: dict[tuple[str, int, int], float] = {}
    free = [0.0] * pp
    at = [0] * pp
    made: list[Slot] = []
    while any(at[stage] < len(orders[stage]) for stage in range(pp)):
        moved = False
        for stage in range(pp):
            while at[stage] < len(orders[stage]):
                kind, chunk, index = orders[stage][at[stage]]
                place = chunk * pp + stage
                begin = _begin(kind, index, place, pp * chunks, ready)
                if begin is None:
                    break
                start = max(free[stage], begin)
                end = start + length[kind]
                ready[kind, place, index] = free[stage] = end
                made.append(Slot(stage, kind, index, start, end, chunk))
                at[stage] += 1
                moved = True
        assert moved, "a schedule must not wait for itself"
    return made


def _begin(kind: str, index: int, place: int, places: int, ready: dict[tuple[str, int, int], float]) -> float | None:
    if kind == "F":
        return 0.0 if place == 0 else ready.get(("F", place - 1, index))
    if kind == "B":
        return ready.get(("F", place, index)) if place == places - 1 else ready.get(("B", place + 1, index))
    return ready.get(("B", place, index))


def _order(schedule: str, pp: int, stage: int, count: int, chunks: int) -> list[Work]:
    if chunks > 1:
        return _interleaved(pp, stage, count, chunks)
    warm = count if schedule == "gpipe" else min(count, pp - stage)
    order: list[Work] = [("F", 0, index) for index in range(warm)]
    if schedule == "gpipe":
        order.extend(("B", 0, index) for index in reversed(range(count)))
        return order
    split = schedule == "zb-h1"
    pending = 0
    for index in range(count):
        order.append(("B", 0, index))
        # ZB-H1 delays weight gradients by the stage's distance from the end, so that they fill the drain.
        if split and index - pending >= stage:
            order.append(("W", 0, pending))
            pending += 1
        if index + warm < count:
            order.append(("F", 0, index + warm))
    if split:
        order.extend(("W", 0, index) for index in range(pending, count))
    return order


def _interleaved(pp: int, stage: int, count: int, chunks: int) -> list[Work]:
    """Micro-batches in groups of P through one chunk after the other (https://arxiv.org/abs/2104.04473, figure 4)."""
    total = count * chunks
    forward: list[Work] = [("F", at // pp % chunks, at // (pp * chunks) * pp + at % pp) for at in range(total)]
    backward: list[Work] = [("B", chunks - 1 - chunk, index) for _, chunk, index in forward]
    warm = min(total, 2 * (pp - stage - 1) + (chunks - 1) * pp)
    order = forward[:warm]
    for at in range(total - warm):
        order += [forward[warm + at], backward[at]]
    return order + backward[total - warm :]


def measured_fraction(slots: list[Slot]) -> float:
    """Idle share of a timeline's stages between the first start and the last end."""
    if not slots:
        return 0.0
    pp = 1 + max(slot.stage for slot in slots)
    whole = pp * max(slot.end for slot in slots)
    return 1.0 - sum(slot.end - slot.start for slot in slots) / whole
