"""The real pynvml against the compiled fake library, in child processes: a library cannot be unloaded."""

from __future__ import annotations

import ast
import ctypes
import inspect
import json
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pynvml
import pytest

from regrow import compiling
from regrow.agent.health import findings, nvml
from regrow.agent.health.fake_nvml import build
from regrow.agent.health.fake_nvml.control import FakeNvml, uuid_of
from regrow.errors import OperationalError

PRELUDE = """
import ctypes, json, os, sys
from pathlib import Path
from regrow.agent.health.probe import preload_fake
preload_fake(Path(os.environ["REGROW_FAKE_NVML"]))
import pynvml
from pynvml import *
nvmlInit()
def code(call, *arguments):
    try:
        call(*arguments)
    except NVMLError as error:
        return error.value
    return 0
"""


def run(fake: FakeNvml, body: str, **environment: str) -> Any:
    """The JSON that `body` prints, run with pynvml on the fake."""
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
        env={"PATH": "/usr/bin:/bin", "REGROW_FAKE_NVML": str(fake.path), "HOME": str(Path.home()), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _pynvml_calls(source: str) -> set[str]:
    """Names of pynvml functions that a module uses."""
    tree = ast.parse(source)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node.attr.startswith("nvml")}
    return {name for name in names if callable(getattr(pynvml, name, None))}


def _symbols(function: str, seen: set[str]) -> set[str]:
    """C symbols that a pynvml function asks the library for, through the pynvml functions that it calls."""
    if function in seen:
        return set()
    seen.add(function)
    source = inspect.getsource(inspect.unwrap(getattr(pynvml, function)))
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            continue
        if node.func.id == "_nvmlGetFunctionPointer" and isinstance(node.args[0], ast.Constant):
            found.add(str(node.args[0].value))
        elif node.func.id.startswith("nvml") and callable(getattr(pynvml, node.func.id, None)):
            found |= _symbols(node.func.id, seen)
    return found


def test_the_fake_has_every_symbol_that_the_agent_uses() -> None:
    calls = _pynvml_calls(Path(nvml.__file__).read_text(encoding="utf-8"))
    assert len(calls) > 35
    library = ctypes.CDLL(str(build.library()))
    wanted = set().union(*(_symbols(call, set()) for call in calls))
    assert {"nvmlDeviceGetCount_v2", "nvmlEventSetWait_v2"} <= wanted
    assert [name for name in sorted(wanted) if not hasattr(library, name)] == []


def test_a_healthy_fake_supports_everything_that_is_read(fake: FakeNvml) -> None:
    from regrow.agent.health.prober import probe_once

    sample = probe_once(fake_state=fake.path)
    assert sample.status == "ok"
    assert [one.errors for one in sample.devices] == [{}] * 4
    for counter in findings.COUNTERS:
        assert counter in findings.counters_of(sample.devices[0])


def test_every_field_of_the_sample_can_be_scripted(fake: FakeNvml) -> None:
    from regrow.agent.health.prober import probe_once

    fake.set_device(
        0,
        temperature=71,
        power_milliwatts=333000,
        utilization=97,
        recovery_action=1,
        ecc_uncorrected_volatile=3,
        ecc_corrected_aggregate=9,
        remap_pending=True,
        remapped_uncorrectable=2,
        sram_threshold_exceeded=1,
        pcie_width=8,
        clock_event_reasons=0x40,
        fabric_health_summary=2,
        nvlinks={"3": {"up": False, "recovery": 4}},
        processes=[{"pid": 77, "memory_bytes": 1024}],
        name=None,
        retired_pages_pending=1,
    )
    one = probe_once(fake_state=fake.path).devices[0]
    assert (one.temperature, one.power_watts, one.utilization_percent, one.recovery_action) == (71, 333.0, 97, 1)
    assert (one.ecc_uncorrected_volatile, one.ecc_corrected_aggregate, one.remap_pending, one.remapped_uncorrectable) == (3, 9, True, 2)
    assert (one.sram_threshold_exceeded, one.pcie_width, one.clock_event_reasons, one.fabric_health_summary) == (True, 8, 0x40, 2)
    assert [(link.link, link.up, link.recovery) for link in one.links if not link.up] == [(3, False, 4)]
    assert [(process.pid, process.memory_bytes) for process in one.processes] == [(77, 1024)]
    assert one.retired_pages_pending
    assert one.errors == {"nvmlDeviceGetName": pynvml.NVML_ERROR_NOT_SUPPORTED}


