"""A real etcd as a child process: what `regrow run` and `regrow demo` stand on, and what the tests break.

Data, log and ports live under a state folder, so a restart continues with the same data on the same port. The child has a
process group of its own and is killed by the kernel when the process that started it ends, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import ssl
import sys
import time
from pathlib import Path

import psutil

from regrow.errors import OperationalError
from regrow.store.binary import HeldPort, check_version, etcd_version, find_etcd

log = logging.getLogger("regrow.store")

_PORT_ATTEMPTS = 8
_PORT_SECONDS = 10.0
_GUARD = Path(__file__).with_name("guard.py")


@dataclasses.dataclass(frozen=True)
class EtcdOptions:
    """How an embedded etcd runs."""

    heartbeat_milliseconds: int = 100
    """Between members. The defaults suit one machine; a fresh member is healthy in 0.3 s, and a member that rests takes 0.4 % of a core
    (0.9 % at 20 and 200)."""
    election_milliseconds: int = 500
    quota_bytes: int = 512 * 1024 * 1024
    """Size of the database beyond which etcd refuses writes."""
    keep_revisions: int = 10_000
    """History kept for watches that were interrupted; older revisions are compacted."""
    start_seconds: float = 60.0
    """Limit for becoming healthy."""
    certificate: Path | None = None
    """Server certificate (PEM): serves clients by TLS. With `key`; clients must show a certificate when `client_ca` is given."""
    key: Path | None = None
    client_ca: Path | None = None
    extra: tuple[str, ...] = ()
    """Further flags of etcd."""


class PortTaken(OperationalError):
    """Somebody took a port between our letting go of it and etcd's taking it."""


