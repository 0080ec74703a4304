"""Estimates with their intervals: a forest plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidegate._json import finite
from tidegate.report.charts import Figure, Palette, axis, base_layout, label, plot_numbers, vertical_line
from tidegate.report.formats import estimate_digits, estimate_text, typographic
from tidegate.report.page import Estimate, Intervals

_ROW = 46
"""Pixels per estimate: its text above, its interval below."""
_TALL_ROW = 64
"""The same if its numbers are below the interval."""
_HALF_BAND = 0.17
"""Half-width of the margin's band, as a share of a row."""
_LONGEST = 26
"""Characters of a name that fit beside its numbers on a phone."""


def intervals_figure(panel: Intervals, palette: Palette) -> Figure:
    """Return the figure of the panel; names and numbers are above the intervals, so it needs no side margin."""
    items, digits = panel.items, estimate_digits(panel.items)
    margin = panel.margin or 0.0
    start, stop = _extent(items, margin)
    pad = 0.04 * ((stop - start) or 1.0)
    words = [note for row, item in enumerate(items) for note in _words(item, row, digits)]
    # On narrow screens numbers are below their interval.
    narrow = [note if note["xanchor"] == "left" else {**note, "yanchor": "top", "yshift": -5} for note in words]
    fill = {"fillcolor": "var(--band)", "line": {"width": 0}, "layer": "below"}
    # A piece of the band behind each interval, without the text between them.
    bands = [
        {"type": "rect", "x0": -margin, "x1": margin, "y0": row - _HALF_BAND, "y1": row + _HALF_BAND, **fill}
        for row in range(len(items))
        if margin
    ]
    return {
        "data": [_trace(item, row, palette, digits) for row, item in enumerate(items)],
        "layout": {
            **base_layout(height=_ROW * len(items) + 60),
            "xaxis": axis(
                title=panel.x_label,
                range=[start - pad, stop + pad],
                fixedrange=True,
                showline=True,
                showgrid=False,
                ticks="outside",
                tickcolor="var(--line)",
            ),
            "yaxis": axis(range=[len(items) - 0.5, -0.75], visible=False, fixedrange=True),
            "shapes": [*bands, vertical_line(0.0)],
            "annotations": words,
            "hovermode": "closest",
            "dragmode": False,
            "margin": {"l": 14, "r": 14, "t": 4, "b": 8},
        },
        "narrow": {"height": _TALL_ROW * len(items) + 60, "annotations": narrow},
    }


def _extent(items: Sequence[Estimate], margin: float = 0.0) -> tuple[float, float]:
    numbers = [0.0, -margin, margin]
    for item in items:
        numbers += [number for number in map(finite, (item.value, item.low, item.high)) if number is not None]
    return min(numbers), max(numbers)


def _trace(item: Estimate, row: int, palette: Palette, digits: int) -> dict[str, Any]:
    color = palette.color(item.label)
    x = plot_numbers((item.low, item.value, item.high))
    return {
        "type": "scatter",
        "name": label(item.label),
        "x": x,
        "y": [row] * 3,
        "mode": "lines+markers",
        "line": {"color": color, "width": 2.4},
        "marker": {"color": color, "size": [1, 10, 1], "opacity": 1, "line": {"width": 0}},
        "hovertemplate": label(f"{item.label}: {typographic(estimate_text(item, digits))}") + "<extra></extra>",
    }


def _words(item: Estimate, row: int, digits: int) -> list[dict[str, Any]]:
    name = item.label if len(item.label) <= _LONGEST else f"{item.label[: _LONGEST - 1]}…"
    numbers = typographic(estimate_text(item, digits)) or "no estimate"
    words = numbers if item.verdict is None else f"{numbers} · {item.verdict}"
    place = {"y": row, "yanchor": "bottom", "yshift": 8, "xref": "paper", "showarrow": False}
    ink = {"color": "var(--ink)", "size": 12.5}
    return [
        {"text": f"<b>{label(name)}</b>", "x": 0, "xanchor": "left", "font": ink, **place},
        {"text": label(words), "x": 1, "xanchor": "right", **place},
    ]
