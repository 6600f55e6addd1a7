"""What an operator does by hand: fork, roll back further, skip batches; the account of samples stays honest."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from pathlib import Path

import pytest
import torch
from ckpt_small import Small
from ckpt_synthetic import simple

from regrow.ckpt import catalog
from regrow.ckpt.operate import OPERATIONS_NAME, account, operations
from regrow.ckpt.verify import verify
from regrow.cli import app


def main(words: list[str]) -> int:
    """`regrow …` by its entry point; the exit code."""
    before, sys.argv = sys.argv, ["regrow", *words]
    try:
        app.run()
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else 0
    finally:
        sys.argv = before
    return 0


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    """`regrow …` in this process: exit code, and the document on stdout."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REGROW_SUPERVISOR", raising=False)

    def call(*words: object):
        code = main([str(word) for word in (*words, "--json")])
        return code, json.loads(capsys.readouterr().out)

    return call


def restorable(folder: Path) -> list[int]:
    return [entry.step for entry in catalog.scan(folder) if entry.state == "restorable"]


def test_roll_back_then_skip_then_train_on(tmp_path, run):
    folder = tmp_path / "job"
    first = Small(folder)
    for step in (1, 2, 3):
        first.train(1)
        first.save(step)
    code, document = run("ckpt", "roll-back-further", folder, "--to-step", 2, "--reason", "loss spike")
    assert code == 0
    assert restorable(folder) == [2, 1]
    assert document["operation"]["set_aside"] == [entry.name for entry in catalog.scan(folder) if entry.step == 3]
    assert document["account"] == {"position": 8, "trained": 8, "skipped": 0, "discarded": 4}
    wanted = Small(folder, 2, catalog.newest_restorable(folder).restore_point())
    wanted.state.restore()
    code, document = run("ckpt", "skip-batches", folder, "--samples", 12, "--reason", "bad shard")
    assert code == 0
    newest = catalog.newest_restorable(folder)
    assert (newest.step, newest.samples, newest.name) == (2, 20, document["operation"]["to_directory"])
    assert verify(Path(newest.directory)).valid
    assert newest.parent.step == 2
    assert document["account"] == {"position": 20, "trained": 8, "skipped": 12, "discarded": 4}
    again = Small(folder, 3, newest.restore_point(), seed=9)
    assert (again.state.restore(), again.state.samples) == (2, 20)
    for name, value in wanted.tensors().items():
        assert torch.equal(value, again.tensors()[name]), name
    again.train(1)
    assert again.state.save(3, 24).outcome == "snapshot"
    assert again.state.counts.last_reason == ""
    code, document = run("ckpt", "lineage", folder)
    assert [one["step"] for one in document["lineage"]] == [3, 2, 2]
    assert [one["samples"] for one in document["lineage"]] == [24, 20, 8]
    assert document["account"] == {"position": 24, "trained": 12, "skipped": 12, "discarded": 4}
    code, document = run("ckpt", "roll-back-further", folder, "--to-step", 1)
    assert document["account"] == {"position": 4, "trained": 4, "skipped": 0, "discarded": 24}


def test_a_fork_is_a_job_of_its_own(tmp_path, run):
    folder, other = tmp_path / "job", tmp_path / "deep" / "other"
    for step in (1, 2):
        simple(folder, step)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    code, document = run("ckpt", "fork", folder, other, "--job", "second", "--step", 1)
    assert code == 0
    entry = catalog.newest_restorable(other)
    assert (entry.job, entry.step, entry.samples, entry.sequence) == ("second", 1, 8, 1)
    assert entry.directory == document["directory"]
    assert verify(Path(entry.directory)).valid
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    source = next(one for one in catalog.scan(folder) if one.step == 1)
    assert entry.parent.record_digest == source.record_digest
    for path in Path(entry.directory).iterdir():
        assert path.stat().st_nlink == 1, "a fork shares nothing with its source"
    code, document = run("ckpt", "diff", entry.directory, source.directory)
    assert code == 0
    assert document["difference"]["facts"]["job"] == ["second", "job"]
    code, document = run("ckpt", "fork", folder, other, "--job", "third")
    assert code == 2
    assert "holds checkpoints already" in document["error"]["what"]
    for name, target, told in (("No Good", tmp_path / "new", "'No Good' is not usable"), ("good", "s3://bucket/new", "is a URL (s3)")):
        code, document = run("ckpt", "fork", folder, target, "--job", name)
        assert code == 2
        assert told in document["error"]["what"]
    assert not (tmp_path / "new").exists()


