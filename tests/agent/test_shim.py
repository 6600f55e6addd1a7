"""The shim with real processes: what a worker sees, how ends are told, who dies with whom."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from tests.agent.harness import Harness, plain, until

from regrow.agent import protocol
from regrow.agent.launcher import ShimUp
from regrow.agent.roster import process_state, start_time

Make = Callable[..., Harness]
SLEEP = "import time\nprint('up', flush=True)\ntime.sleep(600)\n"
DESCRIBE = """
import json, os, signal, sys
def here(): pass
print(json.dumps({
    "argv": sys.argv, "path0": sys.path[0], "file": __file__, "name": __name__, "names": sorted(globals()),
    "spec": __spec__ is None, "main": sys.modules["__main__"].__dict__ is globals(), "code": here.__code__.co_filename,
    "handlers": {s.name: str(signal.getsignal(s)) for s in signal.Signals}, "cwd": os.getcwd(),
    "fds": sorted(f for f in os.listdir("/proc/self/fd") if os.path.exists("/proc/self/fd/" + f)),
    "env": dict(os.environ), "mask": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())), "stdin": sys.stdin.read(),
}))
"""


async def test_a_worker_sees_what_an_interpreter_gives(harness: Make) -> None:
    h = harness()
    await h.up()
    script = h.script(DESCRIBE)
    env = {"PATH": os.environ["PATH"], "LC_CTYPE": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    await h.start([h.worker([script, "--alpha", "two words"], env=env)])
    ended = (await h.next(protocol.WorkerEnded))[0]
    assert ended.worker.status == 0, h.output()
    warm = json.loads(h.output())
    output, _ = await plain(script, "--alpha", "two words", env=env, cwd=h.state)
    assert warm == json.loads(output)


async def test_cold_and_warm_workers_see_the_same(harness: Make) -> None:
    h = harness()
    await h.up()
    script = h.script(DESCRIBE)
    env = {"PATH": os.environ["PATH"], "LC_CTYPE": "C.UTF-8", "OMP_NUM_THREADS": "1"}
    warm = await h.start([h.worker([script], env=env)])
    cold = await h.start([h.worker([script], rank=1, env=env)], generation=2, method="cold")
    assert (warm.method, cold.method) == ("warm", "cold")
    await h.next(protocol.WorkerEnded, 2)
    assert json.loads(h.output(0)) == json.loads(h.output(1))


async def test_modules_run_as_main(harness: Make) -> None:
    h = harness()
    await h.up()
    package = h.state / "pack"
    package.mkdir()
    (package / "__init__.py").write_text("", encoding="utf-8")
    (package / "tool.py").write_text(
        "import sys\nprint(__name__, __spec__.name, sys.argv, sys.modules['__main__'].__name__)\n", encoding="utf-8"
    )
    await h.start([h.worker(["pack.tool", "x"], module=True)])
    await h.next(protocol.WorkerEnded)
    assert h.output().split() == ["__main__", "pack.tool", f"['{package / 'tool.py'}',", "'x']", "__main__"]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("import sys; sys.exit(3)", 3 << 8),
        ("raise SystemExit('bye')", 1 << 8),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", int(signal.SIGSEGV)),
        ("import atexit; atexit.register(lambda: print('atexit ran')); print('done')", 0),
    ],
)
async def test_ends_are_told_as_the_kernel_tells_them(harness: Make, text: str, status: int) -> None:
    h = harness()
    await h.up()
    started = await h.start([h.worker([h.script(text)])])
    ended = (await h.next(protocol.WorkerEnded))[0]
    code = ended.worker.status & ~0x80 if ended.worker.status & 0x7F else ended.worker.status
    assert (code, ended.worker.pid, ended.worker.torn_down) == (status, started.workers[0].pid, False)
    if status == 0:
        assert h.output().splitlines() == ["done", "atexit ran"]


async def test_a_traceback_names_user_frames_only(harness: Make) -> None:
    h = harness()
    await h.up()
    error_file = h.state / "error.json"
    script = h.script("def f():\n    raise ValueError('boom')\nf()\n")
    env = {"PATH": os.environ["PATH"], "TORCHELASTIC_ERROR_FILE": str(error_file)}
    await h.start([h.worker([script], env=env)])
    assert (await h.next(protocol.WorkerEnded))[0].worker.status == 1 << 8
    _, errors = await plain(script)
    assert h.output() == errors
    message = json.loads(error_file.read_text(encoding="utf-8"))["message"]
    assert message["message"] == "ValueError: boom"
    assert "in f" in message["extraInfo"]["py_callstack"]


ENDLESS_END = """
import atexit, ctypes
atexit.register(ctypes.PyDLL(None).pause)  # a call into C that keeps the interpreter's lock, for ever
raise MemoryError("out of address space")
"""


async def test_a_rank_that_failed_cannot_stay_in_its_own_end(harness: Make) -> None:
    h = harness()
    await h.up()
    error_file = h.state / "error.json"
    env = {"PATH": os.environ["PATH"], "TORCHELASTIC_ERROR_FILE": str(error_file), "REGROW_EXIT_SECONDS": "0.3"}
    await h.start([h.worker([h.script(ENDLESS_END)], env=env)])
    ended = (await h.next(protocol.WorkerEnded))[0]
    assert ended.worker.status == 1 << 8, "an exit code like that of any uncaught exception, not a signal"
    assert json.loads(error_file.read_text(encoding="utf-8"))["message"]["message"] == "MemoryError: out of address space"
    assert "MemoryError" in h.output()


CORNERED = {
    "no descriptor is left": """
