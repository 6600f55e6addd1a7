"""Actuators against a real Slurm, and against an API server that speaks Kubernetes' shapes over TLS."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from tests.deploy.slurm import Slurm as Cluster

from regrow import certificates, security
from regrow.errors import ConfigurationError
from regrow.supervisor.actuators.kubernetes import Kubernetes
from regrow.supervisor.actuators.port import ActuatorError, Call, Done, LeftAlone
from regrow.supervisor.actuators.slurm import Slurm
from regrow.supervisor.http_server import ApiServer

NODE = Path(__file__).parents[1] / "data" / "kubernetes" / "node.json"
LIMIT = 60.0


def order(direction: str, node: str = "n1") -> Call:
    return Call(node=node, direction=direction, reason="XID 79: GPU fell off the bus", hardware="GPU-1", id=f"1-{node}-1")  # type: ignore[arg-type]


# --- Slurm


@pytest.mark.timeout(240)
async def test_drain_and_undrain_in_a_real_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory(prefix="rga-", dir="/tmp") as folder:  # short: sockets are in it
        cluster = Cluster(Path(folder))
        cluster.start()
        try:
            monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
            await _up(cluster)
            await _drained_and_back(cluster, Slurm("/usr/bin/scontrol", LIMIT))
        finally:
            cluster.stop()


async def _up(cluster: Cluster) -> None:
    async with asyncio.timeout(120):
        while (await cluster.ask("sinfo", "-h", "-N", "-o", "%t", check=False)).replace("*", "").split() != ["idle", "idle"]:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def _drained_and_back(cluster: Cluster, slurm: Slurm) -> None:
    async def state(node: str) -> str:
        return (await cluster.ask("sinfo", "-h", "-N", "-n", node, "-o", "%T %E")).strip()

    assert await slurm.act(order("in")) == Done("is not drained")
    assert await slurm.act(order("out")) == Done("drained: regrow: XID 79: GPU fell off the bus")
    assert await state("n1") == "drained regrow: XID 79: GPU fell off the bus"
    assert isinstance(await slurm.act(order("out")), Done)
    await slurm.act(order("in"))
    assert (await state("n1")).split()[0].rstrip("*") == "idle"  # the star: it did not answer lately

    await cluster.ask("scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=fan is loud")
    for direction in ("out", "in"):
        assert isinstance(await slurm.act(order(direction, "n2")), LeftAlone)
    assert await state("n2") == "drained fan is loud"
    with pytest.raises(ActuatorError, match="n3"):
        await slurm.act(order("out", "n3"))


# --- Kubernetes


class ApiOfNodes:
    """One node behind GET and PATCH: bearer token, RFC 7386 merge, 409 when the resourceVersion is not the node's."""

    def __init__(self) -> None:
        self.node: dict[str, Any] = json.loads(NODE.read_text(encoding="utf-8"))
        self.asked: list[str] = []
        self.others_write = 0
        """So many times somebody else writes between a GET and a PATCH."""

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/api/v1/nodes/{name}", self.serve, methods=["GET", "PATCH"])])

    async def serve(self, request: Request) -> Response:
        self.asked.append(request.method)
        if request.headers.get("authorization") != "Bearer t0ken":
            return _status(401, "Unauthorized", "Unauthorized")
        name = request.path_params["name"]
        if name != self.node["metadata"]["name"]:
            return _status(404, "NotFound", f'nodes "{name}" not found')
        if request.method == "GET":
            answer = JSONResponse(self.node)
            if self.others_write:
                self.others_write -= 1
                self._merge({"metadata": {"annotations": {"other/seen": str(self.others_write)}}})
            return answer
        if request.headers["content-type"] != "application/merge-patch+json":
            return _status(415, "UnsupportedMediaType", "the body was not of a known type")
        body = await request.json()
        if body["metadata"].get("resourceVersion") not in (None, self.node["metadata"]["resourceVersion"]):
            return _status(409, "Conflict", "the object has been modified; please apply your changes to the latest version and try again")
        self._merge(body)
        return JSONResponse(self.node)

    def _merge(self, patch: dict[str, Any]) -> None:
        _merge(self.node, patch)
        self.node["metadata"]["resourceVersion"] = str(int(self.node["metadata"]["resourceVersion"]) + 1)
        kubernetes_validate.validate(self.node, "1.33", strict=True)

    def taints(self) -> list[str]:
        return [f"{item['key']}={item.get('value', '')}:{item['effect']}" for item in self.node["spec"].get("taints", [])]


def _merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    for name, value in patch.items():
        if value is None:
            target.pop(name, None)
        elif isinstance(value, dict) and isinstance(target.get(name), dict):
            _merge(target[name], value)
        else:
            target[name] = value


