"""The activation and state model against torch's own accounting: tensors kept for the backward pass, bytes of parameters."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from regrow.parallel import memory, shape

torch = pytest.importorskip("torch")
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812 - torch's own name for it

BATCH, SEQ, HIDDEN, HEADS = 2, 128, 256, 8


class Classic(nn.Module):
    """A GPT block with dropout; attention by hand, or fused."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.fused = fused
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.query, self.key, self.value, self.out = (nn.Linear(HIDDEN, HIDDEN) for _ in range(4))
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        q, k, v = (part(normed).view(BATCH, SEQ, HEADS, -1).transpose(1, 2) for part in (self.query, self.key, self.value))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = F.dropout(F.softmax(q @ k.transpose(-1, -2) / math.sqrt(HIDDEN / HEADS), -1), 0.1) @ v
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(BATCH, SEQ, HIDDEN)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(self.second(x)))), 0.1)


class Gated(nn.Module):
    """A Llama-like block: RMSNorm, grouped KV heads, SwiGLU, no dropout."""

    def __init__(self, kv_heads: int, ffn: int) -> None:
        super().__init__()
        self.kv_heads = kv_heads
        narrow = HIDDEN // HEADS * kv_heads
        self.first, self.second = nn.RMSNorm(HIDDEN), nn.RMSNorm(HIDDEN)
        self.query, self.out = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN, bias=False)
        self.key, self.value = nn.Linear(HIDDEN, narrow, bias=False), nn.Linear(HIDDEN, narrow, bias=False)
        self.gate, self.up = nn.Linear(HIDDEN, ffn, bias=False), nn.Linear(HIDDEN, ffn, bias=False)
        self.down = nn.Linear(ffn, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.first(x)
        q = self.query(normed).view(BATCH, SEQ, HEADS, -1).transpose(1, 2)
        k, v = (part(normed).view(BATCH, SEQ, self.kv_heads, -1).transpose(1, 2) for part in (self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(BATCH, SEQ, HIDDEN))
        normed = self.second(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


def kept_bytes(block: nn.Module, masks: int) -> float:
    """Bytes kept for the backward pass as 16-bit training would keep them.

    Measured in fp32 and halved. A CPU keeps a dropout mask in the tensor's own type where a GPU keeps one byte an element,
    so one byte of each of `masks` elements is taken off.
    """
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    seen: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            seen[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    x = torch.randn(BATCH, SEQ, HIDDEN, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(x)
    return sum(size for size, _ in seen.values()) / 2 - masks


TOKENS = BATCH * SEQ * HIDDEN
CASES: list[tuple[Callable[[], nn.Module], dict[str, int], str, int]] = [
    (lambda: Classic(fused=False), {}, "none", 2 * TOKENS + BATCH * HEADS * SEQ * SEQ),
    (lambda: Classic(fused=True), {}, "flash", 2 * TOKENS),
    (lambda: Gated(2, 704), {"kv_heads": 2, "ffn": 704}, "flash", 0),
    (lambda: Gated(8, 512), {"kv_heads": 8, "ffn": 512}, "flash", 0),
]


@pytest.mark.parametrize(("build", "sizes", "recompute", "masks"), CASES)
def test_activations_are_within_ten_per_cent_of_torch(
    build: Callable[[], nn.Module], sizes: dict[str, int], recompute: str, masks: int
) -> None:
    torch.manual_seed(0)
    model = shape.make(layers=1, hidden=HIDDEN, heads=HEADS, vocab=64, seq=SEQ, **sizes)
    modelled = memory.activation_per_layer(model, BATCH, recompute)
    assert modelled == pytest.approx(kept_bytes(build(), masks), rel=0.1)


@pytest.mark.parametrize(("build", "sizes", "recompute", "masks"), CASES[1:])
def test_parameters_of_a_layer_are_torch_s(build: Callable[[], nn.Module], sizes: dict[str, int], recompute: str, masks: int) -> None:
    model = shape.make(layers=1, hidden=HIDDEN, heads=HEADS, vocab=64, seq=SEQ, **sizes)
    assert shape.counts(model).layer == sum(parameter.numel() for parameter in build().parameters())


def test_adam_state_is_torch_s() -> None:
    layer = nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    layer(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    number = sum(parameter.numel() for parameter in layer.parameters())
    moments = sum(value.nbytes for state in optimizer.state.values() for name, value in state.items() if name != "step")
    weights = sum(parameter.nbytes for parameter in layer.parameters())
    gradients = sum(parameter.grad.nbytes for parameter in layer.parameters() if parameter.grad is not None)
    assert memory.model_state(number, 1, 0, memory.RECIPES["fp32"]).total == weights + gradients + moments
