"""Random streams that are only looked at: after whatever was drawn, seeded and put back, the same as a whole capture."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.ckpt import rng
from regrow.ckpt.peek import PythonStream


def whole() -> Any:
    """What NumPy itself says."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return (name, keys.tobytes(), *rest)


OPERATIONS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "python": random.random,
    "python normal": lambda: random.gauss(0, 1),
    "python seeded": lambda: random.seed(7),
    "numpy": np.random.rand,
    "numpy normal": np.random.randn,
    "numpy seeded": lambda: np.random.seed(7),
}


@given(st.lists(st.sampled_from([*OPERATIONS, "put back"]), max_size=12))
def test_any_use_between_two_captures_is_seen(operations: list[str]) -> None:
    python = PythonStream()
    assert python.looks
    kept = (random.getstate(), np.random.get_state(legacy=True))
    for name in operations:
        if name == "put back":
            random.setstate(kept[0])
            np.random.set_state(kept[1])
        else:
            OPERATIONS[name]()
        assert python.state() == random.getstate()
        found = rng.now()
        assert found.python == random.getstate()
        assert found.numpy == whole()


def test_a_stream_that_rests_costs_no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    python = PythonStream()
    first = python.state()

    def refuse() -> None:
        raise AssertionError("a whole capture of a stream that rests")

    monkeypatch.setattr(random, "getstate", refuse)
    assert python.state() is first


def test_words_that_lie_elsewhere_are_never_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on another interpreter: what is looked at is not the state, so nothing is concluded from it."""
    monkeypatch.setattr("ctypes.string_at", lambda address, size: bytes(size))
    python = PythonStream()
    assert not python.looks
    for _ in range(3):
        random.random()
        assert python.state() == random.getstate()


def test_another_bit_generator_of_numpy_is_left_alone() -> None:
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(11))
        found = rng.now()
        assert found.numpy is None
        state = np.random.get_state(legacy=False)
        rng.put_back(found)
        assert np.random.get_state(legacy=False) == state
    finally:
        np.random.set_bit_generator(before)
