"""Which gates curve which charts of attention, by how much, and with which sign?"""

from tidegate.lab.studies.flat_or_curved.run import FlatOrCurvedOptions, FlatOrCurvedResult, finding, run_flat_or_curved
from tidegate.lab.studies.flat_or_curved.views import STUDY, figures, view

__all__ = ["STUDY", "FlatOrCurvedOptions", "FlatOrCurvedResult", "figures", "finding", "run_flat_or_curved", "view"]
