"""Checks of `regrow doctor` for what the forms of deployment and checkpoints lean on. Each changes nothing and has a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import resource
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from regrow.cli.checks import Check
from regrow.errors import ConfigurationError, RegrowError

_BLOCK = 4096
_SECONDS = 5.0
_GIB = 1 << 30
_PROCESSES = 4096
_RUNTIMES = ("docker", "podman")
PORTS = {7070: "beats", 7071: "API", 7072: "peers", 9464: "agent's /metrics"}
"""The ports of the examples in deploy/."""


def direct_io(folder: Path | None = None) -> Check:
    """Whether the current folder's file system takes O_DIRECT: checkpoints are then written past the page cache."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder or Path.cwd(), prefix=".regrow-doctor-") as file:
            handle = os.open(file.name, os.O_WRONLY | os.O_DIRECT)
            try:
                with mmap.mmap(-1, _BLOCK) as block:
                    os.write(handle, block)
            finally:
                os.close(handle)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return Check(
                "direct I/O", "note", "not on this file system: checkpoints go through the page cache", "use ext4 or xfs on a local disk"
            )
        return Check("direct I/O", "warn", f"nothing can be written here: {error.strerror}", "change to a folder of your own")
    return Check("direct I/O", "ok", "works in this folder")


def locked_memory() -> Check:
    """RDMA and pinned buffers count against the limit on locked memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", "ok", "unlimited")
    text = f"{soft / _GIB:.2f} GiB" if soft >= _GIB else f"{soft >> 10} KiB"
    return Check(
        "locked memory", "note", f"{text}: NCCL over RDMA wants it unlimited", "ulimit -l unlimited; LimitMEMLOCK=infinity in a unit"
    )


def processes() -> Check:
    """Processes and threads that this user may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if soft in (resource.RLIM_INFINITY, -1) or soft >= _PROCESSES:
        return Check("processes", "ok", "unlimited" if soft in (resource.RLIM_INFINITY, -1) else str(soft))
    return Check("processes", "warn", f"{soft}: data loaders of 8 ranks need more", f"ulimit -u {_PROCESSES}")


def known_ports() -> Check:
    """Whether somebody listens on the ports of the examples."""
    taken = [f"{port} ({use})" for port, use in PORTS.items() if _listens(port)]
    if taken:
        return Check(
            "ports",
            "note",
            f"in use here: {', '.join(taken)}",
            "is a daemon running already? else give others by --beat, --http, --peer-port",
        )
    return Check("ports", "ok", f"free: {', '.join(map(str, PORTS))}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


def own_name() -> Check:
    """The name of this host leads to an address of its own that others can use."""
    name = socket.gethostname()
    try:
        address = socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)[0][4][0]
    except OSError:
        return Check("host name", "warn", f"{name!r} has no address", "add it to /etc/hosts or DNS, or give --address to the agent")
    if str(address).startswith("127.") or address == "::1":
        hint = "fine on one machine; else give --address to the agent and --advertise to the supervisor"
        return Check("host name", "note", f"{name!r} is {address}, which other hosts cannot reach", hint)
    return Check("host name", "ok", f"{name} is {address}")


def store(url: str) -> Check:
    """The cluster's store, when one is named: it answers, and who leads."""
    if not url:
        return Check("store", "note", "none is named, so none was asked", "--store etcd://HOST:2379, or REGROW_STORE")
    from regrow.store.open import open_store

    async def ask() -> int:
        opened = open_store(url, timeout=_SECONDS)
        try:
            return len(await opened.get_prefix("/regrow/", keys_only=True))
        finally:
            await opened.close()

    shown = url.split("?", 1)[0]
    try:
        found = asyncio.run(ask())
    except RegrowError as error:
        return Check("store", "missing", f"{shown}: {error.what}", error.hint or "is it running? do the certificates fit?")
    return Check("store", "ok", f"{shown} answers; it {'has' if found else 'does not have'} keys of Regrow")


def systemd() -> Check:
    """Whether the units of deploy/systemd can run here."""
    if not Path("/run/systemd/system").is_dir():
        return Check(
            "systemd", "note", "does not run this machine", "docs/deploy-slurm.md, docs/deploy-kubernetes.md, docs/deploy-containers.md"
        )
    done = _ask("systemctl", "--version")
    version = done.splitlines()[0].split()[1] if done else "?"
    return Check("systemd", "ok", f"version {version}")


def slurm() -> Check:
    """Whether a Slurm controller answers."""
    if not shutil.which("scontrol"):
        return Check("slurm", "note", "scontrol is not here", "apt-get install slurm-client, for docs/deploy-slurm.md")
    done = _ask("scontrol", "ping")
    if " UP" in done or "is UP" in done:
        return Check("slurm", "ok", done.splitlines()[0])
    return Check("slurm", "note", "no controller answers", "check SLURM_CONF and munge")


def kubernetes() -> Check:
    """Whether this runs in a pod, or kubectl reaches a cluster."""
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        token = Path("/var/run/secrets/kubernetes.io/serviceaccount/token").exists()
        return Check("kubernetes", "ok", f"this is a pod, {'with' if token else 'without'} a token of the API")
    if not shutil.which("kubectl"):
        return Check("kubernetes", "note", "kubectl is not here", "apt-get install kubernetes-client, for docs/deploy-kubernetes.md")
    done = _ask("kubectl", "version", "--request-timeout=3s", "-o", "yaml")
    if "serverVersion" in done:
        return Check("kubernetes", "ok", "kubectl reaches a cluster")
    return Check("kubernetes", "note", "kubectl is here and reaches no cluster", "check KUBECONFIG")


def observing() -> Check:
    """Whether `regrow observe` has its two programs, and what could start a Grafana beside them."""
    from regrow.observe import stack

    try:
        found = stack.binaries()
    except ConfigurationError as error:
        return Check("observing", "note", error.what, error.hint)
    runtime = next((name for name in _RUNTIMES if shutil.which(name)), "")
    grafana = f"{runtime} could start Grafana" if runtime else f"no container runtime for Grafana ({' or '.join(_RUNTIMES)})"
    return Check("observing", "ok", f"{', '.join(sorted(found))}; {grafana}")


def _ask(*command: str) -> str:
    """What a program says within the limit; nothing when it fails."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS, stdin=subprocess.DEVNULL).stdout
    return ""
