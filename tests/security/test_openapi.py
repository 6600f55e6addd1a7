"""The API is what its OpenAPI document says: every route is in it, and every answer to what it allows, or forbids, fits it."""

from __future__ import annotations

import json
import secrets
import time
from typing import Any

import httpx
import msgspec
import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import content_type_conformance, response_schema_conformance, status_code_conformance

from regrow import wire
from regrow.supervisor import openapi
from regrow.supervisor.core import events as e

LIMIT = 60.0
EXAMPLES = settings(max_examples=8, deadline=None, database=None, suppress_health_check=list(HealthCheck))
CHECKS = [content_type_conformance, response_schema_conformance, status_code_conformance]
DOCUMENT = schemathesis.openapi.from_dict(openapi.document())
LABELS = [found.ok().label for found in DOCUMENT.get_all_operations()]


@pytest.fixture(scope="module")
def served(serving: Any, api: httpx.Client) -> httpx.Client:
    """With a job and a node, so that there is something to answer."""
    hello = wire.Hello(node="n0", cluster="t", incarnation="a" * 32, address="127.0.0.1", slots=2, peer_address="127.0.0.1:1")
    deadline = time.monotonic() + LIMIT
    while not api.get("/healthz").json()["leading"] or serving.made.term.view.term_at is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    serving.post(e.NodeJoined(at=serving.made.now(), hello=hello))
    answer = api.post("/v1/jobs", json={"job": "j", "argv": ["true"], "min_nodes": 1})
    assert answer.status_code == 201, answer.text
    while not api.get("/v1/nodes").json()["nodes"]:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return api


def test_every_route_is_in_the_document(serving: Any) -> None:
    from regrow.supervisor.api import Routes

    routes = {(method, route.path) for route in Routes(serving.made).app().routes for method in route.methods or () if method != "HEAD"}
    listed = {(one.method, one.path) for one in openapi.OPERATIONS if one.path != "/v1/whoami"}
    assert {route for route in routes if route[1] not in openapi.UNLISTED} == listed


def test_roles_are_those_that_are_asked_for() -> None:
    from regrow.supervisor.auth import OPEN_PATHS, required_role

    for one in openapi.OPERATIONS:
        assert one.role == ("" if one.path in OPEN_PATHS else required_role(one.method, one.path)), one.path


@pytest.mark.parametrize("label", LABELS)
@pytest.mark.parametrize("mode", list(GenerationMode))
def test_answers_keep_what_the_document_promises(served: httpx.Client, label: str, mode: GenerationMode) -> None:
    method, path = label.split(" ")
    operation = DOCUMENT[path][method]
    asks = bool(openapi_of(label).parameters or openapi_of(label).body)
    if mode is GenerationMode.NEGATIVE and not asks:
        return  # nothing can be wrong about it

    @settings(EXAMPLES, max_examples=EXAMPLES.max_examples if asks else 1)
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: Any) -> None:
        with requests.Session() as session:
            session.trust_env = False
            given_name = {"x-regrow-user": secrets.token_hex(8)}  # each with its own allowance of orders
            answer = case.call(base_url=str(served.base_url), session=session, headers=given_name, timeout=LIMIT)
        case.validate_response(answer, checks=CHECKS)

    check()


def openapi_of(label: str) -> openapi.Operation:
    return next(one for one in openapi.OPERATIONS if f"{one.method} {one.path}" == label)


def test_what_there_is_is_shown_in_full(served: httpx.Client) -> None:
    """So that the checks above had more than empty lists to look at."""
    for path, count in (("/v1/nodes", "nodes"), ("/v1/jobs", "jobs"), ("/v1/events", "events")):
        assert served.get(path).json()[count], path
    for path in ("/v1/jobs/j", "/v1/nodes/n0", "/openapi.json"):
        assert served.get(path).status_code == 200, path
    assert served.get("/openapi.json").json() == json.loads(msgspec.json.encode(openapi.document()))
