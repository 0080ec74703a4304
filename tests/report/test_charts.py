import json
import math
import re
from importlib import resources

import plotly.graph_objects as go
import pytest
from pages import SPECIAL, VARIANTS, comparison_page, every_panel, intervals, length_lines

from tidegate.report.charts import color_scale, intervals_figure, map_figures, map_size, palette_of
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


def test_a_group_has_one_color_all_over_the_page():
    seen = {}
    for panel in every_panel(PAGE):
        if panel.kind != "lines":
            continue
        groups = {series.label: series.group for series in panel.series}
        for trace in lines_figure(panel, PALETTE)["data"]:
            seen.setdefault(groups.get(trace.get("meta"), trace["legendgroup"]), set()).add(trace["line"]["color"])
    for trace in intervals_figure(intervals(), PALETTE)["data"]:
        seen[SPECIAL if trace["name"].startswith("wide") else trace["name"]].add(trace["line"]["color"])
    colors = [seen[name] for name in VARIANTS]
    assert all(len(color) == 1 for color in colors)
    assert len(set.union(*colors)) == len(VARIANTS)
    assert PALETTE.color("none") == "var(--control)"


def test_two_groups_never_share_both_color_and_dash():
    names = [f"variant {k}" for k in range(20)]
    palette = palette_of(page_of(intervals_of(*(Estimate(label=name, value=0.0) for name in names))))
    assert len({(palette.color(name), palette.dash(name)) for name in names}) == len(names)


def intervals_of(*items, margin=None):
    return Intervals(title="t", alternative="a", x_label="x", items=items, margin=margin)


def test_only_bold_lines_are_in_the_legend_and_they_are_drawn_last():
    traces = lines(
        Series(label="mean", group="a", x=(1, 2), y=(1, 2), low=(0, 1), high=(2, 3)),
        Series(label="seed", group="a", x=(1, 2), y=(1, 2), faint=True),
        Series(label="other", group="b", x=(1, 2), y=(1, 2)),
    )["data"]
    assert [(trace["name"], trace["showlegend"]) for trace in traces] == [
        ("mean", False),
        ("a", False),
        ("mean", True),
        ("other", True),
    ]
    assert {trace["legendgroup"] for trace in traces if trace["name"] != "other"} == {"a"}


def test_the_faint_lines_of_a_group_are_one_trace_with_gaps_and_its_single_points_another():
    first, second, lone, other = (
        Series(label=f"seed {seed}", group=group, x=x, y=x, faint=True)
        for seed, (group, x) in enumerate((("a", (1, 2)), ("a", (3, 4, 5)), ("a", (6,)), ("b", (7, 8))))
    )
    traces = lines(first, second, lone, other)["data"]
    assert [(trace["legendgroup"], trace["mode"], trace["x"]) for trace in traces] == [
        ("a", "lines", [1, 2, None, 3, 4, 5]),
        ("a", "markers", [6]),
        ("b", "lines", [7, 8]),
    ]
    assert all(trace["y"] == trace["x"] for trace in traces)


def test_two_bold_lines_of_a_group_differ_in_their_dash():
    first, second = lines(*(Series(label=name, group="a", x=(1,), y=(1,)) for name in "ab"))["data"]
    assert first["line"]["color"] == second["line"]["color"]
    assert first["line"]["dash"] != second["line"]["dash"]


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


def test_a_line_at_zero_and_a_marker_are_drawn_where_they_are_asked_for():
    series = Series(label="a", group="a", x=(1, 10), y=(1, 2))
    assert lines(series)["layout"]["shapes"] == []
    zero, marker = lines(series, zero_line=True, marker=5.0, marker_label="here")["layout"]["shapes"]
    assert (zero["y0"], zero["y1"], zero["xref"]) == (0, 0, "paper")
    assert (marker["x0"], marker["x1"], marker["yref"]) == (5.0, 5.0, "paper")


@pytest.mark.parametrize(("marker", "side"), [(2.0, "left"), (9.0, "right")])
def test_a_marker_s_label_stands_towards_the_middle(marker, side):
    series = Series(label="a", group="a", x=(0, None, 10), y=(1, 2, 3))
    note = lines(series, marker=marker, marker_label="m")["layout"]["annotations"][1]
    assert (note["x"], note["xanchor"]) == (marker, side)


def test_a_logarithmic_axis_has_ticks_and_puts_labels_at_powers():
    layout = lines_figure(length_lines(), PALETTE)["layout"]
    assert layout["xaxis"]["tickvals"] == [32, 64, 128, 256, 512, 1024]
    assert layout["xaxis"]["ticktext"][-1] == "1,024"
    assert [note["x"] for note in layout["annotations"] if note["text"] == "training length"] == [math.log10(256)]


@pytest.mark.parametrize(("x", "tick"), [((0, 1, 2), 1), ((0, 0.5, 1), None), ((0, 50, 100), None)])
def test_a_few_numbered_things_have_a_tick_each_and_none_between(x, tick):
    figure = lines(Series(label="a", group="a", x=x, y=(1.0, 2.0, 3.0)))
    assert figure["layout"]["xaxis"].get("dtick") == tick


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
        (maps(((-3.0, 0.7),), diverging=True), (-3.0, 3.0)),
        (maps(((0.25, 0.25),)), (-0.25, 0.75)),
        (maps(((None, None),)), (0.0, 1.0)),
        (maps(), (0.0, 1.0)),
    ],
)
def test_a_scale_holds_all_numbers_and_is_never_empty(panel, ends):
    scale = color_scale(panel)
    assert (scale.low, scale.high) == ends


@pytest.mark.parametrize(
    ("columns", "has_text", "size"), [(2, True, "small"), (6, True, "medium"), (16, False, "large")]
)
def test_cells_show_their_numbers_where_they_are_wide_enough(columns, has_text, size):
    panel = maps(((0.5,) * columns,) * 3)
    (figure,) = map_figures(panel)
    assert ("texttemplate" in figure["data"][0]) is has_text
    assert map_size(panel) == size


def test_embedded_json_holds_the_value_and_nothing_that_html_reads():
    value = {"text": "</script><!-- & \u2028", "numbers": [1.5, math.nan, (math.inf, 2)]}
    text = embedded_json(value)
    assert not set("<>&").intersection(text)
    assert json.loads(text) == {"text": value["text"], "numbers": [1.5, None, [None, 2]]}
