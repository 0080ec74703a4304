"""Observe a model while it trains: every so many steps, one step is watched."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn

from tidegate._validation import require_bool, require_sizes
from tidegate.torch.observing.counting import Keys, require_keys
from tidegate.torch.observing.modules import require_names
from tidegate.torch.observing.observation import Observation
from tidegate.torch.observing.watcher import Watcher, observe

_NUM_POINTS = 64
"""Points of each curve that are kept of an observation in the history."""


class Observer:
    """Watches the first step and every `every`-th after it, and keeps what it saw.

        observer = Observer(model, every=100)
        for batch in batches:
            with observer.step():
                loss = model(batch)
            loss.backward()

    `history` has one `(step, observation)` for each step watched, with at most 64 points a curve. A step that
    raises is not kept. `keys`, `heat`, `residual` and `crossing` are those of `observe`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int,
        keys: Keys = 1,
        heat: bool = False,
        residual: bool = True,
        crossing: Sequence[str] = (),
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be an nn.Module; got {type(model).__name__}.")
        require_sizes(every=every)
        require_keys(keys)
        require_names(crossing, model)
        require_bool("heat", heat)
        require_bool("residual", residual)
        self.model = model
        self.every = every
        self.history: list[tuple[int, Observation]] = []
        self._keys: Keys = keys
        self._heat = heat
        self._residual = residual
        self._crossing = tuple(crossing)
        self._next_step = 0
        self._open = ExitStack()
        self._watcher: Watcher | None = None

    @contextmanager
    def step(self, *, padding: Tensor | None = None) -> Generator[Watcher | None]:
        """One training step: put the forward pass inside, the backward pass if you like.

        padding : (B, S) bool, True for real tokens; None reads it from the masks
        yields  : the watcher if this step is watched, else None
        """
        watcher = self.begin(self._next_step, padding=padding)
        try:
            yield watcher
        except BaseException:
            self.abandon()
            raise
        self.end()

    def begin(self, step: int, *, padding: Tensor | None = None) -> Watcher | None:
        """Begin a step, where a `with` has no place; watch if it is due. Each `begin` needs an `end`."""
        if self._watcher is not None:
            raise RuntimeError(f"Step {self._next_step - 1} has not ended. Call end(), or abandon() if it broke off.")
        self._next_step = step + 1
        if step % self.every == 0:
            self._watcher = self._open.enter_context(
                observe(
                    self.model,
                    keys=self._keys,
                    heat=self._heat,
                    residual=self._residual,
                    padding=padding,
                    crossing=self._crossing,
                )
            )
        return self._watcher

    def end(self) -> None:
        """End the step, and keep what was seen of it."""
        watcher = self._watcher
        self.abandon()
        if watcher is not None:
            self.history.append((self._next_step - 1, watcher.observation().in_stretches(_NUM_POINTS)))

    def abandon(self) -> None:
        """Stop watching, and keep nothing of the step."""
        self._watcher = None
        self._open.close()
