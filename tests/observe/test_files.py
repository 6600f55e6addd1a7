"""What is checked in: rules, dashboards and the runbook belong together and to the metrics."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models
from tests.observe.conftest import ROOT

from regrow import telemetry
from regrow.dashboards import grafana, panels, rules, write

FOLDER = ROOT / "dashboards"
ALERTS = rules.alerts(rules.Pace())
OF_THE_PROCESS = {"up", "ALERTS", "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"}


def exported() -> set[str]:
    """Names of all series that there can be."""
    names = {metric.series for metric in telemetry.METRICS if metric.kind != "histogram"}
    for metric in telemetry.METRICS:
        if metric.kind == "histogram":
            names |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
    return names | {record.name for record in rules.records(rules.Pace())}


def test_the_checked_in_files_are_what_the_code_writes() -> None:
    for name, text in (write.files() | grafana.files()).items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, f"{name}: run `python -m regrow.dashboards.write`"
    boards = {f"grafana/{path.name}" for path in (FOLDER / "grafana").iterdir()}
    assert boards == set(grafana.files())


@pytest.mark.parametrize("command", ["check rules", "test rules"])
def test_promtool_accepts_the_rules(command: str) -> None:
    files = sorted((FOLDER / "rules" / "tests").glob("*.yaml")) if command.startswith("test") else sorted((FOLDER / "rules").glob("*.yaml"))
    assert files
    done = subprocess.run(["promtool", *command.split(), *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("factor", [1.0, 1 / 30, 1 / 10_000])
def test_shortened_rules_are_rules(factor: float, tmp_path: Path) -> None:
    path = tmp_path / "alerts.yaml"
    path.write_text(write.alerts_yaml(rules.Pace(factor)) + write.recording_yaml(rules.Pace(factor)).partition("groups:\n")[2])
    done = subprocess.run(["promtool", "check", "rules", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("seconds", "text"), [(60, "1m"), (90, "90s"), (3600, "1h"), (86_400, "1d"), (5400, "90m")])
def test_durations(seconds: float, text: str) -> None:
    assert rules.Pace().d(seconds) == text
    assert rules.Pace(1 / 60).d(60) == "1s"
    assert rules.Pace(1e-9).d(60) == "1s", "never zero"


def test_each_alert_has_a_chapter_of_the_runbook_and_each_chapter_an_alert() -> None:
    text = (ROOT / rules.RUNBOOK).read_text(encoding="utf-8")
    chapters = dict(re.findall(r"^### (Regrow\w+)\n\n(.*?)(?=\n### |\n## |\Z)", text, flags=re.MULTILINE | re.DOTALL))
    assert set(chapters) == {alert.name for alert in ALERTS if alert.severity != "none"}
    for alert in ALERTS:
        if alert.severity == "none":
            assert alert.name in text
            continue
        body = chapters[alert.name]
        assert body.startswith(f"*{alert.severity}*"), f"{alert.name}: the chapter begins with its severity"
        for word in ("Means", "Check", "Do"):
            assert f"**{word}**" in body, f"{alert.name}: {word}"


def test_alerts_are_complete() -> None:
    names = [alert.name for alert in ALERTS]
    assert len(names) == len(set(names))
    for alert in ALERTS:
        assert len(alert.summary) > 10
        assert alert.runbook == f"docs/operations.md#{alert.name.lower()}"
    for one in rules.INHIBITIONS:
        for name in re.findall(r"Regrow\w+", one.source + one.target):
            assert any(re.match(name, known) for known in names), f"inhibition by {name}, which is no alert"


def test_rules_and_panels_ask_for_metrics_that_exist() -> None:
    asked = [alert.expr for alert in ALERTS] + [record.expr for record in rules.records(rules.Pace())]
    asked += [query.expr for board in panels.BOARDS for panel in board.panels for query in panel.queries]
    for expr in asked:
        bare = re.sub(r'"[^"]*"', "", expr)
        for name in re.findall(r"\b(?:regrow[_:][\w:]+|process_\w+)", bare):
            assert name in exported() | OF_THE_PROCESS, f"{name} in {expr}"


def test_every_metric_is_in_the_docs_with_its_labels() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(regrow_\w+)` \| \w+ \| ([^|]*) \|", text, flags=re.MULTILINE))
    assert rows == {metric.series: ", ".join(metric.labels) for metric in telemetry.METRICS}


def test_names_follow_the_rules() -> None:
    for metric in telemetry.METRICS:
        assert not re.search(r"_(ms|milliseconds|minutes|hours|percent|kb|mb|gb)(_|$)", metric.series), metric.series
        assert "job" not in metric.labels, "Prometheus takes it for the scrape job"
        assert "instance" not in metric.labels
        assert metric.help
        assert not metric.help.endswith(".")


BOARDS = sorted((FOLDER / "grafana").glob("*.json"))


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_a_dashboard_is_whole_to_the_models_of_grafanas_sdk(path: Path) -> None:
    """Read into the SDK's models and written again it is the same: no key that Grafana does not know, none that it would add."""
    register_default_plugins()
    document = json.loads(path.read_text(encoding="utf-8"))
    assert json.loads(json.dumps(models.Dashboard.from_json(document), cls=JSONEncoder)) == document


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_have_ids_options_and_a_place_of_their_own(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    shown = document["panels"]
    assert len({panel["id"] for panel in shown}) == len(shown)
    known = {variable["name"] for variable in document["templating"]["list"]} | {"__rate_interval"}
    taken: set[tuple[int, int]] = set()
    for panel in shown:
        assert panel["options"], panel["title"]
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert max(x for x, _ in cells) < 24
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        for target in panel["targets"]:
            assert set(re.findall(r"\$\{?(\w+)", target["expr"])) <= known, target["expr"]
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= set(re.findall(r"\w+", target["expr"])), target["legendFormat"]
