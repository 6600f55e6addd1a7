"""The checks of `regrow doctor`. Each looks at one thing, changes nothing, and says how to get what is missing."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from regrow.errors import RegrowError

Status = Literal["ok", "note", "warn", "missing"]

_LEAST_PYTHON = (3, 11)
_LEAST_TORCH = (2, 9)
_SHM_BYTES = 1 << 30
_LEAST_SHM_BYTES = 64 << 20
_FILES = 4096
_LEAST_FILES = 1024
_DISK_BYTES = 2 << 30


class Check(msgspec.Struct, frozen=True):
    """One answer. ok: fine; note: good to know; warn: works with limits; missing: does not work."""

    name: str
    status: Status
    detail: str
    hint: str = ""


def run_all(*, members: int = 1, deadline_seconds: float = 10.0, store: str = "") -> list[Check]:
    """All checks, in the order in which people need them. Bounded: the slowest is the GPU probe with its deadline."""
    from regrow.cli import checks_deploy as deploy

    single: tuple[Callable[[], Check], ...] = (python, torch, lambda: etcd(members), compiler)
    machine: tuple[Callable[[], Check], ...] = (
        shared_memory,
        open_files,
        deploy.processes,
        deploy.locked_memory,
        disk,
        deploy.direct_io,
        ports,
        deploy.known_ports,
        deploy.own_name,
        cgroup,
        lambda: gpus(deadline_seconds),
        kernel_log,
        clock,
        certificates,
        lambda: deploy.store(store),
        deploy.systemd,
        deploy.slurm,
        deploy.kubernetes,
        deploy.observing,
        cluster_tools,
    )
    return [check() for check in (*single, *machine)]


def exit_code(found: list[Check]) -> int:
    """1: something is missing; 3: it works with limits; 0: fine."""
    states = {one.status for one in found}
    return 1 if "missing" in states else 3 if "warn" in states else 0


def python() -> Check:
    """Python itself."""
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _LEAST_PYTHON:
        return Check("python", "missing", f"{version} is too old", "install Python 3.11 or newer")
    return Check("python", "ok", version)


def torch() -> Check:
    """Torch is looked for, never imported: that takes seconds and belongs to workers."""
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "missing", "not installed (daemons run without it, training does not)", "pip install 'regrow[train]'")
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Check("torch", "note", "found, without a version")
    if tuple(int(word) for word in version.split("+")[0].split(".")[:2] if word.isdigit()) < _LEAST_TORCH:
        return Check("torch", "missing", f"{version} is too old", "pip install 'torch>=2.9'")
    return Check("torch", "ok", version)


def etcd(members: int = 1) -> Check:
    """The etcd binary for an embedded store, and whether its version keeps its members consistent."""
    from regrow.store.binary import check_version, etcd_version, find_etcd

    try:
        path = find_etcd()
        version = asyncio.run(etcd_version(path))
    except RegrowError as error:
        return Check("etcd", "missing", error.what, error.hint)
    text = f"{'.'.join(map(str, version))} at {path}"
    try:
        check_version(version, members=members)
        check_version(version, members=3)
    except RegrowError as error:
        alone = members == 1 and version >= (3, 4, 0)
        detail = f"{text}: good for one local member only ({error.what})" if alone else f"{text}: {error.what}"
        return Check("etcd", "warn" if alone else "missing", detail, error.hint or "install etcd 3.5.3 or newer")
    return Check("etcd", "ok", text)


def compiler() -> Check:
    """A C compiler, for the fake GPU library of demo and tests and for the fastest copy of a snapshot."""
    from regrow import compiling

    command = compiling.compiler()
    if command is None:
        return Check(
            "c compiler",
            "warn",
            "none: snapshots are copied by torch; the fake GPU library of demo and tests cannot be built",
            "apt-get install gcc, or pip install ziglang",
        )
    return Check("c compiler", "ok", " ".join(command))


def shared_memory(path: str = "/dev/shm") -> Check:  # noqa: S108 - the mount itself is what is looked at
    """Room for checkpoint arenas."""
    try:
        usage = shutil.disk_usage(path)
    except OSError as error:
        return Check("shared memory", "missing", f"{path}: {error.strerror}", "mount a tmpfs there")
    text = f"{usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f} GiB in {path}"
    hint = "in a container: docker run --shm-size=8g, or an emptyDir with medium Memory at /dev/shm"
    if usage.free < _LEAST_SHM_BYTES:
        return Check("shared memory", "missing", text, hint)
    return Check("shared memory", "warn", f"{text}: little", hint) if usage.free < _SHM_BYTES else Check("shared memory", "ok", text)


def open_files() -> Check:
    """How many descriptors a process may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} (hard limit {hard})"
    hint = f"ulimit -n {min(65536, hard) if hard > 0 else 65536}"
    if 0 <= soft < _LEAST_FILES:
        return Check("open files", "missing", text, hint)
    return Check("open files", "note", f"{text}: large clusters need more", hint) if 0 <= soft < _FILES else Check("open files", "ok", text)


