"""A real Slurm with two nodes on this machine, in one folder: munged, slurmctld, two slurmd, and nothing left behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import psutil

NODES = ("n1", "n2")


def free_ports(count: int) -> list[int]:
    """Ports that are free now."""
    held = [socket.socket() for _ in range(count)]
    for one in held:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports


def environment_of(pid: int) -> dict[str, str]:
    """What a process was started with. psutil stops at the gap that slurmstepd's new title leaves."""
    try:
        words = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(word.split("=", 1) for word in words if "=" in word)


def step_daemon_of(pid: int) -> int:
    """The slurmstepd above a task; 0: none."""
    try:
        parent = psutil.Process(pid).parent()
        return parent.pid if parent is not None and parent.name() == "slurmstepd" else 0
    except psutil.Error:
        return 0


def kill(pid: int) -> None:
    """SIGKILL; one that is gone already is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Slurm:
    """Starts and stops the daemons, and asks them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.conf = root / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf), "PATH": f"/usr/sbin:{os.environ['PATH']}"}
        self._munge = root / "m"
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        for tool in ("munged", "slurmctld", "slurmd"):
            assert shutil.which(tool, path=self.environment["PATH"]), f"{tool} is missing: tools/system.sh installs it"
        self._munge.mkdir(mode=0o755)
        key = self._munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        files = {name: str(self._munge / name) for name in ("socket", "pid-file", "log-file", "seed-file")}
        self._spawn("munged", "--foreground", "--force", f"--key-file={key}", *(f"--{name}={path}" for name, path in files.items()))
        ports = free_ports(3)
        host = socket.gethostname().split(".")[0]
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=1 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        )
        (self.root / "state").mkdir()
        self.conf.write_text(
            f"""ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={files["socket"]},cred_expire=2
CredType=cred/munge
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
MailProg=/bin/true
StateSaveLocation={self.root}/state
SlurmdSpoolDir={self.root}/spool-%n
SlurmctldPidFile={self.root}/slurmctld.pid
SlurmdPidFile={self.root}/slurmd-%n.pid
KillWait=10
MessageTimeout=60
JobRequeue=1
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=60 State=UP
"""
        )
        self._spawn("slurmctld", "-D", "-c")
        for name in NODES:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        self._spawn(f"slurmd {name}", "-D", "-N", name)

    def _spawn(self, name: str, *arguments: str) -> None:
        tool = shutil.which(name.split(maxsplit=1)[0], path=self.environment["PATH"])
        assert tool is not None
        log = (self.root / f"{name.replace(' ', '-')}.log").open("ab")
        self._daemons[name] = subprocess.Popen([tool, *arguments], env=self.environment, stdout=log, stderr=log, start_new_session=True)
        log.close()

    def kill_node(self, name: str) -> None:
        """As when the host loses power: slurmd with all that it started, at once, without a word to the controller."""
        daemon = self._daemons.pop(f"slurmd {name}")
        tasks = [pid for pid in psutil.pids() if environment_of(pid).get("SLURMD_NODENAME") == name]
        for pid in {*tasks, *(parent for pid in tasks if (parent := step_daemon_of(pid))), daemon.pid}:
            kill(pid)
        daemon.wait()

    async def ask(self, *command: str, check: bool = True) -> str:
        """Output of a Slurm command."""
        done = await asyncio.to_thread(
            subprocess.run, command, env=self.environment, capture_output=True, text=True, check=False, timeout=100
        )
        assert not check or done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    async def job(self, number: str) -> dict[str, str]:
        """`scontrol show job` as a dictionary."""
        words = (await self.ask("scontrol", "-o", "show", "job", number)).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def stop(self) -> None:
        """End everything, steps included."""
        mine = [pid for pid in psutil.pids() if environment_of(pid).get("SLURM_CONF") == str(self.conf) and pid != os.getpid()]
        for pid in {*mine, *(daemon.pid for daemon in self._daemons.values())}:
            kill(pid)
        for daemon in self._daemons.values():
            daemon.wait()

    def logs(self) -> str:
        """The last lines of every log."""
        texts = [f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in sorted(self.root.rglob("*.log"))]
        return "\n".join(texts + [path.read_text(errors="replace")[-3000:] for path in sorted(self.root.glob("*.out"))])
