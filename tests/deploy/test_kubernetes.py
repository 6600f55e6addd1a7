"""The Kubernetes forms: rendered by kustomize, valid for several API versions, and held to a policy."""

from __future__ import annotations

import copy
import re
from typing import Any

import kubernetes_validate
import pytest
from kubeflow_trainer_api import models
from tests.deploy.manifests import jobs, of_kind, pods, render, templates

from regrow import security
from regrow.agent.config import AgentSettings
from regrow.supervisor.actuators.config import ActuatorConfig
from regrow.supervisor.actuators.kubernetes import EFFECTS
from regrow.supervisor.config import SupervisorConfig

FORMS = ("daemonset", "statefulset", "jobset", "taints")
VERSIONS = ("1.30", "1.33", "1.36")
OPERATOR = {security.CA_VARIABLE, security.TOKEN_FILE_VARIABLE}
"""Variables of commands, not of daemons."""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("form", FORMS)
def test_every_object_is_valid_and_has_no_unknown_field(form: str, version: str) -> None:
    for item in render(form):
        if item["kind"] in ("PodMonitor", "JobSet"):
            continue  # custom resources: no schema in the API itself
        kubernetes_validate.validate(item, version, strict=True)
    for name, job in jobs(form).items():
        kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, **job}, version, strict=True)


def lost(given: Any, kept: Any, place: str = "") -> list[str]:
    """What of `given` a model did not take up: fields that its API does not have."""
    if isinstance(given, dict):
        return [entry for key, item in given.items() for entry in lost(item, (kept or {}).get(key), f"{place}.{key}")]
    if isinstance(given, list):
        if len(given) != len(kept or ()):
            return [place]
        return [entry for number, item in enumerate(given) for entry in lost(item, kept[number], f"{place}[{number}]")]
    return [] if given == kept else [place]


def test_the_jobset_is_one_to_the_models_of_its_api() -> None:
    (given,) = of_kind("jobset", "JobSet")
    made = models.JobsetV1alpha2JobSet.from_dict(given)
    assert made is not None
    assert lost(given, made.to_dict()) == []
    broken = copy.deepcopy(given)
    broken["spec"]["successPolicy"]["targetReplicatedJob"] = broken["spec"]["successPolicy"].pop("targetReplicatedJobs")
    made = models.JobsetV1alpha2JobSet.from_dict(broken)
    assert made is not None
    assert lost(broken, made.to_dict())[0].startswith(".spec.successPolicy.targetReplicatedJob")


def test_a_jobset_ends_with_its_job_and_not_with_an_agent() -> None:
    (item,) = of_kind("jobset", "JobSet")
    assert item["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["run"]}
    agents, run = jobs("jobset")["agents"]["spec"], jobs("jobset")["run"]["spec"]
    codes = {
        name: [rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"] if rule["action"] == "FailJob"]
        for name, job in (("agents", agents), ("run", run))
    }
    assert codes == {"agents": [[2]], "run": [[1, 2]]}, "130 (saved and stopped after a notice) is tried again"
    words = run["template"]["spec"]["containers"][0]["args"]
    least, most = map(int, words[words.index("--nnodes") + 1].split(":"))
    assert least < most == agents["parallelism"] == agents["completions"]
    (budget,) = (one["spec"] for one in of_kind("jobset", "PodDisruptionBudget") if one["metadata"]["name"] == "regrow-agent")
    assert budget["minAvailable"] == most - 1
    assert "maxUnavailable" not in budget, "Jobs have no scale that it could be counted from"


def test_the_validator_would_notice() -> None:
    broken = {**of_kind("daemonset", "Deployment")[0]}
    broken["spec"] = {**broken["spec"], "replicsa": 3}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)


def broken_rules(pod: dict[str, Any]) -> list[str]:
    """The policy: what an auditor asks of a pod. Only a supervisor that taints nodes has a token of the API."""
    taints = any(entry["name"] == "REGROW_ACTUATORS_USE" for container in pod["containers"] for entry in container["env"])
    found = [] if pod.get("automountServiceAccountToken") is taints else ["mounts an API token"]
    context = pod.get("securityContext", {})
    found += [] if context.get("runAsNonRoot") and context.get("runAsUser", 0) >= 1000 else ["may run as root"]
    found += [] if context.get("seccompProfile", {}).get("type") == "RuntimeDefault" else ["no seccomp profile"]
    found += [f"shares the host's {name}" for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name)]
    found += [f"mounts {volume['name']} of the host" for volume in pod["volumes"] if "hostPath" in volume]
    for container in pod["containers"]:
        own = container.get("securityContext", {})
        found += [] if own.get("allowPrivilegeEscalation") is False else ["may gain privileges"]
        found += [] if own.get("readOnlyRootFilesystem") else ["writes its image"]
        found += [] if own.get("capabilities", {}).get("drop") == ["ALL"] else ["keeps capabilities"]
        found += ["is privileged"] if own.get("privileged") else []
        found += [] if re.fullmatch(r"[^:]+:\d+\.\d+\.\d+", container["image"]) else ["image without a fixed version"]
        resources = container.get("resources", {})
        found += (
            [] if {"cpu", "memory"} <= set(resources.get("requests", {})) and "memory" in resources.get("limits", {}) else ["no resources"]
        )
        found += (
            []
            if "readinessProbe" in container or (pod.get("restartPolicy") == "Never" and "ports" not in container)
            else ["no readiness probe"]
        )
    return found


