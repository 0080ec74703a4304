"""Does curvature grow with the number of layers? In a structured stack, and at random initialization."""

from tidegate.lab.studies.depth.run import STUDY, DepthOptions, DepthResult, finding, run_depth, view

__all__ = ["STUDY", "DepthOptions", "DepthResult", "finding", "run_depth", "view"]
