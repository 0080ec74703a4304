from typing import get_args

import pytest
from errors import rejects

from tidegate.report.page import Column, Panel, Series, Table


def test_kinds_differ():
    assert len({panel.kind for panel in get_args(Panel)}) == len(get_args(Panel))


def test_a_row_has_a_cell_for_each_column():
    with rejects("Table.rows"):
        Table(title="", columns=(Column(title="a"),), rows=((1, 2),))


@pytest.mark.parametrize("name", ["y", "low", "high"])
def test_a_series_has_a_number_for_each_x(name):
    with rejects(f"Series.{name}"):
        Series(**{"label": "one", "group": "a", "x": (1.0, 2.0), "y": (1.0, 2.0), name: (1.0,)})
