"""The loopback network of a run in a network namespace of its own: lost packets, a rate, one process cut off. Needs root.

Nothing is changed in the machine's own namespace: without `ENTERED` in the environment these functions refuse.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any, cast

import psutil

from regrow.errors import ConfigurationError, OperationalError

ENTERED = "REGROW_CHAOS_NAMESPACE"
_TABLE = "inet regrow_chaos"
_BURST_BYTES = 262_144
"""Above the largest packet of a loopback (its MTU is 65,536): tbf drops what is larger than its bucket for good."""
_SECONDS = 20


def enter(argv: list[str]) -> None:
    """Run this command again in a network namespace of its own; returns at once when it is in one.

    Args:
        argv: the words after `regrow`.

    Raises:
        ConfigurationError: not root, or a tool is missing.
    """
    if os.environ.get(ENTERED):
        return
    missing = [name for name in ("unshare", "ip", "nft", "tc") if shutil.which(name) is None]
    if os.geteuid() != 0 or missing:
        what = f"not installed: {', '.join(missing)}" if missing else "not root"
        raise ConfigurationError(
            f"this plan breaks the network itself, and cannot here: {what}",
            where="regrow chaos run",
            hint="run it as root (apt install util-linux iproute2 nftables), or leave out net_loss, net_rate and data_cut",
        )
    os.environ[ENTERED] = "1"
    inner = (sys.executable, "-m", "regrow", *argv)
    sys.stdout.flush()
    os.execvp("unshare", ("unshare", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", *inner))  # noqa: S606


def lose(share: float) -> None:
    """Every packet is lost with this probability."""
    _rules(f"numgen random mod 10000 < {int(share * 10_000)} drop")


def limit(bytes_per_second: float) -> None:
    """All traffic together goes through a token bucket.

    Raises:
        OperationalError: this kernel has none (tbf).
    """
    _run(
        "tc",
        "qdisc",
        "replace",
        "dev",
        "lo",
        "root",
        "tbf",
        "rate",
        f"{int(bytes_per_second * 8)}bit",
        "burst",
        str(_BURST_BYTES),
        "latency",
        "2s",
    )


def cut_off(pid: int) -> None:
    """No packet of a process's TCP connections arrives any more, its own and those to it.

    Raises:
        OperationalError: it has no connection.
    """
    connections = cast("list[Any]", psutil.Process(pid).net_connections("tcp"))
    ports = sorted({int(one.laddr.port) for one in connections if one.laddr})
    if not ports:
        raise OperationalError("it has no TCP connection", where=f"pid {pid}")
    listed = ", ".join(map(str, ports))
    _rules(f"tcp sport {{ {listed} }} drop", f"tcp dport {{ {listed} }} drop")


def heal() -> None:
    """The network is whole again."""
    if os.environ.get(ENTERED):
        subprocess.run(["nft", "delete", "table", *_TABLE.split()], capture_output=True, timeout=_SECONDS, check=False)
        subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], capture_output=True, timeout=_SECONDS, check=False)


def _rules(*rules: str) -> None:
    lines = [f"add table {_TABLE}", f"add chain {_TABLE} out {{ type filter hook output priority 0; policy accept; }}"]
    _run("nft", "-f", "-", text="\n".join([*lines, *(f"add rule {_TABLE} out {rule}" for rule in rules)]) + "\n")


def _run(*argv: str, text: str = "") -> None:
    if not os.environ.get(ENTERED):
        raise OperationalError("the run has no network of its own", where="regrow chaos", hint="start it by `regrow chaos run`")
    done = subprocess.run(argv, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode:
        raise OperationalError(f"{' '.join(argv)}: {done.stderr.strip()[:300]}", where="network namespace", hint="this kernel lacks it")
