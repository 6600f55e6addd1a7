"""Files for Prometheus and Alertmanager from the rules: YAML texts. As a program it writes those that are checked in.

python -m regrow.dashboards.write
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from regrow.dashboards import rules
from regrow.dashboards.rules import Alert, Pace, Record

_HEAD = "# Written by `python -m regrow.dashboards.write` from dashboards/rules.py: change that file, not this one.\n"
HERE = Path(__file__).parent
DATASOURCE = "prometheus"


def recording_yaml(pace: Pace) -> str:
    """Recording rules."""
    return _HEAD + "groups:\n  - name: regrow-recording\n    rules:\n" + "".join(_record(one) for one in rules.records(pace))


def alerts_yaml(pace: Pace) -> str:
    """Alert rules, a group per scope."""
    text = _HEAD + "groups:\n"
    everything = rules.alerts(pace)
    for scope in dict.fromkeys(one.scope for one in everything):
        text += f"  - name: regrow-{scope}\n    rules:\n" + "".join(_alert(one) for one in everything if one.scope == scope)
    return text


def _record(one: Record) -> str:
    return f"      - record: {one.name}\n        expr: |-\n          {one.expr}\n"


def _alert(one: Alert) -> str:
    return (
        f"      - alert: {one.name}\n        expr: |-\n          {one.expr}\n        for: {one.hold}\n"
        f"        labels:\n          severity: {one.severity}\n          scope: {one.scope}\n"
        f"        annotations:\n          summary: {json.dumps(one.summary)}\n          runbook_url: {json.dumps(one.runbook)}\n"
    )


@dataclasses.dataclass(frozen=True)
class Setting:
    """Where a Prometheus finds things, and how often it looks."""

    discovery: tuple[str, ...] = ("http://127.0.0.1:7070/v1/prometheus/targets",)
    """URLs of HTTP service discovery, one per supervisor; empty: `targets_file`."""
    targets_file: str = ""
    token_file: str = ""
    """A token of role view for the supervisors' API; empty: they answer on loopback."""
    https: bool = False
    ca_file: str = ""
    """PEM file of the authority behind the supervisors' certificates; empty: the system's."""
    rules: str = "rules/*.yaml"
    alertmanager: str = "127.0.0.1:9093"
    every: str = "15s"


def prometheus_yaml(setting: Setting) -> str:
    """Configuration of Prometheus. Targets come from the supervisors; only supervisors are shown the token."""
    auth = f"authorization: {{credentials_file: {json.dumps(setting.token_file)}}}\n" if setting.token_file else ""
    secure = "scheme: https\n" if setting.https else ""
    if setting.ca_file:
        secure += f"tls_config: {{ca_file: {json.dumps(setting.ca_file)}}}\n"
    if setting.discovery:
        asked = auth + secure.replace("scheme: https\n", "")
        found = "http_sd_configs:\n" + "".join(
            f"  - url: {json.dumps(url)}\n    refresh_interval: {setting.every}\n{_indented(asked, 4)}" for url in setting.discovery
        )
    else:
        found = f"file_sd_configs:\n  - files: [{json.dumps(setting.targets_file)}]\n    refresh_interval: {setting.every}\n"
    text = (
        f"{_HEAD}global:\n  scrape_interval: {setting.every}\n  evaluation_interval: {setting.every}\n"
        f"rule_files: [{json.dumps(setting.rules)}]\n"
        f"alerting:\n  alertmanagers:\n    - static_configs:\n        - targets: [{json.dumps(setting.alertmanager)}]\n"
        "scrape_configs:\n"
    )
    for role, own in (("supervisor", auth + secure), ("agent", "")):
        keep = f"relabel_configs:\n  - {{source_labels: [role], regex: {role}, action: keep}}\n"
        text += f"  - job_name: regrow-{role}\n{_indented(own + found + keep, 4)}"
    return text


def _indented(text: str, width: int) -> str:
    return "".join(f"{' ' * width}{line}\n" for line in text.splitlines())


def alertmanager_yaml(*, wait: str = "30s", group: str = "5m", repeat: str = "12h", webhook: str = "") -> str:
    """Configuration of Alertmanager: pages and tickets apart, facts go nowhere, and what silences what.

    Args:
        webhook: base URL that gets pages at /page and tickets at /ticket; empty: nothing is sent, alerts are shown only.
    """
    receivers = ""
    for name in ("page", "ticket"):
        receivers += f"  - name: {name}\n"
        if webhook:
            receivers += f"    webhook_configs:\n      - url: {json.dumps(f'{webhook}/{name}')}\n        send_resolved: true\n"
    text = (
        f"{_HEAD}route:\n  receiver: nobody\n  group_by: [cluster, alertname, job_name]\n"
        f"  group_wait: {wait}\n  group_interval: {group}\n  repeat_interval: {repeat}\n  routes:\n"
        + "".join(f"    - receiver: {name}\n      matchers: ['severity=\"{name}\"']\n" for name in ("page", "ticket"))
        + f"receivers:\n  - name: nobody\n{receivers}inhibit_rules:\n"
    )
    for one in rules.INHIBITIONS:
        text += f"  - source_matchers: ['{one.source}']\n    target_matchers: ['{one.target}']\n    equal: [{', '.join(one.equal)}]\n"
    return text


def files() -> dict[str, str]:
    """The checked-in texts by path under dashboards/."""
    pace = Pace()
    return {
        "rules/recording.yaml": recording_yaml(pace),
        "rules/alerts.yaml": alerts_yaml(pace),
        "prometheus.yml": prometheus_yaml(Setting()),
        "alertmanager.yml": alertmanager_yaml(),
    }


def main() -> None:
    """Write them, and the dashboards where the Grafana SDK is there."""
    from regrow.dashboards import grafana

    for name, text in (files() | grafana.files()).items():
        path = HERE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
