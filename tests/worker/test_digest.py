"""The digest: exact in any order, no single-word change unseen, none of the classic blind spots."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regrow.agent.worker.chaos import flip_bit
from regrow.agent.worker.digest import SMALL_WORDS, Digester
from regrow.places import BLOCK_WORDS, MASK, block_text, locate

KEYS = [0, 1, 0xDEADBEEFCAFEF00D, (1 << 64) - 1]
SIZES = [0, 1, 2, 3, 7, 8, 9, 63, 2 * SMALL_WORDS, 2 * SMALL_WORDS + 1, 2 * BLOCK_WORDS, 2 * BLOCK_WORDS + 1, 4 * BLOCK_WORDS + 5]


def words(size: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).integers(-(2**63), 2**63, size=size, dtype=np.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("size", SIZES)
def test_three_implementations_agree(size: int, dtype: torch.dtype) -> None:
    """Alone, gathered with others, and by torch operations as on a GPU."""
    digester = Digester(3)
    tensor = torch.randn(size, generator=torch.Generator().manual_seed(size)).mul(9).to(dtype)
    alone = digester.tensor(tensor)
    gathered = digester.digest([("x", torch.ones(5)), ("y", tensor), ("z", torch.zeros(3, dtype=torch.bfloat16))])
    assert int(gathered.values[1]) == alone
    from regrow.agent.worker.digest import _finish

    assert int(_finish([digester.sum_in_torch(tensor)[0]], [size * tensor.element_size()])[0]) == alone


def test_shapes_and_layouts() -> None:
    digester = Digester(3)
    square = torch.randn(40, 30)
    assert digester.tensor(square.t()) == digester.tensor(square.t().contiguous())
    assert digester.tensor(square[::2, 3:]) == digester.tensor(square[::2, 3:].clone())
    assert digester.tensor(torch.tensor(3.0)) == digester.tensor(torch.tensor([3.0]))
    misaligned = torch.randn(1001)[1:]
    assert digester.tensor(misaligned) == digester.tensor(misaligned.clone())
    assert digester.tensor(torch.nn.Parameter(square)) == digester.tensor(square)


@pytest.mark.parametrize("size", [300, 2 * BLOCK_WORDS, 10 * BLOCK_WORDS + 7])
def test_one_changed_block_is_told_from_sums(size: int) -> None:
    """By the sums of two looks at a tensor, by NumPy and by torch, and by three words of a whole state."""
    digester = Digester(3)
    tensors = [(f"t{number}", words(size, number)) for number in range(4)]
    before = digester.digest(tensors)
    block, place = divmod(size - 1, BLOCK_WORDS)
    flip_bit(tensors[2][1], size - 1, 61)
    after = digester.digest(tensors)
    assert before.first_difference(after) == f"t2, {block_text(block + 1, 8 * size)}"
    assert tuple(digester.sum_in_torch(tensors[2][1])) == (int(after.sums[2]), int(after.weighted[2]))
    flip_bit(tensors[2][1], 0, 3)
    both = digester.digest(tensors).first_difference(before)
    assert both == ("t2" if block else "t2, " + block_text(1, 8 * size)), f"two blocks: {both}, {place}"
    assert digester.digest(tensors[:2]).first_difference(before) == "t2"


@given(st.lists(st.integers(0, MASK), min_size=1, max_size=40), st.data())
def test_the_only_part_that_differs_is_found_and_two_are_none(parts: list[int], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(parts) - 1))
    change = data.draw(st.integers(1, MASK).filter(lambda value: value % (1 << 50)))
    plain, weighted = change, (place + 1) * change & MASK
    assert locate(plain, weighted) == place + 1
    assert locate(0, weighted) == 0
    assert locate(2, 3) == 0, "no number times 2 is odd"


def test_length_counts() -> None:
    digester = Digester(3)
    seen = {digester.tensor(torch.zeros(size)) for size in range(200)} | {
        digester.tensor(torch.zeros(size, dtype=torch.uint8)) for size in range(1, 9)
    }
    assert len(seen) == 200 + 8 - 2  # 4 and 8 bytes of zero are one float and two floats of zero


def test_names_types_and_order() -> None:
    digester = Digester(3)
    a, b = torch.randn(50), torch.randn(50)
    assert digester.digest([("a", a), ("b", b)]).total == digester.digest([("b", b), ("a", a)]).total
    assert digester.digest([("a", a), ("b", b)]).total != digester.digest([("a", b), ("b", a)]).total
    assert digester.digest([("a", a)]).total != digester.digest([("a", a.view(torch.int32))]).total
    assert digester.digest([("a", a)]).total != Digester(4).digest([("a", a)]).total


@settings(max_examples=150, deadline=None)
@given(
    key=st.integers(0, 2**64 - 1),
    size=st.integers(1, 3000),
    place=st.integers(0, 2**31),
    change=st.integers(1, 2**64 - 1),
    fill=st.sampled_from(["random", "zero", "ones"]),
)
def test_every_change_of_one_word_is_seen(key: int, size: int, place: int, change: int, fill: str) -> None:
    digester = Digester(key)
    tensor = words(size) if fill == "random" else torch.full((size,), 0 if fill == "zero" else -1, dtype=torch.int64)
    before = digester.tensor(tensor)
    raw = tensor.numpy().view(np.uint64)
    raw[place % size] ^= np.uint64(change)
    assert digester.tensor(tensor) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8])
def test_every_bit_of_an_element_is_seen(dtype: torch.dtype) -> None:
    digester = Digester(9)
    tensor = torch.randn(77).mul(10).to(dtype)
    before = digester.tensor(tensor)
    for element, bit in itertools.product((0, 40, 76), range(8 * tensor.element_size())):
        flip_bit(tensor, element, bit)
        assert digester.tensor(tensor) != before
        flip_bit(tensor, element, bit)
    assert digester.tensor(tensor) == before


def weighted_sum(tensor: torch.Tensor) -> int:
    """The classic: odd position weights, modulo 2^64. The control that falls for the cases below."""
    weights = words(tensor.numel(), seed=99) | 1
    return int((tensor * weights).sum())


TOP = -(2**63)


def adversarial(kind: str, size: int, first: int, second: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor and a damaged copy that has the same multiset of words, or pairs of changes that cancel in plain sums."""
    before = words(size, seed=first)
    after = before.clone()
    if kind == "swap":
        after[[first, second]] = before[[second, first]]
    elif kind == "swap of x and -x":
        before[second] = -before[first]
        after = before.clone()
        after[[first, second]] = before[[second, first]]
    elif kind == "two top bits":
        after[first] ^= TOP
        after[second] ^= TOP
    elif kind == "sign of two neighbouring floats, twice":
        for place in (first, second):
            after.view(torch.int32)[2 * place : 2 * place + 2] ^= -(2**31)
    elif kind == "top bits in zeros":
        before.zero_()
        after = before.clone()
        after[first] = after[second] = TOP
    elif kind == "+d and -d":
        after[first] += 1 << 20
        after[second] -= 1 << 20
    elif kind == "zero block moved":
        before[: size // 2] = 0
        after = torch.roll(before, size // 2)
    elif kind == "shards permuted":
        after = torch.cat(before.chunk(4)[::-1])
    elif kind == "all negated":
        after = -before
    else:
        after = before.flip(0)
    return before, after


KINDS = [
    "swap",
    "swap of x and -x",
    "two top bits",
    "sign of two neighbouring floats, twice",
    "top bits in zeros",
    "+d and -d",
    "zero block moved",
    "shards permuted",
    "all negated",
    "reversed",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [16, 4096, 4 * BLOCK_WORDS])
def test_adversarial_pairs_are_seen(kind: str, size: int) -> None:
    pairs = [(1, 2), (0, size - 1), (3, size // 2 + 3)] if size < BLOCK_WORDS else [(7, BLOCK_WORDS + 7), (0, 3 * BLOCK_WORDS)]
    for first, second in pairs:
        before, after = adversarial(kind, size, first, second)
        assert not torch.equal(before, after)
        for key in KEYS:
            digester = Digester(key)
            assert digester.tensor(before) != digester.tensor(after), (kind, size, first, second, key)


def test_the_control_falls_for_top_bits() -> None:
    """So that the cases above are known to be hard."""
    before, after = adversarial("two top bits", 4096, 1, 2)
    assert weighted_sum(before) == weighted_sum(after)


def test_top_bit_pairs_over_many_places() -> None:
    """A mixing that carries the top bit down badly would collide for about half of all pairs, or one in 2^16."""
    digester = Digester(1)
    base = words(512, seed=5)
    effects: set[int] = set()
    for place in range(512):
        changed = base.clone()
        changed[place] ^= TOP
        effects.add((digester.sums(changed)[0] - digester.sums(base)[0]) % 2**64)
    negative = {-effect % 2**64 for effect in effects}
    assert len(effects) == 512
    assert not effects & negative


@pytest.mark.parametrize("bit", range(64))
def test_output_bits_depend_on_every_input_bit(bit: int) -> None:
    """Avalanche of the sum's contribution: flipping an input bit flips about half of the output's upper bits."""
    digester = Digester(17)
    flips = []
    for seed in range(64):
        base = words(1, seed)
        changed = base ^ (1 << bit if bit < 63 else TOP)
        flips.append((digester.tensor(base) ^ digester.tensor(changed)).bit_count())
    assert 24 < sum(flips) / len(flips) < 40


def test_first_difference_names_the_tensor() -> None:
    digester = Digester(3)
    tensors = {f"layer{index}.weight": torch.randn(30 * index + 1, 7) for index in range(40)}
    before = digester.digest(tensors.items())
    flip_bit(tensors["layer31.weight"], 100, 3)
    after = digester.digest(tensors.items())
    assert before.first_difference(after) == f"layer31.weight, {block_text(1, 4 * 931 * 7)}"
    assert before.first_difference(before) == ""
    assert before.total != after.total
    fewer = digester.digest([(name, tensor) for name, tensor in tensors.items() if name != "layer3.weight"])
    assert before.first_difference(fewer) == "layer3.weight"


def test_threads_do_not_matter() -> None:
    tensor = torch.randn(300_000)
    before = torch.get_num_threads()
    found = set()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found |= {Digester(5).tensor(tensor), Digester(5).sum_in_torch(tensor)[0]}
    finally:
        torch.set_num_threads(before)
    assert len(found) == 2


def test_dtensor_takes_the_local_shard() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        tensor = torch.randn(8, 4)
        sharded = distribute_tensor(tensor, mesh)
        assert Digester(5).tensor(sharded) == Digester(5).tensor(tensor)
    finally:
        dist.destroy_process_group()


def test_speed(capsys: pytest.CaptureFixture[str]) -> None:
    """Prints the figures; the limit is loose, it catches an accidental copy or a Python loop over words."""
    digester = Digester(5)
    big = torch.randn(8 << 20)
    small = [(f"n{index}", torch.randn(64, 16)) for index in range(600)]

    def best(work: object, repeats: int = 5) -> float:
        assert callable(work)
        times = []
        for _ in range(repeats):
            begin = time.process_time()
            work()
            times.append(time.process_time() - begin)
        return min(times)

    rate = big.nbytes / best(lambda: digester.tensor(big)) / 1e9
    each = best(lambda: digester.digest(small)) / 600 * 1e6
    with capsys.disabled():
        print(f"\ndigest: {rate:.2f} GB/s on one core, {each:.1f} us for a tensor of 4 KB")
    assert rate > 0.2
