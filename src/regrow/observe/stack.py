"""A Prometheus and an Alertmanager for one cluster, as child processes with files in one folder."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import httpx

import regrow.store
from regrow import security
from regrow.dashboards import rules, write
from regrow.errors import ConfigurationError, OperationalError
from regrow.observe import grafana
from regrow.store.binary import HeldPort

_GUARD = Path(regrow.store.__path__[0]) / "guard.py"
_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_LOOK_SECONDS = 0.5
_DEBIAN = {"prometheus": "prometheus", "alertmanager": "prometheus-alertmanager"}


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run and where."""

    root: Path
    """Folder for configuration, rules, data and logs; made if missing."""
    find: Callable[[], str | None]
    """Base URL of a supervisor now; None: there is none, and nothing to scrape. May block."""
    prometheus_port: int = 0
    alertmanager_port: int = 0
    """Loopback ports; 0: any free one."""
    every_seconds: int = 15
    """Between two scrapes and two evaluations."""
    factor: float = 1.0
    """All durations in the rules are shortened by it."""
    https: bool = False
    """The supervisors' API speaks TLS."""


def binaries() -> dict[str, str]:
    """{"prometheus": path, "alertmanager": path}.

    Raises:
        ConfigurationError: one is missing; names the package.
    """
    found: dict[str, str] = {}
    for name, package in _DEBIAN.items():
        path = shutil.which(name) or shutil.which(package)
        if path is None:
            raise ConfigurationError(
                f"{name} is not installed",
                where="PATH",
                hint=f"apt-get install {package}, or put the {name} binary of its project on the PATH",
            )
        found[name] = path
    return found


