"""Which place a restore asks first: what was measured decides, and what was not is tried."""

from __future__ import annotations

import pytest

from regrow.ckpt.rates import FORGET_SECONDS, MIN_BYTES, STORAGE, Rates, order


@pytest.mark.parametrize(
    ("holders", "known", "asked"),
    [
        (("own", "buddy"), {}, ("own", "buddy")),
        (("own", "buddy"), {STORAGE: 2e9}, ("own", "buddy")),
        (("own", "buddy"), {STORAGE: 2e9, "own": 3e9}, ("buddy", "own")),
        (("own", "buddy"), {"own": 1e9, "buddy": 3e9}, ("buddy", "own")),
        (("own", "buddy"), {STORAGE: 2e9, "own": 1e9, "buddy": 3e9}, ("buddy",)),
        (("own", "buddy"), {STORAGE: 2e9, "own": 1e9}, ("buddy",)),
        (("own", "buddy"), {STORAGE: 4e9, "own": 1e9, "buddy": 3e9}, ()),
        (("own", "buddy"), {STORAGE: 1e9, "own": 1e9, "buddy": 1e9}, ("own", "buddy")),
        (("own",), {STORAGE: 1e8, "own": 1e9, "other": 9e9}, ("own",)),
        ((), {STORAGE: 1e9}, ()),
    ],
)
def test_order(holders, known, asked):
    """Slower than storage: left out, for storage is read where no node gave a part."""
    assert order(holders, known) == asked


def test_rates_are_of_the_newest_transfer_and_are_forgotten():
    now = [0.0]
    rates = Rates(lambda: now[0])
    rates.note("n1", MIN_BYTES - 1, 0.001)
    rates.note("n1", 1e9, 0.0)
    assert rates.known() == {}, "too short to tell"
    rates.note("n1", 1e9, 2.0)
    now[0] = FORGET_SECONDS
    rates.note("n2", 1e9, 1.0)
    assert rates.known() == {"n1": 5e8, "n2": 1e9}
    rates.note("n2", 4e9, 1.0)
    now[0] += 1.0
    assert rates.known() == {"n2": 4e9}, "a node that was slow an hour ago is tried again"
