"""The API as an OpenAPI 3.1 document. Hand-written where it says what a document promises, generated where a type is the promise.

`tests/security/test_openapi.py` sends requests that this document allows, and others, and holds every answer to it.
"""

from __future__ import annotations

from functools import cache
from importlib import metadata
from typing import Any

import msgspec

from regrow import wire
from regrow.supervisor.actuators.orders import Record
from regrow.supervisor.journal import Entry

Schema = dict[str, Any]
_MOST_DIGITS = 18


def _object(**properties: Schema) -> Schema:
    """All of these are always there; others may be added."""
    return {"type": "object", "required": sorted(properties), "properties": properties}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _of(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


TEXT: Schema = {"type": "string"}
NUMBER: Schema = {"type": "number"}
WHOLE: Schema = {"type": "integer"}
YES_NO: Schema = {"type": "boolean"}
ANY: Schema = {"type": "object"}


def _schemas() -> dict[str, Schema]:
    _, generated = msgspec.json.schema_components((wire.JobSpec, Entry, Record), ref_template="#/components/schemas/{name}")
    line = dict.fromkeys(("job", "state", "reason", "mesh"), TEXT) | {"generation": WHOLE, "step": WHOLE}
    line |= {"loss": _or_null(NUMBER), "goodput": _or_null(NUMBER)}
    node = dict.fromkeys(("node", "state", "address", "incarnation", "unusable", "hardware_id"), TEXT)
    node |= dict.fromkeys(("connected", "cordoned", "draining"), YES_NO) | {"slots": WHOLE, "devices": _list(TEXT), "jobs": _list(ANY)}
    node |= {"health": ANY, "quarantine": _or_null(ANY), "silent_seconds": _or_null(NUMBER), "gone_seconds": _or_null(NUMBER)}
    member = {"node": TEXT, "state": TEXT, "ranks": _list(WHOLE), "why": TEXT, "silent_seconds": _or_null(NUMBER), "health": TEXT}
    job = line | {"incidents": _list(ANY), "changes": _list(ANY), "checkpoint": ANY, "checkpoints": _list(ANY), "samples": WHOLE}
    job |= {"outcome": _or_null(ANY), "nodes": _list(_object(**member)), "spec": _of("JobSpec")}
    actuator = dict.fromkeys(("actuator", "mode", "paused"), TEXT) | {"per_hour": WHOLE, "orders": _list(_of("Record")), "held": _list(ANY)}
    status = {"supervisor": TEXT, "leading": YES_NO, "epoch": WHOLE, "store_up": YES_NO, "automation": YES_NO}
    return generated | {
        "Error": _object(error=_object(kind=TEXT, what=TEXT, where=TEXT, hint=TEXT)),
        "JobLine": _object(**line),
        "Job": _object(**job),
        "Node": _object(**node),
        "Status": _object(**status, observed=_list(ANY), nodes=_list(_of("Node")), jobs=_list(_of("JobLine")), quarantine=_list(ANY)),
        "Rank": _object(rank=WHOLE, node=TEXT, local_rank=WHOLE, device=TEXT, generation=WHOLE),
        "Actuator": _object(**actuator),
    }


def _in_path(name: str, text: str, **schema: Any) -> Schema:
    return {"name": name, "in": "path", "required": True, "description": text, "schema": {"type": "string", **schema}}


def _in_query(name: str, text: str, schema: Schema) -> Schema:
    return {"name": name, "in": "query", "required": False, "description": text, "schema": schema}


_COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 10**_MOST_DIGITS - 1}
_JOB = _in_path("job", "Name of the job.", minLength=1)
_NODE = _in_path("node", "Name of the node.", minLength=1)
_ERRORS = {400: "Not understood.", 401: "No token, or one that is not known.", 403: "The role is too low, or not from this machine."}
_MORE = {
    404: "There is no such thing.",
    409: "What is asked contradicts what is.",
    429: "Too many: wait.",
    503: "Not the leader, or no store.",
}


class Operation(msgspec.Struct, frozen=True, kw_only=True):
    """One method on one path."""

    method: str
    path: str
    summary: str
    role: str = "view"
    """view, operate, admin; empty: open to all."""
    parameters: tuple[Schema, ...] = ()
    body: Schema | None = None
    answer: Schema | None = None
    media: str = "application/json"
    status: int = 200

    def document(self) -> Schema:
        """The operation object."""
        content: Schema = {"schema": self.answer or {"type": "string"}}
        responses: dict[str, Schema] = {str(self.status): {"description": "Done.", "content": {self.media: content}}}
        for status, text in (_ERRORS | _MORE).items():
            responses[str(status)] = {"description": text, "content": {"application/json": {"schema": _of("Error")}}}
        made: Schema = {"summary": self.summary, "operationId": self._identifier(), "responses": responses}
        made["security"] = [{"token": []}] if self.role else []
        made["description"] = f"Needs the role {self.role}." if self.role else "Open to all."
        if self.parameters:
            made["parameters"] = list(self.parameters)
        if self.body is not None:
            made["requestBody"] = {"required": True, "content": {"application/json": {"schema": self.body}}}
        return made

    def _identifier(self) -> str:
        words = [word.strip("{}") for word in self.path.replace(".", "/").split("/") if word and word != "v1"]
        return "_".join([self.method.lower(), *words]) if words else f"{self.method.lower()}_root"


