"""Retention by a metric that the script tells: what counts as best, and what `regrow ckpt` says of it."""

from __future__ import annotations

import json
import math
import sys

import pytest
from ckpt_small import Small
from ckpt_synthetic import simple

from regrow.agent.worker.binding import StateKeeper
from regrow.ckpt import catalog
from regrow.ckpt.catalog import CatalogEntry
from regrow.ckpt.manifest import Metric, newest_metrics
from regrow.ckpt.retention import Retention, best, choose, parse_best, prune
from regrow.cli import app
from regrow.errors import ConfigurationError


def entry(step: int, *told: tuple[float, int], state: str = "restorable") -> CatalogEntry:
    metrics = {"held_out": Metric(value=told[0][0], step=told[0][1])} if told else {}
    return CatalogEntry(directory=f"/c/{step}", state=state, step=step, generation=1, sequence=step, metrics=metrics)


def test_one_measurement_counts_once_and_for_the_state_that_is_nearest():
    """Steps 20, 30 and 40 carry what was measured at 18: the first of them holds the state that was measured, nearly."""
    entries = [entry(60), entry(50, (2.5, 48)), entry(40, (2.0, 18)), entry(30, (2.0, 18)), entry(20, (2.0, 18)), entry(10, (3.0, 8))]
    assert best(entries, "held_out", count=2) == ["20", "50"]
    assert best(entries, "held_out", count=1, highest=True) == ["10"]
    assert best(entries, "held_out", count=9) == ["20", "50", "10"]
    assert best(entries, "other", count=9) == best(entries, "held_out", count=-1) == []
    assert best([entry(10, (2.0, 10)), entry(20, (2.0, 20))], "held_out", count=1) == ["20"], "equal: the later one"


def test_the_best_is_kept_besides_the_newest_and_never_instead_of_it():
    entries = [entry(50, (9.0, 50)), entry(40, (3.0, 40)), entry(30, (1.0, 30), state="damaged"), entry(20, (2.0, 20)), entry(10)]
    choices = choose(entries, Retention(keep_last=1, keep_best=1, best_metric="held_out"), generation=1)
    assert {choice.step: choice.keep for choice in choices} == {50: True, 40: False, 30: True, 20: True, 10: False}
    barred = choose(entries, Retention(keep_last=1, keep_best=1, best_metric="held_out"), generation=1, barred={"20"})
    assert {choice.step for choice in barred if choice.keep} == {50, 40, 30}
    assert next(choice.reason for choice in choices if choice.step == 20) == "one of the best 1 by held_out"


def test_metrics_of_several_ranks_and_nodes_become_one():
    old, new = Metric(value=1.0, step=5), Metric(value=2.0, step=6)
    assert newest_metrics({"a": old}, {"a": new, "b": old}) == {"a": new, "b": old}
    assert newest_metrics({"a": new}, {"a": old}) == {"a": new}
    assert newest_metrics({"a": new}, {"a": Metric(value=3.0, step=6)}) == {"a": new}


@pytest.mark.parametrize("text", ["", "held_out:0", "held_out:x", "held_out:1:up", "a b", ":2", "held_out:1:2:max"])
def test_a_flag_that_is_not_understood(text):
    with pytest.raises(ConfigurationError):
        parse_best(text)


def test_forms_of_the_flag():
    assert parse_best("held_out") == ("held_out", 1, False)
    assert parse_best("val/acc:3:max") == ("val/acc", 3, True)
    assert parse_best("acc:max") == ("acc", 1, True)


def main(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str]:
    """`regrow ckpt …` by its entry point: exit code, and what it printed."""
    before, sys.argv = sys.argv, ["regrow", "ckpt", *map(str, words)]
    try:
        app.run()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    else:
        code = 0
    finally:
        sys.argv = before
    return code, capsys.readouterr().out


def test_what_a_script_measures_is_in_the_record(tmp_path):
    """Through the real saving code; what is not finite withdraws the value before it."""
    small = Small(tmp_path)
    keeper = StateKeeper(small.state)
    for step, told in ((1, 2.0), (2, None), (3, math.nan)):
        if told is not None:
            keeper.measured("held_out", told, step)
        keeper.measured("loss", 10.0 - step, step)
        small.train(1)
        small.save(step)
    small.state.close()
    told = {one.step: one.metrics for one in catalog.scan(tmp_path)}
    assert told[1] == {"held_out": Metric(value=2.0, step=1), "loss": Metric(value=9.0, step=1)}
    assert told[2] == {"held_out": Metric(value=2.0, step=1), "loss": Metric(value=8.0, step=2)}
    assert told[3] == {"loss": Metric(value=7.0, step=3)}


def test_commands(tmp_path, capsys):
    for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5)):
        simple(tmp_path, step, metrics={"held_out": Metric(value=loss, step=step)})
    simple(tmp_path, 4, metrics={"held_out": Metric(value=1.5, step=3)})
    code, text = main(capsys, "ls", tmp_path, "--best", "held_out")
    marked = [line for line in text.splitlines() if "<- best" in line]
    assert (code, len(marked), "held_out=1  <- best" in marked[0]) == (0, 1, True)
    assert "held_out=1.5 (of step 3)" in text
    document = json.loads(main(capsys, "ls", tmp_path, "--best", "held_out:1:max", "--json")[1])
    assert [one["step"] for one in document["checkpoints"] if one["best"]] == [1]
    assert document["checkpoints"][0]["metrics"] == {"held_out": {"value": 1.5, "step": 3}}
    assert main(capsys, "ls", tmp_path, "--best", "accuracy")[0] == 2
    assert main(capsys, "prune", tmp_path, "--keep", 1, "--keep-best", "held_out:x")[0] == 2
    assert main(capsys, "prune", tmp_path, "--keep", 1, "--keep-best", "held_out")[0] == 0
    assert [one.step for one in catalog.scan(tmp_path)] == [4, 2]
    prune(tmp_path, Retention(keep_last=1), generation=1)
    assert [one.step for one in catalog.scan(tmp_path)] == [4]
