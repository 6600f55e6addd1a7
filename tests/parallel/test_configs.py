"""Model files as people have them: public architectures counted, argument files with their plan, and what is no transformer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regrow.errors import ConfigurationError
from regrow.parallel import configs, shape

Regrow = Callable[..., tuple[int, Any, str]]
MODELS = Path(__file__).parents[1] / "data" / "models"
PUBLIC = json.loads((MODELS / "public.json").read_text())


@pytest.mark.parametrize("name", list(PUBLIC))
def test_parameters_of_public_architectures(name: str) -> None:
    """Published parameter counts; active ones differ in what their authors count (embedding, head), so within a tenth."""
    entry = PUBLIC[name]
    model, _ = configs.read(json.dumps(entry["config"]), name, seq=2048)
    parts = shape.counts(model)
    assert parts.total / 1e9 == pytest.approx(entry["billion"], rel=0.015)
    if "active_billion" in entry:
        assert parts.active / 1e9 == pytest.approx(entry["active_billion"], rel=0.1)


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ({"model_type": "mamba2", "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8, "num_heads": 4}, "recurrent"),
        ({"model_type": "jamba", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "mamba_d_state": 8}, "mamba_d_state"),
        ({"model_type": "t5", "d_model": 64, "num_layers": 2, "num_heads": 4}, "encoder-decoder"),
        ({"model_type": "resnet", "depths": [1, 2]}, "'resnet' is not known here and names no layers and no hidden and no heads"),
        ({"architectures": ["Thing"]}, "names no layers"),
    ],
)
def test_what_is_no_decoder_of_attention_layers_is_refused(config: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        configs.read(json.dumps(config), "config.json")
    assert word in str(caught.value)
    assert caught.value.hint


def test_a_torchtitan_file_by_flavor(regrow: Regrow) -> None:
    code, document, _ = regrow("plan", "--model", MODELS / "torchtitan.toml", "--nodes", 2, "--global-batch", 64)
    assert code == 0
    assert document["model"]["params"] / 1e9 == pytest.approx(8.03, rel=0.01)
    best = document["best"]
    assert (best["mesh"]["tp"], best["mesh"]["pp"], best["zero_stage"], best["micro_batch"]) == (2, 1, 3, 1)
    assert any("zero 3" in note for note in document["notes"])
    code, document, _ = regrow("plan", "--model", MODELS / "torchtitan.toml", "--nodes", 2, "--global-batch", 64, "--zero", 1)
    assert document["best"]["zero_stage"] == 1  # a flag wins over the file


def test_torchtitan_settings() -> None:
    text = """
[model]
name = "llama3"
flavor = "405B"
[training]
seq_len = 8192
global_batch_size = 512
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = 8
tensor_parallel_degree = 8
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"
[activation_checkpoint]
mode = "selective"
"""
    model, plan = configs.read(text, "job.toml")
    assert (model.layers, model.seq) == (126, 8192)
    wanted = {"dp": 16, "hsdp_shard": 8, "tp": 8, "pp": 4, "zero": 3, "schedule": "interleaved", "virtual": 2, "recompute": "selective"}
    assert plan == wanted | {"global_batch": 512}


def test_an_unknown_flavor_names_those_that_are_known() -> None:
    with pytest.raises(ConfigurationError) as caught:
        configs.read('[model]\nname = "llama3"\nflavor = "9000B"\n', "job.toml")
    assert "llama3 70B" in str(caught.value.hint)


def test_megatron_settings() -> None:
    text = (
        "--num-layers 96 --hidden-size 12288 --num-attention-heads 96 --seq-length 2048 --vocab-size 51200 "
        "--tensor-model-parallel-size=8 --pipeline-model-parallel-size 8 --num-layers-per-virtual-pipeline-stage 3 "
        "--use-distributed-optimizer --recompute-granularity full --sequence-parallel --micro-batch-size 1 --global-batch-size 1536"
    )
    model, plan = configs.read(text, "run.sh")
    assert shape.counts(model).total / 1e9 == pytest.approx(174.6, rel=0.005)
    wanted = {"tp": 8, "pp": 8, "schedule": "interleaved", "virtual": 4, "zero": 1, "recompute": "full", "micro_batch": 1}
    assert plan == wanted | {"global_batch": 1536}


def test_unknown_keys_of_an_inventory_name_the_nearest(regrow: Regrow, tmp_path: Path) -> None:
    target = tmp_path / "nodes.json"
    target.write_text('{"nodes": [{"gpus": 8}], "nvlink_gpu": 3}')
    code, document, _ = regrow("plan", "--params", 1e9, "--inventory", target)
    assert code == 2
    assert document["error"]["hint"] == "did you mean nvlink_gpus?"


@pytest.mark.parametrize("where", ["flag", "file"])
def test_a_slip_of_the_keyboard_does_not_take_all_memory(regrow: Regrow, tmp_path: Path, where: str) -> None:
    target = tmp_path / "nodes.json"
    target.write_text('{"nodes": [{"gpus": 8, "count": 100000000000}]}')
    asked = ("--nodes", 100_000_000_000) if where == "flag" else ("--inventory", target)
    code, document, _ = regrow("plan", "--params", 1e9, *asked)
    assert code == 2
    assert "100000 nodes" in document["error"]["hint"]


def test_hsdp_groups_divide_the_data_axis(regrow: Regrow) -> None:
    assert regrow("plan", "--params", 1e9, "--nodes", 1, "--hsdp-shard", -1)[0] == 2
    code, document, _ = regrow("plan", "--params", 1e9, "--nodes", 1, "--dp", 8, "--tp", 1, "--pp", 1, "--hsdp-shard", 3)
    assert code == 1
    assert "HSDP groups of 3 do not divide DP 8" in document["rejected"][0]["reason"]
    code, document, _ = regrow("plan", "--params", 1e9, "--nodes", 1, "--tp", 1, "--pp", 1, "--zero", 3, "--hsdp-shard", 3)
    assert document["best"]["mesh"]["dp"] == 6
