import lab_runs
import pytest
import torch

from tidegate.lab import compare
from tidegate.lab.presets import PRESETS


@pytest.fixture(autouse=True)
def few_threads():
    """A run sets the number of threads; the tests after it have what they had."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def task(tmp_path):
    return lab_runs.text_of(tmp_path)


@pytest.fixture
def miniatures(monkeypatch):
    """The preset `tiny` is a miniature, and costs are made up; gives the function that sets them."""
    monkeypatch.setitem(PRESETS["lm"], "tiny", PRESETS["lm"]["tiny"])
    monkeypatch.setattr(compare, "measure_costs", compare.measure_costs)
    lab_runs.use_miniatures()
    return lab_runs.use_miniatures
