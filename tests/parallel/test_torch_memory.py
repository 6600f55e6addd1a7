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
        q = self.query(normed).view(len(x), SEQ, HEADS, -1).transpose(1, 2)
        k, v = (part(normed).view(len(x), SEQ, self.kv_heads, -1).transpose(1, 2) for part in (self.key, self.value))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(len(x), SEQ, HIDDEN))
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


class Whole(nn.Module):
    """Embedding, gated blocks, norm and head."""

    def __init__(self, layers: int, vocab: int) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(vocab, HIDDEN), nn.RMSNorm(HIDDEN), nn.Linear(HIDDEN, vocab, bias=False)
        self.layers = nn.ModuleList(Gated(2, 704) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize(("layers", "vocab", "samples"), [(3, 512, 2), (1, 8192, 8)])
def test_the_peak_of_a_step_is_within_ten_per_cent_of_torch(layers: int, vocab: int, samples: int) -> None:
    """Two micro-batches and the optimizer, without any memory behind the tensors; once activations lead, once the logits do.

    In fp32, because norms on a CPU keep fp32 copies of 16-bit inputs, which GPU kernels do not. The model's activations are of
    16 bits: twice as large here.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    with FakeTensorMode():
        net = Whole(layers, vocab)
        optimizer = torch.optim.AdamW(net.parameters(), foreach=False)
        tracker = MemTracker()
        tracker.track_external(net, optimizer)
        with tracker:
            for _ in range(2):
                for _ in range(2):
                    tracker.reset_mod_stats()
                    tokens = torch.randint(0, vocab, (samples, SEQ))
                    F.cross_entropy(net(tokens).flatten(0, 1), tokens.flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
        peak = next(iter(tracker.get_tracker_snapshot("peak").values()))
    model = shape.make(layers=layers, hidden=HIDDEN, heads=HEADS, kv_heads=2, ffn=704, vocab=vocab, seq=SEQ)
    setup = memory.Setup(micro_batch=samples, micro_batches=2, recipe=memory.RECIPES["fp32"], context_bytes=0.0, fragmentation=0.0)
    used = memory.usage(model, (layers,), setup)
    assert used.total + used.activations + used.parts["embedding"] == pytest.approx(peak["Total"], rel=0.1)
