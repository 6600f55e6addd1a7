"""Who gives what to whom when the state of survivors goes over to another mesh: tables, no processes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from regrow.agent.worker import handover
from regrow.ckpt.layout import Box


def box(name: str, start: int, size: int, whole: int = 8) -> Box:
    """A part of a vector."""
    return Box(name, "float32", (whole,), (start,), (size,))


def test_every_needed_element_comes_from_one_holder_and_its_own_is_not_sent() -> None:
    halves, quarters = [box("w", 0, 4), box("w", 4, 4)], [box("w", start, 2) for start in (0, 2, 4, 6)]
    catalogs = [
        handover.Catalog(step=5, samples=40, holds=(halves[0],), needs=(quarters[0],)),
        handover.Catalog(step=5, samples=40, holds=(halves[1],), needs=(quarters[1],)),
        handover.Catalog(step=5, samples=40, holds=(halves[0],), needs=(quarters[2],)),
        handover.Catalog(needs=(quarters[3], box("w#0", 0, 8))),
    ]
    plan = handover.plan(catalogs, 3)
    assert plan is not None
    assert (plan.step, plan.samples, plan.first) == (5, 40, 0)
    filled = {(part.taker, part.target.name, index) for part in plan.parts for index in range(part.start[0], part.start[0] + part.sizes[0])}
    assert filled == {(rank, "w", index) for rank in range(4) for index in (2 * rank, 2 * rank + 1)} | {(3, "w#0", i) for i in range(8)}
    assert sum(part.sizes[0] for part in plan.parts) == len(filled), "nothing comes twice"
    assert [part.giver for part in plan.parts if part.taker == 0] == [0]


def tiles(rows: int, columns: int, replicas: int, shape: tuple[int, int] = (12, 10)) -> list[tuple[Box, ...]]:
    """What ranks have of three matrices that are cut into rows x columns tiles of unequal sizes, each tile on so many ranks."""

    def cut(length: int, parts: int) -> list[tuple[int, int]]:
        ends = [length * part // parts for part in range(parts + 1)]
        return list(itertools.pairwise(ends))

    one = [
        tuple(Box(f"m{number}", "float32", shape, (top, left), (bottom - top, right - left)) for number in range(3))
        for top, bottom in cut(shape[0], rows)
        for left, right in cut(shape[1], columns)
    ]
    return one * replicas


@pytest.mark.parametrize(
    ("before", "after"),
    [((2, 2, 2), (1, 2, 3)), ((5, 1, 1), (7, 1, 1)), ((1, 4, 1), (3, 1, 2)), ((4, 2, 1), (1, 1, 8)), ((1, 1, 3), (2, 5, 1))],
)
def test_whatever_the_cuts_each_element_is_filled_once_by_one_of_its_holders(
    before: tuple[int, int, int], after: tuple[int, int, int]
) -> None:
    """As told: of ranks with the same boxes only the first says them; each rank plans its own share and all shares fit."""
    held, wanted = tiles(*before), tiles(*after)
    world = max(len(held), len(wanted))
    held += [()] * (world - len(held))
    wanted += [wanted[0]] * (world - len(wanted))
    has, needs = [str(boxes) if boxes else "" for boxes in held], [str(boxes) for boxes in wanted]
    told = [
        handover.Catalog(
            step=4 if held[rank] else -1,
            holds=held[rank] if has[rank] and has.index(has[rank]) == rank else (),
            needs=wanted[rank] if needs.index(needs[rank]) == rank else (),
        )
        for rank in range(world)
    ]
    catalogs = handover.filled(told, needs, has)
    assert [catalog.needs for catalog in catalogs] == wanted
    assert [catalog.holds for catalog in catalogs] == held
    whole = handover.plan(catalogs, 1)
    assert whole is not None
    filled: Counter[tuple[int, str, int, int]] = Counter()
    for part in whole.parts:
        assert part.source in held[part.giver]
        assert part.target in wanted[part.taker]
        assert part.giver == part.taker or part.source not in held[part.taker], "its own is not sent"
        for at, size, box in ((part.start, part.sizes, part.source), (part.start, part.sizes, part.target)):
            assert all(o <= s and s + n <= o + m for s, n, o, m in zip(at, size, box.offsets, box.sizes, strict=True))
        (top, left), (height, width) = part.start, part.sizes
        filled.update((part.taker, part.source.name, top + i, left + j) for i in range(height) for j in range(width))
    expected = Counter(
        (rank, box.name, box.offsets[0] + i, box.offsets[1] + j)
        for rank in range(world)
        for box in wanted[rank]
        for i in range(box.sizes[0])
        for j in range(box.sizes[1])
    )
    assert filled == expected
    shares = [handover.plan(catalogs, 1, rank) for rank in range(world)]
    for rank, share in enumerate(shares):
        assert share is not None
        assert list(share.parts) == [part for part in whole.parts if rank in (part.giver, part.taker)]
    assert set(whole.receivers) == {part.taker for part in whole.parts if part.giver != part.taker}


def test_work_is_spread_over_those_that_hold_the_same() -> None:
    box = [Box(f"m{number}", "float32", (8,), (0,), (8,)) for number in range(12)]
    catalogs = [handover.Catalog(step=4, holds=tuple(box), needs=())] * 4 + [handover.Catalog(needs=tuple(box))]
    found = handover.plan(catalogs, 1)
    assert found is not None
    assert Counter(part.giver for part in found.parts) == dict.fromkeys(range(4), 3)


@pytest.mark.parametrize(
    ("steps", "oldest", "step"),
    [((5, 5), 3, 5), ((6, 5), 3, None), ((5, 5), 6, None), ((0, 0), 0, None)],
    ids=["whole", "torn over two steps", "the disk is newer", "no step"],
)
def test_halves_count_only_together(steps: tuple[int, int], oldest: int, step: int | None) -> None:
    catalogs = [
        handover.Catalog(step=steps[0], holds=(box("w", 0, 4),), needs=(box("w", 0, 8),)),
        handover.Catalog(step=steps[1], holds=(box("w", 4, 4),), needs=(box("w", 2, 4),)),
    ]
    plan = handover.plan(catalogs, oldest)
    assert (plan.step if plan is not None else None) == step
