"""`regrow autopsy`: on a real torchrun job that hangs, and the judgement by itself."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regrow.agent.health import flight, jobs, stackview
from regrow.agent.health.autopsy_verdict import RankView, judge
from regrow.agent.health.flight import FlightFinding
from regrow.agent.health.stackview import Frame, Stack, stack_of
from regrow.errors import OperationalError

BIN = Path(sys.executable).parent
TORCH = "/x/site-packages/torch/distributed/distributed_c10d.py"
WAITING = stack_of([Frame("all_reduce", TORCH, 1), Frame("train", "/home/u/train.py", 20)])
ELSEWHERE = stack_of([Frame("barrier", TORCH, 1), Frame("evaluate", "/home/u/train.py", 90)])
LOADING = stack_of(
    [Frame("get", "/usr/lib/python3.11/queue.py", 1), Frame("_next_data", "/x/site-packages/torch/utils/data/dataloader.py", 1)]
)


def view(rank: int, stack: Stack = WAITING, **more: Any) -> RankView:
    return RankView(rank=rank, pid=1000 + rank, state=more.pop("state", "S"), stack=stack, **more)


@pytest.mark.parametrize(
    ("ranks", "cause", "odd"),
    [
        ([view(0), view(1, state="T"), view(2)], "process_stopped", (1,)),
        ([view(0), view(1), view(2, state="gone")], "process_gone", (2,)),
        ([view(0), view(1, state="D", stack=Stack()), view(2)], "stuck_in_kernel", (1,)),
        ([view(0), view(1, LOADING), view(2)], "not_in_collective_data", (1,)),
        ([view(0), view(1), view(2, ELSEWHERE)], "collective_mismatch", (2,)),
        ([view(0, step=7), view(1, step=6), view(2, step=7)], "behind", (1,)),
        ([view(0), view(1), view(2)], "network", ()),
        ([view(0, LOADING), view(1, LOADING), view(2, LOADING)], "all_data", ()),
        ([view(0, moving=True), view(1, LOADING, busy=True), view(2)], "none", ()),
        ([view(0), view(1, ELSEWHERE)], "collective_mismatch", ()),
        ([view(0, LOADING), view(1), view(2, ELSEWHERE)], "not_in_collective_data", (0,)),
    ],
)
def test_the_odd_rank_and_its_cause(ranks: list[RankView], cause: str, odd: tuple[int, ...]) -> None:
    got = judge(ranks[::-1], world_size=3)
    assert (got.cause, got.ranks) == (cause, odd), got.text


def test_ranks_elsewhere_are_told_apart_from_ranks_that_are_gone() -> None:
    assert judge([view(0), view(1)], world_size=8).cause == "remote"
    gone = judge([view(4), view(6), view(7)], world_size=8, local_world_size=4)
    assert (gone.cause, gone.ranks) == ("process_gone", (5,))


def test_the_record_of_collectives_outranks_stacks() -> None:
    found = FlightFinding(group="0 default_pg", kind="behind", ranks=(2,), sequence=41, text="enqueued 41 collectives")
    got = judge([view(0), view(1, LOADING), view(2)], world_size=3, findings=[found])
    assert (got.cause, got.ranks, got.process_group, got.sequence) == ("collective_not_entered", (2,), "0 default_pg", 41)


def test_stacks_of_faulthandler_end_with_the_main_thread() -> None:
    text = 'Thread 0x01 (most recent call first):\n  File "/a/b.py", line 3 in helper\n\nThread 0x02 (most recent call first):\n'
    text += f'  File "{TORCH}", line 9 in barrier\n  File "/home/u/t.py", line 5 in main\n'
    got = stackview.from_faulthandler(text)
    assert (got.kind, got.operation, got.place) == ("collective", "barrier", "main (t.py:5)")


# --- flight recorder ---------------------------------------------------------------------------------------------

_RECORD = """
import os, sys, pathlib, torch, torch.distributed as d
d.init_process_group("gloo", rank=0, world_size=1, init_method="file://" + sys.argv[1] + "/store")
for _ in range(int(sys.argv[2])):
    d.all_reduce(torch.ones(3))
