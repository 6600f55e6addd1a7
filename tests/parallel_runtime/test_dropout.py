"""The keyed mask: known bits, right rate, slices of one full mask, the same when recomputed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regrow.parallel.dropout import KeyedDropout, place_on_mesh, sample_keys

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(word: int) -> int:
    """splitmix64's finaliser in Python integers."""
    word &= WORD
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & WORD
    return word ^ (word >> 31)


def keys(count: int, *, seed: int = 0, step: int = 1) -> Tensor:
    return sample_keys(seed, step, torch.arange(count))


def full_mask(site: int, shape: tuple[int, ...], key: Tensor, p: float = 0.25) -> Tensor:
    return KeyedDropout(p, site, shape)(torch.ones(len(key), *shape), key)


def test_bits_are_splitmix64() -> None:
    seed, step, sample, site, p = 7, 11, 5, 19, 0.3
    base = mix(mix(seed + GOLDEN) ^ mix(step * GOLDEN + 1))
    key = mix((sample + 1) * GOLDEN + base)
    word_key = mix(key ^ mix((site + 1) * GOLDEN))
    expected = []
    for index in range(6):
        word = mix(word_key + (index + 1) * GOLDEN)
        lanes = [(word >> (16 * lane)) & 0xFFFF for lane in range(4)]
        signed = [lane - 65536 if lane >= 32768 else lane for lane in lanes]
        expected += [lane >= round(p * 65536) - 32768 for lane in signed]
    made = KeyedDropout(p, site, (3, 8))(torch.ones(1, 3, 8), sample_keys(seed, step, torch.tensor([sample])))
    assert (made.flatten() != 0).tolist() == expected
    assert made.max().item() == pytest.approx(65536 / (65536 - round(p * 65536)))


def test_rate_and_independence() -> None:
    mask = full_mask(3, (64, 256), keys(16))
    kept = (mask != 0).double()
    assert kept.mean().item() == pytest.approx(0.75, abs=0.003)
    assert mask.double().mean().item() == pytest.approx(1.0, abs=0.005)
    for other in (full_mask(4, (64, 256), keys(16)), full_mask(3, (64, 256), keys(16, seed=1)), full_mask(3, (64, 256), keys(16, step=2))):
        agree = (kept == (other != 0).double()).double().mean().item()
        assert agree == pytest.approx(0.75**2 + 0.25**2, abs=0.005)
    lanes = kept.view(-1, 4)
    assert torch.corrcoef(lanes.T).fill_diagonal_(0).abs().max().item() < 0.02


@pytest.mark.parametrize(("split", "sequence_parallel"), [("sequence", True), ("heads", False), ("heads", True)])
def test_shards_are_slices_of_the_full_mask(split: str, sequence_parallel: bool) -> None:
    shape, key = (7, 3, 8), keys(2)
    whole = full_mask(5, shape, key)
    parts = []
    for index in range(3):
        module = nn.Sequential(KeyedDropout(0.25, 5, shape, split=split))  # type: ignore[arg-type]
        place_on_mesh(module, tp=3, tp_index=index, sequence_parallel=sequence_parallel)
        size = len(torch.arange(7).chunk(3)[index])
        parts.append(module[0](torch.ones(2, size, *shape[1:]), key))
    assert torch.equal(torch.cat(parts, dim=1), whole)


def test_sequence_stays_whole_without_sequence_parallel() -> None:
    module = nn.Sequential(KeyedDropout(0.25, 5, (6, 8)))
    place_on_mesh(module, tp=2, tp_index=1, sequence_parallel=False)
    assert torch.equal(module[0](torch.ones(2, 6, 8), keys(2)), full_mask(5, (6, 8), keys(2)))


def test_batch_order_does_not_matter() -> None:
    order = torch.tensor([3, 1, 2, 0])
    assert torch.equal(full_mask(2, (4, 8), keys(4)[order]), full_mask(2, (4, 8), keys(4))[order])


def test_recomputation_sees_the_same_mask() -> None:
    torch.manual_seed(0)
    layer, drop, key = nn.Linear(8, 8), KeyedDropout(0.5, 1, (4, 8)), keys(3)
    x = torch.randn(3, 4, 8)

    def run(value: Tensor, sample_key: Tensor) -> Tensor:
        return drop(layer(value), sample_key)

    run(x, key).square().sum().backward()
    plain = layer.weight.grad.clone()
    layer.weight.grad = None
    torch.rand(1)
    checkpoint(run, x, key, use_reentrant=False).square().sum().backward()
    assert torch.equal(layer.weight.grad, plain)


def test_refuses_what_it_cannot_key() -> None:
    drop = KeyedDropout(0.5, 1, (4, 8))
    with pytest.raises(ValueError, match="no sample keys"):
        drop(torch.ones(2, 4, 8), None)
    with pytest.raises(ValueError, match="no part of"):
        drop(torch.ones(2, 5, 8), keys(2))
    with pytest.raises(ValueError, match="multiple of 4"):
        KeyedDropout(0.5, 1, (4, 6))
    with pytest.raises(ValueError, match="outside"):
        KeyedDropout(1.0, 1, (4, 8))
    assert torch.equal(drop.eval()(torch.ones(2, 4, 8), None), torch.ones(2, 4, 8))
