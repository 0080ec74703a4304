"""Where does the weight of attention go: to the first key, to a sink, to the other keys?"""

from tidegate.lab.studies.catalogue import QUESTIONS as _QUESTIONS
from tidegate.lab.studies.sinks.run import SinksOptions, SinksResult, finding, run_sinks
from tidegate.lab.studies.sinks.views import figures, view
from tidegate.lab.studies.study import Study as _Study

__all__ = ["STUDY", "SinksOptions", "SinksResult", "figures", "finding", "run_sinks", "view"]

STUDY = _Study(
    name="sinks",
    question=_QUESTIONS["sinks"],
    claim="The bilinear-modulation note, arXiv 2505.06708 and arXiv 2602.01468 say that query-conditioned gating "
    "lowers the weight on the first token, or its impact on the output. That a sink is itself a gate is ours.",
    options=SinksOptions(),
    result=SinksResult,
    run=run_sinks,
    finding=finding,
    view=view,
    figures=figures,
)
