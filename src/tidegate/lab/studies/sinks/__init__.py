"""Where does attention go: to the first key, to a sink, or to the other keys?"""

from tidegate.lab.studies.sinks.run import STUDY, SinksOptions, SinksResult, figures, finding, run_sinks, view

__all__ = ["STUDY", "SinksOptions", "SinksResult", "figures", "finding", "run_sinks", "view"]
