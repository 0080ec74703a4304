"""The page to play with: attention, curvature and gates, computed in the browser and checked against the library."""

from tidegate.explore.page import explore_page

__all__ = ["explore_page"]
