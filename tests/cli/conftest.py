from functools import partial

import pytest
from lab_runs import COARSE

from tidegate.lab.compare import cost
from tidegate.lab.compare import run as compare_module
from tidegate.lab.models import measure


@pytest.fixture(scope="module", autouse=True)
def measured_briefly():
    """Memory is measured in a process of its own for each variant, which `test_cost.py` tests; layers coarsely."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost, "_peak_bytes", lambda run: None)
        patch.setattr(compare_module, "measure_costs", partial(compare_module.measure_costs, rounds=2))
        patch.setattr(measure, "_SAMPLING", COARSE)
        yield
