"""What a kubelet makes of a pod's one container, on this machine: volumes as folders, the environment, the command line, probes.

Paths of mounts become folders, names of services and ports become those of this test; nothing else of a manifest is changed.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ENTRYPOINT = Path(sys.executable).with_name("regrow")
LIMIT = 90.0


@dataclass(frozen=True)
class Cluster:
    """What a pod finds around it."""

    secrets: dict[str, Path]
    """Folder with the files of each Secret."""
    config: dict[str, dict[str, str]]
    """Data of each ConfigMap."""
    claims: dict[str, Path]
    hosts: dict[str, str]
    """host:port of a service -> host:port here."""
    sizes: dict[str, str] = field(default_factory=dict[str, str])
    """Environment of a machine of this size, over the manifest's."""


class Pod:
    """One pod. `fields` is the downward API; `ports` maps its container ports to free ones here."""

    def __init__(self, root: Path, spec: dict[str, Any], cluster: Cluster, fields: dict[str, str], ports: dict[int, int]) -> None:
        self.root, self.spec, self.cluster, self.fields, self.ports = root, spec, cluster, fields, ports
        (self.container,) = spec["containers"]
        root.mkdir(parents=True)
        volumes = {volume["name"]: self._volume(volume) for volume in spec["volumes"]}
        self.mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in self.container["volumeMounts"]}
        self.process: asyncio.subprocess.Process | None = None

    def _volume(self, volume: dict[str, Any]) -> Path:
        if "persistentVolumeClaim" in volume:
            return self.cluster.claims[volume["persistentVolumeClaim"]["claimName"]]
        folder = self.root / volume["name"]
        folder.mkdir()
        if "secret" in volume:
            source = self.cluster.secrets[volume["secret"]["secretName"]]
            wanted = volume["secret"].get("items") or [{"key": path.name, "path": path.name} for path in source.iterdir()]
            for item in wanted:
                shutil.copyfile(source / item["key"], folder / item["path"])
                (folder / item["path"]).chmod(volume["secret"]["defaultMode"] & 0o700)  # ours here; in a pod root's, lent to the group
        else:
            assert "emptyDir" in volume, volume
        return folder

    def here(self, text: str) -> str:
        """A value of the manifest with this machine's folders, addresses and ports, each replaced once."""
        known = {**self.cluster.hosts, **{path: str(folder) for path, folder in self.mounts.items()}, "0.0.0.0": "127.0.0.1"}
        known |= {str(port): str(own) for port, own in self.ports.items()}
        found = "|".join(rf"(?<![\w.]){re.escape(name)}(?!\w)" for name in sorted(known, key=len, reverse=True))
        return re.sub(found, lambda match: known[match[0]], text)

    def environment(self) -> dict[str, str]:
        """Later entries see earlier ones as $(NAME), as in a pod."""
        made: dict[str, str] = {}
        for source in self.container.get("envFrom", ()):
            made |= self.cluster.config[source["configMapRef"]["name"]]
        for entry in self.container.get("env", ()):
            value = entry.get("value")
            if value is None:
                value = self.fields[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            made[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda match: made.get(match[1], match[0]), value)
        return {name: self.here(value) for name, value in made.items()} | self.cluster.sizes

    async def start(self) -> None:
        """The image's entry point with the container's arguments."""
        outside = {name: value for name, value in os.environ.items() if not name.startswith("REGROW_")}
        folder = self.here(self.container["workingDir"]) if "workingDir" in self.container else str(self.root)
        log = os.open(self.root / "log", os.O_CREAT | os.O_WRONLY)
        words = [self.here(word) for word in self.container["args"]]
        self.process = await asyncio.create_subprocess_exec(
            *(str(ENTRYPOINT), *words), env=outside | self.environment(), cwd=folder, stdout=log, stderr=log, start_new_session=True
        )
        os.close(log)

    def log(self) -> str:
        return (self.root / "log").read_text(encoding="utf-8", errors="replace")

    async def ready(self) -> None:
        """Until its readiness probe and, where it has one, its liveness probe are answered with success."""
        names = {port["name"]: self.ports[port["containerPort"]] for port in self.container["ports"]}
        for kind in ("readinessProbe", "livenessProbe"):
            if kind not in self.container:
                continue
            asked = self.container[kind]["httpGet"]
            url = f"{asked.get('scheme', 'HTTP').lower()}://127.0.0.1:{names[asked['port']]}{asked['path']}"
            async with asyncio.timeout(LIMIT), httpx.AsyncClient(verify=False, trust_env=False) as client:
                while not await self._answers(client, url):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)

    async def _answers(self, client: httpx.AsyncClient, url: str) -> bool:
        assert self.process is not None
        assert self.process.returncode is None, self.log()
        try:
            return (await client.get(url)).is_success
        except httpx.TransportError:
            return False

    async def ends(self) -> int:
        """Exit code."""
        assert self.process is not None
        return await asyncio.wait_for(self.process.wait(), LIMIT)

    async def stop(self) -> int:
        """SIGTERM, then SIGKILL when its grace is over; exit code."""
        assert self.process is not None
        if self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), self.spec["terminationGracePeriodSeconds"])
            except TimeoutError:
                os.killpg(self.process.pid, signal.SIGKILL)
        return await self.process.wait()
