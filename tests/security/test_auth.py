"""Roles, denial by default, rate limit and audit of the API: a real supervisor, real HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from regrow.errors import ConfigurationError
from regrow.store.memory import MemoryStore
from regrow.supervisor.auth import Guard, Tokens, digest, required_role
from regrow.supervisor.config import SupervisorConfig
from regrow.supervisor.core.policy import Policy
from regrow.supervisor.pacing import MAX_NAMES, Buckets
from regrow.supervisor.service import Supervisor

LIMIT = 60.0
SECRETS = {"viewer": "view", "oper": "operate", "root": "admin"}


def token_file(tmp_path: Path, names: dict[str, str] = SECRETS) -> Path:
    path = tmp_path / "tokens"
    path.write_text("# who role digest\n" + "".join(f"{name} {role} {digest(name + '-secret')}\n" for name, role in names.items()))
    path.chmod(0o600)
    return path


@asynccontextmanager
async def supervisor(tmp_path: Path, **changes: object) -> AsyncIterator[Supervisor]:
    config = SupervisorConfig(cluster="t", store="memory://", state=str(tmp_path / "s"), ttl=LIMIT, name="s0", **changes)  # type: ignore[arg-type]
    store = MemoryStore()
    made = Supervisor(config, Policy(), store=store)
    running = asyncio.create_task(made.run())
    try:
        async with asyncio.timeout(LIMIT):
            while made.term is None or not made.term.ready or made.term.view.term_at is None:
                if running.done():
                    running.result()
                await asyncio.sleep(0.01)
        yield made
    finally:
        made.stop()
        await running
        await store.close()


def ask(made: Supervisor, token: str = "") -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {token}-secret"} if token else {}
    return httpx.AsyncClient(base_url=f"http://{made.http_address}", headers=headers, timeout=LIMIT, trust_env=False)


ROLES = [
    ("GET", "/v1/status", "view"),
    ("GET", "/metrics", "view"),
    ("GET", "/v1/events", "view"),
    ("POST", "/v1/nodes/n0/cordon", "operate"),
    ("POST", "/v1/jobs/j/stop", "operate"),
    ("POST", "/v1/jobs", "admin"),
    ("POST", "/v1/automation/on", "admin"),
    ("POST", "/v1/something/new", "admin"),
]


async def test_each_role_may_do_what_it_says_and_no_more(tmp_path: Path) -> None:
    order = list(SECRETS.values())
    async with supervisor(tmp_path, tokens=str(token_file(tmp_path))) as made:
        for method, path, needed in ROLES:
            assert required_role(method, path) == needed
            async with ask(made) as nobody:
                answer = await nobody.request(method, path)
                assert (answer.status_code, answer.headers["www-authenticate"]) == (401, 'Bearer realm="regrow"')
            for name, role in SECRETS.items():
                async with ask(made, name) as client:
                    status = (await client.request(method, path)).status_code
                assert (status == 403) == (order.index(role) < order.index(needed)), (method, path, role, status)
                assert status != 401
        async with ask(made) as nobody:
            assert (await nobody.get("/healthz")).status_code == 200


async def test_orders_are_in_the_journal_under_the_name_of_the_token(tmp_path: Path) -> None:
    async with supervisor(tmp_path, tokens=str(token_file(tmp_path))) as made:
        async with ask(made, "root") as client:
            answer = await client.post("/v1/automation/off", headers={"x-regrow-user": "somebody-else"})
            assert answer.status_code == 200
        async with ask(made, "viewer") as client:
            assert (await client.post("/v1/automation/on")).status_code == 403
        kept = [entry for entry in made.journal.since(0) if entry.kind == "operator"]
        assert [(entry.data["by"], entry.data["status"]) for entry in kept] == [("root", 200), ("", 403)]
        assert "/v1/automation/off: 200" in kept[0].text
        assert not [entry for entry in made.journal.since(0) if "somebody-else" in entry.text or "secret" in json.dumps(entry.data)]


async def test_wrong_tokens_are_slowed_down_and_tokens_are_replaced_without_a_restart(tmp_path: Path) -> None:
    path = token_file(tmp_path)
    async with supervisor(tmp_path, tokens=str(path)) as made:
        async with ask(made, "guess") as client:
            seen = [(await client.get("/v1/status")).status_code for _ in range(12)]
            assert seen[:10] == [401] * 10
            assert seen[10:] == [429] * 2
            assert int((await client.get("/v1/status")).headers["retry-after"]) >= 1
        path.write_text(f"new admin {digest('new-secret')}\n")
        assert made.api.port
    async with supervisor(tmp_path / "again", tokens=str(path)) as made:
        async with ask(made, "new") as client:
            assert (await client.get("/v1/whoami")).json() == {"name": "new", "role": "admin", "tokens": True}
        token_file(tmp_path / "again", {"newer": "view"}).replace(path)
        async with ask(made, "newer") as client:
            assert (await client.get("/v1/whoami")).json()["role"] == "view"
        async with ask(made, "new") as client:
            assert (await client.get("/v1/status")).status_code == 401
        path.unlink()
        async with ask(made, "newer") as client:
            assert (await client.get("/v1/status")).status_code == 401


async def test_without_tokens_only_programs_of_this_machine_get_in(tmp_path: Path) -> None:
    async with supervisor(tmp_path) as made, ask(made) as client:
        assert (await client.get("/v1/whoami")).json()["role"] == "admin"
        assert (await client.get("/v1/status", headers={"host": "attacker.example"})).status_code == 403
        page = await client.post("/v1/automation/off", headers={"origin": "https://attacker.example"})
        assert page.status_code == 403
        assert (await client.post("/v1/automation/off", headers={"origin": f"http://{made.http_address}"})).status_code == 200

    served: list[str] = []

    async def app(scope: dict[str, object], _receive: object, _send: object) -> None:
        served.append(str(scope["path"]))

    guard = Guard(app, None, lambda *_: None, lambda: 0.0)  # type: ignore[arg-type]
    sent: list[dict[str, object]] = []

    async def send(message: dict[str, object]) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": "/v1/status", "headers": [], "client": ("10.1.2.3", 1)}
    await guard(scope, None, send)  # type: ignore[arg-type]
    assert (served, sent[0]["status"]) == ([], 403)


async def test_commands_send_the_token_from_the_environment_or_a_file(tmp_path: Path) -> None:
    async with supervisor(tmp_path, tokens=str(token_file(tmp_path))) as made:

        async def regrow(**environment: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "regrow", "node", "ls", "--json", "--supervisor", made.http_address]
            kept = {name: value for name, value in os.environ.items() if not name.startswith("REGROW_")}
            run: Callable[..., subprocess.CompletedProcess[str]] = subprocess.run
            return await asyncio.to_thread(run, command, capture_output=True, text=True, check=False, env=kept | environment)

        refused = await regrow()
        assert refused.returncode == 2
        assert "REGROW_TOKEN" in json.loads(refused.stdout)["error"]["hint"]
        (tmp_path / "mine").write_text("viewer-secret\n")
        assert (await regrow(REGROW_TOKEN_FILE=str(tmp_path / "mine"))).returncode == 0


@pytest.mark.parametrize("line", ["alice operate", "alice boss sha256:" + "0" * 64, "alice view 0123", "alice view sha256:12"])
def test_bad_token_files_are_named_with_their_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# who\n{line}\n")
    path.chmod(0o600)
    with pytest.raises(ConfigurationError) as caught:
        Tokens(path)
    assert caught.value.where.endswith("tokens:2")


def test_a_token_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = token_file(tmp_path)
    path.chmod(0o666)
    with pytest.raises(ConfigurationError, match="open to others"):
        Tokens(path)


def test_buckets_fill_up_again_and_forget_the_oldest() -> None:
    now = [0.0]
    buckets = Buckets(lambda: now[0], burst=2, per_second=0.5)
    assert [buckets.take("a") for _ in range(3)] == [0.0, 0.0, 2.0]
    now[0] = 2.0
    assert buckets.take("a") == 0.0
    for index in range(MAX_NAMES + 10):
        buckets.take(f"n{index}")
    assert len(buckets._level) == MAX_NAMES