def test_handles_by_uuid_and_bus(fake: FakeNvml) -> None:
    got = run(
        fake,
        """
        first = nvmlDeviceGetHandleByIndex(2)
        bus = nvmlDeviceGetPciInfo(first).busId
        again = nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(first).encode())
        print(json.dumps([nvmlDeviceGetUUID(again), nvmlDeviceGetIndex(nvmlDeviceGetHandleByPciBusId(bus.encode())), bus,
                          nvmlSystemGetDriverVersion(), nvmlSystemGetCudaDriverVersion_v2()]))
        """,
    )
    assert got == [uuid_of(2), 2, "00000000:3B:00.0", "570.124.06", 12080]


def test_scripted_errors_for_all_and_for_one_gpu(fake: FakeNvml) -> None:
    fake.set(errors={"nvmlDeviceGetPowerUsage": 999})
    fake.set_device(1, errors={"nvmlDeviceGetTemperature": 4})
    got = run(
        fake,
        """
        zero, one = nvmlDeviceGetHandleByIndex(0), nvmlDeviceGetHandleByIndex(1)
        print(json.dumps([code(nvmlDeviceGetPowerUsage, zero), code(nvmlDeviceGetTemperature, one, 0), code(nvmlDeviceGetTemperature, zero, 0)]))
        """,
    )
    assert got == [999, 4, 0]


def test_init_failure_and_no_driver(fake: FakeNvml, tmp_path: Path) -> None:
    from regrow.agent.health.prober import probe_once

    fake.set(errors={"nvmlInitWithFlags": 18})
    assert (probe_once(fake_state=fake.path).status, probe_once(fake_state=fake.path).error) == ("init_failed", 18)
    assert probe_once(fake_state=tmp_path / "nothing.json").status == "no_driver"
    assert probe_once().status == "no_driver", "this test needs a machine without an NVIDIA driver"


def test_count_drops_and_a_handle_outlives_its_gpu(fake: FakeNvml) -> None:
    got = run(
        fake,
        """
        last = nvmlDeviceGetHandleByIndex(3)
        before = nvmlDeviceGetCount()
        from regrow.agent.health.fake_nvml.control import FakeNvml
        state = FakeNvml(Path(os.environ["REGROW_FAKE_NVML"]))
        state.set(count=3)
        dropped = nvmlDeviceGetCount()
        state.lose(3)
        print(json.dumps([before, dropped, code(nvmlDeviceGetHandleByIndex, 3), code(nvmlDeviceGetPowerUsage, last)]))
        """,
    )
    assert got == [4, 3, pynvml.NVML_ERROR_INVALID_ARGUMENT, pynvml.NVML_ERROR_GPU_IS_LOST]


