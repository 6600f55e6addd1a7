"""Starts `regrow run` as a user would, watches its run folder, breaks its parts by their real pids."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from regrow.processes import marked

LIMIT_SECONDS = 120.0
"""One generous deadline for every wait."""

TEST_MARK = "REGROW_TEST_RUN"
"""In the environment of a launcher and so of everything that it starts, whatever becomes of parents."""


class Run:
    """One `regrow run` process and its cluster."""

    def __init__(self, folder: Path, *arguments: str, name: str = "run") -> None:
        self.folder = folder
        self.root = folder / "r"
        self.log = folder / f"{name}-{time.monotonic_ns()}.log"
        self.mark = str(folder)
        argv = [sys.executable, "-m", "regrow", "run", "--run-dir", str(self.root), "--json", *arguments]
        environment = {**os.environ, TEST_MARK: self.mark, "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as log, (folder / f"{self.log.stem}.json").open("wb") as out:
            self.process = subprocess.Popen(argv, cwd=folder, stdout=out, stderr=log, env=environment)

    # --- waiting

    def until(self, condition: Callable[[], Any], what: str) -> Any:
        """Poll until the condition gives something true; fail with the logs otherwise."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            if self.process.poll() is not None:
                value = condition()
                if value:
                    return value
                raise AssertionError(f"the run ended with {self.process.returncode} before {what}\n{self.story()}")
            time.sleep(0.05)
        raise AssertionError(f"did not see {what} within {LIMIT_SECONDS} s\n{self.story()}")

    def wait(self, limit_seconds: float = LIMIT_SECONDS) -> int:
        """Until the launcher ends; its exit status."""
        try:
            return self.process.wait(limit_seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the run did not end\n{self.story()}") from None

    def gone(self, limit_seconds: float) -> list[int]:
        """Processes of this run that are left after the limit."""
        deadline = time.monotonic() + limit_seconds
        while True:
            left = [pid for pid in marked(TEST_MARK, self.mark) if pid != self.process.pid]
            if not left or time.monotonic() > deadline:
                return left
            time.sleep(0.02)

    def close(self) -> None:
        """Kill whatever is left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in marked(TEST_MARK, self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue

    # --- what is there

    def result(self) -> dict[str, Any]:
        """The JSON document that the run printed."""
        return json.loads((self.folder / f"{self.log.stem}.json").read_text())

    def job(self, name: str) -> dict[str, Any]:
        """The job's document, empty while nobody answers."""
        try:
            address = json.loads((self.root / "supervisor" / "supervisor.json").read_text())["http"]
            with urllib.request.urlopen(f"http://{address}/v1/jobs/{name}", timeout=5) as answer:
                return json.load(answer)
        except (OSError, ValueError, KeyError, urllib.error.URLError):
            return {}

    def post(self, path: str) -> None:
        """An order to the supervisor's API."""
        address = json.loads((self.root / "supervisor" / "supervisor.json").read_text())["http"]
        with urllib.request.urlopen(urllib.request.Request(f"http://{address}{path}", method="POST"), timeout=20) as answer:
            answer.read()

    def pids(self, word: str) -> list[int]:
        """Live processes of this run with `word` in their command line."""
        found: list[int] = []
        for pid in marked(TEST_MARK, self.mark):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if word in line:
                found.append(pid)
        return found

    def inject(self, node: str, kind: str, rank: int = -1, order: dict[str, Any] | None = None) -> dict[str, Any]:
        """A fault through the agent's admin socket: kill_worker, stop_worker, kill_shim, kill_writer, kill_agent; worker: `order`."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(20)
            connection.connect(str(self.root / "nodes" / node / "agent.sock"))
            connection.sendall(json.dumps({"type": "inject", "kind": kind, "rank": rank, "order": order or {}}).encode() + b"\n")
            return json.loads(connection.makefile().readline() or "{}")  # an agent that killed itself does not answer

    def story(self) -> str:
        """Ends of all logs, for a failed test."""
        texts = [f"--- launcher\n{self.log.read_text(errors='replace')[-3000:]}"]
        logs = sorted([*self.root.glob("*.log"), *self.root.glob("nodes/*.log"), *self.root.glob("nodes/*/jobs/*/g*/rank*.out")])
        texts += [f"--- {path.relative_to(self.root)}\n{path.read_text(errors='replace')[-1500:]}" for path in logs]
        return "\n".join(texts)[-20000:]
