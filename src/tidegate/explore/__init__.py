"""An interactive page about attention, curvature and gates, computed in the browser and tested against the library."""

from tidegate.explore.page import explore_page

__all__ = ["explore_page"]
