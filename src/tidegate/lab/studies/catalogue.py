"""Every study by its name."""

from __future__ import annotations

from tidegate.lab.studies.boundary import run as boundary
from tidegate.lab.studies.boundary import views as boundary_views
from tidegate.lab.studies.depth import run as depth
from tidegate.lab.studies.depth import views as depth_views
from tidegate.lab.studies.flat_or_curved import run as flat_or_curved
from tidegate.lab.studies.flat_or_curved import views as flat_or_curved_views
from tidegate.lab.studies.gate_tuning import run as gate_tuning
from tidegate.lab.studies.gate_tuning import views as gate_tuning_views
from tidegate.lab.studies.study import Study
from tidegate.lab.studies.trained_layers import run as trained_layers
from tidegate.lab.studies.trained_layers import views as trained_layers_views

STUDIES: dict[str, Study] = {
    study.name: study
    for study in (
        Study(
            name="flat-or-curved",
            question="Which gates bend which charts of attention, how much, and to which side?",
            run=flat_or_curved.flat_or_curved,
            result=flat_or_curved.Result,
            finding=flat_or_curved.finding,
            sections=flat_or_curved_views.sections,
            draw=flat_or_curved_views.draw,
        ),
        Study(
            name="depth",
            question="Does curvature grow with the number of layers, where gates alone can bend and at random?",
            run=depth.depth_study,
            result=depth.Result,
            finding=depth.finding,
            sections=depth_views.sections,
            draw=depth_views.draw,
        ),
        Study(
            name="boundary",
            question="Do gates help on bent boundaries, is it the gate, and does curvature go with accuracy?",
            run=boundary.boundary_study,
            result=boundary.Result,
            finding=boundary.finding,
            sections=boundary_views.sections,
            draw=boundary_views.draw,
        ),
        Study(
            name="trained-layers",
            question="How do the attention layers of a language model bend, before and after training?",
            run=trained_layers.trained_layers,
            result=trained_layers.Result,
            finding=trained_layers.finding,
            sections=trained_layers_views.sections,
            draw=trained_layers_views.draw,
        ),
        Study(
            name="gate-tuning",
            question="Do gates learn when they are added to a trained model, and which remedy makes them move?",
            run=gate_tuning.gate_tuning,
            result=gate_tuning.Result,
            finding=gate_tuning.finding,
            sections=gate_tuning_views.sections,
            draw=gate_tuning_views.draw,
        ),
    )
}
"""In the order in which they are best read."""
