"""Every study by its name."""

from __future__ import annotations

from typing import Any

from tidegate.lab.studies import boundary, depth, flat_or_curved, gate_tuning, rates, sinks, trained_layers
from tidegate.lab.studies.study import Study

STUDIES: dict[str, Study[Any, Any]] = {
    each.STUDY.name: each.STUDY for each in (flat_or_curved, depth, boundary, trained_layers, sinks, gate_tuning, rates)
}
"""In the order in which they are best read."""
