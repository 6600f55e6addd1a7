import xml.etree.ElementTree as ET

import pytest

from regrow import charts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.13, 0.87, [0.2, 0.4, 0.6, 0.8]), (5, 5, [5]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_charts_hold_what_they_are_given_and_escape_it() -> None:
    drawn = charts.lines(
        {"<main>": [(0, 1.0), (1, 0.5)], "twin": [(0, 1.0), (1, 0.5)]}, label="loss & more", x_label="step", marks={0.5: "fault"}
    )
    assert drawn.count("<polyline") == 2
    assert "<main>" not in drawn
    assert "fault" in drawn


def test_stack_lengths_are_to_one_scale() -> None:
    drawn = charts.stacks({"a": {"detect": 1.0, "restore": 3.0}, "b": {"detect": 2.0}}, label="phases")
    assert "width=125.00" in drawn
    assert "width=375.00" in drawn
    assert "width=250.00" in drawn


def test_flat_and_empty_series_are_drawn() -> None:
    assert "<polyline" in charts.lines({"x": [(1, 1)]}, label="one point")
    assert "no data" in charts.lines({}, label="none")


def test_page_is_one_document() -> None:
    page = charts.page("Run <1>", charts.table(("a", "b"), [("<x>", 1)]))
    assert page.startswith("<!doctype html>")
    assert "&lt;x&gt;" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    ET.fromstring("<t>" + charts.table(("a",), [(1,)]) + "</t>")


def test_text_stands_left_and_numbers_right() -> None:
    drawn = charts.table(("name", "mesh", "seconds"), [("a", "dp=2", "3.5 s"), ("b", "dp=3", "")])
    assert drawn.count("<th class=text>") == 2
    assert "<td>3.5 s</td>" in drawn