class EmbeddedEtcd:
    """One member. All methods belong to one event loop.

    Args:
        state: folder for data, log and ports; made if missing.
        options: how it runs.
        name: name of the member.
    """

    def __init__(self, state: Path, options: EtcdOptions | None = None, *, name: str = "etcd") -> None:
        self.state = state
        self.options = options or EtcdOptions()
        self.name = name
        self.client_port = 0
        self.peer_port = 0
        self.initial_cluster = ""
        """name=url,... of all members; empty: it is alone."""
        self.num_starts = 0
        self._held: list[HeldPort] = []
        self._process: asyncio.subprocess.Process | None = None
        self._wanted = False
        self._log_start = 0

    @property
    def scheme(self) -> str:
        """http or https, for clients."""
        return "https" if self.options.certificate else "http"

    @property
    def endpoint(self) -> str:
        """host:port for clients."""
        return f"127.0.0.1:{self.client_port}"

    @property
    def url(self) -> str:
        """For `open_store`; with TLS the options for certificates are the caller's to add."""
        return f"{'etcds' if self.options.certificate else 'etcd'}://{self.endpoint}"

    @property
    def peer_url(self) -> str:
        """Where other members reach it."""
        return f"http://127.0.0.1:{self.peer_port}"

    @property
    def pid(self) -> int | None:
        """Pid while it runs."""
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    @property
    def log_path(self) -> Path:
        """Its standard output and error."""
        return self.state / "etcd.log"

    # --- life

    async def start(self) -> None:
        """Start it and wait until it is healthy. With data from an earlier run: on the same ports, if they are free.

        Raises:
            ConfigurationError: no usable etcd binary.
            OperationalError: it did not become healthy; the end of its log is in the hint.
        """
        for attempt in range(_PORT_ATTEMPTS):
            self.hold_ports()
            try:
                await self.spawn(members=1)
                await self.wait_healthy()
                return
            except PortTaken as error:
                log.warning("etcd name=%s attempt=%d: %s", self.name, attempt + 1, error.what)
                await self.stop()
                self._ports_path().unlink(missing_ok=True)
                self.client_port = self.peer_port = 0
            except BaseException:
                await self.stop()
                raise
        raise OperationalError(f"{_PORT_ATTEMPTS} times a port was taken at the last moment", where=f"etcd {self.name}")

    async def restart(self) -> None:
        """Start it again after its end (or `kill`, `stop`), with the same data on the same ports: clients know the address.

        Raises:
            OperationalError: a port is in use, or it did not become healthy.
        """
        await self._reap()
        deadline = time.monotonic() + _PORT_SECONDS
        while True:
            try:
                self._held = [HeldPort(self.client_port), HeldPort(self.peer_port)]
                break
            except OperationalError:
                self._release_ports()
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(0.1)
        await self.spawn(members=1)
        await self.wait_healthy()

    async def supervise(self) -> None:
        """Restart it whenever it ends, until `stop`. Run it as a task; a restart that fails is tried again each second."""
        while self._wanted:
            await self._reap()
            if not self._wanted:
                return
            log.warning("etcd name=%s ended, restarting", self.name)
            try:
                await self.restart()
            except OperationalError as error:
                log.warning("etcd name=%s did not come back: %s", self.name, error.what)
                await asyncio.sleep(1.0)

    async def stop(self, grace_seconds: float = 5.0) -> None:
        """SIGTERM, after the grace SIGKILL. Data and ports stay for a later `start`."""
        self._wanted = False
        self._release_ports()
        if self.pid is None or self._process is None:
            return
        self.send_signal(signal.SIGTERM)
        self.send_signal(signal.SIGCONT)
        try:
            async with asyncio.timeout(grace_seconds):
                await self._process.wait()
        except TimeoutError:
            self.send_signal(signal.SIGKILL)
            await self._process.wait()

    def send_signal(self, number: int) -> None:
        """A signal to the process, if it runs (SIGKILL, SIGSTOP, SIGCONT in tests)."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, and wait for its end. `restart` brings it back; so does `supervise`."""
        self.send_signal(signal.SIGKILL)
        await self._reap()

    # --- parts of a start, for clusters of several members

    def hold_ports(self) -> None:
        """Choose ports (those of the last run, if they are free) and keep others from taking them."""
        self.state.mkdir(parents=True, exist_ok=True)
        known: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            known = json.loads(self._ports_path().read_text(encoding="utf-8"))
        self._held = []
        for name in ("client", "peer"):
            try:
                self._held.append(HeldPort(known.get(name, 0)))
            except OperationalError:
                self._held.append(HeldPort())
        self.client_port, self.peer_port = (held.number for held in self._held)
        self._ports_path().write_text(json.dumps({"client": self.client_port, "peer": self.peer_port}), encoding="utf-8")

    async def spawn(self, *, members: int) -> None:
        """Start the process on the ports that are held; says nothing about health."""
        binary = find_etcd()
        if self.num_starts == 0:
            check_version(await etcd_version(binary), members=members)
        environment = {name: text for name, text in os.environ.items() if not name.startswith("ETCD_")}
        self.num_starts += 1
        self._wanted = True
        with self.log_path.open("ab") as output:
            self._log_start = output.tell()
            argv = (sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), str(binary), *self._flags())
            self._release_ports()
            self._process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    async def wait_healthy(self) -> None:
        """Until it answers linearizable reads.

        Raises:
            PortTaken: it ended because a port was in use.
            OperationalError: it ended, or the limit passed.
        """
        deadline = time.monotonic() + self.options.start_seconds
        while not await self._healthy():
            if self.pid is None:
                text = self._log_tail()
                if "address already in use" in text:
                    raise PortTaken("a port is in use", where=f"{self.endpoint} or {self.peer_url}", hint=f"see {self.log_path}")
                code = self._process.returncode if self._process else None
                raise OperationalError(f"etcd ended with {code} at its start", where=str(self.log_path), hint=text)
            if time.monotonic() > deadline:
                raise OperationalError(
                    f"etcd was not healthy within {self.options.start_seconds:.0f} s", where=str(self.log_path), hint=self._log_tail()
                )
            await asyncio.sleep(0.02)

    # --- inside

    def _ports_path(self) -> Path:
        return self.state / "ports.json"

    def _release_ports(self) -> None:
        held, self._held = self._held, []
        for port in held:
            port.release()

    async def _reap(self) -> None:
        if self._process is not None:
            await self._process.wait()

    def _flags(self) -> list[str]:
        options = self.options
        client_url = f"{self.scheme}://{self.endpoint}"
        flags = {
            "name": self.name,
            "data-dir": str(self.state / "data"),
            "listen-client-urls": client_url,
            "advertise-client-urls": client_url,
            "listen-peer-urls": self.peer_url,
            "initial-advertise-peer-urls": self.peer_url,
            "initial-cluster": self.initial_cluster or f"{self.name}={self.peer_url}",
            "initial-cluster-state": "new",
            "heartbeat-interval": str(options.heartbeat_milliseconds),
            "election-timeout": str(options.election_milliseconds),
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": str(options.keep_revisions),
            "quota-backend-bytes": str(options.quota_bytes),
            "log-level": "warn",
        }
        if options.certificate and options.key:
            flags |= {"cert-file": str(options.certificate), "key-file": str(options.key)}
        if options.client_ca:
            flags |= {"trusted-ca-file": str(options.client_ca)}
        given = [f"--{name}={text}" for name, text in flags.items()]
        return [*given, *(("--client-cert-auth",) if options.client_ca else ()), *options.extra]

    async def _healthy(self) -> bool:
        """Its own judgement, by HTTP: a linearizable read succeeded. (No grpc here: the caller may not want it loaded.)

        Another etcd on this port would say the same, so it must be our process that listens.
        """
        if not self._listens():
            return False
        context = None
        if self.options.certificate:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE  # we started it ourselves and send it nothing
            if self.options.client_ca:
                assert self.options.certificate is not None
                context.load_cert_chain(self.options.certificate, self.options.key)
        try:
            async with asyncio.timeout(2.0):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.client_port, ssl=context)
                try:
                    writer.write(b"GET /health HTTP/1.0\r\n\r\n")
                    return b'"health":"true"' in await reader.read(65536)
                finally:
                    writer.close()
                    with contextlib.suppress(OSError):
                        await writer.wait_closed()
        except (OSError, TimeoutError):
            return False

    def _listens(self) -> bool:
        if self.pid is None:
            return False
        try:
            sockets = psutil.Process(self.pid).net_connections("tcp")
        except psutil.Error:
            return False
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == self.client_port for one in sockets if one.laddr)

    def _log_tail(self) -> str:
        with self.log_path.open("rb") as text:
            text.seek(max(self._log_start, self.log_path.stat().st_size - 3000))
            return text.read().decode(errors="replace").strip()


