"""Whatever comes from outside is understood or refused in the parser's own words: no other exception, no 500, no hang."""

from __future__ import annotations

import contextlib
import json
import secrets
import tempfile
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from regrow import wire
from regrow.agent.health import classify
from regrow.ckpt import catalog, manifest
from regrow.errors import ConfigurationError, OperationalError
from regrow.supervisor.auth import Tokens
from regrow.supervisor.stats import history

FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=5),
    max_leaves=12,
)
KINDS: tuple[Any, ...] = (wire.FromAgent, wire.ToAgent, wire.FromWorker, wire.ToWorker, wire.PeerMessage, wire.JobSpec)
TAGS = sorted(
    {str(kind.__struct_config__.tag) for kind in vars(wire).values() if isinstance(kind, type) and issubclass(kind, msgspec.Struct)}
)
MESSAGES = st.builds(
    lambda tag, body: {"type": tag, **body}, st.sampled_from(TAGS), st.dictionaries(st.text(max_size=12), JSON, max_size=5)
)


@FUZZ
@given(
    data=st.binary(max_size=200)
    | JSON.map(lambda value: json.dumps(value).encode())
    | MESSAGES.map(lambda value: json.dumps(value).encode())
)
@example(data=b'{"type": ["beat"]}')
@example(data=b"[" * 100_000)
def test_messages(data: bytes) -> None:
    for kind in KINDS:
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            wire.decode(data, kind)


@FUZZ
@given(
    text=st.text(max_size=400) | st.builds("NVRM: Xid (PCI:{}): {}, {}".format, st.text(max_size=20), st.integers(), st.text(max_size=80))
)
@example(text="NVRM: Xid (PCI:0000:01:00): " + "9" * 5000)
def test_kernel_log_lines(text: str) -> None:
    found = classify.classify(text)
    classify.verdict([found])


@FUZZ
@given(data=st.binary(max_size=300) | JSON.map(lambda value: json.dumps(value).encode()))
@example(data=b"\x80\x04cos\nsystem\n.")
def test_checkpoint_records(data: bytes) -> None:
    with pytest.raises(OperationalError):
        manifest.parse_record(data, Path("record.json"))
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / manifest.directory_name(5, 1, "abcdef")
        place.mkdir()
        (place / manifest.RECORD_NAME).write_bytes(data)
        assert catalog.newest_restorable(folder) is None


@FUZZ
@given(
    text=st.text(max_size=300)
    | st.lists(st.lists(st.text(max_size=10), max_size=6).map(",".join), max_size=5).map(
        lambda rows: "at,node,planned,lost_seconds\n" + "\n".join(rows)
    )
)
@example(text="at,node\nnan,a\ninf,b\n")
@example(text='at,node\n"' + "x" * 200_000)
def test_failure_tables(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failures.csv"
        path.write_text(text, encoding="utf-8", errors="surrogatepass")
        with contextlib.suppress(ConfigurationError):
            history.read(path)


@FUZZ
@given(text=st.text(alphabet=st.characters(codec="utf-8"), max_size=200))
def test_token_files(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens"
        path.write_text(text, encoding="utf-8")
        path.chmod(0o600)
        try:
            tokens = Tokens(path)
        except ConfigurationError:
            return
        assert tokens.find("") is None
        assert tokens.find(text) is None


WORDS = st.sampled_from(
    ["v1", "jobs", "nodes", "events", "status", "automation", "on", "stop", "cordon", "where", "x", "..", "%2e%2e", "%00", "%ff", ""]
)
PATHS = st.lists(
    WORDS | st.text(alphabet=st.characters(min_codepoint=33, max_codepoint=126, exclude_characters="%?#"), max_size=8), max_size=5
)
QUERIES = st.dictionaries(st.sampled_from(["after", "limit", "rank", "generation", "job", "x"]), st.text(max_size=12), max_size=3)


@FUZZ
@given(
    method=st.sampled_from(["GET", "POST", "PUT", "DELETE"]),
    path=PATHS,
    query=QUERIES,
    body=st.binary(max_size=60) | JSON.map(lambda value: json.dumps(value).encode()),
)
@example(method="GET", path=["v1", "events"], query={"after": "\u0665"}, body=b"")
@example(method="GET", path=["v1", "events"], query={"after": "9" * 5000}, body=b"")
@example(method="POST", path=["v1", "jobs"], query={}, body=b'{"job": "../../x", "argv": ["a"]}')
@example(method="POST", path=["v1", "jobs"], query={}, body=b'{"job": "j", "argv": ["a"], "nproc_per_node": -1}')
def test_requests(api: httpx.Client, method: str, path: list[str], query: dict[str, str], body: bytes) -> None:
    url = str(api.base_url).rstrip("/") + "/" + "/".join(path)
    own_bucket = {"x-regrow-user": secrets.token_hex(8)}
    answer = api.request(method, url, params=query, content=body, headers=own_bucket)
    assert answer.status_code < 500 or answer.status_code == 503, (answer.status_code, answer.text)
    assert "Traceback" not in answer.text
    if answer.status_code >= 400 and not answer.headers["content-type"].startswith("text/plain"):
        assert answer.json()["error"]["what"]
    assert api.get("/healthz").json()["ok"]
