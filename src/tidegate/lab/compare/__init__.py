"""From a request to runs, verdicts and a page: `tidegate compare`.

Modules import in one direction: `variants` and `presets` are parts of a `request`, `design` turns it into runs, `run`
executes and records them, `summary` tests the results, `fairness` checks the conditions, and `page` shows both.
"""

from __future__ import annotations

from tidegate.lab.compare.fairness import fairness_checks, violations_in_words
from tidegate.lab.compare.page import comparison_page
from tidegate.lab.compare.presets import PRESETS, Preset
from tidegate.lab.compare.request import Request
from tidegate.lab.compare.run import RunsFailedError, compare
from tidegate.lab.compare.summary import Summary, VariantSummary, summarise
from tidegate.lab.compare.variants import parse_variant, parse_variants
from tidegate.lab.training.records import Variant, records_path

__all__ = [
    "PRESETS",
    "Preset",
    "Request",
    "RunsFailedError",
    "Summary",
    "Variant",
    "VariantSummary",
    "compare",
    "comparison_page",
    "fairness_checks",
    "parse_variant",
    "parse_variants",
    "records_path",
    "summarise",
    "violations_in_words",
]