import os
while True:
    os.open("/dev/null", os.O_RDONLY)
""",
    "stderr is closed": """
import os, sys
os.close(2)
sys.excepthook = lambda kind, error, trace: sys.stderr.buffer.raw.write(b"x")
raise OSError(24, "Too many open files")
""",
}


@pytest.mark.parametrize("how", CORNERED)
async def test_the_error_is_told_where_it_is_hard_to_tell(harness: Make, how: str) -> None:
    h = harness()
    await h.up()
    error_file = h.state / "error.json"
    env = {"PATH": os.environ["PATH"], "TORCHELASTIC_ERROR_FILE": str(error_file)}
    script = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))" + CORNERED[how]
    await h.start([h.worker([h.script(script)], env=env)])
    assert (await h.next(protocol.WorkerEnded))[0].worker.status == 1 << 8
    assert "[Errno 24] Too many open files" in json.loads(error_file.read_text(encoding="utf-8"))["message"]["message"]


WAITS = """
import sys
from regrow.agent.worker import failure

sys.excepthook = lambda *what: print("then the end", flush=True)
hook = failure.UncaughtHook(lambda error: None, lambda error: print("pause", error, flush=True))
ours = sys.excepthook
sys.excepthook = lambda *what: ours(*what)  # as torch does when the process joins a group
raise RuntimeError("a peer is gone")
"""


async def test_who_lost_a_peer_may_wait_before_anything_is_made_of_its_error(harness: Make) -> None:
    h = harness()
    await h.up()
    await h.start([h.worker([h.script(WAITS)])])
    assert (await h.next(protocol.WorkerEnded))[0].worker.status == 1 << 8
    assert h.output().splitlines() == ["pause a peer is gone", "then the end"]


async def test_a_missing_script_or_folder_is_named(harness: Make) -> None:
    h = harness()
    await h.up()
    await h.start([h.worker(["/nowhere/train.py"]), h.worker([h.script("")], rank=1, cwd="/nowhere")])
    ended = await h.next(protocol.WorkerEnded, 2)
    assert {item.worker.status for item in ended} == {78 << 8}
    assert "/nowhere/train.py" in h.output(0)
    assert "/nowhere" in h.output(1)


async def test_random_states_differ_between_ranks(harness: Make) -> None:
    h = harness(preload=("numpy",))
    await h.up()
    script = h.script("import random\nimport numpy\nprint(random.random(), numpy.random.rand())")
    await h.start([h.worker([script], rank=rank) for rank in (0, 1)])
    await h.next(protocol.WorkerEnded, 2)
    assert len({*h.output(0).split(), *h.output(1).split()}) == 4


async def test_an_environment_for_the_interpreter_starts_cold(harness: Make) -> None:
    h = harness()
    await h.up()
    script = h.script("import sys; print(sys.flags.hash_randomization, hash('a'))")
    env = {"PATH": os.environ["PATH"], "PYTHONHASHSEED": "0"}
    state = await h.start([h.worker([script], env=env)])
    assert state.method == "cold"
    assert "PYTHONHASHSEED" in state.method_reason
    await h.next(protocol.WorkerEnded)
    output, _ = await plain(script, env=env)
    assert h.output() == output


@pytest.mark.parametrize("method", ["warm", "cold"])
async def test_a_stop_takes_the_whole_group(harness: Make, method: str) -> None:
    h = harness()
    await h.up()
    text = "import os, subprocess, time\np = subprocess.Popen(['sleep', '600'])\nprint(p.pid, flush=True)\ntime.sleep(600)\n"
    script = h.script(text)
    await h.start([h.worker([script], rank=rank) for rank in (0, 1)], method=method)
    await until(lambda: h.output(0).strip() and h.output(1).strip())
    helpers = [int(h.output(rank)) for rank in (0, 1)]
    pids = await h.launcher.stop("toy", 1)
    ended = await h.next(protocol.WorkerEnded, 2)
    assert sorted(item.worker.pid for item in ended) == sorted(pids)
    assert all(item.worker.status == signal.SIGKILL and item.worker.torn_down for item in ended)
    await until(lambda: all(process_state(pid) in ("", "Z") for pid in helpers))


async def test_helpers_of_workers_that_ended_are_swept(harness: Make) -> None:
    h = harness()
    await h.up()
    script = h.script("import subprocess\np = subprocess.Popen(['sleep', '600'])\nprint(p.pid)\np.returncode = 0\n")
    await h.start([h.worker([script])])
    await h.next(protocol.WorkerEnded)
    await until(lambda: process_state(int(h.output())) in ("", "Z"))


async def test_helpers_in_sessions_of_their_own_are_swept(harness: Make) -> None:
    h = harness()
    await h.up()
    text = (
        "import subprocess, time\n"
        "p = subprocess.Popen(['sh', '-c', 'sleep 600 & echo $!; sleep 600'], start_new_session=True)\n"
        "print(p.pid, flush=True)\ntime.sleep(600)\n"
    )
    await h.start([h.worker([h.script(text)])])
    await until(lambda: len(h.output().split()) == 2)
    await h.launcher.stop("toy", 1)
    await h.next(protocol.WorkerEnded)
    await until(lambda: all(process_state(int(pid)) in ("", "Z") for pid in h.output().split()))


async def test_an_own_end_before_the_stop_is_not_torn_down(harness: Make) -> None:
    h = harness()
    await h.up()
    started = await h.start([h.worker([h.script(SLEEP)]), h.worker([h.script(SLEEP)], rank=1)])
    await until(lambda: "up" in h.output(0) and "up" in h.output(1))
    shim = (await h.up()).pid
    os.kill(shim, signal.SIGSTOP)
    os.kill(started.workers[1].pid, signal.SIGKILL)
    await until(lambda: process_state(started.workers[1].pid) == "Z")
    stop = asyncio.create_task(h.launcher.stop("toy", 1))
    await asyncio.sleep(0)
    os.kill(shim, signal.SIGCONT)
    assert await stop == (started.workers[0].pid,)
    ended = {item.worker.rank: item.worker for item in await h.next(protocol.WorkerEnded, 2)}
    assert (ended[0].torn_down, ended[1].torn_down) == (True, False)


async def test_starts_are_idempotent_and_older_ones_refused(harness: Make) -> None:
    h = harness()
    await h.up()
    workers = [h.worker([h.script(SLEEP)])]
    first = await h.start(workers, generation=2)
    again = await h.start(workers, generation=2)
    assert again.workers == first.workers
    with pytest.raises(Exception, match="older than 2"):
        await h.start(workers, generation=1)


async def test_a_stopped_worker_is_killed(harness: Make) -> None:
    h = harness()
    await h.up()
    started = await h.start([h.worker([h.script(SLEEP)])])
    await until(lambda: "up" in h.output())
    os.kill(started.workers[0].pid, signal.SIGSTOP)
    await until(lambda: process_state(started.workers[0].pid) == "T")
    await h.launcher.stop("toy", 1)
    assert (await h.next(protocol.WorkerEnded))[0].worker.status == signal.SIGKILL


_HOLD = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.ptrace(16, int(sys.argv[1]), 0, 0):  # PTRACE_ATTACH
    sys.exit(os.strerror(ctypes.get_errno()))
os.waitpid(int(sys.argv[1]), 0x40000000)
print("held", flush=True)
time.sleep(600)
"""


