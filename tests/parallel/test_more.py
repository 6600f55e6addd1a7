"""Schedules drawn slot by slot, placement, advice, pictures, calibration."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regrow.errors import ConfigurationError
from regrow.ids import MeshShape
from regrow.parallel import calibrate, comm, draw, inventory, memory, pipeline, placement, planner, shape
from regrow.parallel.planner import Request

Regrow = Callable[..., tuple[int, Any, str]]
BASE = ("--layers", 16, "--hidden", 4096, "--heads", 32, "--vocab", 32000, "--seq", 2048, "--nodes", 4, "--global-batch", 64)


@given(st.sampled_from(["gpipe", "1f1b"]), st.integers(1, 8), st.integers(1, 24))
def test_drawn_schedules_have_the_bubble_of_the_formula(schedule: str, pp: int, count: int) -> None:
    slots = pipeline.timeline(schedule, pp, count)
    assert pipeline.measured_fraction(slots) == pytest.approx(pipeline.bubble_fraction(schedule, pp, count))


@given(st.sampled_from(["gpipe", "1f1b", "zb-h1"]), st.integers(1, 8), st.integers(1, 24))
def test_drawn_schedules_hold_what_the_memory_model_says(schedule: str, pp: int, count: int) -> None:
    slots = pipeline.timeline(schedule, pp, count)
    freed = "B"
    for stage in range(pp):
        own = sorted((slot for slot in slots if slot.stage == stage), key=lambda slot: slot.start)
        held = most = 0
        for slot in own:
            held += 1 if slot.kind == "F" else -1 if slot.kind == freed else 0
            most = max(most, held)
        assert held == 0
        assert most == pipeline.in_flight(schedule, pp, count, stage=stage)


@given(st.integers(2, 6), st.integers(2, 4), st.integers(1, 4))
def test_interleaved_schedule_is_the_formula_s(pp: int, virtual: int, groups: int) -> None:
    """Bubble, what each stage holds, and each micro-batch once through each chunk, forward before backward."""
    count = groups * pp
    slots = pipeline.timeline("interleaved", pp, count, virtual)
    assert pipeline.measured_fraction(slots) == pytest.approx(pipeline.bubble_fraction("interleaved", pp, count, virtual))
    for stage in range(pp):
        own = sorted((slot for slot in slots if slot.stage == stage), key=lambda slot: slot.start)
        held = most = 0
        for slot in own:
            held += 1 if slot.kind == "F" else -1
            most = max(most, held)
        assert len(own) == len({(slot.kind, slot.chunk, slot.micro_batch) for slot in own}) == 2 * virtual * count
        assert held == 0
        if count >= 2 * pp:
            assert most / virtual == pytest.approx(pipeline.in_flight("interleaved", pp, count, virtual, stage))


@pytest.mark.parametrize(("schedule", "virtual", "count"), [("zbv", 1, 8), ("dualpipe", 1, 8), ("interleaved", 2, 6)])
def test_what_is_not_drawn_is_refused(schedule: str, virtual: int, count: int) -> None:
    with pytest.raises(ConfigurationError):
        pipeline.timeline(schedule, 4, count, virtual)


@given(st.integers(2, 8), st.integers(0, 16))
def test_zero_bubble_needs_as_many_micro_batches_as_stages(pp: int, more: int) -> None:
    slots = pipeline.timeline("zb-h1", pp, pp + more)
    assert pipeline.measured_fraction(slots) == pytest.approx(pipeline.bubble_fraction("zb-h1", pp, pp + more))


@pytest.mark.parametrize(
    ("schedule", "pp", "virtual", "layers", "counts", "word"),
    [
        ("interleaved", 4, 2, 32, (6,), "multiples of PP 4"),
        ("interleaved", 4, 16, 32, (8,), "cannot fill"),
        ("dualpipe", 3, 1, 32, (8,), "even"),
        ("dualpipe", 4, 1, 32, (4,), "at least 8"),
        ("zbv", 4, 1, 6, (8,), "cannot fill"),
    ],
)
def test_schedules_that_cannot_run(schedule: str, pp: int, virtual: int, layers: int, counts: tuple[int, ...], word: str) -> None:
    assert word in pipeline.problem(schedule, pp, virtual, layers, counts)


def racks(number: int, nodes: int, gpus: int = 8) -> inventory.Inventory:
    described = [{"gpus": gpus, "count": nodes, "name": f"r{rack}", "domain": f"rack{rack}"} for rack in range(number)]
    return inventory.read(json.dumps({"nodes": described}), "test")


@given(st.sampled_from([(4, 8, 1), (2, 4, 4), (8, 2, 2), (1, 8, 4), (5, 2, 3)]))
def test_every_rank_has_a_gpu_of_its_own_and_tp_stays_inside(axes: tuple[int, int, int]) -> None:
    mesh = MeshShape(dp=axes[0], tp=axes[1], pp=axes[2])
    made = placement.place(mesh, racks(2, 2))
    seats = list(zip(made.nodes, made.gpus, strict=True))
    assert len(set(seats)) == mesh.world_size
    assert max(made.gpus) < 8
    for first in range(0, mesh.world_size, mesh.tp):
        assert len(set(made.nodes[first : first + mesh.tp])) == 1
    assert sum(made.idle.values()) == 32 - mesh.world_size


def test_buddies_live_in_another_domain() -> None:
    made = placement.place(MeshShape(dp=4, tp=8), racks(2, 2))
    domain = {name: name.split("-")[0] for name in made.buddies}
    assert len(made.buddies) == 4
    assert all(domain[name] != domain[buddy] for name, buddy in made.buddies.items())
    assert sorted(made.buddies.values()) == sorted(made.buddies)


def test_one_domain_is_told() -> None:
    made = placement.place(MeshShape(dp=2, tp=8), racks(1, 2))
    assert any("one failure domain" in warning for warning in made.warnings)


def test_the_axis_with_more_traffic_lies_further_in() -> None:
    mesh = MeshShape(dp=2, tp=4, pp=2)
    light = placement.place(mesh, racks(2, 1), dp_bytes=1.0, pp_bytes=9.0)
    heavy = placement.place(mesh, racks(2, 1), dp_bytes=9.0, pp_bytes=1.0)
    first = mesh.rank(dp=0, pp=0)
    assert light.nodes[first] == light.nodes[mesh.rank(dp=0, pp=1)] != light.nodes[mesh.rank(dp=1, pp=0)]
    assert heavy.nodes[first] == heavy.nodes[mesh.rank(dp=1, pp=0)] != heavy.nodes[mesh.rank(dp=0, pp=1)]


def test_an_nvlink_rack_without_names(regrow: Regrow) -> None:
    """18 nodes of 4 GPUs in NVLink domains of 72: one domain; of 24: three, each with room for one TP 16."""
    shape_ = ("--layers", 16, "--hidden", 4096, "--heads", 32, "--vocab", 32000, "--seq", 2048, "--global-batch", 64)
    nodes = ("--nodes", 18, "--gpus-per-node", 4, "--tp", 16, "--pp", 1, "--placement")
    for domain, replicas in ((72, 4), (24, 3), (20, 3)):
        code, document, _ = regrow("plan", *shape_, *nodes, "--nvlink-gpus", domain)
        assert code == 0
        assert document["best"]["mesh"]["dp"] == replicas
        assert document["best"]["gpus_idle"] == 72 - 16 * replicas


def test_tp_over_two_nodes_when_asked() -> None:
    made = placement.place(MeshShape(dp=2, tp=16), racks(2, 2))
    assert len(set(zip(made.nodes, made.gpus, strict=True))) == 32


def test_replacing_a_node_moves_only_its_ranks() -> None:
    made = placement.place(MeshShape(dp=3, tp=8), racks(2, 2))
    lost = made.nodes[8]
    spare = next(name for name in made.idle if name not in made.nodes)
    after = placement.replace_node(made, lost, spare)
    changed = [rank for rank in range(24) if made.nodes[rank] != after.nodes[rank]]
    assert changed == list(made.ranks_on(lost))
    assert lost not in after.buddies.values()
    with pytest.raises(ConfigurationError):
        placement.replace_node(made, spare, lost)


def test_survivors_keep_their_part_when_replicas_go() -> None:
    old = MeshShape(dp=4, tp=2, pp=2)
    made = placement.place(old, racks(4, 2, gpus=2))
    lost = {made.nodes[old.rank(dp=1, pp=0)]}
    new = MeshShape(dp=3, tp=2, pp=2)
    sources = placement.shrink(made, lost, new)
    assert [old.coordinates(rank)["dp"] for rank in sources[::4]] == [0, 2, 3]
    for rank, source in enumerate(sources):
        before, after = old.coordinates(source), new.coordinates(rank)
        assert (before["pp"], before["tp"]) == (after["pp"], after["tp"])
        assert made.nodes[source] not in lost


def test_holes_are_filled_from_broken_replicas() -> None:
    old = MeshShape(dp=3, tp=1, pp=2)
    made = placement.place(old, racks(3, 2, gpus=1))
    lost = {made.nodes[old.rank(dp=0, pp=0)], made.nodes[old.rank(dp=1, pp=1)]}
    sources = placement.shrink(made, lost, MeshShape(dp=2, tp=1, pp=2))
    assert sources == (old.rank(dp=2, pp=0), old.rank(dp=2, pp=1), old.rank(dp=1, pp=0), old.rank(dp=0, pp=1))
    with pytest.raises(ConfigurationError):
        placement.shrink(made, lost, MeshShape(dp=2, tp=2, pp=1))


def test_placement_and_advice_through_the_command(regrow: Regrow) -> None:
    code, document, _ = regrow("plan", *BASE, "--tp", 8, "--placement", "--advise", "--critical-batch", 32)
    assert code == 0
    ranks = [rank for some in document["placement"]["ranks"].values() for rank in some]
    assert sorted(ranks) == list(range(32))
    topics = {line["topic"] for line in document["advice"]}
    assert {"walls", "batch", "tokens", "tp", "precision", "restart"} <= topics
    text = " ".join(line["text"] for line in document["advice"])
    assert "critical batch 32" in text
    assert "GPTQ" in text
    assert all(line["source"] for line in document["advice"])


def test_advice_warns_where_zero_3_does_not_pay(regrow: Regrow) -> None:
    flags = ("--layers", 4, "--hidden", 1024, "--heads", 16, "--vocab", 32000, "--seq", 1024, "--nodes", 1, "--gpus-per-node", 4)
    _, document, _ = regrow("plan", *flags, "--global-batch", 16, "--zero", 3, "--tp", 1, "--pp", 1, "--advise")
    text = " ".join(line["text"] for line in document["advice"] if line["topic"] == "zero")
    assert "use ZeRO-1" in text
    assert "4 ranks" in text


@pytest.mark.parametrize(
    ("more", "topic", "words"),
    [
        (("--zero", 2, "--tp", 1, "--pp", 1, "--micro-batch", 1), "zero", "each of the 2 micro-batches of a step is reduced by itself"),
        (("--zero", 1, "--tp", 1, "--pp", 1), "zero", "ZeRO-1 moves the same bytes as DDP"),
        (("--zero", 0, "--tp", 1, "--pp", 1), "zero", "copies of the same state"),
        (("--tp", 4, "--pp", 1), "tp", "more TP does not lower a GPU's traffic"),
        (("--tp", 16, "--pp", 1), "tp", "64 latency-bound all-reduces a micro-batch"),
        (("--tp", 1, "--pp", 4, "--micro-batch", 1), "bubble", "a bubble of 10 % takes M = 27 micro-batches (about 9 P), a replica has 8"),
        (("--tp", 1, "--pp", 4), "pp", "hardest part to build"),
        (("--tp", 1, "--pp", 4, "--micro-batch", 1), "batch", "scaling the learning rate by P x M"),
        (("--tp", 1, "--pp", 1, "--critical-batch", 32), "batch", "above the critical batch 32"),
    ],
)
def test_each_rule_is_told_where_it_holds(regrow: Regrow, more: tuple[object, ...], topic: str, words: str) -> None:
    code, document, _ = regrow("plan", *BASE, *more, "--advise")
    assert code == 0
    assert any(words in line["text"] for line in document["advice"] if line["topic"] == topic)


def test_a_wall_says_how_it_shows(regrow: Regrow) -> None:
    _, document, _ = regrow("plan", *BASE, "--tp", 16, "--pp", 1)
    wall = document["best"]["wall"]
    assert (wall["binds"], "swings" in wall["symptom"]) == ("communication", True)


@pytest.mark.parametrize("kind", ["mesh", "schedule", "regime"])
def test_pictures_are_valid_svg(regrow: Regrow, tmp_path: Path, kind: str) -> None:
    target = tmp_path / "picture.svg"
    code, _, _ = regrow("plan", *BASE, "--tp", 4, "--pp", 4, "--svg", target, "--picture", kind)
    assert code == 0
    root = ET.fromstring(target.read_text())
    boxes = [node for node in root if node.tag.endswith("rect")]
    assert root.tag.endswith("svg")
    assert len(boxes) > 10


def test_pictures_that_cannot_be(regrow: Regrow, tmp_path: Path) -> None:
    assert regrow("plan", *BASE, "--svg", tmp_path / "x.svg", "--picture", "cake")[0] == 2
    assert regrow("plan", *BASE, "--svg", tmp_path / "none" / "x.svg")[0] == 1


def test_terminal_plot_marks_the_minimum() -> None:
    points = [(x / 10, (x / 10 - 2) ** 2 + 1) for x in range(1, 100)]
    lines = draw.curve_text(points, mark=2.0)
    marked = [line for line in lines if "+" in line and "-" not in line]
    assert len(marked) == 1
    assert marked == [lines[11]]


CPU = shape.make(layers=6, hidden=128, heads=4, ffn=512, vocab=256, seq=64)
MESHES = ("8x1x1", "4x2x1", "2x2x2", "4x1x2", "2x1x2", "1x2x2", "1x1x1")


def cpu_request() -> Request:
    there = inventory.uniform(4, 2, device="cpu", gpu_memory_gb=16)
    return Request(model=CPU, inventory=there, global_batch=16, micro_batch=(1,), context_bytes=0.0)


def test_calibration_recovers_a_machine(tmp_path: Path, regrow: Regrow) -> None:
    import msgspec

    asked = cpu_request()
    truth = msgspec.structs.replace(asked.constants, efficiency=0.1, step_overhead=0.02, tp_overlap=-4.0)
    samples = [calibrate.Sample(mesh=MeshShape.parse(text), step_seconds=1.0) for text in MESHES]
    times = calibrate.predict(asked, samples, truth)
    measured = [msgspec.structs.replace(sample, step_seconds=time) for sample, time in zip(samples, times, strict=True)]
    found = calibrate.calibrate(asked, measured)
    assert found.rank_correlation == pytest.approx(1.0)
    assert found.worst_error < 0.1
    target = tmp_path / "run.json"
    target.write_text(json.dumps([{"mesh": text, "step_seconds": time} for text, time in zip(MESHES, times, strict=True)]))
    flags = ("--layers", 6, "--hidden", 128, "--heads", 4, "--ffn", 512, "--vocab", 256, "--seq", 64, "--gpu-type", "cpu", "--nodes", 4)
    code, document, _ = regrow("plan", *flags, "--gpus-per-node", 2, "--global-batch", 16, "--micro-batch", 1, "--calibrate", target)
    assert code == 0
    assert document["calibration"]["rank_correlation"] > 0.9


@pytest.mark.parametrize(
    "text",
    ["", "{}", "[]", '[{"mesh": "2x2x2"}]', '[{"mesh": "2x2x2", "step_seconds": -1}]', '[{"mesh": "2x2x2", "step_seconds": "fast"}]', "3"],
)
def test_calibration_refuses(text: str) -> None:
    with pytest.raises(ConfigurationError):
        calibrate.read(text, "run.json")


def test_rank_correlation() -> None:
    assert calibrate.rank_correlation([1, 2, 3], [10, 20, 30]) == 1.0
    assert calibrate.rank_correlation([1, 2, 3], [30, 20, 10]) == -1.0
    assert -1.0 < calibrate.rank_correlation([1, 2, 3, 4], [1, 1, 2, 0]) < 1.0


@given(st.floats(1.0, 1e12), st.integers(1, 4096))
def test_all_reduce_is_reduce_scatter_and_all_gather(size: float, ranks: int) -> None:
    assert comm.all_reduce(size, ranks) == pytest.approx(comm.reduce_scatter(size, ranks) + comm.all_gather(size, ranks))
    assert comm.all_reduce(size, 1) == comm.broadcast(size, 1) == comm.all_to_all(size, 1) == 0.0


@given(st.sampled_from([0, 1, 2, 3]), st.integers(1, 512))
def test_largest_model_is_the_inverse_of_the_state(zero: int, ranks: int) -> None:
    params = memory.largest_model(80e9, ranks, zero)
    assert memory.model_state(params, ranks, zero).total == pytest.approx(80e9, rel=1e-6)


def test_the_survivor_table_through_the_command(regrow: Regrow) -> None:
    code, document, _ = regrow("plan", *BASE, "--table", "--rate-per-gpu-hour", 2e-5, "--repair-hours", 24)
    assert code == 0
    rows = document["table"]["rows"]
    assert [row["nodes"] for row in rows] == [4, 3, 2, 1]
    assert all(row["gpus_used"] + row["gpus_idle"] == row["gpus"] for row in rows)
    assert document["table"]["spares"]["spares"] >= 0


def test_people_can_read_it(capsys: pytest.CaptureFixture[str], regrow: Regrow) -> None:
    from regrow.cli import plan_text

    _, document, _ = regrow("plan", *BASE, "--lose", 1, "--table", "--placement", "--advise", "--rate-per-gpu-hour", 2e-5)
    plan_text.show(document)
    text = capsys.readouterr().out
    for word in ("best:", "why", "memory", "bubble", "after losing 1 node,", "MTBF", "best mesh by surviving nodes", "placement", "walls"):
        assert word in text
    _, document, _ = regrow("plan", *BASE, "--tp", 3)
    plan_text.show(document)
    text = capsys.readouterr().out
    assert "no legal plan" in text
    assert "heads 32 is not a multiple of TP 3" in text
    assert "would work" in text


def test_planner_choices_agree_with_the_job_side() -> None:
    best = planner.plan(Request(model=CPU, inventory=inventory.uniform(1, 1, device="cpu"), global_batch=4)).best
    assert best is not None
    assert best.mesh == MeshShape()
