"""Which experts of a head can be estimated from data, and how fast, by where the gate stands?"""

from tidegate.lab.studies.catalogue import QUESTIONS as _QUESTIONS
from tidegate.lab.studies.rates.result import QUICK, RatesOptions, RatesResult
from tidegate.lab.studies.rates.run import finding, run_rates
from tidegate.lab.studies.rates.views import view
from tidegate.lab.studies.study import Study as _Study

__all__ = ["QUICK", "STUDY", "RatesOptions", "RatesResult", "finding", "run_rates", "view"]

STUDY = _Study(
    name="rates",
    question=_QUESTIONS["rates"],
    claim="arXiv 2602.01468 says that a gated expert takes polynomially many samples to estimate, and an ungated "
    "one exponentially many: a statement on mixtures with more experts than there are. In our parametrisation "
    "the experts are the channels of one head, which share one routing, so that without a gate their sum is "
    "all there is to estimate; most fits have as many experts as there are, and start near the truth.",
    options=RatesOptions(),
    quick=QUICK,
    result=RatesResult,
    run=run_rates,
    finding=finding,
    view=view,
)
