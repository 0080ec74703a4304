"""Does curvature grow with the number of layers, where gates alone can bend and at random?"""

from tidegate.lab.studies.catalogue import QUESTIONS as _QUESTIONS
from tidegate.lab.studies.depth.run import DepthOptions, DepthResult, finding, run_depth
from tidegate.lab.studies.depth.views import view
from tidegate.lab.studies.study import Study as _Study

__all__ = ["STUDY", "DepthOptions", "DepthResult", "finding", "run_depth", "view"]

STUDY = _Study(
    name="depth",
    question=_QUESTIONS["depth"],
    claim="arXiv 2604.14702 says that curvature grows systematically with depth in a structured regime. In our "
    "parametrisation: the structured stack is our own, and what is measured are slices unless tangent=full.",
    options=DepthOptions(),
    result=DepthResult,
    run=run_depth,
    finding=finding,
    view=view,
)
