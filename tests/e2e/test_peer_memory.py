"""A node is lost and its shards on storage are destroyed with it: they come from the memory of its buddy."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.e2e.launcher import Run
from tests.e2e.test_spare import TOY, lose_power

from regrow.ckpt import catalog
from regrow.ckpt.manifest import read_manifests, read_record

pytestmark = pytest.mark.timeout(400)


def restored_bytes(run: Run, node: str) -> dict[str, int]:
    """What the restore of rank 0 read, by source, as the node's agent tells Prometheus."""
    address = json.loads((run.root / "nodes" / node / "agent-run.json").read_text())["metrics"]
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("regrow_worker_restored_bytes{")]
    return {re.search(r'source="(\w+)"', line)[1]: int(float(line.rsplit(" ", 1)[1])) for line in lines}


def destroy(checkpoints: Path, node: str) -> None:
    """Overwrite what a node wrote, in every checkpoint that there is."""
    for entry in catalog.scan(checkpoints):
        directory = Path(entry.directory)
        if entry.state != "restorable":
            continue
        for manifest in read_manifests(directory, read_record(directory)):
            for rank in manifest.ranks if manifest.node == node else ():
                (directory / rank.file).write_bytes(b"\xff" * rank.size_bytes)


def test_a_lost_node_restores_from_its_buddys_memory(launch: Callable[..., Run], tmp_path: Path, twin: dict[int, float]) -> None:
    sizes = ("--local", "3", "--nproc-per-node", "1", "--nnodes", "2:2", "--global-batch", "8")
    flags = ("--job", "toy", "--peer-memory", "--no-in-place", "--no-gasp")  # else the survivor has it all in its own memory
    run = launch(*sizes, *flags, str(TOY), "--steps", "150", "--log", str(tmp_path / "log"))
    copied = lambda: all("copy held" in (run.root / "nodes" / name / "writer.log").read_text() for name in nodes())  # noqa: E731

    def nodes() -> list[str]:
        return [node["node"] for node in run.job("toy").get("nodes", []) if node["ranks"]]

    run.until(lambda: (run.job("toy").get("checkpoint") or {}).get("step") and len(nodes()) == 2 and copied(), "a checkpoint with copies")
    (lost,) = (node["node"] for node in run.job("toy")["nodes"] if node["ranks"] == [0])
    assert lose_power(run, lost) >= 3
    destroy(run.root / "checkpoints", lost)
    run.until(lambda: any(item["recovered"] for item in run.job("toy").get("incidents", [])), "a recovery")
    log = tmp_path / "log"
    restored = json.loads((log / "g2-r0.jsonl").read_text().splitlines()[0])["restored"]
    assert restored > 0, "storage had only damaged bytes of this node"
    (spare,) = (node["node"] for node in run.job("toy")["nodes"] if node["ranks"] == [0])
    sources = restored_bytes(run, spare)
    assert sources["peers"] > 0
    assert sources["storage"] == 0
    assert run.wait() == 0, run.story()
    lines = [json.loads(line) for line in (log / "g2-r0.jsonl").read_text().splitlines()[1:]]
    assert lines[0]["step"] == restored + 1
    for line in lines:
        assert line["loss"] == pytest.approx(twin[line["step"]], rel=1e-5)
    assert run.gone(5.0) == []
