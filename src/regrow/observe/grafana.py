"""What a Grafana needs to show the dashboards here: provisioning, and two ways to start it in a container.

None of it runs in the tests: Grafana is in no package index. The provisioning's form is Grafana's documented one, the pod is held to the
schema of Kubernetes' API, and the Compose file says the same as the pod.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from regrow.dashboards import write

IMAGE = "docker.io/grafana/grafana:11.6.0"
ADDRESS = "127.0.0.1:3000"
_INSIDE = "/etc/grafana/provisioning"


def files(prometheus: str, root: Path) -> dict[str, str]:
    """Texts by path under `root`.

    Args:
        prometheus: base URL of the data source; on this machine's loopback, so Grafana shares its network.
        root: absolute folder of the session; the containers mount its folder grafana/.
    """
    source = {"name": "Prometheus", "uid": "prometheus", "type": "prometheus", "url": prometheus, "isDefault": True}
    provider = {"name": "Regrow", "type": "file", "options": {"path": f"{_INSIDE}/boards"}}
    texts = {
        "grafana/datasources/prometheus.yaml": {"apiVersion": 1, "datasources": [source]},
        "grafana/dashboards/regrow.yaml": {"apiVersion": 1, "providers": [provider]},
        "grafana-pod.yaml": pod(root),
        "compose.yaml": compose(root),
    }
    made = {name: json.dumps(document, indent=1) + "\n" for name, document in texts.items()}  # JSON is YAML
    for path in sorted((write.HERE / "grafana").glob("*.json")):
        made[f"grafana/boards/{path.name}"] = path.read_text(encoding="utf-8")
    return made


def environment() -> dict[str, str]:
    """Settings of Grafana: on loopback only, anybody there may look, nobody may change anything."""
    host, port = ADDRESS.split(":")
    return {
        "GF_SERVER_HTTP_ADDR": host,
        "GF_SERVER_HTTP_PORT": port,
        "GF_AUTH_ANONYMOUS_ENABLED": "true",
        "GF_AUTH_ANONYMOUS_ORG_ROLE": "Viewer",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }


def pod(root: Path) -> dict[str, Any]:
    """For `podman kube play`."""
    container = {
        "name": "grafana",
        "image": IMAGE,
        "env": [{"name": name, "value": value} for name, value in environment().items()],
        "volumeMounts": [{"name": "provisioning", "mountPath": _INSIDE, "readOnly": True}],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    volume = {"name": "provisioning", "hostPath": {"path": str(root / "grafana"), "type": "Directory"}}
    spec = {"hostNetwork": True, "restartPolicy": "Never", "containers": [container], "volumes": [volume]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "regrow-grafana"}, "spec": spec}


def compose(root: Path) -> dict[str, Any]:
    """For `docker compose`."""
    service = {
        "image": IMAGE,
        "network_mode": "host",
        "environment": environment(),
        "volumes": [f"{root / 'grafana'}:{_INSIDE}:ro"],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
    }
    return {"name": "regrow-grafana", "services": {"grafana": service}}


def hint(root: Path) -> str:
    """How to add Grafana here."""
    if shutil.which("podman") and not shutil.which("docker"):
        line = f"podman kube play {root}/grafana-pod.yaml"
    else:
        line = f"docker compose -f {root}/compose.yaml up"
    return f"Grafana       where a container runtime works: {line} (then http://{ADDRESS})"
