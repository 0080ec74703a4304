"""Which gates bend which charts of attention, how much, and to which side?"""

from tidegate.lab.studies.flat_or_curved.run import FlatOrCurvedOptions, FlatOrCurvedResult, finding, run_flat_or_curved
from tidegate.lab.studies.flat_or_curved.views import view
from tidegate.lab.studies.study import Study as _Study

__all__ = ["STUDY", "FlatOrCurvedOptions", "FlatOrCurvedResult", "finding", "run_flat_or_curved", "view"]

STUDY = _Study(
    name="flat-or-curved",
    question="Which gates bend which charts of attention, how much, and to which side?",
    options=FlatOrCurvedOptions(),
    result=FlatOrCurvedResult,
    run=run_flat_or_curved,
    finding=finding,
    view=view,
)
