"""Observe a model during training, at every n-th step."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import Tensor, nn

from tidegate._validation import require_sizes
from tidegate.torch.observing.counting import Keys
from tidegate.torch.observing.observation import Observation
from tidegate.torch.observing.watcher import Watcher, observe, validate_options

_POINTS_PER_CURVE = 64


class Observer:
    """Observe training at every n-th step, beginning with the first, and store the observations.

        observer = Observer(model, every=100)
        for batch in batches:
            with observer.step():
                loss = model(batch)
            loss.backward()

    `history` has one `(step, observation)` for each observed step, with at most 64 points per curve. A step that
    raises is discarded. `keys`, `heat`, `residual` and `crossing` are those of `observe`.
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
        validate_options(model, keys=keys, heat=heat, residual=residual, crossing=crossing)
        require_sizes(every=every)
        self.model = model
        self.every = every
        self.history: list[tuple[int, Observation]] = []
        self._observe = partial(observe, model, keys=keys, heat=heat, residual=residual, crossing=tuple(crossing))
        self._next_step = 0
        self._open = ExitStack()
        self._watcher: Watcher | None = None

    @contextmanager
    def step(self, *, padding: Tensor | None = None) -> Generator[Watcher | None]:
        """Observe one training step if it is due: the forward pass goes inside, the backward pass may.

        Args:
            padding: (B, S) bool, True for real tokens; None infers it.

        Yields:
            The watcher if this step is observed, else None.
        """
        watcher = self.begin(self._next_step, padding=padding)
        try:
            yield watcher
        except BaseException:
            self.abandon()
            raise
        self.end()

    def begin(self, step: int, *, padding: Tensor | None = None) -> Watcher | None:
        """Begin a step without a `with`, and observe it if it is due. Each `begin` needs an `end`."""
        if self._watcher is not None:
            raise RuntimeError(f"Step {self._next_step - 1} has not ended. Call end(), or abandon() if it failed.")
        self._next_step = step + 1
        if step % self.every == 0:
            self._watcher = self._open.enter_context(self._observe(padding=padding))
        return self._watcher

    def end(self) -> None:
        """End the step, and store its observation."""
        watcher = self._watcher
        self.abandon()
        if watcher is not None:
            self.history.append((self._next_step - 1, watcher.observation().downsample(_POINTS_PER_CURVE)))

    def abandon(self) -> None:
        """Stop observing, and discard the step."""
        self._watcher = None
        self._open.close()
