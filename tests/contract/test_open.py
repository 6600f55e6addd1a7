"""URLs of stores: what opens, and what bad ones get before anything is tried."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from regrow.errors import ConfigurationError
from regrow.store.generate import PROTO, generate, proto_digest, recorded_digest
from regrow.store.memory import MemoryStore
from regrow.store.open import open_store


async def test_memory_stores() -> None:
    one, other = open_store("memory://"), open_store("memory://")
    await one.put("a", b"")
    assert await other.get("a") is None
    left, right = open_store("memory://shared"), open_store("memory://shared")
    assert isinstance(left, MemoryStore)
    await left.put("a", b"")
    assert await right.get("a") is not None
    for store in (one, other, left, right):
        await store.close()


async def test_endpoints() -> None:
    from regrow.store.etcd import EtcdStore

    for url, endpoints, tls in (
        ("etcd://a:1,b:2", ("a:1", "b:2"), False),
        ("etcd://a", ("a:2379",), False),
        ("etcds://10.0.0.1:4001/", ("10.0.0.1:4001",), True),
        ("etcd://[::1]:2379", ("[::1]:2379",), False),
    ):
        store = open_store(url)
        assert isinstance(store, EtcdStore)
        access = store._connection.access
        assert (access.endpoints, access.tls) == (endpoints, tls), url
        await store.close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("http://a:2379", "scheme 'http'"),
        ("a:2379", "scheme"),
        ("etcd://", "not host:port"),
        ("etcd://a:port", "not host:port"),
        ("etcd://a:99999", "not host:port"),
        ("etcd://a:1,,b:2", "not host:port"),
        ("etcd://a:1/path", "path"),
        ("etcd://a:1?colour=red", "unknown option 'colour'"),
        ("etcd://a:1?user=me", "belong together"),
        ("etcd://a:1?cert=x", "belong together"),
        ("etcd://a:1?cacert=/no/such/file", "cannot be read"),
    ],
)
def test_bad_urls(url: str, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason) as caught:
        open_store(url)
    assert caught.value.where == "--store"
    assert "etcd://10.0.0.1:2379" in caught.value.hint


def test_the_port_and_the_memory_store_load_without_grpc() -> None:
    """Workers, forking servers and the command line must not have grpc's threads."""
    program = "import sys, regrow.store.open, regrow.store.embedded, regrow.store.election; sys.exit('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_generated_code_belongs_to_its_proto() -> None:
    for suffix in ("py", "pyi"):
        assert recorded_digest(PROTO.with_name(f"etcd_rpc_pb2.{suffix}")) == proto_digest(), "run python -m regrow.store.generate"


@pytest.mark.soak
def test_generating_again_gives_the_same_code(tmp_path: Path) -> None:
    """In an environment of its own: the generator does not install beside a new protobuf."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    python = str(venv / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "--quiet", "grpcio-tools==1.71.2"], check=True)
    for made in generate(tmp_path / "out", python=python):
        assert made.read_bytes() == PROTO.with_name(made.name).read_bytes()
