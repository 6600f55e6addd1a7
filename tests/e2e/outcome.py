"""What must hold after any fault, read from what the run left: the store's whole history, the workers' logs, the processes."""

from __future__ import annotations

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.hosts import LIMIT_SECONDS, Site

PREFIX = "/regrow/local/jobs/toy/"


def logs(folder: Path) -> dict[int, list[list[dict[str, Any]]]]:
    """{generation: the lines of each rank's log}, generations in order."""
    found: dict[int, list[list[dict[str, Any]]]] = {}
    for path in sorted(folder.glob("g*-r*.jsonl"), key=lambda path: int(path.stem[1:].split("-")[0])):
        lines = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
        found.setdefault(int(path.stem[1:].split("-")[0]), []).append(lines)
    return found


def true_frontier(folder: Path, before: int) -> int:
    """The highest step that any rank of a generation below `before` has applied, by its own words."""
    own = [lines[-1].get("step", lines[0]["restored"]) for number, ranks in logs(folder).items() if number < before for lines in ranks]
    return max((int(step) for step in own), default=0)


def restored(folder: Path, after: int) -> dict[int, int]:
    """{generation: the step that its workers took up} of the generations above `after`."""
    found: dict[int, int] = {}
    for number, ranks in logs(folder).items():
        if number > after:
            steps = {lines[0]["restored"] for lines in ranks if lines}
            assert len(steps) == 1, f"ranks of generation {number} restored different steps: {steps}"
            found[number] = steps.pop()
    return found


def assert_like_twin(folder: Path, twin: dict[int, float]) -> None:
    """The lineage has every step once, with the loss of a run without faults."""
    kept: dict[int, float] = {}
    for ranks in logs(folder).values():
        lines = ranks[0]
        kept = {step: loss for step, loss in kept.items() if step <= lines[0]["restored"]} | {
            line["step"]: line["loss"] for line in lines[1:]
        }
    assert sorted(kept) == list(range(1, max(kept) + 1))
    for step, loss in kept.items():
        if step in twin:
            assert loss == pytest.approx(twin[step], rel=1e-5), f"step {step}"


def assert_one_generation_publishes(site: Site) -> int:
    """Each checkpoint was committed while the generation that wrote it was the current one. Returns how many."""
    current, found = 0, 0
    for event in history(site):
        key = event["key"].removeprefix(PREFIX)
        if key == "generation":
            assert event["value"]["number"] > current, "numbers of generations rise"
            current = event["value"]["number"]
        elif key.startswith("checkpoints/") and event["created"]:
            assert event["value"]["generation"] == current, f"{key} by {event['value']['generation']} while {current} is current"
            found += 1
    return found


def num_commits(site: Site) -> int:
    """Checkpoints that were ever committed."""
    return sum(event["created"] and event["key"].startswith(f"{PREFIX}checkpoints/") for event in history(site))


def history(site: Site) -> list[dict[str, Any]]:
    """All that was ever written below the job's prefix, in order of its revision, up to now."""
    client = site.etcdctl("put", f"{PREFIX}end", '"end"', "-w", "json")
    done = subprocess.run(client, capture_output=True, timeout=LIMIT_SECONDS, check=False)
    assert done.returncode == 0, site.story()
    now = json.loads(done.stdout)["header"]["revision"]
    found: list[dict[str, Any]] = []
    newest = 0
    with subprocess.Popen(site.etcdctl("watch", "--prefix", PREFIX, "--rev=1", "-w", "json"), stdout=subprocess.PIPE) as watch:
        assert watch.stdout is not None
        for line in watch.stdout:
            for event in json.loads(line).get("Events") or ():
                item = event["kv"]
                newest = max(newest, item["mod_revision"])
                if "value" in item:
                    value = json.loads(base64.b64decode(item["value"]))
                    created = item["create_revision"] == item["mod_revision"]
                    found.append({"key": base64.b64decode(item["key"]).decode(), "value": value, "created": created})
            if newest >= now:  # workers write meanwhile: it may not be the last of its batch
                break
        watch.kill()
    return found


def assert_no_orphan(site: Site) -> None:
    """Whatever trains belongs to the current generation, on its members; nothing else does once the old ones were told."""

    def clean() -> bool:
        job = site.job()
        members = {node["node"] for node in job.get("nodes", []) if node["ranks"]}
        return bool(members) and all(
            host in members and number == job["generation"] for host, found in site.workers().items() for number, _ in found
        )

    site.until(clean, "only workers of the current generation")