async def test_a_worker_that_a_debugger_holds_is_dead_when_it_was_killed(harness: Make) -> None:
    """The kernel tells its end to the debugger first. Taken for a process that cannot be killed, it would cost the host."""
    h = harness()
    await h.up()
    started = await h.start([h.worker([h.script(SLEEP)])])
    await until(lambda: "up" in h.output())
    pid = started.workers[0].pid
    debugger = await asyncio.create_subprocess_exec(sys.executable, "-c", _HOLD, str(pid), stdout=subprocess.PIPE)
    try:
        assert debugger.stdout is not None
        assert await debugger.stdout.readline() == b"held\n"
        await h.launcher.stop("toy", 1)
        assert (await h.next(protocol.WorkerEnded))[0].worker.status == signal.SIGKILL
        assert process_state(pid) == "Z"
    finally:
        debugger.kill()
        await debugger.communicate()
    await until(lambda: process_state(pid) == "")


async def test_a_new_agent_takes_over_shim_and_workers(harness: Make) -> None:
    first = harness()
    ready = await first.up()
    started = await first.start([first.worker([first.script(SLEEP)]), first.worker([first.script("print('short')", "short.py")], rank=1)])
    await first.next(protocol.WorkerEnded)
    await first.leave(stop_shim=False)
    second = harness()
    again = await second.up()
    assert (again.pid, again.start_time) == (ready.pid, ready.start_time)
    assert (await second.next(ShimUp))[0].adopted
    workers = again.generations[0].workers
    assert [worker.pid for worker in workers] == [worker.pid for worker in started.workers]
    assert [worker.status for worker in workers] == [None, 0]
    assert start_time(workers[0].pid) == workers[0].start_time
    await second.launcher.stop("toy", 1)
    await second.next(protocol.WorkerEnded)


