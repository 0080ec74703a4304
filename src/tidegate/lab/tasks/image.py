"""Images and their classes.

Legend: N images, B batch, C channels, S height and width.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any, Literal, final

import numpy as np
import numpy.typing as npt

from tidegate._validation import InputError, require_size
from tidegate.lab.tasks.documents import changed
from tidegate.lab.tasks.pictures import DIGITS, Pictures, digit_pictures, folder_pictures, picture_folder
from tidegate.lab.tasks.seeding import draws
from tidegate.lab.tasks.task import PROBE_ROWS, Batch, in_batches

_DIGITS_SIZE = 8
_FOLDER_SIZE = 32


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTask:
    """The class of an image."""

    source: str = DIGITS
    """`digits`, the handwritten digits of scikit-learn, or a folder with a folder of images for each class."""
    image_size: int = _DIGITS_SIZE
    """Height and width; images of a folder are brought to it, and digits are 8."""
    validation_share: float = 0.2
    """How many images of each class are held out."""
    fingerprint: str = ""
    """What the images must be; empty takes what is there."""
    kind: Literal["image"] = "image"

    def __post_init__(self) -> None:
        require_size("image_size", self.image_size)
        if self.source == DIGITS and self.image_size != _DIGITS_SIZE:
            raise InputError("image_size", expected=f"{_DIGITS_SIZE} for the digits", got=self.image_size)
        if not 0 < self.validation_share <= 0.5:
            raise InputError("validation_share", expected="above 0 and at most 0.5", got=self.validation_share)

    @property
    def length(self) -> int:
        """One image is one example."""
        return 1

    def load(self) -> ImageData:
        """Read the images; once in a process. Raise InputError if they are no longer what they were."""
        return _load(self)

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:
        """As plain JSON values; without `location`, the fingerprint stands for where the images lie."""
        dropped = () if location or not self.fingerprint else ("source",)
        return {name: value for name, value in asdict(self).items() if name not in dropped}


def image_task(data: str | None = None, *, image_size: int | None = None) -> ImageTask:
    """Return the task that `data` names, found and fingerprinted; raise InputError if there are no such images.

    data       : None or "digits", or a folder with a folder for each class
    image_size : of a folder's images, 32 if None
    """
    if data is None or data == DIGITS:
        task = ImageTask(image_size=image_size or _DIGITS_SIZE)
    else:
        task = ImageTask(source=picture_folder(data), image_size=image_size or _FOLDER_SIZE)
    return replace(task, fingerprint=_read(task).fingerprint)


@final
class ImageData:
    """Images on both sides, (N, C, S, S) each, standardised by the mean and spread of those trained on."""

    def __init__(self, task: ImageTask, pictures: Pictures) -> None:
        self._task = task
        self._pictures = pictures
        held_out = _held_out(pictures, task.validation_share)
        self._held_out, self._training = np.flatnonzero(held_out), np.flatnonzero(~held_out)
        self._mean, self._spread = _statistics(pictures, self._training)

    @property
    def vocab_size(self) -> int:
        """Classes."""
        return len(self._pictures.classes)

    @property
    def bytes_per_token(self) -> None:
        """The targets are no text."""
        return

    @property
    def chance_loss(self) -> float:
        """All classes alike."""
        return math.log(self.vocab_size)

    @property
    def num_training_examples(self) -> int:
        """Images."""
        return len(self._training)

    @property
    def facts(self) -> dict[str, Any]:
        """Source, fingerprint, sizes and classes."""
        return {
            **self._task.to_dict(),
            "fingerprint": self._pictures.fingerprint,
            "channels": self._pictures.images.shape[1],
            "num_classes": self.vocab_size,
            "classes": list(self._pictures.classes),
            "chance_loss": self.chance_loss,
            "num_training_examples": self.num_training_examples,
            "num_training_images": len(self._training),
            "num_held_out_images": len(self._held_out),
            "held_out": f"{100 * self._task.validation_share:.3g} % of each class, chosen by a hash",
        }

    @property
    def description(self) -> str:
        """What the images are, and how many."""
        size, channels = self._task.image_size, self._pictures.images.shape[1]
        return (
            f"{self._pictures.title}, {size} × {size} in {'grey' if channels == 1 else 'colour'}, "
            f"{self.vocab_size} classes: {len(self._training):,} images to train on and {len(self._held_out):,} held "
            "out, chosen by a hash in each class."
        )

    def batch(self, *, seed: int, step: int, size: int) -> Batch:
        """Images (B, C, S, S) and classes (B,): every image once before any comes again, in a new order each time."""
        count = len(self._training)
        epochs, places = np.divmod(step * size + np.arange(size), count)
        orders = {
            epoch: draws("training", seed=seed, step=int(epoch)).permutation(count) for epoch in np.unique(epochs)
        }
        rows = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        return self._examples(self._training[rows])

    def validation(self) -> list[Batch]:
        """All that is held out, 64 images a batch but for the last."""
        return [self._examples(rows) for rows in in_batches(self._held_out)]

    def final(self) -> list[Batch]:
        """All that is held out."""
        return self.validation()

    def probe(self) -> Batch:
        """Eight held-out images, evenly spread over the classes, or all if there are fewer."""
        count = min(PROBE_ROWS, len(self._held_out))
        by_class = self._held_out[np.argsort(self._pictures.labels[self._held_out], kind="stable")]
        return self._examples(by_class[np.arange(count) * len(by_class) // count])

    def long(self) -> None:
        """Images have no length to go beyond."""
        return

    def _examples(self, rows: npt.NDArray[np.int64]) -> Batch:
        import torch

        images = (self._pictures.images[rows].astype(np.float32) - self._mean) / self._spread
        return Batch(torch.from_numpy(images), torch.from_numpy(self._pictures.labels[rows]))


@lru_cache(maxsize=4)
def _load(task: ImageTask) -> ImageData:
    pictures = _read(task)
    if task.fingerprint not in ("", pictures.fingerprint):
        raise changed(task.source, task.fingerprint, pictures.fingerprint)
    return ImageData(task, pictures)


def _read(task: ImageTask) -> Pictures:
    return digit_pictures() if task.source == DIGITS else folder_pictures(task.source, task.image_size)


def _held_out(pictures: Pictures, share: float) -> npt.NDArray[np.bool_]:
    """(N,): the first of each class in the order of the keys, at least one; those with the same key go together."""
    chosen = np.zeros(len(pictures.labels), dtype=bool)
    keys = np.asarray(pictures.keys)
    for label in range(len(pictures.classes)):
        rows = np.flatnonzero(pictures.labels == label)
        ordered = np.sort(keys[rows])
        last = ordered[max(round(share * len(rows)), 1) - 1]
        chosen[rows] = keys[rows] <= last
        if chosen[rows].all():
            name = pictures.classes[label]
            hint = f"The class {name!r} has too few; one at least is held out."
            raise InputError("data", expected="folders of at least two different images each", hint=hint)
    return chosen


def _statistics(pictures: Pictures, training: npt.NDArray[np.int64]) -> tuple[Any, Any]:
    """Mean and standard deviation (C, 1, 1) of the images trained on; a channel without spread is left unscaled."""
    images = pictures.images[training]
    mean = images.mean(axis=(0, 2, 3), dtype=np.float64, keepdims=True)[0]
    spread = images.std(axis=(0, 2, 3), dtype=np.float64, keepdims=True)[0]
    return mean.astype(np.float32), np.where(spread > 0, spread, 1.0).astype(np.float32)
