"""Observe the attention of a trained model, and make a page of it: `tidegate observe`."""

from __future__ import annotations

from tidegate.lab.observe.page import observation_page, observation_sections
from tidegate.lab.observe.run import model_observation

__all__ = ["model_observation", "observation_page", "observation_sections"]
