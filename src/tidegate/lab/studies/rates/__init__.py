"""Which experts of a head can be estimated from data, and how fast, by placement of the gate?"""

from tidegate.lab.studies.rates.run import QUICK, RatesOptions, RatesResult, finding, run_rates
from tidegate.lab.studies.rates.views import STUDY, view

__all__ = ["QUICK", "STUDY", "RatesOptions", "RatesResult", "finding", "run_rates", "view"]
