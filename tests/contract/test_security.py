"""TLS and users, on a real etcd."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from regrow.store import cas
from regrow.store.base import AuthFailed, Store, StoreUnavailable
from regrow.store.embedded import EmbeddedCluster, EmbeddedEtcd, EtcdOptions
from regrow.store.open import open_store

LIMIT = 60.0

EXTENSIONS = """
[server]
subjectAltName = IP:127.0.0.1
extendedKeyUsage = serverAuth, clientAuth
[client]
extendedKeyUsage = clientAuth
"""


def make_certificates(folder: Path) -> None:
    """ca.pem, server.pem/.key for 127.0.0.1, client.pem/.key, and other.pem: an authority that signed none of them."""
    openssl = shutil.which("openssl")
    assert openssl is not None, "openssl is not installed; `tools/system.sh .venv all` does it"
    (folder / "extensions").write_text(EXTENSIONS)

    def run(*arguments: str) -> None:
        subprocess.run([openssl, *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        run("req", "-x509", *curve, "-keyout", f"{name}.key", "-out", f"{name}.pem", "-days", "2", "-subj", f"/CN=regrow test {name}")
    for name in ("server", "client"):
        run("req", *curve, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        run("x509", "-req", "-in", f"{name}.csr", *signer, "-extfile", "extensions", "-extensions", name, "-out", f"{name}.pem")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture
async def secured(tmp_path: Path, certificates: Path) -> AsyncIterator[EmbeddedEtcd]:
    options = EtcdOptions(
        certificate=certificates / "server.pem", key=certificates / "server.key", client_ca=certificates / "ca.pem"
    )  # fmt: skip
    member = EmbeddedEtcd(tmp_path / "etcd", options)
    await member.start()
    yield member
    await member.stop()


async def test_tls_with_certificates_on_both_sides(secured: EmbeddedEtcd, certificates: Path) -> None:
    url = f"etcd://{secured.endpoint}?cacert={certificates}/ca.pem&cert={certificates}/client.pem&key={certificates}/client.key"
    store = open_store(url, timeout=LIMIT)
    watch = store.watch_prefix("/a")
    await asyncio.wait_for(anext(watch), LIMIT)
    lease = await store.lease(5)
    await store.put("/a", b"1", lease=lease)
    assert [event.key for event in (await asyncio.wait_for(anext(watch), LIMIT)).events] == ["/a"]
    await store.close()


async def test_tls_refuses_strangers_on_both_sides(secured: EmbeddedEtcd, certificates: Path) -> None:
    strangers: list[Store] = []
    for options in (
        f"?cacert={certificates}/other.pem&cert={certificates}/client.pem&key={certificates}/client.key",
        f"?cacert={certificates}/ca.pem",
        "",
    ):
        scheme = "etcds" if options else "etcd"
        strangers.append(open_store(f"{scheme}://{secured.endpoint}{options}", timeout=1.5))
    refused = await asyncio.gather(*(store.put("/a", b"stranger") for store in strangers), return_exceptions=True)
    assert [type(one) for one in refused] == [StoreUnavailable] * 3, refused
    assert "cacert" in str(refused[0]), "an unknown authority is named as the likely cause"
    for store in strangers:
        await store.close()


async def enable_users(etcd: EmbeddedEtcd, tls: ssl.SSLContext | None = None) -> None:
    """root (may do all) and agent (may read and write /regrow/ only), by etcd's JSON gateway."""

    def base64(text: str) -> str:
        import base64 as codec

        return codec.b64encode(text.encode()).decode()

    base = f"{'https' if tls else 'http'}://{etcd.endpoint}/v3/auth"
    async with httpx.AsyncClient(base_url=base, timeout=LIMIT, verify=tls if tls is not None else True, trust_env=False) as http:
        for path, body in (
            ("role/add", {"name": "root"}),
            ("role/add", {"name": "member"}),
            (
                "role/grant",
                {"name": "member", "perm": {"permType": "READWRITE", "key": base64("/regrow/"), "range_end": base64("/regrow0")}},
            ),
            ("user/add", {"name": "root", "password": "all"}),
            ("user/add", {"name": "agent", "password": "secret"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/grant", {"user": "agent", "role": "member"}),
            ("enable", {}),
        ):
            (await http.post(f"/{path}", json=body)).raise_for_status()


async def test_users_permissions_and_login_after_a_restart(etcd: EmbeddedEtcd, tmp_path: Path) -> None:
    await enable_users(etcd)
    (tmp_path / "password").write_text("secret\n")
    (tmp_path / "wrong").write_text("guess")

    def as_user(password: str) -> str:
        return f"{etcd.url}?user=agent&password-file={tmp_path}/{password}"

    for url in (etcd.url, as_user("wrong")):
        stranger = open_store(url, timeout=10)
        with pytest.raises(AuthFailed):
            await stranger.get("/regrow/a")
        await stranger.close()

    store = open_store(as_user("password"), timeout=LIMIT)
    watch = store.watch_prefix("/regrow/")
    await asyncio.wait_for(anext(watch), LIMIT)
    lease = await store.lease(2)
    await store.put("/regrow/a", b"1", lease=lease)
    with pytest.raises(AuthFailed):
        await store.put("/elsewhere", b"1")
    forbidden = store.watch_prefix("/elsewhere", start_revision=1)
    with pytest.raises(AuthFailed):
        await asyncio.wait_for(anext(forbidden), LIMIT)

    await etcd.kill()  # it forgets its tokens
    await etcd.restart()
    async with asyncio.timeout(LIMIT):
        while await store.get("/regrow/a") is None:
            await store.put("/regrow/a", b"again", lease=await store.lease(5))
    await store.put("/regrow/end", b"")
    keys: list[str] = []
    async with asyncio.timeout(LIMIT):
        while "/regrow/end" not in keys:
            keys.extend(event.key for event in (await anext(watch)).events)
    assert keys[0] == "/regrow/a"
    await store.close()


@pytest.mark.soak
async def test_three_members_with_tls_and_users_are_restarted_one_after_the_other(tmp_path: Path, certificates: Path) -> None:
    """A rolling restart of etcd: each member forgets the tokens that it gave, the client logs in again and nothing is missed."""
    options = EtcdOptions(
        heartbeat_milliseconds=100,
        election_milliseconds=1000,
        certificate=certificates / "server.pem",
        key=certificates / "server.key",
        client_ca=certificates / "ca.pem",
    )
    cluster = EmbeddedCluster(tmp_path / "cluster", options=options)
    await cluster.start()
    tls = ssl.create_default_context(cafile=str(certificates / "ca.pem"))
    tls.load_cert_chain(certificates / "client.pem", certificates / "client.key")
    await enable_users(cluster.members[0], tls)
    (tmp_path / "password").write_text("secret\n")
    (tmp_path / "wrong").write_text("guess")

    def url(password: str) -> str:
        files = f"cacert={certificates}/ca.pem&cert={certificates}/client.pem&key={certificates}/client.key"
        return f"{cluster.url}?{files}&user=agent&password-file={tmp_path}/{password}"

    stranger = open_store(url("wrong"), timeout=10)
    with pytest.raises(AuthFailed):
        await stranger.get("/regrow/a")
    await stranger.close()

    store = open_store(url("password"), timeout=LIMIT)
    watch = store.watch_prefix("/regrow/")
    await asyncio.wait_for(anext(watch), LIMIT)
    lease = await store.lease(5)
    await store.put("/regrow/mine", b"", lease=lease)
    written = ["/regrow/mine"]
    for number, member in enumerate(cluster.members):
        await member.kill()
        for key in (f"/regrow/{number}/without", f"/regrow/{number}/with"):
            if key.endswith("with"):
                await member.restart()
            assert (await cas.create(store, key, b"", timeout=LIMIT)).won
            written.append(key)
    seen: list[str] = []
    async with asyncio.timeout(LIMIT):
        while written[-1] not in seen:
            seen.extend(event.key for event in (await anext(watch)).events)
    assert seen == written
    assert not lease.lost.is_set()
    assert await store.get("/regrow/mine") is not None
    with pytest.raises(AuthFailed):
        await store.put("/elsewhere", b"")
    await store.close()
    await cluster.stop()
