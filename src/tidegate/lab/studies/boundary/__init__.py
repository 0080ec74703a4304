"""Do gates help on nonlinear decision boundaries, and does curvature correlate with accuracy?"""

from tidegate.lab.studies.boundary.run import BoundaryResult, finding, run_boundary
from tidegate.lab.studies.boundary.training import BoundaryOptions
from tidegate.lab.studies.boundary.views import STUDY, figures, view

__all__ = ["STUDY", "BoundaryOptions", "BoundaryResult", "figures", "finding", "run_boundary", "view"]
