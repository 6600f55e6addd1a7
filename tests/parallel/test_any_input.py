"""Whatever is asked, the answer is a document whose parts agree, or a refusal with a reason; never a crash."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

Regrow = Callable[..., tuple[int, Any, str]]

OPTIONAL = {
    "--kv-heads": st.sampled_from([1, 2, 4, 8]),
    "--ffn": st.sampled_from([1024, 2816, 4096, 5000]),
    "--micro-batch": st.sampled_from(["1", "2", "3", "4,8"]),
    "--tp": st.integers(1, 9),
    "--pp": st.integers(1, 12),
    "--dp": st.integers(1, 40),
    "--cp": st.sampled_from([1, 2, 4]),
    "--zero": st.integers(0, 3),
    "--experts": st.sampled_from([4, 8]),
    "--ep": st.sampled_from([1, 2, 4]),
    "--schedule": st.sampled_from(["gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipe", "auto"]),
    "--virtual": st.integers(1, 3),
    "--recompute": st.sampled_from(["none", "flash", "selective", "full"]),
    "--optimizer": st.sampled_from(["mixed", "fp32", "8bit", "bf16", "sgd", "mixed-fp32-grad"]),
    "--offload": st.sampled_from(["none", "optimizer", "all"]),
    "--hsdp-shard": st.sampled_from([0, 2, 8]),
    "--lose": st.integers(0, 2),
    "--gpu-memory-gb": st.sampled_from([1.5, 4, 24, 80]),
}
FLAGS = ("--equal-replicas", "--no-sequence-parallel", "--replicate-kv", "--table", "--placement", "--advise", "--classic", "--untied")


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    layers=st.integers(1, 24),
    heads=st.sampled_from([1, 2, 6, 7, 8, 16]),
    nodes=st.integers(1, 5),
    gpus=st.sampled_from(["1", "2", "6", "8"]),
    total=st.integers(1, 96),
    more=st.fixed_dictionaries({}, optional=OPTIONAL),
    flags=st.sets(st.sampled_from(FLAGS)),
)
def test_every_answer_adds_up(
    regrow: Regrow, layers: int, heads: int, nodes: int, gpus: str, total: int, more: dict[str, object], flags: set[str]
) -> None:
    shape = ("--layers", layers, "--hidden", heads * 64, "--heads", heads, "--vocab", 1000, "--seq", 512)
    words = [word for pair in more.items() for word in pair]
    code, document, stderr = regrow(
        "plan", *shape, "--nodes", nodes, "--gpus-per-node", gpus, "--global-batch", total, *words, *sorted(flags)
    )
    if code == 2:
        assert stderr.strip()
        return
    if code == 1:
        assert document["best"] is None
        assert document["rejected"]
        assert all(one["reason"] for one in document["rejected"])
        return
    assert code == 0
    for plan in document["plans"]:
        check(document, plan, layers, total)
    assert document["best"] == document["plans"][0]
    assert [plan["step_seconds"] for plan in document["plans"]] == sorted(plan["step_seconds"] for plan in document["plans"])


def check(document: dict[str, Any], plan: dict[str, Any], layers: int, total: int) -> None:
    mesh = plan["mesh"]
    used = mesh["dp"] * mesh["tp"] * mesh["pp"] * mesh["cp"]
    assert plan["gpus_used"] == used
    assert used + plan["gpus_idle"] == document["inventory"]["gpus"]
    assert len(plan["layers_per_stage"]) == mesh["pp"]
    assert sum(plan["layers_per_stage"]) == layers
    assert len(plan["micro_batches"]) == mesh["dp"]
    assert sum(plan["micro_batches"]) * plan["micro_batch"] == total
    assert max(plan["micro_batches"]) - min(plan["micro_batches"]) <= 1
    memory = plan["memory_bytes"]
    assert memory["total"] <= document["inventory"]["gpu_memory_bytes"]
    assert memory["total"] == pytest.approx(sum(value for name, value in memory.items() if name != "total"))
    assert all(value >= 0 for value in memory.values())
    seconds = plan["seconds"]
    parts = sum(value for name, value in seconds.items() if name != "dp_hidden")
    assert plan["step_seconds"] == pytest.approx(parts)
    assert all(value >= 0 and math.isfinite(value) for value in seconds.values())
    assert 0 < plan["mfu"] < 1
    assert 0 < plan["efficiency"] <= 1
    assert 0 <= plan["bubble_fraction"] < 1
    assert all(value >= 0 for value in plan["comm_bytes"].values())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"nodes": []}',
        '{"nodes": [{"gpus": 8, "count": 0}]}',
        '{"nodes": [{"gpus": -8}]}',
        '{"nodes": [{"gpus": 8, "name": "a"}, {"gpus": 8, "name": "a"}]}',
        '{"nodes": [{"gpu": 8}]}',
        '{"nodes": [{"gpus": 8}], "links": {"ethernet": {"gb_per_second": 1, "latency_us": 1}}}',
        '{"nodes": [{"gpus": 8}], "links": {"nvlink": {"gb_per_second": 0, "latency_us": 1}}}',
        '{"nodes": [{"gpus": 8}], "links": {"nvlink": {"gb_per_second": 9, "latency_us": -1}}}',
        '{"nodes": [{"gpus": 8}], "gpu_memory_gb": -1}',
        '{"nodes": [{"gpus": 8}], "gpu_type": "abacus"}',
        '{"nodes": [{"gpus": 8}], "nvlink_gpus": 0}',
    ],
)
def test_broken_inventories(regrow: Regrow, tmp_path: Path, text: str) -> None:
    target = tmp_path / "nodes.json"
    target.write_text(text)
    code, document, _ = regrow("plan", "--params", 1e9, "--inventory", target)
    assert code == 2
    assert document["error"]["hint"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "{}",
        "null",
        '{"hidden_size": 64}',
        '{"num_hidden_layers": 2, "hidden_size": 64}',
        '{"num_hidden_layers": 2.5, "hidden_size": 64, "num_attention_heads": 4}',
        '{"num_hidden_layers": -2, "hidden_size": 64, "num_attention_heads": 4}',
        "[model",
        "--num-layers many --hidden-size",
        "\x00\x01",
    ],
)
def test_broken_model_files(regrow: Regrow, tmp_path: Path, text: str) -> None:
    target = tmp_path / "config.json"
    target.write_text(text)
    code, document, _ = regrow("plan", "--model", target, "--nodes", 1)
    assert code == 2
    assert document["error"]["hint"]


def test_an_inventory_file_with_links_domains_and_a_torus(regrow: Regrow, tmp_path: Path) -> None:
    described: dict[str, Any] = {
        "nodes": [{"name": f"rack{rack}", "gpus": 8, "count": 64, "domain": f"rack{rack}"} for rack in range(4)],
        "gpu_type": "a100",
        "links": {"infiniband": {"gb_per_second": 25, "latency_us": 20}, "cross": {"gb_per_second": 5, "latency_us": 40}},
    }
    target = tmp_path / "nodes.json"
    target.write_text(json.dumps(described))
    shape = ("--layers", 32, "--hidden", 4096, "--heads", 32, "--vocab", 32000, "--seq", 2048, "--global-batch", 2048)
    forced = ("--dp", 2048, "--tp", 1, "--pp", 1, "--zero", 3, "--inventory", target)
    code, tiers, _ = regrow("plan", *shape, *forced)
    assert code == 0
    assert (tiers["inventory"]["nodes"], tiers["inventory"]["gpus"]) == (256, 2048)
    target.write_text(json.dumps(described | {"torus": True}))
    code, torus, _ = regrow("plan", *shape, *forced)
    assert code == 0
    assert torus["best"]["step_seconds"] < tiers["best"]["step_seconds"]


def test_auto_schedule_is_never_worse(regrow: Regrow) -> None:
    shape = ("--layers", 32, "--hidden", 8192, "--heads", 64, "--vocab", 32000, "--seq", 4096, "--nodes", 8, "--global-batch", 64)
    plain = regrow("plan", *shape, "--pp", 8)[1]["best"]
    auto = regrow("plan", *shape, "--pp", 8, "--schedule", "auto")[1]["best"]
    assert auto["step_seconds"] < plain["step_seconds"]
    assert auto["schedule"] != "1f1b"


def test_short_replicas_run_weightless_micro_batches_under_zero_3(regrow: Regrow) -> None:
    shape = ("--layers", 8, "--hidden", 1024, "--heads", 16, "--vocab", 32000, "--seq", 1024, "--nodes", 1, "--global-batch", 20)
    _, document, _ = regrow("plan", *shape, "--dp", 8, "--tp", 1, "--pp", 1, "--micro-batch", 1, "--zero", 3)
    assert document["best"]["micro_batches"] == [3, 3, 3, 3, 2, 2, 2, 2]
    assert document["best"]["zero_weight_micro_batches"] == 4
    assert document["equal_replicas"]["mesh"]["dp"] == 5
    _, document, _ = regrow("plan", *shape, "--dp", 8, "--tp", 1, "--pp", 1, "--micro-batch", 1, "--zero", 1)
    assert document["best"]["zero_weight_micro_batches"] == 0


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("flag", "value"),
    [("--layers", 10**13), ("--heads", 10**13), ("--kv-heads", 10**9), ("--gpus-per-node", 1_000_003), ("--nodes", 10**13)],
)
def test_a_slip_of_the_keyboard_is_refused_at_once(regrow: Regrow, flag: str, value: int) -> None:
    """Going through every stage, divisor or GPU of such a number would take for ever."""
    given = {"--layers": 32, "--hidden": 4096, "--heads": 32, "--vocab": 32000, "--seq": 4096, "--nodes": 4, "--gpus-per-node": 8}
    words = [word for pair in (given | {flag: value}).items() for word in pair]
    code, _, stderr = regrow("plan", *words, "--global-batch", 64)
    assert code == 2
    assert flag in stderr
    assert "at most" in stderr
