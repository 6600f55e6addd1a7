"""From reports to records: the collector as tables, records under kill -9, fences, one order of all checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from ckpt_synthetic import commit, shard, simple, spec_of, write_shards

from regrow.ckpt import catalog, retention
from regrow.ckpt.commit import Collector, checkpoint_record, write_record
from regrow.ckpt.manifest import read_record
from regrow.ckpt.retention import Retention, choose, prune
from regrow.ckpt.verify import verify
from regrow.errors import ConfigurationError, FencedError, OperationalError
from regrow.wire import ShardFile, ShardsDurable, ShardsFailed


def report(step=1, ranks=(0, 1), node="n0", **changes) -> ShardsDurable:
    files = tuple(ShardFile(rank=rank, name=f"r{rank}", size_bytes=1, digest="d") for rank in ranks)
    values = {
        "job": "job", "epoch": 1, "generation": 1, "step": step, "node": node, "directory": f"/c/step-{step}", "ranks": ranks,
        "world_size": 4, "samples": step * 8, "files": files, "manifest": f"node-{node}.json", "manifest_digest": "m", "num_bytes": 10,
    }  # fmt: skip
    return ShardsDurable(**{**values, **changes})


def failed(step=1, node="n1") -> ShardsFailed:
    return ShardsFailed(job="job", generation=1, step=step, node=node, reason="disk full")


@pytest.mark.parametrize(("messages", "kinds"), [
    ([report(), report(ranks=(2, 3), node="n1")], ["waiting", "complete"]),
    ([report(), report(), report(ranks=(2, 3), node="n1"), report()], ["waiting", "waiting", "complete", "duplicate"]),
    ([report(), failed(), report(ranks=(2, 3), node="n1")], ["waiting", "void", "void"]),
    ([failed(), report()], ["void", "void"]),
    ([report(generation=2), report(epoch=2), report(job="other")], ["refused", "refused", "refused"]),
    ([report(), report(ranks=(1, 2), node="n1")], ["waiting", "void"]),
    ([report(), report(ranks=(2, 3), node="n1", directory="/c/elsewhere")], ["waiting", "void"]),
    ([report(), report(ranks=(2, 3), node="n1", samples=9)], ["waiting", "void"]),
    ([report(world_size=2)], ["void"]),
    ([report(files=())], ["void"]),
    ([report(), report(manifest_digest="other")], ["waiting", "void"]),
    ([report(1), report(2), report(2, (2, 3), "n1"), report(1, (2, 3), "n1")], ["waiting", "waiting", "complete", "void"]),
    ([report(2), report(1), report(1, (2, 3), "n1"), report(2, (2, 3), "n1")], ["waiting", "waiting", "complete", "complete"]),
])  # fmt: skip
def test_all_ranks_or_none(messages, kinds):
    collector = Collector(spec_of(4))
    assert [collector.add(message).kind for message in messages] == kinds


def test_an_older_step_that_comes_late_is_void():
    """Its record would get the higher sequence and be restored instead of the newer step."""
    collector = Collector(spec_of(1))
    newer, older = (report(step, ranks=(0,), world_size=1) for step in (7, 6))
    assert collector.add(newer).kind == "complete"
    late = collector.add(older)
    assert (late.kind, late.reason) == ("void", "superseded by step 7")


def test_what_the_collector_tells():
    collector = Collector(spec_of(4))
    assert collector.add(report(1)).missing == (2, 3)
    assert collector.open_steps == {1: (2, 3)}
    collector.add(report(2))
    outcome = collector.add(report(2, (2, 3), "n1"))
    assert outcome.superseded == (1,)
    assert outcome.pending is not None
    assert (outcome.pending.num_bytes, outcome.pending.samples, len(outcome.pending.reports)) == (20, 16, 2)
    assert collector.open_steps == {}


KILL = """
import sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import msgspec
from ckpt_synthetic import commit, spec_of
from regrow.wire import ShardsDurable
commit(spec_of(1), msgspec.json.decode(sys.argv[2].encode(), type=ShardsDurable))
"""


@pytest.mark.parametrize("name", [".metadata", "record.json"])
@pytest.mark.parametrize("call", ["write", "fsync", "rename", "sync"])
def test_a_committer_killed_at_any_call_can_be_repeated(tmp_path, name, call):
    simple(tmp_path, 1, world=1)
    spec = spec_of(1)
    held = [[shard("model.w", (6, 4), (1,), (0,), 0)]]
    import numpy as np

    message = write_shards(tmp_path, 2, spec, held, {"model.w": np.ones((6, 4), np.float32)})
    environment = {**os.environ, "REGROW_CKPT_FAULTS": f"publish.{name}.{call}:kill"}
    support = str(Path(__file__).parent / "support")
    command = [sys.executable, "-c", KILL, support, msgspec.json.encode(message).decode()]
    assert subprocess.run(command, env=environment, check=False).returncode == -signal.SIGKILL
    entry = catalog.newest_restorable(tmp_path)
    assert entry is not None
    assert entry.step == (2 if (name, call) == ("record.json", "sync") else 1)
    assert verify(Path(entry.directory)).valid
    record = commit(spec, message)
    assert record.step == 2
    entry = catalog.newest_restorable(tmp_path)
    assert entry is not None
    assert (entry.step, entry.sequence, entry.record_digest) == (2, 2, record.digest)
    assert verify(Path(entry.directory)).valid
    assert checkpoint_record(record, entry.directory).record_digest == entry.restore_point().record_digest


def test_a_shard_that_is_not_what_was_reported_is_not_committed(tmp_path):
    import numpy as np

    spec = spec_of(1)
    message = write_shards(tmp_path, 1, spec, [[shard("w", (4,), (1,), (0,), 0)]], {"w": np.ones(4, np.float32)})
    pending = Collector(spec).add(message).pending
    assert pending is not None
    with (Path(message.directory) / "rank-00000.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(OperationalError, match=r"rank-00000\.safetensors is not what node n0 reported"):
        write_record(pending, written_at=0.0)
    assert catalog.newest_restorable(tmp_path) is None


def test_an_older_generation_cannot_publish_after_a_later_one(tmp_path):
    """A03 on storage: generation 2 was formed from step 10; generation 1 wakes up with step 20."""
    first = simple(tmp_path, 10, generation=1)
    point = catalog.read_entry(first).restore_point()
    simple(tmp_path, 12, generation=2, restore=point)
    with pytest.raises(FencedError, match="generation 1 may not publish"):
        simple(tmp_path, 20, generation=1)
    entry = catalog.newest_restorable(tmp_path)
    assert entry is not None
    assert (entry.step, entry.generation) == (12, 2)


def test_one_order_whatever_wrote_them(tmp_path):
    """F13: another mesh, a new cluster that counts generations from 1 again, a roll-back: the newest commit wins."""
    simple(tmp_path, 100, generation=7, world=4)
    point = catalog.newest_restorable(tmp_path)
    assert point is not None
    simple(tmp_path, 200, generation=8, world=2, restore=point.restore_point())
    resharded = catalog.newest_restorable(tmp_path)
    assert resharded is not None
    assert resharded.step == 200
    simple(tmp_path, 210, generation=1, world=3, nonce="new", restore=resharded.restore_point())
    newest = catalog.newest_restorable(tmp_path)
    assert newest is not None
    assert (newest.step, newest.generation) == (210, 1)
    assert newest.parent is not None
    assert newest.parent.directory == resharded.name
    simple(tmp_path, 150, generation=9, world=3, restore=point.restore_point())
    rolled_back = catalog.newest_restorable(tmp_path)
    assert rolled_back is not None
    assert rolled_back.step == 150
    assert catalog.highest_generation(tmp_path) == 9
    older = catalog.newest_restorable(tmp_path, not_after_step=120)
    assert older is not None
    assert older.step == 100


def test_nothing_valid_although_something_was_expected_is_an_error(tmp_path):
    """F03: the sole checkpoint is damaged. Unfinished ones before the first commit are no reason to stop."""
    assert catalog.decide_restore(tmp_path / "not-there") is None
    with pytest.raises(OperationalError, match="was expected and none can be restored"):
        catalog.decide_restore(tmp_path / "not-there", expected=True)
    (tmp_path / "step-000000000001-g1-abc").mkdir()
    assert catalog.decide_restore(tmp_path) is None
    directory = simple(tmp_path, 5)
    (directory / "rank-00001.safetensors").unlink()
    with pytest.raises(OperationalError, match=r"rank-00001\.safetensors is missing") as caught:
        catalog.decide_restore(tmp_path)
    assert "fresh start" in caught.value.hint
    assert catalog.decide_restore(tmp_path, fresh_start=True) is None
    assert directory.is_dir()


def test_a_damaged_one_is_set_aside_and_the_next_older_is_taken(tmp_path):
    simple(tmp_path, 1)
    directory = simple(tmp_path, 2)
    catalog.set_aside(directory, "rank 1 found a wrong block")
    catalog.set_aside(directory, "again")
    entry = catalog.decide_restore(tmp_path)
    assert entry is not None
    assert entry.step == 1
    damaged = catalog.scan(tmp_path)[0]
    assert (damaged.state, damaged.problem) == ("damaged", "was set aside: rank 1 found a wrong block")


@pytest.mark.parametrize("place", ["file/below", "/proc/regrow"])
def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, place):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(ConfigurationError, match="cannot be written") as refusal:
        catalog.check_writable(tmp_path / place)
    assert place in refusal.value.where
    assert refusal.value.hint


def test_the_check_of_a_folder_leaves_it_empty(tmp_path):
    catalog.check_writable(tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list every folder")
def test_a_folder_that_cannot_be_listed_is_an_error_for_users(tmp_path):
    tmp_path.chmod(0o000)
    with pytest.raises(OperationalError, match="cannot be listed"):
        catalog.scan(tmp_path)


def test_a_listing_error_is_an_error(tmp_path):
    """F09: never read as 'no checkpoints'."""
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(OperationalError, match="cannot be listed"):
        catalog.scan(file)


def test_names_decide_nothing(tmp_path):
    """F01: a later directory without a record, a pointer file and a renamed copy change nothing."""
    directory = simple(tmp_path, 3)
    (tmp_path / "step-000000000009-g1-abc").mkdir()
    (tmp_path / "latest").write_text("step-000000000009-g1-abc")
    entry = catalog.newest_restorable(tmp_path)
    assert entry is not None
    assert entry.step == 3
    directory.rename(tmp_path / "step-000000000077-g1-moved")
    entry = catalog.newest_restorable(tmp_path)
    assert entry is not None
    assert entry.step == 3


def test_one_job_a_folder(tmp_path):
    """Another job may take a folder over by going on from its newest checkpoint; two that save into one are told, and nothing is lost."""
    spec = spec_of(1)
    held, arrays = [[shard("w", (4,), (1,), (0,), 0)]], {"w": np.zeros(4, np.float32)}
    first = commit(spec, write_shards(tmp_path, 5, spec, held, arrays))
    entry = catalog.newest_restorable(tmp_path)
    assert entry is not None
    other = msgspec.structs.replace(spec_of(1, 1), job="other")
    with pytest.raises(OperationalError, match="the folder is that of job job: it holds step-000000000005-g1-abc"):
        commit(other, write_shards(tmp_path, 6, other, held, arrays, nonce="fresh"))
    heir = msgspec.structs.replace(other, generation=2, restore=entry.restore_point())
    assert commit(heir, write_shards(tmp_path, 7, heir, held, arrays)).sequence == first.sequence + 1
    with pytest.raises(OperationalError, match="the folder is that of job other"):
        commit(spec, write_shards(tmp_path, 8, spec, held, arrays))
    assert [one.step for one in catalog.scan(tmp_path) if one.state == "restorable"] == [7, 5]
    with pytest.raises(ConfigurationError, match="holds checkpoints of job other"):
        catalog.check_own(tmp_path, "job")
    catalog.check_own(tmp_path / "missing", "job")


def test_one_that_cannot_be_read_stops_neither_saves_nor_retention(tmp_path):
    """A checkpoint that an administrator put there with other permissions, or a bad sector: here a record that is a folder."""
    simple(tmp_path, 1)
    unreadable = simple(tmp_path, 2)
    (unreadable / "record.json").rename(unreadable / "record.old")
    (unreadable / "record.json").mkdir()
    for step in (3, 4):
        simple(tmp_path, step)
    choices = {choice.step: choice.keep for choice in prune(tmp_path, Retention(keep_last=1), generation=1)}
    assert choices == {4: True, 3: False, 2: True, 1: False}
    for look in (catalog.scan, catalog.newest_restorable, catalog.decide_restore):
        with pytest.raises(OperationalError, match="cannot be read: Is a directory"):
            look(tmp_path)


def test_retention_keeps_what_it_must_and_touches_nothing_else(tmp_path):
    """F05: strange names, leftovers of this and of older generations, the live step, missing folder."""
    assert prune(tmp_path / "missing", Retention(), generation=1) == []
    for step in range(1, 7):
        simple(tmp_path, step * 10, generation=2)
    strangers = ["step-abc", "step-12.tmp", "notes", "step-000000000001"]
    for name in strangers:
        (tmp_path / name).mkdir()
    for name in ("step-000000000005-g1-abc", "step-000000000015-g2-abc", "step-000000000070-g2-abc"):
        (tmp_path / name).mkdir()
    protected = "step-000000000020-g2-abc"
    choices = prune(tmp_path, Retention(keep_last=2, keep_every_steps=30), generation=2, protected={protected})
    gone = {choice.name for choice in choices if not choice.keep}
    assert gone == {"step-000000000010-g2-abc", "step-000000000040-g2-abc", "step-000000000005-g1-abc", "step-000000000015-g2-abc"}
    left = {path.name for path in tmp_path.iterdir()}
    kept = {f"step-{step:012d}-g2-abc" for step in (20, 30, 50, 60, 70)}
    assert left == {*strangers, *kept}
    assert [entry.step for entry in catalog.scan(tmp_path) if entry.state == "restorable"] == [60, 50, 30, 20]


def test_one_in_so_many_hours_is_kept():
    hours = [3.1, 3.0, 1.9, 1.2, 0.5, 0.1]
    entries = [
        catalog.CatalogEntry(directory=f"/c/{at}", state="restorable", step=int(at * 10), generation=1, written_at=at * 3600)
        for at in hours
    ]
    choices = choose(entries, Retention(keep_last=1, keep_every_seconds=3600), generation=1)
    assert [choice.name for choice in choices if choice.keep] == ["3.1", "3.0", "1.2", "0.1"], "the newest, and the first of each hour"


def test_the_newest_restorable_is_never_removed(tmp_path):
    simple(tmp_path, 1)
    damaged = simple(tmp_path, 2)
    catalog.set_aside(damaged, "test")
    prune(tmp_path, Retention(keep_last=0), generation=5)
    assert {entry.step: entry.state for entry in catalog.scan(tmp_path)} == {2: "damaged", 1: "restorable"}


def test_an_interrupted_removal_is_finished_later(tmp_path):
    directory = simple(tmp_path, 1)
    simple(tmp_path, 2)
    directory.rename(tmp_path / f"{retention.TRASH}{directory.name}-0badcafe")
    (tmp_path / f"{retention.TRASH}mine").mkdir()
    prune(tmp_path, Retention(), generation=1)
    assert {path.name for path in tmp_path.iterdir()} == {"step-000000000002-g1-abc", f"{retention.TRASH}mine"}


def test_the_record_certifies_itself(tmp_path):
    directory = simple(tmp_path, 1)
    path = directory / "record.json"
    document = json.loads(path.read_bytes())
    document["step"] = 2
    path.write_text(json.dumps(document))
    entry = catalog.read_entry(directory)
    assert (entry.state, "digest does not match" in entry.problem) == ("damaged", True)
    assert read_record is not None
