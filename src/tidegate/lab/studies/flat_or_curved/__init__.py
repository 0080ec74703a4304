"""Which gates bend which charts of attention, how much, and to which side?"""

from tidegate.lab.studies.catalogue import QUESTIONS as _QUESTIONS
from tidegate.lab.studies.flat_or_curved.run import FlatOrCurvedOptions, FlatOrCurvedResult, finding, run_flat_or_curved
from tidegate.lab.studies.flat_or_curved.views import figures, view
from tidegate.lab.studies.study import Study as _Study

__all__ = ["STUDY", "FlatOrCurvedOptions", "FlatOrCurvedResult", "figures", "finding", "run_flat_or_curved", "view"]

STUDY = _Study(
    name="flat-or-curved",
    question=_QUESTIONS["flat-or-curved"],
    claim="arXiv 2604.14702 says that ungated attention is intrinsically flat, and that multiplicative gating "
    "allows curvature, also positive. In our parametrisation: five charts that say what moves and what stays, "
    "and gates of the vocabulary at chosen strengths. Levels of different charts do not compare.",
    options=FlatOrCurvedOptions(),
    result=FlatOrCurvedResult,
    run=run_flat_or_curved,
    finding=finding,
    view=view,
    figures=figures,
)
