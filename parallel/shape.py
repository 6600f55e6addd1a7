"""What a transformer's shape says: parameters, and floating-point operations, whole, per layer and per stage."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from regrow.errors import ConfigurationError
from regrow.wire import ModelShape

VOCAB_MULTIPLE = 128
"""Megatron pads the vocabulary to a multiple of 128 x TP (make-vocab-size-divisible-by)."""


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer. Sizes in elements; zero hidden size: only `params`, and perhaps layers, are known."""

    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    vocab: int = 0
    seq: int = 0
    params: int = 0
    """Total as stated by the user; 0: counted from the shape."""
    gated: bool = False
    """SwiGLU or GeGLU: three matrices in the MLP instead of two, no biases, no dropout, rotary positions."""
    tied: bool = True
    """Input embedding and output head are one matrix."""
    experts: int = 0
    """Routed experts of a MoE layer; 0: dense."""
    experts_per_token: int = 0
    expert_ffn: int = 0
    shared_experts: int = 0
    dense_layers: int = 0
    """Leading layers without experts."""
    attention_params: int = 0
    """Parameters of one attention block where it is not the plain one (multi-head latent attention); 0: counted."""
    name: str = ""

    @property
    def known(self) -> bool:
        """Whether the shape, not only a parameter count, is known."""
        return self.layers > 0 and self.hidden > 0


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of the parts of a model."""

    layer: float
    """Dense part of one layer on average: attention, norms, MLP or shared experts and router."""
    layer_experts: float
    """Routed experts of one layer, averaged over all layers."""
    layer_active: float
    """What one token uses of one layer on average: the dense part and its chosen experts."""
    mlp: float
    """MLP matrices that one token uses in one layer on average."""
    embedding: float
    """The first stage's extra: token and learned position embeddings."""
    head: float
    """The last stage's extra. A tied head is a copy of the embedding where the two lie on different stages."""
    total: float
    """Of the whole model: a tied head counts once."""
    active: float
    """Per token, embedding included once."""


@lru_cache(maxsize=256)
def counts(model: Model) -> Counts:
    """Parameter counts. Classic block: L (12 h^2 + 13 h) + (V + s) h, equal to Megatron's
    12 L h^2 (1 + 13/(12 h) + (V + s)/(12 L h)) (https://arxiv.org/abs/2104.04473, equation 2).

    A stated total that differs from the count scales the layers, so that all parts still add up.
    """
    if not model.known:
        total = float(model.params)
        return Counts(layer=0.0, layer_experts=0.0, layer_active=0.0, mlp=0.0, embedding=0.0, head=0.0, total=total, active=total)
    h, wide = model.hidden, model.heads * model.head_dim
    attention = model.attention_params or h * (2 * wide + 2 * model.kv_heads * model.head_dim)
    matrices = 3 if model.gated else 2
    norms = 2 * h if model.gated else 13 * h
    dense_mlp = matrices * h * model.ffn
    sparse = model.layers - model.dense_layers if model.experts else 0
    share = sparse / model.layers
    expert = matrices * h * (model.expert_ffn or model.ffn)
    layer = attention + norms + (1 - share) * dense_mlp + share * (model.shared_experts * expert + h * model.experts)
    experts = share * model.experts * expert
    chosen = share * model.experts_per_token * expert
    mlp = (1 - share) * dense_mlp + share * (model.experts_per_token + model.shared_experts) * expert
    embedding = model.vocab * h + (0 if model.gated else model.seq * h)
    head = float(model.vocab * h)
    ends = embedding + (0.0 if model.tied else head)
    total = model.layers * (layer + experts) + ends
    factor = 1.0
    if model.params:
        if model.params <= ends:
            raise ConfigurationError(
                f"{model.params:.4g} parameters are fewer than the {ends:.4g} of the embeddings alone",
                where="--params",
                hint="leave --params out to count from the shape",
            )
        factor = (model.params - ends) / (total - ends)
        total = float(model.params)
    return Counts(
        layer=layer * factor,
        layer_experts=experts * factor,
        layer_active=(layer + chosen) * factor,
        mlp=mlp * factor,
        embedding=float(embedding),
        head=head,
        total=total,
        active=model.layers * (layer + chosen) * factor + ends,
    )


def counted(model: Model) -> float:
    """Parameters by shape alone, whatever total the user stated; 0 without a shape."""
    return counts(msgspec.structs.replace(model, params=0)).total if model.known else 0.0