class Stack:
    """Start with `async with`. Targets follow the cluster: a leader that moved, nodes that came and went."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._binaries = binaries()
        self.root = plan.root.absolute()
        self.prometheus = ""
        """Base URL."""
        self.alertmanager = ""
        self._children: list[asyncio.subprocess.Process] = []
        self._following: asyncio.Task[None] | None = None
        self._client = httpx.AsyncClient(timeout=httpx.Timeout(5.0), trust_env=False)
        self._api = httpx.AsyncClient(
            timeout=httpx.Timeout(5.0), trust_env=False, headers=security.operator_headers(), verify=security.operator_verify()
        )

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self.stop()

    # --- life

    async def _start(self) -> None:
        ports = [_hold(self._plan.alertmanager_port, "alertmanager"), _hold(self._plan.prometheus_port, "prometheus")]
        self.alertmanager, self.prometheus = (f"http://127.0.0.1:{port.number}" for port in ports)
        self._write(f"127.0.0.1:{ports[0].number}")
        await self._child(
            "alertmanager",
            "--config.file=alertmanager.yml",
            "--storage.path=data/alertmanager",
            f"--web.listen-address=127.0.0.1:{ports[0].release()}",
            "--cluster.listen-address=",
        )
        await self._child(
            "prometheus",
            "--config.file=prometheus.yml",
            "--storage.tsdb.path=data/prometheus",
            f"--web.listen-address=127.0.0.1:{ports[1].release()}",
        )
        for base, child in zip((self.alertmanager, self.prometheus), self._children, strict=True):
            await self._until_ready(base, child)
        self._following = asyncio.create_task(self._follow())

    async def stop(self) -> None:
        """Stop both; what they wrote stays."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        for child in self._children:
            if child.returncode is None:
                child.terminate()
        for child in self._children:
            try:
                await asyncio.wait_for(child.wait(), _STOP_SECONDS)
            except TimeoutError:
                child.kill()
                await child.wait()
        await self._client.aclose()
        await self._api.aclose()

    async def alerts_page(self) -> str:
        """Where people see the alerts: Debian's package has the classic pages only."""
        plain = f"{self.prometheus}/alerts"
        return plain if (await self._client.get(plain)).is_success else f"{self.prometheus}/classic/alerts"

    async def _child(self, name: str, *arguments: str) -> None:
        with (self.root / f"{name}.log").open("ab") as log:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()), self._binaries[name], *arguments),
                cwd=self.root,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._children.append(child)

    async def _until_ready(self, base: str, child: asyncio.subprocess.Process) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await self._client.get(f"{base}/-/ready")).status_code == 200:
                    return
            if child.returncode is not None or time.monotonic() > deadline:
                raise OperationalError("did not start", where=base, hint=f"read the logs in {self.root}")
            await asyncio.sleep(0.05)

    def _write(self, alertmanager: str) -> None:
        plan, every = self._plan, f"{self._plan.every_seconds}s"
        pace = rules.Pace(plan.factor)
        token = security.operator_token()
        setting = write.Setting(
            discovery=(),
            targets_file="targets.json",
            token_file="token" if token else "",
            https=plan.https,
            ca_file=os.environ.get(security.CA_VARIABLE, "") if plan.https else "",
            alertmanager=alertmanager,
            every=every,
        )
        short = {"wait": pace.d(30), "group": pace.d(300)} if plan.factor < 1 else {}
        texts = {
            "prometheus.yml": write.prometheus_yaml(setting),
            "alertmanager.yml": write.alertmanager_yaml(**short),
            "rules/recording.yaml": write.recording_yaml(pace),
            "rules/alerts.yaml": write.alerts_yaml(pace),
            "targets.json": "[]\n",
            **grafana.files(self.prometheus, self.root),
        }
        try:
            for name, text in texts.items():
                path = self.root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text, encoding="utf-8")
            if token:
                with open(os.open(self.root / "token", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as secret:
                    secret.write(token)
        except OSError as error:
            raise ConfigurationError(f"cannot be written: {error.strerror}", where=str(self.root), hint="give another --run-dir") from error

    # --- targets

    async def _follow(self) -> None:
        """Keep the target list. Nobody answers: it stays, so that `up` tells. No cluster at all: it is empty."""
        known = "[]\n"
        while True:
            text = await self._targets(known)
            if text != known:
                known = text
                fresh = self.root / "targets.new"
                fresh.write_text(text, encoding="utf-8")
                fresh.replace(self.root / "targets.json")
            await asyncio.sleep(_LOOK_SECONDS)

    async def _targets(self, known: str) -> str:
        try:
            base = await asyncio.to_thread(self._plan.find)
            if base is None:
                return "[]\n"
            answer = await self._api.get(f"{base}/v1/prometheus/targets")
            return json.dumps(answer.json()) + "\n" if answer.is_success else known
        except (OperationalError, httpx.HTTPError, ValueError):
            return known

    # --- asking

    async def query(self, expr: str, **more: Any) -> list[dict[str, Any]]:
        """Instant query; with start, end and step a range query. The result's series.

        Raises:
            OperationalError: Prometheus refuses the expression or does not answer.
        """
        return await query(self._client, self.prometheus, expr, **more)

    async def get(self, url: str) -> Any:
        """GET a JSON document of either."""
        answer = await self._client.get(url)
        answer.raise_for_status()
        return answer.json()


def _hold(number: int, name: str) -> HeldPort:
    try:
        return HeldPort(number)
    except OperationalError as error:
        hint = f"stop what listens there, or --{name}-port 0 for any free one"
        raise OperationalError(error.what, where=error.where, hint=hint) from error


async def query(client: httpx.AsyncClient, base: str, expr: str, **more: Any) -> list[dict[str, Any]]:
    """Ask a Prometheus."""
    path = "query_range" if "start" in more else "query"
    try:
        answer = (await client.get(f"{base}/api/v1/{path}", params={"query": expr, **more})).json()
    except (httpx.HTTPError, ValueError) as error:
        raise OperationalError(f"Prometheus does not answer: {error}", where=base) from error
    if answer.get("status") != "success":
        raise OperationalError(str(answer.get("error", answer)), where=expr)
    return answer["data"]["result"]
