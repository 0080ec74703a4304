import json
from typing import get_args

import pytest
from errors import rejects

from tidegate.report.page import (
    Check,
    Checks,
    Column,
    Estimate,
    Intervals,
    Lines,
    Map,
    Maps,
    Page,
    Panel,
    Prose,
    Section,
    Series,
    Snippet,
    Table,
    Verdicts,
    View,
    Views,
)

ESTIMATE = Estimate(label="bma", value=0.1, low=-0.1, high=None, verdict="worse", sentence="bma: worse")
TABLE = Table(title="Table", columns=(Column(title="a"), Column(title="b", digits=2)), rows=(("x", 1.5), (None, 2)))
SERIES = Series(label="one", group="bma", x=(1.0, 2.0), y=(None, 3.0), low=(0.0, 1.0), high=(2.0, None))
PANELS = (
    Verdicts(items=(ESTIMATE,), rule="The rule.", unit="nats"),
    Intervals(title="Differences", alternative="words", x_label="nats", items=(ESTIMATE,), margin=0.01),
    TABLE,
    Lines(title="Loss", alternative="words", x_label="tokens", y_label="nats", series=(SERIES,), marker=2.0),
    Maps(
        title="Gates",
        alternative="words",
        row_label="layer",
        column_label="head",
        value_label="mean",
        maps=(Map(label="bma", values=((0.1, None), (0.3, 0.4))),),
        low=0.0,
    ),
    Checks(items=(Check(name="Seeds", state="violated", detail="none"),)),
    Prose(paragraphs=("One.", "Two."), caution=True),
    Snippet(title="Command", text="tidegate compare"),
    Views(title="Two ways", views=(View(label="as a table", panel=TABLE),)),
)


def page_of(*panels):
    return Page(title="A page", summary="What.", sections=(Section(title="One", panels=panels),), data={"a": [1, None]})


def test_there_is_an_example_of_every_panel():
    assert {type(panel) for panel in PANELS} == set(get_args(Panel))


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.kind)
def test_a_page_goes_through_json_and_back(panel):
    page = page_of(panel)
    assert Page.from_json(page.to_json()) == page


def test_kinds_differ():
    assert len({panel.kind for panel in PANELS}) == len(PANELS)


def test_a_panel_of_an_unknown_kind_is_refused():
    text = page_of(PANELS[-2]).to_json().replace('"snippet"', '"poem"')
    with rejects("sections[0].panels[0].kind"):
        Page.from_json(text)


def test_an_unknown_field_is_refused():
    data = json.loads(page_of().to_json()) | {"colour": "blue"}
    with rejects("colour"):
        Page.from_json(json.dumps(data))


def test_a_number_that_json_does_not_have_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        Page(title="", summary="", sections=(), data={"loss": float("inf")}).to_json()


def test_a_row_has_a_cell_for_each_column():
    with pytest.raises(ValueError, match="rows of a Table have 1 cells, one a column; got 2"):
        Table(title="", columns=(Column(title="a"),), rows=((1, 2),))


@pytest.mark.parametrize("name", ["y", "low", "high"])
def test_a_series_has_a_number_for_each_x(name):
    with pytest.raises(ValueError, match=f"{name} of the Series 'one' has 1 numbers; x has 2"):
        Series(**{"label": "one", "group": "a", "x": (1.0, 2.0), "y": (1.0, 2.0), name: (1.0,)})
