"""Which experts of a head can be estimated from data, and how fast, by where the gate stands?"""

from tidegate.lab.studies.rates.result import QUICK, RatesOptions, RatesResult
from tidegate.lab.studies.rates.run import finding, run_rates
from tidegate.lab.studies.rates.views import view
from tidegate.lab.studies.study import Study as _Study

__all__ = ["QUICK", "STUDY", "RatesOptions", "RatesResult", "finding", "run_rates", "view"]

STUDY = _Study(
    name="rates",
    question="Which experts of a head can be estimated from data, and how fast, by where the gate stands?",
    options=RatesOptions(),
    quick=QUICK,
    result=RatesResult,
    run=run_rates,
    finding=finding,
    view=view,
)