def _status(code: int, reason: str, message: str) -> Response:
    body = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "reason": reason, "code": code}
    return JSONResponse(body, status_code=code)


class Served:
    """The API on loopback with TLS, and how to reach it."""

    def __init__(self, api: ApiOfNodes, port: int, folder: Path) -> None:
        self.api, self.url, self.folder = api, f"https://127.0.0.1:{port}", folder

    def client(self, **changes: Any) -> Kubernetes:
        given = {"token_file": str(self.folder / "token"), "ca_file": str(self.folder / "ca.pem")}
        fixed = {"taint": "regrow/quarantined", "effect": "NoSchedule", "timeout_seconds": LIMIT}
        return Kubernetes(self.url, **(given | fixed | changes))


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[Served]:
    certificates.make_authority(tmp_path, days=1)
    certificates.issue(tmp_path, "etcd", "api", hosts=("127.0.0.1",), days=1)
    (tmp_path / "token").write_text("t0ken\n")
    api = ApiOfNodes()
    tls = security.Tls(security.Files(str(tmp_path / "api.pem"), str(tmp_path / "api.key")), "server", clients_show=False)
    server = ApiServer(api.app(), tls=tls.listening)
    await server.start("127.0.0.1", 0)
    yield Served(api, server.port, tmp_path)
    await server.stop()


async def test_taint_and_label_come_and_go_and_those_of_others_stay(served: Served) -> None:
    api, kubernetes = served.api, served.client()
    others = api.taints()
    assert others, "the recorded node has a taint of its own"
    for _ in range(2):
        assert isinstance(await kubernetes.act(order("out", "gpu-17")), Done)
        assert api.taints() == [*others, "regrow/quarantined=true:NoSchedule"]
    assert api.asked == ["GET", "PATCH", "GET"], "the second time there was nothing to do"
    assert api.node["metadata"]["labels"]["regrow/quarantined"] == "true"
    assert api.node["metadata"]["annotations"]["regrow/quarantined-reason"] == "regrow: XID 79: GPU fell off the bus"
    await kubernetes.act(order("in", "gpu-17"))
    assert api.taints() == others
    assert not [name for name in (*api.node["metadata"]["labels"], *api.node["metadata"]["annotations"]) if "regrow" in name]


async def test_another_effect_replaces_ours(served: Served) -> None:
    await served.client().act(order("out", "gpu-17"))
    await served.client(effect="NoExecute").act(order("out", "gpu-17"))
    assert [text for text in served.api.taints() if "regrow" in text] == ["regrow/quarantined=true:NoExecute"]


async def test_a_node_that_somebody_else_changes_meanwhile_is_read_again(served: Served) -> None:
    served.api.others_write = 2
    await served.client().act(order("out", "gpu-17"))
    assert served.api.asked == ["GET", "PATCH"] * 3
    assert served.api.node["metadata"]["annotations"]["other/seen"] == "0"
    served.api.others_write = 100
    with pytest.raises(ActuatorError, match="changed by somebody else"):
        await served.client().act(order("in", "gpu-17"))


async def test_failures_say_what_to_do(served: Served) -> None:
    with pytest.raises(ActuatorError, match="404") as caught:
        await served.client().act(order("out", "nobody"))
    assert "named in Kubernetes as in Regrow" in caught.value.hint
    (served.folder / "token").write_text("old")
    with pytest.raises(ActuatorError, match="401"):
        await served.client().act(order("out", "gpu-17"))
    certificates.make_authority(served.folder / "other", days=1)
    with pytest.raises(ActuatorError, match="does not answer"):
        await served.client(ca_file=str(served.folder / "other" / "ca.pem")).act(order("out", "gpu-17"))
    with pytest.raises(ConfigurationError, match="does not run in a Kubernetes cluster"):
        Kubernetes("", token_file="", ca_file="", taint="x", effect="NoSchedule", timeout_seconds=1.0)


async def test_the_command_line_tries_a_way_out(served: Served) -> None:
    config = served.folder / "c.toml"
    config.write_text(
        f'[actuators]\nkubernetes_url = "{served.url}"\nkubernetes_token_file = "{served.folder}/token"\nkubernetes_ca = "{served.folder}/ca.pem"\n'
    )

    async def attempt(*words: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "regrow", "actuators", "try", "kubernetes", "gpu-17", "--config", str(config), "--json", *words]
        done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    assert (await attempt())["would"].startswith("PATCH /api/v1/nodes/gpu-17: taint regrow/quarantined=true:NoSchedule")
    assert served.api.asked == []
    assert (await attempt("--really"))["done"] is True
    assert (await attempt("--really", "--back"))["detail"] == "taint and label removed"
