"""Do gates help on bent boundaries, is it the gate, and does curvature go with accuracy?"""

from tidegate.lab.studies.boundary.finding import finding
from tidegate.lab.studies.boundary.result import BoundaryResult
from tidegate.lab.studies.boundary.run import run_boundary
from tidegate.lab.studies.boundary.training import BoundaryOptions
from tidegate.lab.studies.boundary.views import view
from tidegate.lab.studies.study import Study as _Study

__all__ = ["STUDY", "BoundaryOptions", "BoundaryResult", "finding", "run_boundary", "view"]

STUDY = _Study(
    name="boundary",
    question="Do gates help on bent boundaries, is it the gate, and does curvature go with accuracy?",
    options=BoundaryOptions(),
    result=BoundaryResult,
    run=run_boundary,
    finding=finding,
    view=view,
)
