"""Reads a model's shape from the files people have: Hugging Face config.json, Megatron and torchtitan arguments."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Mapping
from typing import Any, cast

from regrow.errors import ConfigurationError
from regrow.parallel.shape import Model, make

_HF: dict[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "multi_query_group_num"),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", "mlp_hidden_size"),
    "vocab": ("vocab_size", "padded_vocab_size"),
    "seq": ("max_position_embeddings", "n_positions", "n_ctx", "seq_length", "max_sequence_length", "max_seq_len"),
    "experts": ("n_routed_experts", "num_local_experts", "num_experts"),
    "experts_per_token": ("num_experts_per_tok", "num_experts_per_token", "moe_top_k"),
    "expert_ffn": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
}
_MEGATRON = {
    "num-layers": "layers",
    "hidden-size": "hidden",
    "num-attention-heads": "heads",
    "num-query-groups": "kv_heads",
    "kv-channels": "head_dim",
    "ffn-hidden-size": "ffn",
    "padded-vocab-size": "vocab",
    "vocab-size": "vocab",
    "seq-length": "seq",
    "num-experts": "experts",
    "moe-router-topk": "experts_per_token",
    "moe-ffn-hidden-size": "expert_ffn",
}
_MEGATRON_PLAN = {
    "tensor-model-parallel-size": "tp",
    "pipeline-model-parallel-size": "pp",
    "context-parallel-size": "cp",
    "expert-model-parallel-size": "ep",
    "micro-batch-size": "micro_batch",
    "global-batch-size": "global_batch",
}
_TITAN_PLAN = {
    "tensor_parallel_degree": "tp",
    "pipeline_parallel_degree": "pp",
    "context_parallel_degree": "cp",
    "expert_parallel_degree": "ep",
    "data_parallel_shard_degree": "dp_shard",
    "data_parallel_replicate_degree": "dp_replicate",
}
_CLASSIC = ("gpt2", "gpt_neox", "gpt_neo", "opt", "bloom", "falcon", "gptj", "gpt_bigcode", "mpt", "bert", "roberta", "starcoder2")
"""Beginnings of model types with a plain two-matrix MLP; so have "phi", and whatever names relu2 or a plain gelu as activation."""
_TIED = ("gemma", "cohere")
"""Beginnings of model types whose head is the embedding unless the file says otherwise."""
_RECURRENT = re.compile(r"^(mamba|ssm|rwkv|recurrent|linear_attn|linear_num|state_size|time_mix|lru)")


def read(text: str, source: str, **overrides: float | bool | str | None) -> tuple[Model, dict[str, Any]]:
    """A model from the text of a file, and the plan that the file states (axes, batches, zero, recompute, schedule, virtual; may be empty).

    Args:
        text: a Hugging Face config.json, a torchtitan TOML, or a script or list of Megatron arguments.
        source: the file's name, for messages.
        overrides: what the command line says; wins where not None.

    Raises:
        ConfigurationError: none of these formats, or sizes that contradict.
    """
    stripped = text.lstrip()
    if stripped.startswith("{"):
        shape, plan = _hugging_face(text, source), {}
    elif "--num-layers" in text or "--hidden-size" in text:
        shape, plan = _megatron(text)
    elif re.search(r"^\s*\[", text, re.MULTILINE):
        shape, plan = _titan(text, source)
    else:
        raise ConfigurationError(
            "is neither a Hugging Face config.json nor Megatron or torchtitan arguments",
            where=source,
            hint="give config.json, a file with --num-layers ... or a torchtitan TOML, or describe the model by flags",
        )
    shape.update({key: value for key, value in overrides.items() if value is not None})
    if not shape.get("layers") and not shape.get("params"):
        known = ", ".join(f"{name} {flavor}" for name, flavor in _TITAN_FLAVORS)
        hint = f"add the model's flags, e.g. --layers (torchtitan names that are known: {known})"
        raise ConfigurationError("does not say how many layers the model has", where=source, hint=hint)
    return make(**shape), plan


def _hugging_face(text: str, source: str) -> dict[str, Any]:
    try:
        document: Any = json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"is not JSON: {error}", where=source, hint="give the model's config.json") from error
    config = cast("dict[str, Any]", document)
    nested = config.get("text_config")
    if isinstance(nested, dict):
        config = {**config, **cast("dict[str, Any]", nested)}
    kind = str(config.get("model_type", ""))
    _refuse_other_kinds(config, kind, source)
    shape: dict[str, Any] = {}
    for ours, names in _HF.items():
        value = next((config[name] for name in names if isinstance(config.get(name), int | float)), None)
        if value:
            shape[ours] = value
    if kind:
        shape["gated"] = not (kind.startswith(_CLASSIC) or kind == "phi" or config.get("hidden_act") == "relu2")
    if isinstance(config.get("tie_word_embeddings"), bool):
        shape["tied"] = config["tie_word_embeddings"]
    elif kind.startswith(_TIED):
        shape["tied"] = True
    if kind.startswith(("falcon", "gpt_bigcode")) and config.get("multi_query"):
        shape.setdefault("kv_heads", 1)
    latent = _latent_attention(config)
    if latent:
        shape["attention_params"] = latent
        shape.setdefault("head_dim", config.get("v_head_dim"))
        shape["kv_heads"] = shape.get("heads")
    shape["name"] = str(config.get("_name_or_path") or kind)
    if config.get("mlp_hidden_size") and kind.startswith("olmo") and shape.get("ffn"):
        shape["ffn"] = int(shape["ffn"]) // 2
    return shape | _experts(config, kind, shape)


def _experts(config: Mapping[str, Any], kind: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    """What families of MoE models write in ways of their own: shared experts, and layers between them without experts."""
    if not shape.get("experts"):
        return {}
    made: dict[str, Any] = {}
    shared, expert = config.get("shared_expert_intermediate_size"), config.get("moe_intermediate_size")
    if isinstance(shared, int) and isinstance(expert, int) and expert:
        made["shared_experts"] = shared // expert
    if kind.startswith("llama4"):
        made |= {"expert_ffn": config.get("intermediate_size"), "ffn": config.get("intermediate_size_mlp"), "shared_experts": 1}
    every = config.get("decoder_sparse_step") or config.get("interleave_moe_layer_step")
    if isinstance(every, int) and every > 1 and shape.get("layers"):
        made["dense_layers"] = int(shape["layers"]) - int(shape["layers"]) // every
    return made


def _refuse_other_kinds(config: Mapping[str, Any], kind: str, source: str) -> None:
    """What this planner has no formulas for. Sizes that are missing are named later, with their flags."""
    named = f"model_type {kind!r}" if kind else "this configuration"
    hint = "give --params (and --layers) for model state and meshes without activations"
    if config.get("is_encoder_decoder") or kind in ("t5", "mt5", "bart", "whisper"):
        raise ConfigurationError(
            f"{named} is an encoder-decoder model; only decoder-only transformers are modelled", where=source, hint=hint
        )
    recurrent = sorted(key for key in config if _RECURRENT.match(key))
    if recurrent or kind.startswith(("mamba", "rwkv")):
        raise ConfigurationError(
            f"{named} has recurrent layers ({', '.join(recurrent[:3]) or kind}); only attention layers are modelled",
            where=source,
            hint=hint,
        )
    missing = [ours for ours in ("layers", "hidden", "heads") if not any(config.get(name) for name in _HF[ours])]
    if len(missing) > 1:
        known = f"model_type {kind!r} is not known here and " if kind else "it "
        raise ConfigurationError(
            f"{known}names no {' and no '.join(missing)}",
            where=source,
            hint="give a transformer's config.json (num_hidden_layers, hidden_size, num_attention_heads, ...), or flags",
        )


def _latent_attention(config: Mapping[str, Any]) -> int:
    """Parameters of DeepSeek's multi-head latent attention (https://arxiv.org/abs/2412.19437, section 2.1.1); 0: not used."""
    rank = config.get("kv_lora_rank")
    if not isinstance(rank, int) or rank < 1:
        return 0
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    nope, rope, value = (int(config.get(name) or 0) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query_rank = config.get("q_lora_rank")
    query = query_rank * (hidden + heads * (nope + rope)) if isinstance(query_rank, int) else hidden * heads * (nope + rope)
    return query + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _megatron(text: str) -> tuple[dict[str, Any], dict[str, Any]]:
    joined = re.sub(r"\\\s*\n", " ", text)
    words = [word for line in joined.splitlines() for word in _words(line)]
    flags: dict[str, str] = {}
    for index, word in enumerate(words):
        if not word.startswith("--"):
            continue
        name, _, value = word[2:].partition("=")
        after = words[index + 1] if index + 1 < len(words) else ""
        flags[name.replace("_", "-")] = value or ("" if after.startswith("--") else after)
    shape: dict[str, Any] = {ours: int(flags[name]) for name, ours in _MEGATRON.items() if flags.get(name, "").isdigit()}
    plan: dict[str, Any] = {ours: int(flags[name]) for name, ours in _MEGATRON_PLAN.items() if flags.get(name, "").isdigit()}
    if "use-distributed-optimizer" in flags:
        plan["zero"] = 1
    if flags.get("recompute-granularity") in ("selective", "full"):
        plan["recompute"] = flags["recompute-granularity"]
    chunk = flags.get("num-layers-per-virtual-pipeline-stage", "")
    if chunk.isdigit() and int(chunk) and plan.get("pp", 1) > 1 and shape.get("layers"):
        plan |= {"schedule": "interleaved", "virtual": max(1, shape["layers"] // plan["pp"] // int(chunk))}
    shape["gated"] = "swiglu" in flags
    shape["tied"] = "untie-embeddings-and-output-weights" not in flags
    return shape, plan


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return line.split()


def _titan(text: str, source: str) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"is not TOML: {error}", where=source, hint="give a torchtitan job file") from error
    shape: dict[str, Any] = {}
    model = document.get("model", {})
    for ours, names in _HF.items():
        value = next((model[name] for name in names if isinstance(model.get(name), int)), None)
        if value:
            shape[ours] = value
    training = document.get("training", {})
    if isinstance(training.get("seq_len"), int):
        shape["seq"] = training["seq_len"]
    section = document.get("parallelism", training)
    flavor = _TITAN_FLAVORS.get((str(model.get("name", "")), str(model.get("flavor", ""))))
    shape = (flavor or {}) | shape
    plan: dict[str, Any] = {
        ours: section[name] for name, ours in _TITAN_PLAN.items() if isinstance(section.get(name), int) and section[name] > 0
    }
    _titan_data_axis(section, plan)
    schedule = str(section.get("pipeline_parallel_schedule", "")).lower()
    if plan.get("pp", 1) > 1 and schedule in _TITAN_SCHEDULES:
        plan["schedule"], virtual = _TITAN_SCHEDULES[schedule]
        plan |= {"virtual": virtual} if virtual else {}
    mode = document.get("activation_checkpoint", {}).get("mode")
    if mode in ("selective", "full"):
        plan["recompute"] = mode
    if isinstance(training.get("local_batch_size"), int):
        plan["micro_batch"] = training["local_batch_size"]
    if isinstance(training.get("global_batch_size"), int) and training["global_batch_size"] > 0:
        plan["global_batch"] = training["global_batch_size"]
    return shape, plan


def _titan_data_axis(section: Mapping[str, Any], plan: dict[str, Any]) -> None:
    """Replicas x shards are DP; sharding (-1: all that is left, torchtitan's default) is FSDP, which is ZeRO-3."""
    copies, shards = plan.pop("dp_replicate", 1), plan.pop("dp_shard", None)
    if section.get("data_parallel_shard_degree", -1) != 1:
        plan["zero"] = 3
    if shards:
        plan["dp"] = copies * shards
        if copies > 1 and shards > 1:
            plan["hsdp_shard"] = shards


_TITAN_SCHEDULES = {
    "gpipe": ("gpipe", 0),
    "1f1b": ("1f1b", 0),
    "interleaved1f1b": ("interleaved", 2),
    "interleavedzerobubble": ("zb-h1", 0),
    "zbvzerobubble": ("zbv", 0),
    "dualpipev": ("zbv", 0),
}
_LLAMA3 = {"vocab": 128256, "kv_heads": 8, "gated": True, "tied": False}
_TITAN_FLAVORS: dict[tuple[str, str], dict[str, Any]] = {
    ("llama3", "8B"): _LLAMA3 | {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336},
    ("llama3", "70B"): _LLAMA3 | {"layers": 80, "hidden": 8192, "heads": 64, "ffn": 28672},
    ("llama3", "405B"): _LLAMA3 | {"layers": 126, "hidden": 16384, "heads": 128, "ffn": 53248},
}
"""Sizes behind torchtitan's names (Llama 3: https://arxiv.org/abs/2407.21783, table 3)."""
