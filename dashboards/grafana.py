"""Grafana's JSON of the panels. Needs grafana-foundation-sdk (a development dependency); the JSON is checked in."""

from __future__ import annotations

import json
from typing import Any

from grafana_foundation_sdk.builders import common, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.builders import dashboard as boards
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as words
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models.prometheus import PromQueryFormat as Format

from regrow.dashboards.panels import BOARDS, Board, Panel

SOURCE = "datasource"
_HEIGHT = {"stat": 4, "name": 4, "states": 7}


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
    for number, panel in enumerate(board.panels, 1):
        made = made.with_panel(_panel(panel, number))
    document: Any = json.loads(json.dumps(made.build(), cls=JSONEncoder))
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _source() -> models.DataSourceRef:
    return models.DataSourceRef(type_val="prometheus", uid=f"${{{SOURCE}}}")


def _panel(panel: Panel, number: int) -> Any:
    """Every panel has its options and an id of its own: Grafana would have to guess them."""
    made = _kind(panel)
    made = made.id(number).title(panel.title).datasource(_source()).unit(panel.unit).span(panel.width).height(_HEIGHT.get(panel.kind, 8))
    if panel.about:
        made = made.description(panel.about)
    if panel.words:
        words_of = {value: models.ValueMappingResult(text=word, color=colour) for value, (word, colour) in panel.words.items()}
        made = made.mappings([models.ValueMap(options=words_of)])
    for number_of_query, query in enumerate(panel.queries):
        found = prometheus.Dataquery().expr(query.expr).legend_format(query.legend).ref_id(chr(ord("A") + number_of_query))
        if panel.kind == "table":
            found = found.format(Format.TABLE)
        made = made.with_target(found.instant() if panel.kind in ("stat", "name", "table") else found.range())
    return made


def _kind(panel: Panel) -> Any:
    legend = common.VizLegendOptions().show_legend(True).display_mode(words.LegendDisplayMode.LIST).placement(words.LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(words.TooltipDisplayMode.MULTI).sort(words.SortOrder.DESCENDING)
    newest = common.ReduceDataOptions().values(False).calcs(["lastNotNull"])
    match panel.kind:
        case "stat" | "name":
            number = words.BigValueTextMode.VALUE if len(panel.queries) == 1 else words.BigValueTextMode.VALUE_AND_NAME
            mode = words.BigValueTextMode.NAME if panel.kind == "name" else number
            plain = stat.Panel().reduce_options(newest).text_mode(mode).graph_mode(words.BigValueGraphMode.NONE)
            return plain.color_mode(words.BigValueColorMode.VALUE)
        case "table":
            hidden = models.DataTransformerConfig(id_val="organize", options={"excludeByName": {"Time": True, "Value": True}})
            return table.Panel().show_header(True).with_transformation(hidden)
        case "states":
            rows = (
                statetimeline.Panel()
                .show_value(words.VisibilityMode.NEVER)
                .row_height(0.9)
                .merge_values(True)
                .line_width(0)
                .fill_opacity(70)
            )
            return rows.legend(legend.show_legend(False)).tooltip(tooltip)
        case "lines":
            lines = timeseries.Panel().fill_opacity(0)
        case "stack":
            lines = timeseries.Panel().fill_opacity(40).stacking(common.StackingConfig().mode(words.StackingMode.NORMAL))
    return lines.show_points(words.VisibilityMode.NEVER).legend(legend).tooltip(tooltip)
