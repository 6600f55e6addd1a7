"""AdamW with moments in 8 bits: its codes, and that a shard which cuts a block is refused, under ZeRO stage 1 too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regrow.errors import ConfigurationError
from regrow.parallel import quantised
from regrow.parallel.quantised import BLOCK, WHOLE_SHAPE, AdamW8


def values() -> torch.Tensor:
    """Rows from tiny to large."""
    return torch.randn(7, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 2, 7).unsqueeze(1)


def test_codes_are_near_and_second_moments_never_become_zero() -> None:
    first, codes, scales = values(), torch.zeros(7, 64, dtype=torch.int8), torch.zeros(7, 64 // BLOCK)
    quantised.encode_signed(first, codes, scales)
    largest = first.unflatten(-1, (-1, BLOCK)).abs().amax(-1, keepdim=True).expand(-1, -1, BLOCK).reshape(7, 64)
    assert ((quantised.decode_signed(codes, scales) - first).abs() / largest).max() < 0.01
    second, unsigned = first.square(), torch.zeros(7, 64, dtype=torch.uint8)
    quantised.encode_unsigned(second, unsigned, scales)
    back = quantised.decode_unsigned(unsigned, scales)
    assert (back > 0).all(), "a second moment that becomes zero makes the update explode"
    big = second > largest.square() / 100
    assert (back[big] / second[big] - 1).abs().max() < 0.03


def test_a_second_moment_without_gradients_decays() -> None:
    """The decay of one step is less than the distance of two codes: what is rounded the same way each time must not add up."""
    second, codes, scales = values().square(), torch.zeros(7, 64, dtype=torch.uint8), torch.zeros(7, 64 // BLOCK)
    quantised.encode_unsigned(second, codes, scales)
    start = quantised.decode_unsigned(codes, scales)
    for _ in range(200):
        quantised.encode_unsigned(quantised.decode_unsigned(codes, scales) * 0.999, codes, scales)
    ratio = quantised.decode_unsigned(codes, scales) / start
    assert ratio.min() > 0.999**200 * 0.99
    assert ratio.max() < 0.999**200 * 1.01


def test_blocks_of_a_shard_are_those_of_the_whole() -> None:
    """Codes and scales of a part are parts of the codes and scales: what re-sharding needs."""
    whole = values()
    codes, scales = torch.zeros(7, 64, dtype=torch.int8), torch.zeros(7, 64 // BLOCK)
    quantised.encode_signed(whole, codes, scales)
    for rows, columns in ((slice(2, 5), slice(0, 64)), (slice(0, 7), slice(BLOCK, 3 * BLOCK))):
        part = whole[rows, columns]
        few, little = torch.zeros(part.shape, dtype=torch.int8), torch.zeros(part.shape[0], part.shape[1] // BLOCK)
        quantised.encode_signed(part, few, little)
        assert torch.equal(few, codes[rows, columns])
        assert torch.equal(little, scales[rows, columns.start // BLOCK : columns.stop // BLOCK])


def train(optimizer_of: Any) -> float:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    optimizer = optimizer_of(model.parameters())
    inputs = torch.randn(64, 16)
    loss = torch.zeros(())
    for _ in range(150):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def test_trains_like_adamw_in_two_and_a_half_bytes_a_parameter() -> None:
    exact, ours = train(lambda parameters: torch.optim.AdamW(parameters, lr=3e-3)), train(lambda parameters: AdamW8(parameters, lr=3e-3))
    assert ours == pytest.approx(exact, rel=0.1)
    assert ours != exact
    weight = torch.nn.Parameter(torch.zeros(32, 32))
    optimizer = AdamW8([weight])
    optimizer.materialise(None)
    kept = {name: tensor for name, tensor in optimizer.state[weight].items() if name != "step"}
    assert sum(tensor.numel() * tensor.element_size() for tensor in kept.values()) == 2.5 * weight.numel()


@pytest.mark.parametrize(("shape", "quantised_"), [((48,), False), ((8, 24), False), ((8, 32), True)])
def test_small_and_odd_tensors_keep_float32(shape: tuple[int, ...], quantised_: bool) -> None:
    assert quantised.is_quantised(torch.zeros(shape)) is quantised_


def test_a_slice_that_cuts_a_block_is_refused() -> None:
    view = torch.nn.Parameter(torch.zeros(48, 24))
    setattr(view, WHOLE_SHAPE, torch.Size((48, 48)))
    with pytest.raises(ConfigurationError, match="cuts through a block of 16") as caught:
        AdamW8([view]).materialise(None)
    assert caught.value.hint
