"""Chaos plans and score cards as data; one short plan on a real cluster."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from regrow.chaos import plan as plans
from regrow.chaos.kinds import COSTS, KINDS
from regrow.chaos.score import Shot, card, judge, upper95
from regrow.cli.app import build
from regrow.cli.chaos import tell_card
from regrow.errors import ConfigurationError


class TestPlan:
    @pytest.mark.parametrize("name", list(plans.BUILT_IN))
    def test_built_in_plans_are_sound(self, name: str) -> None:
        assert plans.load(name).fault

    def test_a_file(self, tmp_path: Path) -> None:
        path = tmp_path / "p.toml"
        path.write_text('seed = 3\n[cluster]\nnodes = 2\n[[fault]]\nkind = "worker_stop"\nrank = 1\n', encoding="utf-8")
        got = plans.load(str(path))
        assert (got.seed, got.cluster.nodes, got.fault[0].rank, got.fault[0].deadline_seconds) == (3, 2, 1, 60.0)

    @pytest.mark.parametrize(
        ("text", "word"),
        [
            ("", "no faults"),
            ("[", "docs/chaos.md"),
            ("version = 9\n[[fault]]\nkind = 'worker_kill'", "version 9"),
            ("[[fault]]\nkind = 'worker_kil'", "worker_kill"),
            ("[[fault]]\nkind = 'worker_kill'\nnode = 'n7'", "n7"),
            ("[[fault]]\nkind = 'worker_kill'\nrank = 'x'", "not a number"),
            ("[[fault]]\nkind = 'nvml_noise'\nxid = 79", "no noise"),
            ("[[fault]]\nkind = 'worker_kill'\ncolour = 1", "colour"),
            ("[[fault]]\nkind = 'worker_kill'\nstraggler = true", "straggler belongs"),
            ("[cluster]\nnodes = 0\n[[fault]]\nkind = 'worker_kill'", "needs a node"),
        ],
    )
    def test_wrong_plans_say_what_is_wrong(self, text: str, word: str) -> None:
        with pytest.raises(ConfigurationError) as caught:
            plans.parse(text, where="plan")
        assert word in str(caught.value)

    @given(st.integers(1, 12), st.integers(0, 10_000), st.integers(2, 6))
    @settings(max_examples=30, deadline=None)
    def test_drawn_plans_are_a_function_of_the_seed_and_leave_nodes_over(self, number: int, seed: int, nodes: int) -> None:
        drawn = plans.draw(number, seed=seed, nodes=nodes)
        assert drawn == plans.draw(number, seed=seed, nodes=nodes)
        assert len(drawn.fault) == number
        taken = [
            one for one in drawn.fault if one.truth.incidents and (one.kind.startswith("nvml_") or one.kind in ("preempt", "flip_bit"))
        ]
        assert len(taken) <= nodes - 2
        for fault in drawn.fault:
            plans._check(fault, "drawn", drawn)


SLOW = msgspec.structs.replace(KINDS["worker_slow"], straggler=True)


def shot(kind: str, *, said: dict[str, Any] | None = None, seen: float = 2.0, **values: Any) -> Shot:
    incident = None if said is None else {"id": "i1", "recovered": True, "seconds": 3.0, "lost_steps": 1, "text": "t", **said}
    seen_at = None if said is None else seen
    usual: dict[str, Any] = {"node": "n1", "rank": 1, "at": 0.0, "deadline_seconds": 10.0, "seen_at": seen_at, "incident": incident}
    return Shot(kind=kind, **{**usual, **values})


class TestScore:
    @pytest.mark.parametrize(
        ("made", "error"),
        [
            (shot("worker_kill", said={"kind": "worker_exit", "node": "n1", "rank": 1}), ""),
            (shot("worker_kill"), "miss"),
            (shot("worker_kill", said={"kind": "worker_exit", "node": "n1", "rank": 0}), "wrong_rank"),
            (shot("worker_kill", said={"kind": "worker_exit", "node": "n2", "rank": 3}), "wrong_node"),
            (shot("worker_kill", said={"kind": "hang", "node": "n1", "rank": 1}), "wrong_kind"),
            (shot("worker_kill", said={"kind": "worker_exit", "node": "n1", "rank": 1}, seen=11.0), "late"),
            (shot("worker_kill", said={"kind": "worker_exit", "node": "n1", "rank": 1, "recovered": False}), "not_recovered"),
            (shot("worker_kill", injected=False), "not_injected"),
            (shot("nvml_lost", said={"kind": "unhealthy", "node": "n1", "rank": -1}), ""),
            (shot("nvml_lost", said={"kind": "unhealthy"}), "unnamed"),
            (shot("worker_slow", truth=SLOW, slow_rank=1), ""),
            (shot("worker_slow", truth=SLOW), "miss"),
            (shot("worker_slow", truth=SLOW, slow_rank=-1), "wrong_rank"),
            (shot("agent_kill"), ""),
            (shot("agent_kill", went_on=False), "not_recovered"),
            (shot("nvml_noise", said={"kind": "unhealthy", "node": "n1"}), "false_alarm"),
        ],
    )
    def test_one_fault(self, made: Shot, error: str) -> None:
        mark = judge(made)
        assert mark.error == error
        assert mark.named_right == (error in ("", "late", "not_recovered"))
        assert (mark.cost == 0) == (error == "")

    def test_the_card_adds_up(self) -> None:
        shots = [
            shot("worker_kill", said={"kind": "worker_exit", "node": "n1", "rank": 1}),
            shot("nvml_xid"),
            shot("agent_kill"),
            shot("nvml_noise", said={"kind": "unhealthy", "node": "n1"}),
        ]
        got = card(shots, plan="p", seed=1, stray_incidents=1, observed_seconds=1800)
        assert (got.ok, got.num_expected, got.num_detected, got.num_named_right, got.num_false_alarms) == (False, 2, 1, 1, 2)
        assert got.cost == COSTS["miss"] + 2 * COSTS["false_alarm"]
        assert got.false_alarms_per_day_upper95 == pytest.approx(upper95(2) * 48)
        assert card(shots[::2], plan="p", seed=1, stray_incidents=0, observed_seconds=60).ok

    def test_bounds_of_a_poisson_mean(self) -> None:
        assert upper95(0) == pytest.approx(2.9957, abs=1e-3)
        assert upper95(3) == pytest.approx(7.7537, abs=1e-3)

    def test_blaming_a_sound_node_costs_more_than_a_miss(self) -> None:
        assert COSTS["wrong_node"] > COSTS["miss"]

    def test_a_card_is_plain_data(self) -> None:
        got = card([shot("worker_kill")], plan="p", seed=1, stray_incidents=0, observed_seconds=60)
        assert msgspec.json.decode(msgspec.json.encode(got))["marks"][0]["error"] == "miss"


def regrow(*arguments: str | Path, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(Path(sys.executable).with_name("regrow")), *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ('[[fault]]\nkind = "worker_kill"\n[[fault]]\nkind = "worker_kil"', "p.toml, line 3, fault 2"),
        ('[[fault]]\nkind = "worker_kill"\n\nrankk = 3', "p.toml, line 4, fault 1"),
        ('seed = 1\n[[fault]]\nkind = "worker_kill"\nquiet_seconds = "x"', "p.toml, line 4, fault 1"),
        ('nodess = 3\n[[fault]]\nkind = "worker_kill"', "p.toml, line 1"),
        ('[job]\n\nsteps = "x"\n[[fault]]\nkind = "worker_kill"\nsteps = 3', "p.toml, line 3"),
        ('fault = [{kind = "worker_kil"}]', "p.toml, fault 1"),
    ],
)
def test_a_wrong_plan_is_told_by_line(text: str, place: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plans.parse(text, where="p.toml")
    assert caught.value.where == place


def test_a_plans_script_is_looked_for_beside_the_plan(tmp_path: Path) -> None:
    text = '[job]\nscript = "mine.py"\n[[fault]]\nkind = "worker_kill"\n'
    (tmp_path / "p.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"no script 'mine\.py'"):
        plans.load(str(tmp_path / "p.toml"))
    (tmp_path / "mine.py").touch()
    assert plans.load(str(tmp_path / "p.toml")).job.script == str(tmp_path / "mine.py")


def test_a_card_fits_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    long = {"id": "i", "kind": "hang", "node": "n10", "rank": 1023, "text": "word " * 80, "seconds": 1234.5, "lost_steps": 10**6}
    shot = Shot(kind="worker_stop", node="n10", rank=1023, at=0.0, seen_at=123.4, deadline_seconds=200, incident=long, detail="why " * 80)
    tell_card(card([shot], plan="p", seed=1, stray_incidents=1000, observed_seconds=1e6))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80, lines
    assert sum("word word" in line for line in lines) > 1
    assert any("why why" in line for line in lines)


def test_ls_and_dry_run(tmp_path: Path) -> None:
    def invoked(*arguments: str | Path) -> Result:
        return CliRunner().invoke(build(), ["chaos", *map(str, arguments), "--json"])

    assert {one["name"] for one in json.loads(invoked("ls").stdout)["kinds"]} == set(KINDS)
    assert len(json.loads(invoked("run", "--draw", "3", "--seed", "5", "--dry-run").stdout)["fault"]) == 3
    assert isinstance(invoked("run", tmp_path / "absent.toml").exception, ConfigurationError)
    assert regrow("chaos", "run", "--json").returncode == 2


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("plan", ["smoke", "gpu", "daemons", "workers"])
def test_a_plan_on_a_real_cluster(plan: str, tmp_path: Path) -> None:
    done = regrow("chaos", "run", plan, "--run-dir", tmp_path / "run", "--json", timeout=280)
    got = json.loads(done.stdout)
    assert done.returncode == 0, got
    assert got["num_named_right"] == got["num_expected"]