def disk() -> Check:
    """Room and permission where runs are kept by default: under the current folder."""
    here = Path.cwd()
    usage = shutil.disk_usage(here)
    text = f"{usage.free / 2**30:.1f} GiB free at {here}"
    if not os.access(here, os.W_OK):
        return Check("disk", "warn", f"{here} is not writable", "change to a folder of your own, or give --state")
    return Check("disk", "ok", text) if usage.free >= _DISK_BYTES else Check("disk", "warn", f"{text}: little", "free some space")


def ports() -> Check:
    """Loopback TCP and Unix sockets, and the name localhost."""
    try:
        with socket.socket() as server, socket.socket() as client:
            server.bind(("127.0.0.1", 0))
            server.listen(1)
            client.settimeout(2.0)
            client.connect(server.getsockname())
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as unix:
            unix.bind(f"{folder}/s")
    except OSError as error:
        return Check("sockets", "missing", f"loopback or Unix sockets do not work: {error}", "allow local sockets")
    try:
        address = socket.gethostbyname("localhost")
    except OSError:
        return Check("sockets", "warn", "the name localhost has no address", "add '127.0.0.1 localhost' to /etc/hosts")
    return Check("sockets", "ok", f"loopback TCP and Unix sockets work; localhost is {address}")


def cgroup() -> Check:
    """Which cgroup version, and whether groups can be made (workers are then killed as a group)."""
    root = Path("/sys/fs/cgroup")
    version = "v2" if (root / "cgroup.controllers").exists() else "v1" if (root / "memory").is_dir() else ""
    if not version:
        return Check("cgroup", "note", "none visible: worker processes are stopped by process group")
    writable = os.access(root if version == "v2" else root / "memory", os.W_OK)
    return Check("cgroup", "ok" if writable else "note", f"{version}, {'writable' if writable else 'read-only: process groups are used'}")


def gpus(deadline_seconds: float = 10.0) -> Check:
    """The NVIDIA driver, asked in a child process with a deadline."""
    from regrow.agent.health.prober import probe_once

    sample = probe_once(deadline_seconds=deadline_seconds)
    if sample.status == "no_driver":
        return Check("gpus", "note", "no NVIDIA driver: CPU training (gloo) only")
    if sample.status != "ok":
        return Check(
            "gpus",
            "missing",
            f"the driver is there and does not work: {sample.status}: {sample.detail}",
            "regrow health --explain; nvidia-smi",
        )
    lost = len(sample.unreachable) + len(sample.lost_uuids())
    text = f"{sample.count} GPUs, driver {sample.driver_version}, {sample.seconds:.1f} s to read"
    return Check("gpus", "warn", f"{text}; {lost} do not answer", "regrow health --explain") if lost else Check("gpus", "ok", text)


def kernel_log() -> Check:
    """Whether XIDs and machine checks can be read from the kernel log."""
    if os.access("/dev/kmsg", os.R_OK):
        return Check("kernel log", "ok", "/dev/kmsg is readable")
    return Check("kernel log", "note", "/dev/kmsg is not readable: XIDs come from NVML alone", "run the agent as root or with CAP_SYSLOG")


def clock() -> Check:
    """Whether somebody disciplines the clock. Regrow never compares wall clocks of two hosts; people do, in logs."""
    from regrow.agent.health.host import clock_state

    synchronised, offset = clock_state()
    if synchronised is None:
        return Check("clock", "note", "its discipline cannot be read")
    if not synchronised:
        return Check(
            "clock", "note", "not synchronised: times in logs of several hosts will not line up", "run chrony or systemd-timesyncd"
        )
    return Check("clock", "ok", f"synchronised, offset {abs(offset or 0.0) * 1e3:.1f} ms")


_TOOLS = {"sbatch": "Slurm jobs", "etcdctl": "etcd backup", "buildah": "container images"}
"""Programs that only some forms want. systemd, Slurm and Kubernetes have checks of their own."""


def certificates() -> Check:
    """Whether `regrow certs` can make certificates here; daemons use them without it."""
    if importlib.util.find_spec("cryptography") is None:
        return Check("certificates", "note", "`regrow certs` needs the package cryptography", "pip install 'regrow[security]'")
    return Check("certificates", "ok", f"cryptography {importlib.metadata.version('cryptography')}")


def cluster_tools() -> Check:
    """Which forms of deployment this machine has the tools for. None is needed to run."""
    found = [text for name, text in _TOOLS.items() if shutil.which(name)]
    lacking = [f"{text} ({name})" for name, text in _TOOLS.items() if not shutil.which(name)]
    detail = f"found: {', '.join(found) or 'none'}" + (f"; not here: {', '.join(lacking)}" if lacking else "")
    return Check("cluster tools", "note" if lacking else "ok", detail, "docs/deploy-*.md say what each form needs" if lacking else "")