class EmbeddedCluster:
    """Several members on this machine, for tests and trials of failover.

    Args:
        state: folder with one folder per member below.
        members: how many.
        options: of every member. The default gives the members longer timeouts than a lone one, so that two busy cores do
            not bring elections about.
    """

    def __init__(self, state: Path, members: int = 3, options: EtcdOptions | None = None) -> None:
        chosen = options or EtcdOptions(heartbeat_milliseconds=100, election_milliseconds=1000)
        self.members = [EmbeddedEtcd(state / f"m{index}", chosen, name=f"m{index}") for index in range(members)]

    @property
    def url(self) -> str:
        """For `open_store`, with all members."""
        return f"{self.members[0].url.partition(':')[0]}://{','.join(member.endpoint for member in self.members)}"

    async def start(self) -> None:
        """Start a fresh cluster and wait until all members are healthy.

        Raises:
            ConfigurationError: no usable etcd binary; a version that is refused for clusters.
            OperationalError: a member did not become healthy.
        """
        for _ in range(_PORT_ATTEMPTS):
            for member in self.members:
                member.hold_ports()
            together = ",".join(f"{member.name}={member.peer_url}" for member in self.members)
            try:
                for member in self.members:
                    member.initial_cluster = together
                    await member.spawn(members=len(self.members))
                for member in self.members:
                    await member.wait_healthy()
                return
            except PortTaken:
                await self.stop()
                for member in self.members:
                    shutil.rmtree(member.state)
            except BaseException:
                await self.stop()
                raise
        raise OperationalError(f"{_PORT_ATTEMPTS} times a port was taken at the last moment", where="etcd cluster")

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Stop all members. (A leader that is told to end looks for a successor first, in vain.)"""
        await asyncio.gather(*(member.stop(grace_seconds) for member in self.members))
