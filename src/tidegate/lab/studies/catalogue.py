"""All studies by name. They are imported on access, because most of them import PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final

from tidegate.lab.studies.study import Study

QUESTIONS: dict[str, str] = {
    "flat-or-curved": "Which gates curve which charts of attention, by how much, and with which sign?",
    "depth": "Does curvature grow with the number of layers, in a structured stack and at random initialization?",
    "boundary": "Do gates help on nonlinear boundaries, is it the gate, and does curvature correlate with accuracy?",
    "trained-layers": "How curved are the attention layers of a language model, before and after training?",
    "sinks": "Where does attention go: to the first key, to a sink, or to the other keys?",
    "gate-tuning": "Do gates learn when they are added to a trained model, and which remedy makes them move?",
    "rates": "Which experts of a head can be estimated from data, and how fast, by placement of the gate?",
}
"""The question of every study, in reading order."""


@final
class _Studies(Mapping[str, Study[Any, Any]]):
    def __getitem__(self, name: str) -> Study[Any, Any]:
        from tidegate.lab.studies import boundary, depth, flat_or_curved, gate_tuning, rates, sinks, trained_layers

        modules = (flat_or_curved, depth, boundary, trained_layers, sinks, gate_tuning, rates)
        return {each.STUDY.name: each.STUDY for each in modules}[name]

    def __iter__(self) -> Iterator[str]:
        return iter(QUESTIONS)

    def __len__(self) -> int:
        return len(QUESTIONS)


STUDIES: Mapping[str, Study[Any, Any]] = _Studies()
