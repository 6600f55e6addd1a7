"""What is written for a Grafana in a container: the pod is one to the API, the Compose file says the same, and the paths meet."""

from __future__ import annotations

import json
from pathlib import Path

import kubernetes_validate

from regrow.observe import grafana


def test_the_pod_is_valid_and_stays_on_loopback(tmp_path: Path) -> None:
    pod = json.loads(grafana.files("http://127.0.0.1:9090", tmp_path)["grafana-pod.yaml"])
    for version in ("1.30", "1.36"):
        kubernetes_validate.validate(pod, version, strict=True)
    (container,) = pod["spec"]["containers"]
    said = {entry["name"]: entry["value"] for entry in container["env"]}
    assert f"{said['GF_SERVER_HTTP_ADDR']}:{said['GF_SERVER_HTTP_PORT']}" == grafana.ADDRESS
    assert grafana.ADDRESS.startswith("127.0.0.1:"), "anybody who reaches it may look"


def test_the_compose_file_says_what_the_pod_says(tmp_path: Path) -> None:
    made = {name: json.loads(text) for name, text in grafana.files("http://127.0.0.1:9090", tmp_path).items()}
    (container,), (volume,) = (made["grafana-pod.yaml"]["spec"][name] for name in ("containers", "volumes"))
    service = made["compose.yaml"]["services"]["grafana"]
    assert service["image"] == container["image"]
    assert service["environment"] == {entry["name"]: entry["value"] for entry in container["env"]}
    assert (service["network_mode"], made["grafana-pod.yaml"]["spec"]["hostNetwork"]) == ("host", True)
    (mount,) = container["volumeMounts"]
    assert service["volumes"] == [f"{volume['hostPath']['path']}:{mount['mountPath']}:ro"]


def test_the_provisioning_finds_the_boards_and_the_data_source(tmp_path: Path) -> None:
    made = grafana.files("http://127.0.0.1:9090", tmp_path)
    (provider,) = json.loads(made["grafana/dashboards/regrow.yaml"])["providers"]
    (mount,) = json.loads(made["grafana-pod.yaml"])["spec"]["containers"][0]["volumeMounts"]
    inside = Path(provider["options"]["path"]).relative_to(mount["mountPath"])
    boards = [json.loads(text) for name, text in made.items() if Path(name).parent == Path("grafana") / inside]
    assert len(boards) == 5
    (source,) = json.loads(made["grafana/datasources/prometheus.yaml"])["datasources"]
    assert (source["type"], source["url"], source["isDefault"]) == ("prometheus", "http://127.0.0.1:9090", True)
    for board in boards:
        (kind,) = (variable["query"] for variable in board["templating"]["list"] if variable["type"] == "datasource")
        assert kind == source["type"]