def test_wrong_use_changes_nothing(tmp_path, run):
    folder = tmp_path / "job"
    made = simple(folder, 1)
    for words, message in (
        (("roll-back-further", folder), "there is not an older checkpoint"),
        (("roll-back-further", folder, "--to-step", 1), "there is not an older checkpoint of step 1"),
        (("skip-batches", folder), "say how much"),
        (("skip-batches", folder, "--batches", 1, "--samples", 1), "say how much"),
        (("skip-batches", folder, "--batches", 1), "does not say its global batch"),
        (("skip-batches", tmp_path / "none", "--samples", 1), "does not exist"),
        (("lineage", tmp_path / "none"), "does not exist"),
    ):
        code, document = run("ckpt", *words)
        assert code == 2, words
        assert message in document["error"]["what"], words
    data = bytearray((made / "rank-00000.safetensors").read_bytes())
    data[-4097] ^= 1
    (made / "rank-00000.safetensors").write_bytes(data)
    code, document = run("ckpt", "skip-batches", folder, "--samples", 8)
    assert code == 1
    assert "is damaged: rank-00000.safetensors" in document["error"]["what"]
    assert [path.name for path in folder.iterdir()] == [made.name]
    assert not (folder / OPERATIONS_NAME).exists()


def test_a_loader_with_a_position_of_its_own_cannot_skip(tmp_path, run):
    class Loader:
        def state_dict(self):
            return {"at": 4}

        def load_state_dict(self, state):
            raise AssertionError

    alone = Small(tmp_path / "job", data=Loader())
    alone.train(1)
    alone.save(1)
    code, document = run("ckpt", "skip-batches", tmp_path / "job", "--samples", 8)
    assert code == 2
    assert "a position of its own" in document["error"]["what"]
    assert restorable(tmp_path / "job") == [1]


def test_not_while_the_job_runs(tmp_path, run):
    """The supervisor is asked where one is known."""
    simple(tmp_path / "job", 1)
    simple(tmp_path / "job", 2)

    class Answer(http.server.BaseHTTPRequestHandler):
        state = "running"

        def do_GET(self):
            body = json.dumps({"jobs": [{"job": "job", "state": self.state}]}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        where = f"http://127.0.0.1:{server.server_port}"
        code, document = run("ckpt", "roll-back-further", tmp_path / "job", "--supervisor", where)
        assert code == 2
        assert "job job runs" in document["error"]["what"]
        assert restorable(tmp_path / "job") == [2, 1]
        Answer.state = "stopped"
        code, document = run("ckpt", "roll-back-further", tmp_path / "job", "--supervisor", where)
        assert code == 0
        assert restorable(tmp_path / "job") == [1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_people_read_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for step in (1, 2):
        simple(tmp_path / "job", step)
    assert main(["ckpt", "roll-back-further", "job", "--reason", "spike at 2"]) == 0
    assert "step 2 -> 1: 8 samples will be trained again" in capsys.readouterr().out
    assert main(["ckpt", "lineage", "job"]) == 0
    shown = capsys.readouterr().out
    assert "operator: roll-back step 2 -> 1, samples 16 -> 8  spike at 2" in shown
    assert "samples: position 8, trained 8, skipped 0, rolled back 8" in shown
    assert main(["ckpt", "ls", "job"]) == 0
    assert "rolled back to step 1 by an operator: spike at 2" in capsys.readouterr().out
    assert account(operations(tmp_path / "job"), 8).discarded == 8