_FOLLOW = _in_query("follow", "1: as server-sent events, without an end.", {"type": "string", "enum": ["0"]})

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        method="GET", path="/healthz", role="", summary="Alive, and in which role.", answer=_object(ok=YES_NO, leading=YES_NO, epoch=WHOLE)
    ),
    Operation(method="GET", path="/metrics", summary="Prometheus text format.", media="text/plain"),
    Operation(method="GET", path="/openapi.json", summary="This document.", answer=ANY),
    Operation(method="GET", path="/v1/whoami", summary="Whose token this is.", answer=_object(name=TEXT, role=TEXT, tokens=YES_NO)),
    Operation(
        method="GET",
        path="/v1/prometheus/targets",
        summary="HTTP service discovery for Prometheus.",
        answer=_list(_object(targets=_list(TEXT), labels=ANY)),
    ),
    Operation(method="GET", path="/v1/status", summary="The cluster at a glance.", answer=_of("Status")),
    Operation(method="GET", path="/v1/jobs", summary="All jobs.", answer=_object(jobs=_list(_of("JobLine")))),
    Operation(
        method="POST",
        path="/v1/jobs",
        role="admin",
        summary="Submit a job: it runs a program on the nodes.",
        body=_of("JobSpec"),
        answer=_object(job=TEXT, submitted=YES_NO),
        status=201,
    ),
    Operation(method="GET", path="/v1/jobs/{job}", summary="One job.", parameters=(_JOB,), answer=_of("Job")),
    Operation(
        method="GET",
        path="/v1/jobs/{job}/where",
        summary="On which node and GPU a rank runs, or ran.",
        parameters=(
            _JOB,
            _in_query("rank", "Only this rank.", _COUNT),
            _in_query("generation", "An earlier generation.", _COUNT),
        ),
        answer=_object(job=TEXT, generation=WHOLE, ranks=_list(_of("Rank"))),
    ),
    Operation(
        method="POST",
        path="/v1/jobs/{job}/{command}",
        role="operate",
        summary="An order to a job.",
        parameters=(_JOB, _in_path("command", "The order.", enum=["stop", "save-and-stop", "pause", "resume", "abort"])),
        answer=_object(job=TEXT, changed=YES_NO),
    ),
    Operation(method="GET", path="/v1/nodes", summary="All nodes.", answer=_object(nodes=_list(_of("Node")))),
    Operation(method="GET", path="/v1/nodes/{node}", summary="One node.", parameters=(_NODE,), answer=_of("Node")),
    Operation(
        method="POST",
        path="/v1/nodes/{node}/{command}",
        role="operate",
        summary="An order on a node.",
        parameters=(_NODE, _in_path("command", "The order.", enum=["cordon", "uncordon", "drain", "clear"])),
        answer=_object(node=TEXT, command=TEXT),
    ),
    Operation(
        method="POST",
        path="/v1/automation/{state}",
        role="admin",
        summary="Stop or allow what the supervisor does by itself.",
        parameters=(_in_path("state", "on or off.", enum=["on", "off"]),),
        answer=_object(automation=TEXT),
    ),
    Operation(
        method="GET",
        path="/v1/actuators",
        summary="What Slurm, Kubernetes or a program was told of quarantined nodes.",
        answer=_object(mode=TEXT, actuators=_list(_of("Actuator"))),
    ),
    Operation(
        method="GET",
        path="/v1/events",
        summary="The journal, newest entries in memory; with follow=1 a stream (text/event-stream) that does not end.",
        parameters=(
            _in_query("after", "Only entries with a higher id.", _COUNT),
            _in_query("limit", "At most so many of the newest.", _COUNT | {"minimum": 1}),
            _in_query("job", "Only of this job.", TEXT),
            _in_query("without", "With follow=1: kinds of entries that are left out, divided by commas.", TEXT),
            _FOLLOW,
        ),
        answer=_object(events=_list(_of("Entry"))),
    ),
)
UNLISTED = ("/", "/page/{name}", "/v1/page")
"""Routes of the operator's page: its own business, not an interface."""


@cache
def document() -> Schema:
    """The whole document."""
    paths: dict[str, Schema] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method.lower()] = operation.document()
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Regrow supervisor",
            "version": metadata.version("regrow"),
            "description": "Any supervisor answers; /v1 of one that stands by answers 503. Fields may be added, none is renamed or removed.",
        },
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer", "description": "regrow certs token"}},
        },
    }
