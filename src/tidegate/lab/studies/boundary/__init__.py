"""Do gates help on nonlinear decision boundaries, and does curvature correlate with accuracy?"""

from tidegate.lab.studies.boundary.run import STUDY, BoundaryResult, figures, finding, run_boundary, view
from tidegate.lab.studies.boundary.training import BoundaryOptions

__all__ = ["STUDY", "BoundaryOptions", "BoundaryResult", "figures", "finding", "run_boundary", "view"]