@pytest.mark.parametrize("form", FORMS)
def test_pods_keep_the_policy(form: str) -> None:
    assert [broken_rules(pod) for pod in pods(form)] == [[]] * (3 if form == "jobset" else 2)


def test_the_policy_would_notice() -> None:
    pod = {**pods("daemonset")[0], "hostPID": True, "securityContext": {}}
    assert broken_rules(pod) == ["may run as root", "no seccomp profile", "shares the host's hostPID"]


@pytest.mark.parametrize("form", FORMS)
def test_settings_and_secrets_fit_the_daemons(form: str) -> None:
    fields = {
        "SUPERVISOR": set(SupervisorConfig.__dataclass_fields__),
        "AGENT": set(AgentSettings.__dataclass_fields__),
        "ACTUATORS": set(ActuatorConfig.__dataclass_fields__),
    }
    names = [name for item in of_kind(form, "ConfigMap") for name in item["data"]]
    names += [entry["name"] for pod in pods(form) for container in pod["containers"] for entry in container["env"]]
    for name in names:
        if name.startswith("REGROW_") and name not in OPERATOR:
            _, section, field = name.split("_", 2)
            assert field.lower() in fields[section], name
    for pod in pods(form):
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("form", FORMS)
def test_selectors_meet_their_pods(form: str) -> None:
    labels = {item["metadata"]["labels"]["app.kubernetes.io/name"] for item in templates(form)}
    assert labels == {"regrow-supervisor", "regrow-agent"} | ({"regrow-run"} if form == "jobset" else set())
    for item in of_kind(form, "PodMonitor", "PodDisruptionBudget", "Service"):
        selector = item["spec"]["selector"]
        assert selector.get("matchLabels", selector)["app.kubernetes.io/name"] in labels, item["metadata"]["name"]
    ports = {port["name"] for pod in pods(form) for container in pod["containers"] for port in container.get("ports", ())}
    assert {end["port"] for item in of_kind(form, "PodMonitor") for end in item["spec"]["podMetricsEndpoints"]} <= ports


@pytest.mark.parametrize("form", FORMS)
def test_the_stop_limit_leaves_time_for_a_save(form: str) -> None:
    agent = next(pod for pod in pods(form) if pod["containers"][0]["name"] == "agent")
    assert agent["terminationGracePeriodSeconds"] > AgentSettings().notice_seconds + 30


@pytest.mark.parametrize("form", ["daemonset", "statefulset", "jobset"])
def test_accounts_have_no_rights(form: str) -> None:
    assert not of_kind(form, "Role", "ClusterRole", "RoleBinding", "ClusterRoleBinding")


@pytest.mark.parametrize("form", FORMS)
def test_nothing_comes_in_that_is_not_named(form: str) -> None:
    assert all(item["automountServiceAccountToken"] is False for item in of_kind(form, "ServiceAccount"))
    denied = [item for item in of_kind(form, "NetworkPolicy") if item["spec"]["podSelector"] == {} and "ingress" not in item["spec"]]
    assert len(denied) == 1


def test_the_form_with_taints_may_do_just_that_and_begins_as_a_dry_run() -> None:
    assert [item["rules"] for item in of_kind("taints", "ClusterRole")] == [
        [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}]
    ]
    bound = of_kind("taints", "ClusterRoleBinding")[0]
    assert bound["subjects"] == [{"kind": "ServiceAccount", "name": "regrow-supervisor", "namespace": "regrow"}]
    supervisor = next(pod for pod in pods("taints") if pod["containers"][0]["name"] == "supervisor")
    values = {entry["name"]: entry.get("value") for entry in supervisor["containers"][0]["env"]}
    assert (values["REGROW_ACTUATORS_MODE"], values["REGROW_ACTUATORS_USE"]) == ("dry-run", "kubernetes")
    agent = next(pod for pod in pods("taints") if pod["containers"][0]["name"] == "agent")
    own = [item for item in agent["tolerations"] if item["key"] == ActuatorConfig().kubernetes_taint]
    assert own == [{"key": "regrow/quarantined", "operator": "Exists"}], f"every effect of {EFFECTS} is tolerated"


@pytest.mark.parametrize("form", FORMS)
def test_three_supervisors_on_three_hosts_are_stopped_one_at_a_time(form: str) -> None:
    supervisor = of_kind(form, "Deployment")[0]["spec"]
    assert supervisor["replicas"] == 3
    assert supervisor["strategy"]["rollingUpdate"] == {"maxSurge": 0, "maxUnavailable": 1}
    spread = supervisor["template"]["spec"]["topologySpreadConstraints"][0]
    assert (spread["topologyKey"], spread["whenUnsatisfiable"], spread["maxSkew"]) == ("kubernetes.io/hostname", "DoNotSchedule", 1)
    budgets = {item["metadata"]["name"]: item["spec"] for item in of_kind(form, "PodDisruptionBudget")}
    assert budgets["regrow-supervisor"]["maxUnavailable"] == 1
