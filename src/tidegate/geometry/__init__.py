"""Curvature of representations: the geometry that a map induces on its inputs if its outputs parametrize distributions.

Functions take a map and points of PyTorch or JAX. Derivatives are exact, except in the proxies. Surfaces of
known curvature are in `tidegate.geometry.surfaces`.
"""

import types

from tidegate.geometry.charts import Chart as Chart
from tidegate.geometry.charts import depth_chart as depth_chart
from tidegate.geometry.charts import frozen_weight_chart as frozen_weight_chart
from tidegate.geometry.charts import input_chart as input_chart
from tidegate.geometry.charts import query_chart as query_chart
from tidegate.geometry.charts import weight_chart as weight_chart
from tidegate.geometry.curvature import gaussian_curvature as gaussian_curvature
from tidegate.geometry.curvature import scalar_curvature as scalar_curvature
from tidegate.geometry.curvature import second_fundamental_form as second_fundamental_form
from tidegate.geometry.curvature import sectional_curvature as sectional_curvature
from tidegate.geometry.errors import GeometryError as GeometryError
from tidegate.geometry.errors import PrecisionWarning as PrecisionWarning
from tidegate.geometry.intrinsic import christoffel_symbols as christoffel_symbols
from tidegate.geometry.intrinsic import intrinsic_curvature as intrinsic_curvature
from tidegate.geometry.intrinsic import intrinsic_scalar_curvature as intrinsic_scalar_curvature
from tidegate.geometry.intrinsic import riemann_tensor as riemann_tensor
from tidegate.geometry.metric import categorical_chart as categorical_chart
from tidegate.geometry.metric import fisher_rao_metric as fisher_rao_metric
from tidegate.geometry.proxies import Agreement as Agreement
from tidegate.geometry.proxies import StepLinearity as StepLinearity
from tidegate.geometry.proxies import agreement_with_curvature as agreement_with_curvature
from tidegate.geometry.proxies import second_difference_ratio as second_difference_ratio
from tidegate.geometry.proxies import step_linearity as step_linearity

__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]: derived, so that each name is listed once
    name for name, value in globals().items() if not name.startswith("_") and not isinstance(value, types.ModuleType)
]
