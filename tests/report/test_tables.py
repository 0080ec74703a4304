from dataclasses import replace

from pages import main_table

from tidegate.report.maps import map_figures
from tidegate.report.page import Column, Map, Table, layer_head_maps
from tidegate.report.tables import format_rows, map_table, numeric_columns


def marked(values, better):
    table = Table(title="", columns=(Column(title="", better=better),), rows=tuple((value,) for value in values))
    return [row[0].best for row in format_rows(table)]


def test_the_best_number_of_a_column_is_marked():
    assert marked((3.0, 1.0, None, "words", 1.0), "low") == [False, True, False, False, True]
    assert marked((3.0, 1.0, 2.0), "high") == [True, False, False]


def test_nothing_is_marked_where_nothing_is_better():
    assert not any(marked((3.0, 1.0), None))
    assert not any(marked((2.0, 2.0), "low"))
    assert not any(marked((2.0, None), "low"))
    assert not any(marked((2.0, float("nan")), "low"))


def test_numbers_may_be_written_as_text():
    columns = tuple(Column(title=title) for title in "abcd")
    rows = (("x", "1.2 ± 0.1", 3.0, None), ("2 y", "−0.5 to +1", None, ""))
    assert numeric_columns(Table(title="", columns=columns, rows=rows)) == [False, True, True, False]


def test_cells_carry_their_numbers_unrounded():
    table = main_table()
    numbers = [[cell.number for cell in row] for row in format_rows(table)]
    assert numbers == [[None if isinstance(value, str) else value for value in row] for row in table.rows]


def test_a_map_is_a_table_too():
    map_ = Map(label="g1", values=((0.125, None), (1.0,)))
    panel = layer_head_maps("title", "mean gate", {"g1": map_.values})
    table = map_table(map_, panel, digits=2)
    assert [[cell.text for cell in row] for row in format_rows(table)] == [
        ["layer 0", "0.12", ""],
        ["layer 1", "1.00", ""],
    ]


def test_named_rows_and_columns_of_a_map_have_their_names():
    map_ = Map(label="g1", values=((0.1, 0.2), (0.3, 0.4)))
    panel = replace(
        layer_head_maps("title", "difference", {"g1": map_.values}),
        row_label="init",
        column_label="rate",
        row_names=("0.02", "torch"),
        column_names=("0.001", "0.002"),
    )
    table = map_table(map_, panel, digits=2)
    assert [column.title for column in table.columns] == ["", "rate 0.001", "rate 0.002"]
    assert [row[0] for row in table.rows] == ["init 0.02", "init torch"]
    (figure,) = map_figures(replace(panel, maps=(map_,)))
    assert figure["layout"]["xaxis"]["ticktext"] == ["0.001", "0.002"]
    assert figure["data"][0]["customdata"][1][0] == ["torch", "0.001"]
