"""K03: what is not finite is found by its bits, for every value of the small types."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regrow.ckpt.finite import is_finite


@pytest.mark.parametrize(("name", "bits"), [("bfloat16", 16), ("float16", 16), ("float8_e5m2", 8), ("float8_e4m3fn", 8)])
def test_every_value(name, bits):
    raw = np.arange(1 << bits, dtype=np.uint16 if bits == 16 else np.uint8)
    values = torch.from_numpy(raw.view(np.int16 if bits == 16 else np.uint8)).view(getattr(torch, name))
    right = torch.isfinite(values.float()).tolist()
    found = [is_finite(name, memoryview(raw[index : index + 1]).cast("B")) for index in range(1 << bits)]
    assert found == right
    assert not all(right)


@pytest.mark.parametrize("name", ["bfloat16", "float32", "float8_e5m2", "int64"])
def test_nothing_is_finite(name):
    assert is_finite(name, memoryview(b""))
