import json
import math
import re
from importlib import resources

import plotly.graph_objects as go
import pytest
from pages import comparison_page, every_panel

from tidegate.report.charts import color_scale, intervals_figure, map_figures, palette_of
from tidegate.report.html import embedded_json
from tidegate.report.lines import lines_figure
from tidegate.report.page import Estimate, Intervals, Lines, Map, Maps, Page, Section, Series

PAGE = comparison_page()
PALETTE = palette_of(PAGE)


def figures():
    """All figures of the page, with their panel's title."""
    for panel in every_panel(PAGE):
        if panel.kind == "lines":
            yield panel.title, lines_figure(panel, PALETTE)
        if panel.kind == "intervals":
            yield panel.title, intervals_figure(panel, PALETTE)
        if panel.kind == "maps":
            yield from ((f"{panel.title} {place}", figure) for place, figure in enumerate(map_figures(panel)))


FIGURES = dict(figures())


def lines(*series, **options):
    panel = Lines(title="t", alternative="a", x_label="x", y_label="y", series=series, **options)
    return lines_figure(panel, palette_of(page_of(panel)))


def page_of(*panels):
    return Page(title="t", summary="s", sections=(Section(title="s", panels=panels),), data={})


@pytest.mark.parametrize("title", FIGURES)
def test_plotly_knows_every_option_of_a_figure_and_the_style_sheet_its_colors(title):
    figure = FIGURES[title]
    assert go.Figure(data=figure["data"], layout=figure["layout"] | figure.get("narrow", {})).data
    style = resources.files("tidegate.report").joinpath("templates", "style.css").read_text()
    used = set(re.findall(r"var\((--[\w-]+)\)", json.dumps(figure)))
    assert used
    assert used <= set(re.findall(r"(--[\w-]+):", style))


def intervals_of(*items, margin=None):
    return Intervals(title="t", alternative="a", x_label="x", items=items, margin=margin)


def test_missing_numbers_are_gaps_in_a_line():
    (trace,) = lines(Series(label="a", group="a", x=(1, 2, 3), y=(1.0, None, math.nan)))["data"]
    assert trace["y"] == [1.0, None, None]
    assert trace["connectgaps"] is False


def test_a_band_is_closed_around_each_stretch_without_gaps():
    numbers = (1, 2, None, 4)
    band, _ = lines(
        Series(label="a", group="a", x=(1, 2, 3, 4), y=numbers, low=numbers, high=(2, 3, None, 5)),
    )["data"]
    assert band["x"] == [1, 2, 2, 1, None, 4, 4]
    assert band["y"] == [1, 2, 3, 2, None, 4, 5]


def test_plotly_is_given_no_tags_and_no_templates_from_names():
    texts = json.dumps(lines(Series(label="<b>%{x}", group="<i>", x=(1,), y=(1,)))["data"])
    assert "&lt;b&gt;%\\u200b{x}" in texts
    assert '"name": "<b>' not in texts


def test_intervals_show_zero_and_the_margin_whatever_the_estimates():
    figure = intervals_figure(intervals_of(Estimate(label="a", value=5.0, low=4.0, high=6.0), margin=1.0), PALETTE)
    low, high = figure["layout"]["xaxis"]["range"]
    assert low < -1.0
    assert high > 6.0
    band, zero = figure["layout"]["shapes"]
    assert (band["x0"], band["x1"], zero["x0"]) == (-1.0, 1.0, 0.0)


def test_an_estimate_that_could_not_be_made_is_said_to_be_missing():
    figure = intervals_figure(intervals_of(Estimate(label="a", value=None, verdict="diverged")), PALETTE)
    assert figure["data"][0]["x"] == [None, None, None]
    assert "no estimate · diverged" in [note["text"] for note in figure["layout"]["annotations"]]


def maps(*matrices, **options):
    panel_maps = tuple(Map(label=str(place), values=values) for place, values in enumerate(matrices))
    labels = {"row_label": "layer", "column_label": "head", "value_label": "gate"}
    return Maps(title="t", alternative="a", maps=panel_maps, **labels, **options)


def test_maps_share_one_scale():
    traces = [figure["data"][0] for figure in map_figures(maps(((0.0, 1.0),), ((2.0, None),)))]
    assert {(trace["zmin"], trace["zmax"]) for trace in traces} == {(0.0, 2.0)}
    assert traces[1]["z"] == [[2.0, None]]
    assert map_figures(maps(((0.0, 1.0),)))[0]["layout"]["yaxis"]["autorange"] == "reversed"


@pytest.mark.parametrize(
    ("panel", "ends"),
    [
        (maps(((0.2, 0.4),), low=0.0, high=1.0), (0.0, 1.0)),
        (maps(((-0.2, 0.7),), diverging=True), (-0.7, 0.7)),
        (maps(((0.25, 0.25),)), (-0.25, 0.75)),
        (maps(((None, None),)), (0.0, 1.0)),
        (maps(), (0.0, 1.0)),
    ],
)
def test_a_scale_holds_all_numbers_and_is_never_empty(panel, ends):
    scale = color_scale(panel)
    assert (scale.low, scale.high) == ends


def test_embedded_json_holds_the_value_and_nothing_that_html_reads():
    value = {"text": "</script><!-- & \u2028", "numbers": [1.5, math.nan, (math.inf, 2)]}
    text = embedded_json(value)
    assert not set("<>&").intersection(text)
    assert json.loads(text) == {"text": value["text"], "numbers": [1.5, None, [None, 2]]}
