"""The study of rates as a page: what can be estimated, how fast, why, and where that ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tidegate.lab.studies.rates.limits import caution, near_gates_panels, surplus_table, truths_table
from tidegate.lab.studies.rates.panels import (
    error_panels,
    gauge_table_panel,
    modulus_panels,
    names,
    slope_intervals,
    slope_table,
    start_panel,
)
from tidegate.lab.studies.rates.result import RatesResult
from tidegate.report.page import Page, Panel, Section, Snippet


def rates_page(result: RatesResult, *, command: str = "", environment: dict[str, str] | None = None) -> Page:
    """The whole page; its data are the result, and what it was made by.

    command : as it was typed; empty says that it was made from Python
    """
    data: dict[str, Any] = {
        "finding": finding(result),
        "result": result.to_dict(),
        "command": command,
        "environment": environment or {},
    }
    return Page(
        title="What a gate makes estimable",
        summary=finding(result),
        sections=tuple(_sections(result, data)),
        data=data,
        footer="Made by tidegate.",
    )


def finding(result: RatesResult) -> str:
    """What holds, in sentences made from the numbers."""
    by_verdict: dict[str, list[str]] = {}
    for found in result.rates:
        by_verdict.setdefault(found.slopes["expert"].verdict, []).append(found.position)
    words = [f"{verdict} for {names(by_verdict[verdict])}" for verdict in _VERDICTS if verdict in by_verdict]
    regression = [found.slopes["regression"].slope for found in result.rates]
    agreeing = sum(count.agrees for count in result.gauge)
    return (
        f"The experts of a head are {', '.join(words)}. The regression error of the same fits falls with slopes from "
        f"{min(regression):.2f} to {max(regression):.2f}. Flat directions are as many as predicted for {agreeing} of "
        f"{len(result.gauge)} layers."
    )


_VERDICTS = ("identified", "not identified", "inconclusive")


def _sections(result: RatesResult, data: dict[str, Any]) -> Iterator[Section]:
    settings = result.settings
    yield Section(
        title="Slopes and verdicts",
        lead=f"Two experts, {settings.replicates} replicates of {settings.starts} starts, n to {max(settings.ns):,}.",
        panels=(slope_intervals(result), slope_table(result)),
    )
    yield Section(
        title="Experts and predictions of the same fits",
        lead="Lines are medians over replicates; bands hold 80 % of them.",
        panels=error_panels(result),
    )
    yield Section(
        title="What no data can tell",
        lead="Directions of a layer's parameters in which no output changes.",
        panels=(gauge_table_panel(result),),
    )
    yield Section(
        title="How much the function must change",
        lead="One expert is held away from its true value and all else is fitted; what is left, data can see.",
        panels=modulus_panels(result),
    )
    yield Section(
        title="Where the fit began",
        lead="Starts lie around the truth at a fixed radius. What is not identified keeps their error.",
        panels=(start_panel(result),),
    )
    yield Section(title="Limits", panels=tuple(_limits(result)))
    yield Section(title="How to get this again", panels=tuple(_reproduction(data)))


def _limits(result: RatesResult) -> Iterator[Panel]:
    yield from near_gates_panels(result)
    yield from (table for table in (truths_table(result), surplus_table(result)) if table is not None)
    yield caution(result)


def _reproduction(data: dict[str, Any]) -> Iterator[Panel]:
    yield Snippet(title="Command", text=data["command"] or "(made from Python)")
    yield Snippet(title="Settings", text=json.dumps(data["result"]["settings"], indent=1, ensure_ascii=False))
    if data["environment"]:
        yield Snippet(title="Versions and machine", text=json.dumps(data["environment"], indent=1, ensure_ascii=False))
