"""Python imports this when it starts, in processes that inherit the path: see fault_points.py."""

import fault_points

fault_points.install()