@pytest.mark.parametrize("method", ["warm", "cold"])
async def test_workers_die_with_the_shim(harness: Make, method: str) -> None:
    h = harness()
    ready = await h.up()
    text = "import subprocess, time\np = subprocess.Popen(['sleep', '600'])\nprint(p.pid, flush=True)\ntime.sleep(600)\n"
    started = await h.start([h.worker([h.script(text)])], method=method)
    await until(lambda: h.output().strip())
    os.kill(ready.pid, signal.SIGKILL)
    down = await h.down()
    assert [worker.pid for state in down.generations for worker in state.workers] == [started.workers[0].pid]
    await until(lambda: process_state(started.workers[0].pid) in ("", "Z"))
    fresh = (await h.next(ShimUp, 2))[1]
    assert fresh.ready.pid != ready.pid
    assert not fresh.adopted
    assert fresh.ready.generations == ()


async def test_without_an_agent_the_shim_stops_its_workers(harness: Make) -> None:
    h = harness(orphan_seconds=0.5)
    ready = await h.up()
    started = await h.start([h.worker([h.script(SLEEP)])])
    await until(lambda: "up" in h.output())
    await h.leave(stop_shim=False)
    await until(lambda: process_state(ready.pid) in ("", "Z") and process_state(started.workers[0].pid) in ("", "Z"))
    assert "no agent for 0.5 s" in (h.state / "shim.log").read_text(encoding="utf-8")


async def test_a_cut_lifeline_ends_all_at_once(harness: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    monkeypatch.setenv("REGROW_LIFELINE", str(read))
    h = harness(orphan_seconds=600)
    ready = await h.up()
    started = await h.start([h.worker([h.script(SLEEP)])])
    await until(lambda: "up" in h.output())
    await h.leave(stop_shim=False)
    os.close(write)
    await until(lambda: process_state(ready.pid) in ("", "Z") and process_state(started.workers[0].pid) in ("", "Z"), 10)
    os.close(read)


async def test_a_second_shim_in_one_folder_is_refused(harness: Make) -> None:
    h = harness()
    await h.up()
    command = [sys.executable, "-m", "regrow.agent.shim", "--socket", str(h.state / "other.sock"), "--state", str(h.state), "--no-imports"]
    process = await asyncio.create_subprocess_exec(*command, stderr=subprocess.PIPE)
    _, text = await process.communicate()
    assert process.returncode == 3
    assert b"another shim serves" in text


async def test_nonsense_on_the_socket_is_answered(harness: Make) -> None:
    h = harness()
    await h.up()
    reader, writer = await asyncio.open_unix_connection(str(h.state / "shim.sock"))
    await reader.readline()
    writer.write(b"hello\n" + b'{"type":"dance","id":7}\n')
    await writer.drain()
    assert b"not a request" in await reader.readline()
    assert b"unknown request 'dance'" in await reader.readline()
    writer.close()
    assert (await h.launcher.state()).generations == ()


async def test_nothing_waits_for_a_shim_that_is_still_importing(harness: Make) -> None:
    h = harness(preload=("slow_to_import",))
    ready = await h.up()
    (h.state / "slow_to_import.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    os.environ["PYTHONPATH"] = str(h.state)
    try:
        h.launcher.spawned.clear()
        os.kill(ready.pid, signal.SIGKILL)
        await h.down()
        await h.launcher.spawned.wait()
    finally:
        del os.environ["PYTHONPATH"]
    async with asyncio.timeout(3):
        assert await h.launcher.stop("toy", 1) == ()
        await h.launcher.forget("toy", 1)
