"""Grafana's JSON of the panels. Needs grafana-foundation-sdk (a development dependency); the JSON is checked in."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import common, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as words
from grafana_foundation_sdk.models import dashboard as models

from regrow.dashboards.panels import BOARDS, Board, Panel

SOURCE = "datasource"
_HEIGHT = {"stat": 4, "states": 7}


def files() -> dict[str, str]:
    """Text of each dashboard by path under dashboards/."""
    return {f"grafana/{board.uid}.json": text(board) for board in BOARDS}


def text(board: Board) -> str:
    """One dashboard."""
    made = (
        boards.Dashboard(board.title)
        .uid(board.uid)
        .tags(["regrow"])
        .refresh("10s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .with_variable(boards.DatasourceVariable(SOURCE).label("Data source").type("prometheus"))
    )
    for name, query in board.variables.items():
        made = made.with_variable(
            boards.QueryVariable(name).query(query).datasource(_source()).refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    for panel in board.panels:
        made = made.with_panel(_panel(panel))
    document: Any = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _source() -> models.DataSourceRef:
    return models.DataSourceRef(type_val="prometheus", uid=f"${{{SOURCE}}}")


def _panel(panel: Panel) -> Any:
    made: Any
    match panel.kind:
        case "stat":
            made = stat.Panel()
        case "table":
            made = table.Panel()
        case "states":
            made = statetimeline.Panel()
        case "lines":
            made = timeseries.Panel().fill_opacity(0).show_points(words.VisibilityMode.NEVER)
        case "stack":
            stacking = common.StackingConfig().mode(words.StackingMode.NORMAL)
            made = timeseries.Panel().fill_opacity(40).stacking(stacking).show_points(words.VisibilityMode.NEVER)
    made = made.title(panel.title).datasource(_source()).unit(panel.unit).span(panel.width).height(_HEIGHT.get(panel.kind, 8))
    if panel.about:
        made = made.description(panel.about)
    for number, query in enumerate(panel.queries):
        found = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number))
        made = made.with_target(found.instant() if panel.kind in ("stat", "table") else found.range())
    return made
