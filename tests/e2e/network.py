"""Hosts of a test as network namespaces: two networks (management and data) on bridges, links that can be cut or made lossy.

Nothing is made in the machine's own namespace. Needs root.
"""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

MANAGEMENT = "mgmt"
"""Interface of a host towards etcd and the supervisors."""
DATA = "data"
"""Interface of a host towards the other workers."""
NETWORKS = (MANAGEMENT, DATA)
_SUBNET = {MANAGEMENT: "10.77.0", DATA: "10.78.0"}
_CLONE_NEWNET = 0x40000000
_T = TypeVar("_T")
_LIBC = ctypes.CDLL(None, use_errno=True)


@functools.cache
def why_not() -> str:
    """Why this process cannot make network namespaces; empty when it can. (Missing tools are a failure: tools/system.sh has them.)"""
    if os.geteuid() != 0:
        return "network namespaces need root"
    tried = subprocess.run(("unshare", "--net", "true"), capture_output=True, text=True, timeout=60, check=False)
    return f"this machine gives no network namespace: {tried.stderr.strip()}" if tried.returncode else ""


def command(*argv: str, text: str = "") -> None:
    """Run a tool; its words are in the failure."""
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise AssertionError(f"{' '.join(argv)}: {done.stderr.strip()}\n{text}")


class Network:
    """Namespaces of one test. Names carry the pid, so that leftovers of a killed test are known and removed by the next one."""

    def __init__(self, hosts: Iterable[str]) -> None:
        self.hosts = list(hosts)
        self._prefix = f"regrow{os.getpid()}"
        self._pool = ThreadPoolExecutor(max_workers=1)

    def start(self) -> None:
        """Make hosts, bridges and links."""
        missing = [name for name in ("ip", "nft", "nsenter", "etcdctl") if shutil.which(name) is None]
        assert not missing, f"not installed: {', '.join(missing)}; `tools/system.sh .venv all` does it"
        remove_leftovers()
        switch = self.namespace("switch")
        command("ip", "netns", "add", switch)
        for host in self.hosts:
            command("ip", "netns", "add", self.namespace(host))
        middle = [line for net in NETWORKS for line in (f"link add {net} type bridge", f"link set {net} up")]
        for number, host in enumerate(self.hosts, start=1):
            own = ["link set lo up"]
            for net in NETWORKS:
                middle.append(f"link add {host}-{net} type veth peer name {net} netns {self.namespace(host)}")
                middle += [f"link set {host}-{net} master {net}", f"link set {host}-{net} up"]
                own += [f"addr add {_SUBNET[net]}.{number}/24 dev {net}", f"link set {net} up"]
            command("ip", "-n", switch, "-batch", "-", text="\n".join(middle) + "\n")
            command("ip", "-n", self.namespace(host), "-batch", "-", text="\n".join(own) + "\n")
            middle = []

    def stop(self) -> None:
        """Remove everything that was made."""
        self._pool.shutdown()
        for host in ("switch", *self.hosts):
            subprocess.run(["ip", "netns", "del", self.namespace(host)], capture_output=True, timeout=60, check=False)

    def namespace(self, host: str) -> str:
        """Its name for `ip netns`."""
        return f"{self._prefix}-{host}"

    def address(self, host: str, net: str) -> str:
        """Of a host in one of the networks."""
        return f"{_SUBNET[net]}.{self.hosts.index(host) + 1}"

    def inside(self, host: str, *argv: str) -> list[str]:
        """A command line that runs on this host."""
        return ["nsenter", f"--net=/run/netns/{self.namespace(host)}", "--", *argv]

    def call(self, host: str, work: Callable[[], _T]) -> _T:
        """Run a function in a thread that is on this host as far as sockets go."""

        def entered() -> _T:
            with Path(f"/run/netns/{self.namespace(host)}").open("rb") as handle:
                if _LIBC.setns(handle.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), f"setns {host}")
            return work()

        return self._pool.submit(entered).result(timeout=60)

    def pids(self, host: str) -> list[int]:
        """All processes on this host."""
        own = Path(f"/run/netns/{self.namespace(host)}").stat().st_ino
        found: list[int] = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and (entry / "ns/net").stat().st_ino == own:
                    found.append(int(entry.name))
            except OSError:
                continue  # it ended meanwhile
        return found

    # --- links

    def cut(self, host: str, nets: Iterable[str] = NETWORKS, *, arriving: bool = True, leaving: bool = True) -> None:
        """From now on packets are dropped in silence, in one direction or both: nobody is told that a connection is over."""
        self._rules(host, nets, "drop", arriving=arriving, leaving=leaving)

    def lose(self, host: str, per_cent: int, nets: Iterable[str] = NETWORKS) -> None:
        """Drop arriving packets at random."""
        self._rules(host, nets, f"numgen random mod 100 < {per_cent} drop", arriving=True, leaving=False)

    def heal(self, host: str) -> None:
        """Let everything through again."""
        command("nsenter", f"--net=/run/netns/{self.namespace(host)}", "--", "nft", "flush", "ruleset")

    def _rules(self, host: str, nets: Iterable[str], rule: str, *, arriving: bool, leaving: bool) -> None:
        lines = ["flush ruleset", "table inet test {"]
        for hook, word, wanted in (("input", "iifname", arriving), ("output", "oifname", leaving)):
            if wanted:
                rules = "; ".join(f'{word} "{net}" {rule}' for net in nets)
                lines.append(f"chain {hook} {{ type filter hook {hook} priority 0; {rules}; }}")
        command("nsenter", f"--net=/run/netns/{self.namespace(host)}", "--", "nft", "-f", "-", text="\n".join([*lines, "}"]) + "\n")


def remove_leftovers() -> None:
    """Namespaces of tests that were killed."""
    folder = Path("/run/netns")
    for entry in folder.iterdir() if folder.exists() else ():
        pid = entry.name.removeprefix("regrow").partition("-")[0]
        if entry.name.startswith("regrow") and pid.isdigit() and not Path(f"/proc/{pid}").exists():
            command("ip", "netns", "del", entry.name)
