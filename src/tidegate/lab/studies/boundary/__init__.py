"""Do gates help on bent boundaries, is it the gate, and does curvature go with accuracy?"""

from tidegate.lab.studies.boundary.finding import finding
from tidegate.lab.studies.boundary.run import BoundaryResult, run_boundary
from tidegate.lab.studies.boundary.training import BoundaryOptions
from tidegate.lab.studies.boundary.views import figures, view
from tidegate.lab.studies.catalogue import QUESTIONS as _QUESTIONS
from tidegate.lab.studies.study import Study as _Study

__all__ = ["STUDY", "BoundaryOptions", "BoundaryResult", "figures", "finding", "run_boundary", "view"]

STUDY = _Study(
    name="boundary",
    question=_QUESTIONS["boundary"],
    claim="arXiv 2604.14702 says that gated models win on nonlinear decision boundaries, that they have no "
    "consistent edge on linear ones, and that curvature correlates with accuracy (r = 0.79). In our "
    "parametrisation: tasks, models and the measure of curvature are our own, and at which level that r was "
    "taken is not known here.",
    options=BoundaryOptions(),
    result=BoundaryResult,
    run=run_boundary,
    finding=finding,
    view=view,
    figures=figures,
)
