"""Curvature of representations: the geometry that a map's outputs, read as distributions, give to its inputs.

Functions take callables and points of PyTorch or JAX and measure what is exactly there. Closed-form surfaces are in
`tidegate.geometry.surfaces`.
"""

from tidegate.geometry.chart import Chart
from tidegate.geometry.charts import depth_chart, frozen_weight_chart, input_chart, query_chart, weight_chart
from tidegate.geometry.curvature import (
    gaussian_curvature,
    scalar_curvature,
    second_fundamental_form,
    sectional_curvature,
)
from tidegate.geometry.errors import GeometryError, PrecisionWarning
from tidegate.geometry.intrinsic import (
    christoffel_symbols,
    intrinsic_curvature,
    intrinsic_scalar_curvature,
    riemann_tensor,
)
from tidegate.geometry.metric import categorical_chart, fisher_rao_metric
from tidegate.geometry.proxies import (
    Agreement,
    StepLinearity,
    agreement_with_curvature,
    second_difference_ratio,
    step_linearity,
)

__all__ = [
    "Agreement",
    "Chart",
    "GeometryError",
    "PrecisionWarning",
    "StepLinearity",
    "agreement_with_curvature",
    "categorical_chart",
    "christoffel_symbols",
    "depth_chart",
    "fisher_rao_metric",
    "frozen_weight_chart",
    "gaussian_curvature",
    "input_chart",
    "intrinsic_curvature",
    "intrinsic_scalar_curvature",
    "query_chart",
    "riemann_tensor",
    "scalar_curvature",
    "second_difference_ratio",
    "second_fundamental_form",
    "sectional_curvature",
    "step_linearity",
    "weight_chart",
]
