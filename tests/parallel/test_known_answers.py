"""tests/data/known_answers.json, entry by entry, through the JSON of the command line wherever a command shows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from regrow.ids import MeshShape
from regrow.parallel import batch, comm, inventory, memory, mesh, pipeline, shape

Regrow = Callable[..., tuple[int, Any, str]]
DATA = Path(__file__).parents[1] / "data"
KNOWN = {entry["id"]: entry for entry in json.loads((DATA / "known_answers.json").read_text())}
BIG = ("--gpu-memory-gb", 1e6)


def close(value: float, tolerance: float = 0.01) -> Any:
    return pytest.approx(value, rel=tolerance)


def classic(layers: int, hidden: int, heads: int, *, vocab: int = 51200, seq: int = 2048) -> list[object]:
    return ["--layers", layers, "--hidden", hidden, "--heads", heads, "--vocab", vocab, "--seq", seq]


@pytest.mark.parametrize("index", range(6))
def test_zero_state(regrow: Regrow, index: int) -> None:
    case, want = KNOWN["D-ZERO"]["inputs"]["cases"][index], KNOWN["D-ZERO"]["expected"]["gb"][index]
    dp = case["dp"]
    nodes, per = (1, dp) if dp <= 8 else (dp // 8, 8)
    for zero, key in enumerate(("ddp", "zero1", "zero2", "zero3")):
        flags = (
            "--params",
            case["params_b"] * 1e9,
            "--nodes",
            nodes,
            "--gpus-per-node",
            per,
            "--dp",
            dp,
            "--tp",
            1,
            "--pp",
            1,
            "--zero",
            zero,
        )
        code, document, _ = regrow("plan", *flags, "--global-batch", 1024, *BIG)
        assert code == 0
        used = document["best"]["memory_bytes"]
        assert (used["weights"] + used["gradients"] + used["optimizer"]) / 1e9 == close(want[key], 0.005)


def test_a_parameter_count_and_nodes_are_enough(regrow: Regrow) -> None:
    code, document, _ = regrow("plan", "--params", 7e9, "--nodes", 1, "--gpus-per-node", 8, "--zero", 3, "--tp", 1, "--pp", 1)
    used = document["best"]["memory_bytes"]
    assert code == 0
    assert (used["weights"] + used["gradients"] + used["optimizer"]) / 1e9 == close(14.0)


def test_all_reduce_factors() -> None:
    entry = KNOWN["D-ALLREDUCE"]
    for ranks, factor in entry["expected"]["factor"].items():
        assert comm.all_reduce(1e9, int(ranks)) == close(factor * 1e9, 1e-6)
    for ranks, factor in entry["expected"]["reduce_scatter_or_all_gather_factor"].items():
        assert comm.reduce_scatter(1e9, int(ranks)) == comm.all_gather(1e9, int(ranks)) == close(factor * 1e9, 1e-6)
        assert comm.all_reduce(1e9, int(ranks)) == close(2 * comm.reduce_scatter(1e9, int(ranks)), 1e-12)


@pytest.mark.parametrize(("recompute", "key"), [("none", "forward_and_backward_gb"), ("full", "with_recomputation_gb")])
def test_tp_volume(regrow: Regrow, recompute: str, key: str) -> None:
    entry = KNOWN["D-TP-VOLUME"]
    want = entry["expected"]
    shape_flags = classic(32, 4096, 32, vocab=32000)
    flags = ("--nodes", 1, "--dp", 1, "--tp", 8, "--pp", 1, "--micro-batch", 4, "--global-batch", 4, "--recompute", recompute, *BIG)
    _, document, _ = regrow("plan", *shape_flags, *flags)
    best = document["best"]
    assert best["comm_bytes"]["tp"] / 1e9 == close(want[key])
    detail = best["comm_detail"]
    assert detail["tp_message_bytes"] == want["message_bytes"]
    assert detail["tp_per_all_reduce"] / 1e6 == close(want["per_allreduce_mb"])
    assert detail["tp_per_layer_forward"] / 1e6 == close(want["per_layer_forward_mb"])
    assert detail["tp_forward"] / 1e9 == close(want["forward_only_32_layers_gb"])
    assert len(detail["tp_passes"]) == (3 if recompute == "full" else 2)


@pytest.mark.parametrize("index", range(6))
def test_bubble(regrow: Regrow, index: int) -> None:
    entry = KNOWN["D-BUBBLE"]
    stages, count = (entry["inputs"]["cases"][index][key] for key in ("P", "M"))
    flags = (
        "--nodes",
        1,
        "--gpus-per-node",
        stages,
        "--dp",
        1,
        "--tp",
        1,
        "--pp",
        stages,
        "--micro-batch",
        1,
        "--global-batch",
        count,
        *BIG,
    )
    _, document, _ = regrow("plan", *classic(48, 1024, 16), *flags)
    best = document["best"]
    assert best["bubble_fraction"] == close(entry["expected"]["fraction"][index], 1e-4)
    assert best["bubble_ratio"] == close(entry["expected"]["ratio_to_ideal"][index], 1e-4)


def test_interleaved_bubble(regrow: Regrow) -> None:
    for virtual, ratio in KNOWN["D-BUBBLE"]["expected"]["interleaved_ratio_P8_M16"].items():
        schedule = ("--schedule", "interleaved", "--virtual", virtual) if int(virtual) > 1 else ()
        flags = ("--nodes", 1, "--dp", 1, "--tp", 1, "--pp", 8, "--micro-batch", 1, "--global-batch", 16, *schedule, *BIG)
        _, document, _ = regrow("plan", *classic(64, 1024, 16), *flags)
        assert document["best"]["bubble_ratio"] == close(ratio, 1e-4)


@pytest.mark.parametrize("index", range(5))
def test_activation_per_layer(regrow: Regrow, index: int) -> None:
    entry = KNOWN["D-ACTIVATION"]
    case, want = entry["inputs"]["cases"][index], entry["expected"]
    layers = 3
    shape_flags = classic(layers, case["h"], case["a"], seq=case["s"])
    flags = ("--nodes", 1, "--gpus-per-node", 1, "--global-batch", 1, "--micro-batch", case["b"], "--recompute", "none", *BIG)
    _, document, _ = regrow("plan", *shape_flags, *flags)
    best = document["best"]
    assert best["memory_bytes"]["activations"] / layers == close(want["bytes_per_layer"][index])
    whole = best["memory_detail"]["activation_per_layer_bytes"]["whole"]
    assert whole["flash"] == close(want["linear_part_34sbh"][index])
    terms = memory.activation_terms(shape.make(layers=1, hidden=case["h"], heads=case["a"], seq=case["s"], vocab=100))
    assert terms.quadratic == close(want["quadratic_term"][index], 1e-6)
    assert whole["selective"] / whole["flash"] == close(18 / 34)
    assert whole["full"] / whole["flash"] == close(2 / 34)


@pytest.mark.parametrize(("flag", "key"), [("--no-sequence-parallel", "gpt3_tp8"), ("--sequence-parallel", "gpt3_tp8_sp")])
def test_activation_under_tp(regrow: Regrow, flag: str, key: str) -> None:
    flags = ("--nodes", 1, "--dp", 1, "--tp", 8, "--pp", 1, "--global-batch", 1, "--micro-batch", 1, "--recompute", "none", flag, *BIG)
    _, document, _ = regrow("plan", *classic(96, 12288, 96), *flags)
    assert document["best"]["memory_bytes"]["activations"] / 96 == close(KNOWN["D-ACTIVATION"]["expected"][key])


@pytest.mark.parametrize("index", range(5))
def test_every_layer_lands_in_one_stage(regrow: Regrow, index: int) -> None:
    case = KNOWN["D-PP-LAYERS"]["inputs"]["cases"][index]
    layers, stages = case["layers"], case["pp"]
    flags = ("--nodes", stages, "--gpus-per-node", 1, "--dp", 1, "--tp", 1, "--pp", stages, "--global-batch", 32, "--micro-batch", 1, *BIG)
    code, document, _ = regrow("plan", *classic(layers, 1024, 16), *flags)
    if layers < stages:
        assert code == 1
        assert document["best"] is None
        assert f"PP {stages} is more than {layers} layers" in document["rejected"][0]["reason"]
        return
    counts = document["best"]["layers_per_stage"]
    assert (len(counts), sum(counts)) == (stages, layers)


MEGATRON = KNOWN["D-MEGATRON-2021"]


@pytest.mark.parametrize("index", range(10))
def test_megatron_table(regrow: Regrow, index: int) -> None:
    _, heads, hidden, layers, tp, pp, gpus, total, *_ = MEGATRON["inputs"]["rows"][index]
    want = MEGATRON["expected"]["rows"][index]
    flags = ("--nodes", gpus // 8, "--gpu-type", "a100", "--global-batch", total, "--tp", tp, "--pp", pp)
    code, document, _ = regrow("plan", *classic(layers, hidden, heads), *flags)
    assert code == 0
    best = document["best"]
    assert best["mesh"]["dp"] == want["dp"]
    assert set(best["layers_per_stage"]) == {want["layers_per_stage"]}
    assert best["micro_batches"][0] * best["micro_batch"] == want["batch_per_replica"]
    assert best["gpus_idle"] == 0
    assert document["model"]["params"] / 1e9 == close(want["params_from_shape_b"], 1e-3)
    assert document["model"]["params"] / 1e9 == close(want["params_b"], 0.03)


@pytest.mark.parametrize("index", range(5))
def test_losing_one_node_keeps_the_batch(regrow: Regrow, index: int) -> None:
    want = KNOWN["D-SHRINK-ONE-NODE"]["expected"]["rows"][index]
    row = next(row for row in MEGATRON["inputs"]["rows"] if row[0] == want["params_b"])
    _, heads, hidden, layers, tp, pp, gpus, total, *_ = row
    flags = ["--nodes", gpus // 8, "--gpu-type", "a100", "--global-batch", total, "--tp", tp, "--pp", pp, "--micro-batch", 1, "--lose", 1]
    _, document, _ = regrow("plan", *classic(layers, hidden, heads), *flags)
    best = document["best"]
    assert document["inventory"]["gpus"] == want["gpus_after_losing_one_node"]
    assert best["mesh"]["dp"] == want["max_whole_replicas"]
    assert sum(best["micro_batches"]) * best["micro_batch"] == total
    assert max(best["micro_batches"]) - min(best["micro_batches"]) <= 1
    _, document, _ = regrow("plan", *classic(layers, hidden, heads), *flags, "--equal-replicas")
    best = document["best"]
    assert best["mesh"]["dp"] == want["largest_dp_keeping_batch_exact"]
    assert (best["gpus_used"], best["gpus_idle"]) == (want["gpus_used"], want["idle_gpus"])


@pytest.mark.parametrize("index", range(3))
def test_llama3_meshes(regrow: Regrow, index: int) -> None:
    row = KNOWN["D-LLAMA3-MESH"]["inputs"]["rows"][index]
    flags = ("--model", DATA / "models" / "llama-3.1-405b.json", "--seq", row["seq"], "--nodes", row["gpus"] // 8)
    axes = ("--tp", row["tp"], "--cp", row["cp"], "--pp", row["pp"], "--global-batch", 16 * 2**20 // row["seq"])
    code, document, _ = regrow("plan", *flags, *axes)
    assert code == 0
    best = document["best"]
    assert (best["mesh"]["dp"], best["gpus_used"]) == (row["dp"], row["gpus"])
    assert best["layers_per_stage"] == [7, *[8] * 14, 7]


def test_llama3_kv_heads_cap_tp(regrow: Regrow) -> None:
    flags = (
        "--model",
        DATA / "models" / "llama-3.1-405b.json",
        "--seq",
        8192,
        "--nodes",
        1024,
        "--global-batch",
        2048,
        "--tp",
        16,
        "--pp",
        16,
    )
    code, document, _ = regrow("plan", *flags)
    assert code == 1
    assert "KV heads 8 are not a multiple of TP 16" in document["rejected"][0]["reason"]
    code, document, _ = regrow("plan", *flags, "--replicate-kv")
    assert code == 0


def test_rank_order_of_llama3() -> None:
    want = KNOWN["D-LLAMA3-MESH"]["expected"]["rank_of_example_2x2x2x2"]
    world = MeshShape(tp=2, cp=2, pp=2, dp=2)
    for name, (tp, cp, pp, dp) in want.items():
        assert world.coordinates(int(name.removeprefix("GPU"))) == {"dp": dp, "pp": pp, "cp": cp, "tp": tp}


def test_elastic_batch(regrow: Regrow) -> None:
    entry = KNOWN["D-ELASTIC-BATCH"]
    case = entry["inputs"]["a"]
    for row, want in zip(case["rows"], entry["expected"]["a"], strict=True):
        sizes = ",".join(map(str, row["micro"]))
        flags = ("--nodes", 2, "--tp", row["mp"], "--pp", 1, "--global-batch", case["batch"], "--micro-batch", sizes, *BIG)
        _, document, _ = regrow("plan", *classic(16, 4096, 32), *flags)
        assert document["best"]["micro_batch"] == want
        assert sum(document["best"]["micro_batches"]) * want == case["batch"]
    cap, micro = entry["inputs"]["b"]["max_train_batch"], tuple(entry["inputs"]["b"]["micro"])
    assert 0 < batch.elastic_batch(cap, micro) <= cap
    assert batch.elastic_batch(240, micro) == 240


def test_chunk_sizes() -> None:
    entry = KNOWN["D-RESHARD-ZERO-SIZE"]
    for case, want in zip(entry["inputs"]["cases"], entry["expected"]["sizes"], strict=True):
        assert list(mesh.chunk_sizes(case["n"], case["ranks"])) == want


def test_largest_model(regrow: Regrow) -> None:
    want = KNOWN["D-LARGEST-MODEL"]["expected"]
    flags = ("--params", 1e9, "--nodes", 1, "--gpus-per-node", 8, "--gpu-memory-gb", 80, "--global-batch", 8)
    _, document, _ = regrow("plan", *flags)
    rows = {row["row"]: row for row in document["largest_model"]["lecture"]}
    for name, billion in want["from_printed_formula_billion"].items():
        assert rows[name]["from_printed_formula_billion"] == close(billion)
        assert rows[name]["printed_billion"] == want["printed_billion"][name]
    assert [name for name, row in rows.items() if row["follows_from_its_formula"]] == ["zero2", "zero3"]
    formula = document["largest_model"]["by_formula"]
    assert formula["ddp"]["billion"] == close(5.0)
    assert formula["zero3"]["billion"] == close(40.0)


def test_zero_traffic_two_readings(regrow: Regrow) -> None:
    size = 7e9 * 2
    share = 7 / 8
    for zero, factor in ((0, 2), (1, 2), (2, 2), (3, 3)):
        flags = ("--params", 7e9, "--nodes", 1, "--dp", 8, "--tp", 1, "--pp", 1, "--zero", zero, "--global-batch", 8, *BIG)
        _, document, _ = regrow("plan", *flags)
        best = document["best"]
        assert best["comm_bytes"]["dp"] == close(factor * size * share, 1e-6)
        if zero:
            assert best["comm_detail"]["dp_gradients_only"] == close(size * share, 1e-6)
            assert KNOWN["D-ZERO-COMM"]["expected"][f"zero{zero}"].startswith(f"{factor}S")
        assert best["comm_detail"]["dp_reading"].startswith(f"{factor}S")


def test_one_rank_moves_nothing(regrow: Regrow) -> None:
    _, document, _ = regrow("plan", *classic(4, 1024, 16), "--nodes", 1, "--gpus-per-node", 1, "--global-batch", 4)
    assert set(document["best"]["comm_bytes"].values()) == {0.0}


def test_mtbf(regrow: Regrow) -> None:
    entry = KNOWN["D-LAMBDA-SCALING"]
    for gpus, hours in entry["expected"]["mtbf_h"].items():
        nodes, per = (1, int(gpus)) if int(gpus) < 8 else (int(gpus) // 8, 8)
        flags = ("--params", 1e9, "--nodes", nodes, "--gpus-per-node", per, "--dp", 1, "--tp", 1, "--pp", 1, "--global-batch", 8)
        _, document, _ = regrow("plan", *flags, "--rate-per-gpu-hour", entry["inputs"]["lambda_per_gpu_hour"])
        assert document["reliability"]["mtbf_hours"] == close(hours)
        if gpus in entry["expected"]["p_no_failure_24h"]:
            assert document["reliability"]["p_no_failure_24h"] == close(entry["expected"]["p_no_failure_24h"][gpus])


def test_tp_reference_curve() -> None:
    assert [comm.tp_reference_loss(tp) for tp in (1, 8, 16, 32, 64)] == [0.0, 0.11, 0.42, 0.65, 0.65]
    assert 0.11 < comm.tp_reference_loss(12) < 0.42


def test_seed_all_reduce_times() -> None:
    """14 GB over 8 GPUs: 24.5 GB each, 0.49 s on InfiniBand, 0.08 s on NVLink (seed text)."""
    volume = comm.all_reduce(14e9, 8)
    assert volume == close(24.5e9)
    assert comm.ring_seconds(volume, 8, inventory.INFINIBAND) == close(0.49)
    assert comm.ring_seconds(volume, 8, inventory.DEVICES["a100"].nvlink) == close(0.082)


def test_ten_per_cent_bubble_takes_about_nine_times_the_stages() -> None:
    assert pipeline.micro_batches_for(0.1, 8) == 63
    assert pipeline.bubble_fraction("1f1b", 8, 63) <= 0.1 < pipeline.bubble_fraction("1f1b", 8, 62)


def test_data_parallel_traffic_does_not_depend_on_the_batch(regrow: Regrow) -> None:
    moved = set()
    for total in (64, 256, 1024):
        flags = ("--nodes", 2, "--dp", 16, "--tp", 1, "--pp", 1, "--zero", 1, "--micro-batch", 1, "--global-batch", total)
        _, document, _ = regrow("plan", *classic(8, 2048, 16), *flags)
        moved.add(document["best"]["comm_bytes"]["dp"])
    assert len(moved) == 1