def test_an_old_driver_lacks_symbols(fake: FakeNvml) -> None:
    from regrow.agent.health.prober import probe_once

    gone = ["nvmlDeviceGetTemperatureV", "nvmlDeviceGetGpuFabricInfoV", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetSramEccErrorStatus"]
    fake.set(missing_symbols=gone, driver_version="470.57.02")
    fake.set_device(0, temperature=66, retired_pages_dbe=2, retired_pages_sbe=1)
    library = ctypes.CDLL(str(build.library(missing=gone)))
    assert not any(hasattr(library, name) for name in gone)
    one = probe_once(fake_state=fake.path).devices[0]
    assert {code for name, code in one.errors.items() if name in gone} == {pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    assert (one.temperature, one.retired_pages, one.fabric_state) == (66, 3, None)


def test_counters_ramp_with_the_states_own_clock(fake: FakeNvml) -> None:
    fake.set(now=100.0)
    fake.ramp(0, "pcie_replays", 2.0, start=5)
    body = "print(json.dumps(nvmlDeviceGetPcieReplayCounter(nvmlDeviceGetHandleByIndex(0))))"
    assert run(fake, body) == 5
    fake.set(now=130.0)
    assert run(fake, body) == 65


def test_a_ramp_without_a_clock_grows_with_real_time(fake: FakeNvml) -> None:
    fake.ramp(0, "pcie_replays", 1e6)
    body = "h = nvmlDeviceGetHandleByIndex(0)\nprint(json.dumps([nvmlDeviceGetPcieReplayCounter(h) for _ in range(2)]))"
    first, second = run(fake, body)
    assert 0 < first < second


def test_faults_heal_after_resets(fake: FakeNvml) -> None:
    fake.set_fault(1, heals_after_resets=2, recovery_action=1, errors={"nvmlDeviceGetPowerUsage": 16})
    body = """
    one = nvmlDeviceGetHandleByIndex(1)
    print(json.dumps([nvmlDeviceGetFieldValues(one, [230])[0].value.ullVal, code(nvmlDeviceGetPowerUsage, one)]))
    """
    assert run(fake, body) == [1, 16]
    fake.reset(1)
    assert run(fake, body) == [1, 16]
    fake.reset(1)
    assert run(fake, body) == [0, 0]


def test_each_event_set_has_a_cursor_of_its_own(fake: FakeNvml) -> None:
    fake.set_xid(0, 31)
    got = run(
        fake,
        """
        from regrow.agent.health.fake_nvml.control import FakeNvml
        state = FakeNvml(Path(os.environ["REGROW_FAKE_NVML"]))
        def events(kinds, *indices):
            made = nvmlEventSetCreate()
            for index in indices:
                nvmlDeviceRegisterEvents(nvmlDeviceGetHandleByIndex(index), kinds, made)
            return made
        def drain(made):
            got = []
            while True:
                try:
                    event = nvmlEventSetWait_v2(made, 0)
                except NVMLError_Timeout:
                    return got
                got.append([nvmlDeviceGetUUID(event.device)[-1], event.eventType, event.eventData])
        all_of, only_one, ecc = events(8, 0, 1, 2, 3), events(8, 1), events(2, 0, 1)
        state.set_xid(0, 13, 43)
        first = drain(all_of)
        state.set_xid(1, 79)
        state.add_event(1, 2, 0)
        print(json.dumps([first, drain(all_of), drain(only_one), drain(ecc), drain(all_of)]))
        """,
    )
    assert got == [[["0", 8, 13], ["0", 8, 43]], [["1", 8, 79]], [["1", 8, 79]], [["1", 2, 0]], []]


def test_waiting_for_an_event_ends_when_one_comes(fake: FakeNvml) -> None:
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PRELUDE
            + "made = nvmlEventSetCreate()\nnvmlDeviceRegisterEvents(nvmlDeviceGetHandleByIndex(0), 8, made)\nprint('ready', flush=True)\n"
            + "print(nvmlEventSetWait_v2(made, 30000).eventData, flush=True)",
        ],
        env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "REGROW_FAKE_NVML": str(fake.path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    fake.set_xid(0, 63)
    began = time.monotonic()
    out, _ = child.communicate(timeout=30)
    assert out.strip() == "63"
    assert time.monotonic() - began < 15


def test_several_readers_and_writers_see_whole_states(fake: FakeNvml) -> None:
    """Readers run while states are replaced under them: no call fails, and each sees one state after the other."""
    body = """
    import time
    handles = [nvmlDeviceGetHandleByIndex(i) for i in range(4)]
    print("[]", file=sys.stderr, flush=True)
    seen = set()
    until = time.monotonic() + 30
    while len(seen) < 5 and time.monotonic() < until:
        seen.add(nvmlDeviceGetTemperature(handles[0], 0))
        assert nvmlDeviceGetCount() == 4
    print(json.dumps(sorted(seen)))
    """
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", PRELUDE + textwrap.dedent(body)],
            env={"PATH": "/usr/bin:/bin", "HOME": str(Path.home()), "REGROW_FAKE_NVML": str(fake.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for reader in readers:
        assert reader.stderr is not None
        assert reader.stderr.readline() == "[]\n"
    degrees = 0
    while any(reader.poll() is None for reader in readers):
        degrees = degrees % 50 + 1
        fake.set_device(0, temperature=degrees)
    for reader in readers:
        out, err = reader.communicate(timeout=30)
        assert reader.returncode == 0, err
        assert len(json.loads(out)) == 5


def test_a_broken_state_file_is_no_driver(fake: FakeNvml) -> None:
    from regrow.agent.health.prober import probe_once

    for text in ("", "{", '{"devices": [', "[1, 2", '{"a" 1}', '{"devices": [{"uuid": "x"}', "\x00\x01"):
        fake.path.write_text(text, encoding="utf-8")
        assert probe_once(fake_state=fake.path).status == "no_driver", text


def test_no_compiler_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(compiling.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OperationalError, match="ziglang"):
        build.library(cache=tmp_path / "cache")
