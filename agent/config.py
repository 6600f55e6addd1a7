"""Settings of the agent daemon: file [agent] < environment REGROW_AGENT_* < flag."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path
from typing import Literal

from regrow import security
from regrow.errors import ConfigurationError
from regrow.ids import check_name


@dataclasses.dataclass(frozen=True)
class AgentSettings:
    """Everything that an agent can be told. Times in seconds."""

    node: str = ""
    """Name of this node in the cluster; default: the host's name."""
    cluster: str = "local"
    """Name of the cluster: keys are under /regrow/<cluster>/."""
    store: str = ""
    """URL of the store, etcd://host:port[,host:port]."""
    state: Path = Path()
    """State folder of this node: sockets, logs, fences; one agent a folder."""
    slots: int = 1
    """Workers that this node runs at most."""
    address: str = "127.0.0.1"
    """Host under which peers reach this node; stores and peer port listen on it."""
    peer_port: int = 0
    """Port for reports of other nodes; 0: any free one."""
    metrics: str = "127.0.0.1:0"
    """Host and port of /metrics. Port 0: any free one, written to <state>/agent-run.json; empty: off."""
    failure_domain: str = ""
    """What fails together with this node (rack, power, switch): copies of its checkpoints go to a node in another one."""
    hardware_id: str = ""
    """What quarantine is keyed by without GPU UUIDs; default: the chassis serial, or machine id and state folder."""
    node_ttl_seconds: float = 15.0
    """Lease of this node's key in the store."""
    orphan_seconds: float = 30.0
    """Workers are stopped when no agent came back for this long."""
    notice_seconds: float = 30.0
    """On SIGTERM: how long to wait for a save and for the leader's release."""
    kill_seconds: float = 10.0
    """A worker that is alive so long after SIGKILL makes the node unusable."""
    static_seconds: float = 7200.0
    """Workers go on for so long without any leader, then they are stopped."""
    warm: bool = True
    """Keep a process with torch imported that forks the workers (about 300 MB, shared with them)."""
    preload: str = ""
    """Modules that the shim imports besides torch, separated by commas."""
    fake_nvml: str = ""
    """State file of a fake NVML: its GPUs are taken for this node's (demo and tests)."""
    kernel_log: str = "/dev/kmsg"
    """Kernel log to follow for XIDs and machine checks; empty: none. With a fake NVML only a file is
    followed, never the host's own log."""
    health_seconds: float = 5.0
    """Between two health probes; 0: none."""
    preflight_seconds: float = 20.0
    """Budget of the check of memory, matrix product, disk and GPUs before this node joins; 0: none. Not made when workers of an
    agent that ran here before may still be at work."""

    tls_certificate: str = ""
    """PEM file of this node's certificate: beats and reports to other nodes go over TLS, both sides known."""
    tls_key: str = ""
    """PEM file of the certificate's key."""
    tls_ca: str = ""
    """PEM file of the cluster's authority."""

    def tls(self, side: Literal["server", "client"]) -> security.Tls | None:
        """TLS of this node; None: plain connections."""
        files = security.Files(self.tls_certificate, self.tls_key, self.tls_ca)
        return security.Tls(files, side) if files.certificate else None

    def preloads(self) -> tuple[str, ...]:
        """`preload` as names."""
        return tuple(name.strip() for name in self.preload.split(",") if name.strip())


def check(settings: AgentSettings) -> AgentSettings:
    """Settings with defaults filled in, when an agent can run with them. No side effects.

    Raises:
        ConfigurationError: names the flag and what to try.
    """
    node = settings.node or socket.gethostname().split(".")[0].lower()
    check_name("node", node)
    check_name("cluster", settings.cluster)
    if not settings.store:
        raise ConfigurationError("no store is given", where="--store", hint="give --store etcd://HOST:2379, or set REGROW_AGENT_STORE")
    if settings.state == Path():
        raise ConfigurationError("no state folder is given", where="--state", hint="give --state /var/lib/regrow")
    if settings.slots < 1:
        raise ConfigurationError(f"{settings.slots} slots", where="--slots", hint="a node runs at least one worker")
    for name in ("node_ttl_seconds", "orphan_seconds", "kill_seconds", "static_seconds"):
        if getattr(settings, name) <= 0:
            raise ConfigurationError(f"{getattr(settings, name)} is not above 0", where=f"--{name.replace('_', '-')}", hint="give seconds")
    if not 0 <= settings.peer_port < 65536:
        raise ConfigurationError(f"{settings.peer_port} is no port", where="--peer-port", hint="0 takes any free one")
    state = settings.state.absolute()
    if len(str(state)) > 90:
        raise ConfigurationError(
            f"is too long ({len(str(state))} characters) for the sockets in it", where=f"--state {state}", hint="use a path of at most 90"
        )
    check_state_folder(state)
    check_address(settings.address, settings.peer_port, "--address")
    if settings.metrics:
        host, _, port = settings.metrics.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ConfigurationError(f"{settings.metrics!r} is not host:port", where="--metrics", hint="write it like 127.0.0.1:9464")
        check_address(host.strip("[]"), int(port), "--metrics")
    security.Files(settings.tls_certificate, settings.tls_key, settings.tls_ca).check("[agent]")
    return dataclasses.replace(settings, node=node, state=state)


def check_state_folder(state: Path) -> None:
    """The folder exists or can be made, and can be written.

    Raises:
        ConfigurationError: it is not so.
    """
    existing = state
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigurationError(f"{existing} cannot be written", where=f"--state {state}", hint="give a folder that this user can write")


def check_address(host: str, port: int, where: str) -> None:
    """This machine has the address, and the port is free.

    Raises:
        ConfigurationError: it is not so.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {host}:{port}: {error.strerror or error}",
                where=where,
                hint="give an address of this host and a free port",
            ) from error


def hardware_id(settings: AgentSettings) -> str:
    """The chassis serial where firmware tells it, else machine id and state folder (several agents may share a host)."""
    if settings.hardware_id:
        return settings.hardware_id
    for name in ("product_uuid", "product_serial"):
        try:
            text = Path(f"/sys/class/dmi/id/{name}").read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            continue
        if text and text.lower() not in ("none", "not specified", "to be filled by o.e.m.", "0"):
            return f"{text}{_folder_suffix(settings)}"
    try:
        machine = Path("/etc/machine-id").read_text(encoding="ascii").strip()
    except OSError:
        machine = socket.gethostname()
    return f"{machine}{_folder_suffix(settings)}"


def _folder_suffix(settings: AgentSettings) -> str:
    return "" if str(settings.state).startswith("/var/lib/") else f"@{settings.state}"