c = torch._C._distributed_c10d
pathlib.Path(sys.argv[1], "trace_0").write_bytes(c._dump_fr_trace(True, True, False))
pathlib.Path(sys.argv[1], "json_0").write_bytes(c._dump_fr_trace_json(True, False))
"""


def test_what_torch_writes_is_read_in_both_formats(tmp_path: Path) -> None:
    environment = os.environ | {"TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-c", _RECORD, str(tmp_path), "3"], check=True, env=environment, timeout=120)
    pickled, text = flight.read(tmp_path / "trace_0"), flight.read(tmp_path / "json_0")
    assert pickled.rank == 0
    assert pickled.enqueued == text.enqueued == {"0 default_pg": 3}
    assert pickled.operations[0].name == "gloo:all_reduce"
    assert [one.sequence for one in text.operations] == [1, 2, 3]


class _Evil:
    def __reduce__(self) -> Any:
        return (os.system, ("touch /tmp/regrow-evil",))


@pytest.mark.parametrize(
    "data",
    [
        pickle.dumps(_Evil()),
        pickle.dumps({"entries": [_Evil()]}, protocol=0),
        pickle.dumps({"entries": [Path("/")]}),
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x04}\x94.",
        b"garbage",
        b"",
        b'{"entries": 3}',
    ],
)
def test_a_dump_that_would_run_code_or_is_damaged_is_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "t_3").write_bytes(data)
    with pytest.raises(OperationalError, match="no flight recorder dump"):
        flight.read(tmp_path / "t_3")


def _dump(rank: int, names: list[str], completed: int) -> flight.Recording:
    entries = [
        {
            "process_group": ["0", "dp"],
            "pg_id": 0,
            "collective_seq_id": number,
            "profiling_name": name,
            "state": "scheduled",
            "input_sizes": [[4]],
        }
        for number, name in enumerate(names, 1)
    ]
    status = {"0": {"last_enqueued_collective": len(names), "last_completed_collective": completed}}
    return flight.parse(json.dumps({"entries": entries, "pg_status": status}).encode(), rank)


def test_behind_mismatch_and_not_completed() -> None:
    same = ["all_reduce"] * 5
    (behind,) = flight.compare([_dump(0, same, 4), _dump(1, same[:4], 4), _dump(2, same, 4)])
    assert (behind.kind, behind.ranks, behind.sequence) == ("behind", (1,), 4)
    (mismatch,) = flight.compare([_dump(0, same, 4), _dump(1, same, 4), _dump(2, [*same[:4], "broadcast"], 4)])
    assert (mismatch.kind, mismatch.ranks, mismatch.sequence) == ("mismatch", (2,), 5)
    (pending,) = flight.compare([_dump(0, same, 5), _dump(1, same, 4), _dump(2, same, 5)])
    assert (pending.kind, pending.ranks) == ("not_completed", (1,))
    assert flight.compare([_dump(0, same, 5), _dump(1, same, 5)]) == []


# --- a real job --------------------------------------------------------------------------------------------------

_TOY = """
import os, sys, time, torch, torch.distributed as dist

def load(step):
    if step == 3 and dist.get_rank() == 1:
        time.sleep(600)

dist.init_process_group("gloo")
x = torch.ones(10)
for step in range(10**9):
    load(step)
    if step == 3:
        os.write(1, b"ready\\n")  # one write: the launcher's workers share the pipe, and run without buffers
    dist.all_reduce(x)
    time.sleep(0.01)
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    script = tmp_path / "toy.py"
    script.write_text(textwrap.dedent(_TOY))
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "3", script]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        assert process.stdout is not None
        for _ in range(2):
            assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)


def test_a_hung_job_of_torchrun_is_explained_within_30_seconds(job: subprocess.Popen[str], tmp_path: Path) -> None:
    children = [int(pid) for pid in Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()]
    deadline = time.monotonic() + 60
    while True:  # the two that are ready enter the collective a moment after they say so
        began = time.monotonic()
        done = subprocess.run(
            [BIN / "regrow", "autopsy", "--pid", str(job.pid), "--gap", "0.5", "--json"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        (report,) = json.loads(done.stdout)["jobs"]
        if report["verdict"]["status"] == "hung" or time.monotonic() > deadline:
            break
    assert time.monotonic() - began < 30
    assert done.returncode == 1
    assert report["verdict"]["ranks"] == [1]
    assert report["verdict"]["cause"] == "not_in_collective_sleep"
    assert "load (toy.py:6)" in report["verdict"]["text"]
    assert [group["ranks"] for group in report["groups"]] == [[0, 2], [1]]
    assert {one["pid"] for one in report["ranks"]} == set(children), "the launcher's pid stands for its ranks"
    assert {one.pid for one in jobs.find((children[1],))} == set(children), "and so does any rank's"
    assert jobs.find((os.getpid(),)) == jobs.find((job.pid,)), "whoever started the launcher"

    (tmp_path / "node.json").write_text(done.stdout)
    merged = subprocess.run(
        [BIN / "regrow", "autopsy", "--merge", tmp_path / "node.json"], capture_output=True, text=True, timeout=60, check=False
    )
    assert merged.returncode == 1
    assert "rank 1: it sleeps while 2 wait in all_reduce" in merged.stdout


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--pid", "1"], 2, "no training process"),
        (["--merge", "/absent"], 2, "--merge"),
        (["--flight", "/absent_0", "--pid", "1"], 2, "cannot be read"),
    ],
)
def test_wrong_input(arguments: list[str], code: int, words: str) -> None:
    done = subprocess.run([BIN / "regrow", "autopsy", *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == code
    assert words in done.stderr
    assert "Traceback" not in done.stderr
