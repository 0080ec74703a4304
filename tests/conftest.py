import hypothesis
import jax
import matplotlib as mpl
import pytest
from libraries import LIBRARIES

mpl.use("Agg")
jax.config.update("jax_enable_x64", True)
hypothesis.settings.register_profile("tidegate", derandomize=True, deadline=None, max_examples=20, database=None)
hypothesis.settings.load_profile("tidegate")


@pytest.fixture(scope="session", params=LIBRARIES, ids=lambda library: library.name)
def library(request):
    """Each array library in turn; JAX once eager and once jitted."""
    return request.param
