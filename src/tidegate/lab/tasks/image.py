"""Images and their classes.

Legend: N images, B batch, C channels, S height and width.
"""

from __future__ import annotations

import hashlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np
import numpy.typing as npt

from tidegate._validation import InputError, require_size
from tidegate.lab.tasks.documents import (
    Document,
    changed,
    exists,
    expand_home,
    files_below,
    fingerprint,
    holds_records,
    read_bytes,
    unreadable,
)
from tidegate.lab.tasks.task import PROBE_ROWS, Batch, in_batches, make_rng

DIGITS = "digits"
"""The source that needs no path."""

_FORMATS = (
    "AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "MPO", "PCX", "PNG", "PPM", "TGA", "TIFF", "WEBP",
)  # fmt: skip
"""Formats that are read. Pillow knows others, some of which are programs: it gives PostScript to an interpreter."""


_MOST_PIXELS = 8_000_000
_MOST_PIXELS_PER_BYTE = 100
"""An image may have the one or the other number of pixels: a small file can declare more than the memory holds. Photos
have about ten for a byte."""
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
            epoch: make_rng("training", seed=seed, step=int(epoch)).permutation(count) for epoch in np.unique(epochs)
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


class Pictures(NamedTuple):
    """Images of one size, with their classes."""

    images: npt.NDArray[np.uint8]
    """(N, C, S, S)"""
    labels: npt.NDArray[np.int64]
    """(N,)"""
    classes: tuple[str, ...]
    keys: tuple[str, ...]
    """A hash of each image, by which some are held out."""
    fingerprint: str
    title: str


def digit_pictures() -> Pictures:
    """The 1797 handwritten digits that come with scikit-learn."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        hint = "The digits need the package scikit-learn: pip install 'tidegate[lab]'."
        raise InputError("data", expected="a folder of images", got=DIGITS, hint=hint) from error
    digits: Any = load_digits()
    images = np.ascontiguousarray(digits.images, dtype=np.uint8)[:, None]
    labels = np.asarray(digits.target, dtype=np.int64)
    documents = [Document(str(label), image.tobytes()) for image, label in zip(images, labels, strict=True)]
    classes = tuple(map(str, range(10)))
    return Pictures(images, labels, classes, _keys(documents), fingerprint(documents), "Handwritten digits")


def picture_folder(source: str) -> str:
    """Return the absolute path of a folder with at least two class folders; raise InputError if it is none."""
    folder = expand_home(source).absolute()
    if not exists(folder):
        hint = "It does not exist."
        raise InputError("data", expected="a folder of images, or 'digits'", got=source, hint=hint)
    if not folder.is_dir() or len(_class_folders(folder)) < 2:
        expected = "a folder with one folder of images for each of two or more classes"
        raise InputError("data", expected=expected, got=source)
    return str(folder)


def folder_pictures(source: str, image_size: int) -> Pictures:
    """The images of a folder, the shorter side brought to `image_size` and the longer one cut.

    Grey if all of them are, else in colour. Hidden files, and those without the ending of a known format, are left out.
    """
    try:
        from PIL import Image
    except ImportError as error:
        hint = "Image files need the package pillow: pip install 'tidegate[lab]'."
        raise InputError("data", expected="'digits'", got=source, hint=hint) from error
    folders = _class_folders(Path(source))
    endings = frozenset(ending for ending, kind in Image.registered_extensions().items() if kind in _FORMATS)
    documents: list[Document] = []
    opened: list[npt.NDArray[np.uint8]] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        paths = sorted(path for path in files_below(folder) if path.suffix.lower() in endings)
        if len(paths) < 2:
            hint = f"{folder} has {len(paths)}; one is held out."
            raise InputError("data", expected="folders of at least two images each", hint=hint)
        for path in paths:
            content = read_bytes(path)
            # Hashes stand for the files, which together may be larger than the memory.
            documents.append(Document(path.relative_to(source).as_posix(), hashlib.sha256(content).digest()))
            opened.append(_read_image(path, content, image_size))
            labels.append(label)
    channels = max(len(image) for image in opened)
    images = np.stack([np.broadcast_to(image, (channels, image_size, image_size)) for image in opened])
    names = tuple(folder.name for folder in folders)
    title = f"Images of {Path(source).name}"
    return Pictures(images, np.asarray(labels, dtype=np.int64), names, _keys(documents), fingerprint(documents), title)


def _class_folders(folder: Path) -> list[Path]:
    """Leave out hidden folders, and those that a comparison wrote to."""
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise unreadable(folder, error) from error
    return [path for path in folders if not holds_records(path)]


def _read_image(path: Path, content: bytes, image_size: int) -> npt.NDArray[np.uint8]:
    """(1, S, S) if the image is grey, else (3, S, S)."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.init()
    known = [name for name in _FORMATS if name in Image.OPEN]
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(BytesIO(content), formats=known) as image:
            _require_moderate_size(path, image.size, len(content))
            grey = image.mode in ("1", "L", "LA")
            fitted = ImageOps.fit(image.convert("L" if grey else "RGB"), (image_size, image_size))
    except UnidentifiedImageError as error:
        hint = f"It is none of {', '.join(known)}. Convert it or take it out."
        raise InputError("data", expected="an image", got=path, hint=hint) from error
    except InputError:
        raise
    # Decoders raise errors of many classes, those of the modules that they call among them.
    except Exception as error:
        reason = str(error).rstrip(".") or type(error).__name__
        hint = f"{reason}. Mend it or take it out."
        raise InputError("data", expected="an image", got=path, hint=hint) from error
    array = np.asarray(fitted, dtype=np.uint8)
    return array[None] if grey else np.moveaxis(array, -1, 0)


def _require_moderate_size(path: Path, size: tuple[int, int], num_bytes: int) -> None:
    width, height = size
    if width * height > max(_MOST_PIXELS, _MOST_PIXELS_PER_BYTE * num_bytes):
        expected = f"an image of at most {_MOST_PIXELS:,} pixels or {_MOST_PIXELS_PER_BYTE} for each byte"
        hint = f"It declares {width} × {height} pixels in {num_bytes:,} bytes. Scale it down or take it out."
        raise InputError("data", expected=expected, got=path, hint=hint)


def _keys(documents: Sequence[Document]) -> tuple[str, ...]:
    return tuple(hashlib.sha256(document.content).hexdigest() for document in documents)