def padded_vocab(vocab: int, tp: int) -> int:
    """Vocabulary rounded up to a multiple of 128 x TP, so that every rank holds the same number of rows."""
    multiple = VOCAB_MULTIPLE * tp
    return -(-vocab // multiple) * multiple


def layer_forward_flops(model: Model, tokens: float) -> float:
    """Operations of one layer's forward pass over `tokens`: 2 per active parameter and token, plus causal attention
    2 x tokens x seq x (heads x head_dim) (half of the full square; https://arxiv.org/abs/2205.14135)."""
    attention = 2.0 * tokens * model.seq * model.heads * model.head_dim
    return 2.0 * counts(model).layer_active * tokens + attention


def head_forward_flops(model: Model, tokens: float) -> float:
    """Operations of the output head's forward pass."""
    return 2.0 * model.hidden * model.vocab * tokens


def step_flops(model: Model, samples: int) -> float:
    """Useful operations of one optimizer step, forward and backward (3 x forward), recomputation not counted.

    Without a shape: 6 x parameters x tokens with the sequence length that was given, or 1.
    """
    if not model.known:
        return 6.0 * model.params * samples * max(1, model.seq)
    tokens = float(samples * model.seq)
    return 3.0 * (model.layers * layer_forward_flops(model, tokens) + head_forward_flops(model, tokens))


MOST = {"layers": 10_000, "heads": 100_000, "kv_heads": 100_000}
"""Beyond these a size is a slip of the hand, and going through every stage or divisor would take for ever."""


def make(**given: float | bool | str | None) -> Model:
    """A checked `Model` from what a user gave (None: not given), with the usual values for the rest.

    Usual: as many KV heads as heads, head_dim = hidden / heads, ffn = 4 x hidden, two experts a token. An MLP that is not
    4 x hidden, grouped KV heads or experts mean a gated (Llama-like) block with untied head, else the classic GPT block.

    Raises:
        ConfigurationError: negative, fractional, absurd or contradicting sizes, or too little to plan with.
    """
    values = {key: value for key, value in given.items() if value is not None}
    for key, value in values.items():
        if isinstance(value, float) and not value.is_integer():  # also infinity and NaN
            raise ConfigurationError(f"{key} is {value}, not a whole number", where=_flag(key), hint="sizes are whole numbers")
        if not isinstance(value, bool | str) and value < 0:
            raise ConfigurationError(f"{key} is {value}", where=_flag(key), hint="sizes cannot be negative")
        if not isinstance(value, str) and value > MOST.get(key, value):
            raise ConfigurationError(f"{key} is {value:g}", where=_flag(key), hint=f"at most {MOST[key]} are planned for")
    sizes = {key: value if isinstance(value, bool | str) else int(value) for key, value in values.items()}
    model = msgspec.convert(sizes, Model)
    if model.hidden or model.heads or (model.layers and not model.params):
        return _complete(model, values)
    if not model.params:
        raise ConfigurationError(
            "no model is described", where="plan", hint="give --params, or --layers --hidden --heads --vocab --seq, or --model config.json"
        )
    return model


def of_wire(shape: ModelShape) -> Model:
    """The model of a job specification (its zeros mean: not stated)."""
    return make(**{name: getattr(shape, name) or None for name in shape.__struct_fields__})


def _complete(model: Model, values: dict[str, float | bool | str]) -> Model:
    for name in ("layers", "hidden", "heads"):
        if getattr(model, name) < 1:
            raise ConfigurationError(
                f"{name} is {getattr(model, name)}", where=_flag(name), hint="layers, hidden and heads must all be given and positive"
            )
    kv_heads = model.kv_heads or model.heads
    head_dim = model.head_dim or model.hidden // model.heads
    if not model.head_dim and model.hidden % model.heads:
        near = [heads for heads in range(1, 2 * model.heads) if model.hidden % heads == 0]
        best = min(near, key=lambda heads: abs(heads - model.heads))
        raise ConfigurationError(
            f"hidden {model.hidden} is not a multiple of {model.heads} heads",
            where="--heads",
            hint=f"use {best} heads, or --hidden {model.heads * max(1, head_dim)}, or state --head-dim",
        )
    if model.heads % kv_heads:
        raise ConfigurationError(
            f"{model.heads} heads cannot share {kv_heads} KV heads evenly", where="--kv-heads", hint="KV heads must divide the heads"
        )
    ffn = model.ffn or 4 * model.hidden
    likely_gated = ffn != 4 * model.hidden or kv_heads != model.heads or model.experts > 0
    gated = bool(values.get("gated", likely_gated))
    if model.dense_layers > model.layers:
        raise ConfigurationError(
            f"{model.dense_layers} dense layers of {model.layers}", where="--dense-layers", hint="they are a part of the layers"
        )
    top = model.experts_per_token or (min(2, model.experts) if model.experts else 0)
    if top > model.experts:
        raise ConfigurationError(
            f"{top} experts a token of {model.experts}", where="--experts-per-token", hint="choose at most all of them"
        )
    return msgspec.structs.replace(
        model,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        gated=gated,
        tied=bool(values.get("tied", not gated)),
        experts_per_token=top,
        expert_ffn=(model.expert_ffn or ffn) if model.experts else 0,
    )


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")
