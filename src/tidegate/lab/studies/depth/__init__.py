"""Does curvature grow with the number of layers, where gates alone can bend and at random?"""

from tidegate.lab.studies.depth.run import DepthOptions, DepthResult, finding, run_depth
from tidegate.lab.studies.depth.views import view
from tidegate.lab.studies.study import Study as _Study

__all__ = ["STUDY", "DepthOptions", "DepthResult", "finding", "run_depth", "view"]

STUDY = _Study(
    name="depth",
    question="Does curvature grow with the number of layers, where gates alone can bend and at random?",
    options=DepthOptions(),
    result=DepthResult,
    run=run_depth,
    finding=finding,
    view=view,
)
