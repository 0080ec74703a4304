"""Image classification.

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
"""Supported formats. Pillow reads others, some of which are programs: it runs an interpreter for PostScript."""
_MAX_PIXELS = 8_000_000
_MAX_PIXELS_PER_BYTE = 100
"""An image may exceed one of the two limits: a small file can declare more pixels than memory holds. Photos have about
ten per byte."""
_DIGITS_SIZE = 8
_FOLDER_SIZE = 32


@final
@dataclass(frozen=True, kw_only=True, slots=True)
class ImageTask:
    """Image classification, on the digits or on a folder of images."""

    source: str = DIGITS
    """`digits`, the handwritten digits of scikit-learn, or a folder with a folder of images for each class."""
    image_size: int = _DIGITS_SIZE
    """Height and width; images of a folder are resized, and digits are 8."""
    validation_share: float = 0.2
    """Share of the images of each class that is held out."""
    fingerprint: str = ""
    """The expected fingerprint of the images; empty accepts any."""
    kind: Literal["image"] = "image"

    def __post_init__(self) -> None:
        require_size("image_size", self.image_size)
        if self.source == DIGITS and self.image_size != _DIGITS_SIZE:
            raise InputError("image_size", expected=f"{_DIGITS_SIZE} for the digits", got=self.image_size)
        if not 0 < self.validation_share <= 0.5:
            raise InputError("validation_share", expected="in (0, 0.5]", got=self.validation_share)

    @property
    def length(self) -> int:
        """Return 1: one image is one example."""
        return 1

    def load(self) -> ImageData:
        """Load the images, once per process. Raise InputError if they have changed."""
        return _load(self)

    def to_dict(self, *, location: bool = True) -> dict[str, Any]:
        """Return plain JSON values; without `location`, the fingerprint replaces the path."""
        dropped = () if location or not self.fingerprint else ("source",)
        return {name: value for name, value in asdict(self).items() if name not in dropped}


def image_task(data: str | None = None, *, image_size: int | None = None) -> ImageTask:
    """Return the task for `data` with its fingerprint. Raise InputError if the images cannot be found or read.

    Args:
        data: None or "digits", or a folder with a folder for each class.
        image_size: Height and width; None is 32 for the images of a folder.
    """
    if data is None or data == DIGITS:
        task = ImageTask(image_size=image_size or _DIGITS_SIZE)
    else:
        task = ImageTask(source=image_folder(data), image_size=image_size or _FOLDER_SIZE)
    return replace(task, fingerprint=_read(task).fingerprint)


@final
class ImageData:
    """Training and held-out images, standardized by the mean and standard deviation of the training images."""

    bytes_per_token: None = None

    def __init__(self, task: ImageTask, pictures: Pictures) -> None:
        self._pictures = pictures
        held_out = _held_out(pictures, task.validation_share)
        self._held_out, self._training = np.flatnonzero(held_out), np.flatnonzero(~held_out)
        images = pictures.images[self._training]
        mean = images.mean(axis=(0, 2, 3), dtype=np.float64, keepdims=True)[0]
        std = images.std(axis=(0, 2, 3), dtype=np.float64, keepdims=True)[0]
        self._mean = mean.astype(np.float32)
        # A constant channel is not scaled.
        self._std = np.where(std > 0, std, 1.0).astype(np.float32)
        self.vocab_size = len(pictures.classes)
        self.chance_loss = math.log(self.vocab_size)
        self.num_training_examples = len(images)
        channels = images.shape[1]
        self.facts: dict[str, Any] = {
            **task.to_dict(),
            "fingerprint": pictures.fingerprint,
            "channels": channels,
            "num_classes": self.vocab_size,
            "classes": list(pictures.classes),
            "chance_loss": self.chance_loss,
            "num_training_examples": self.num_training_examples,
            "num_training_images": len(images),
            "num_held_out_images": len(self._held_out),
            "held_out": f"{100 * task.validation_share:.3g} % of each class, chosen by a hash",
        }
        self.description = (
            f"{pictures.title}, {task.image_size} × {task.image_size} in {'gray' if channels == 1 else 'color'}, "
            f"{self.vocab_size} classes: {len(images):,} training images and {len(self._held_out):,} held out, chosen "
            "by a hash in each class."
        )

    def batch(self, *, seed: int, step: int, size: int) -> Batch:
        """Return images (B, C, S, S) and classes (B,), in a new random order each epoch."""
        count = len(self._training)
        epochs, places = np.divmod(step * size + np.arange(size), count)
        orders = {
            epoch: make_rng("training", seed=seed, step=int(epoch)).permutation(count) for epoch in np.unique(epochs)
        }
        rows = [orders[epoch][place] for epoch, place in zip(epochs, places, strict=True)]
        return self._examples(self._training[rows])

    def validation(self) -> list[Batch]:
        """Return all held-out images in batches of 64; the last may differ."""
        return [self._examples(rows) for rows in in_batches(self._held_out)]

    def final(self) -> list[Batch]:
        """Return all held-out images."""
        return self.validation()

    def probe(self) -> Batch:
        """Return eight held-out images, evenly spread over the classes, or all if there are fewer."""
        count = min(PROBE_ROWS, len(self._held_out))
        by_class = self._held_out[np.argsort(self._pictures.labels[self._held_out], kind="stable")]
        return self._examples(by_class[np.arange(count) * len(by_class) // count])

    def long(self) -> None:
        """Return None: images have no length."""
        return

    def _examples(self, rows: npt.NDArray[np.int64]) -> Batch:
        import torch

        images = (self._pictures.images[rows].astype(np.float32) - self._mean) / self._std
        return Batch(torch.from_numpy(images), torch.from_numpy(self._pictures.labels[rows]))


@lru_cache(maxsize=4)
def _load(task: ImageTask) -> ImageData:
    pictures = _read(task)
    if task.fingerprint not in ("", pictures.fingerprint):
        raise changed(task.source, task.fingerprint, pictures.fingerprint)
    return ImageData(task, pictures)


def _read(task: ImageTask) -> Pictures:
    return read_digits() if task.source == DIGITS else read_image_folder(task.source, task.image_size)


def _held_out(pictures: Pictures, share: float) -> npt.NDArray[np.bool_]:
    """Return (N,): True for the first images of each class in the order of their hashes; copies stay together."""
    chosen = np.zeros(len(pictures.labels), dtype=bool)
    hashes = np.asarray(pictures.hashes)
    for label in range(len(pictures.classes)):
        rows = np.flatnonzero(pictures.labels == label)
        ordered = np.sort(hashes[rows])
        last = ordered[max(round(share * len(rows)), 1) - 1]
        chosen[rows] = hashes[rows] <= last
        if chosen[rows].all():
            name = pictures.classes[label]
            hint = f"The class {name!r} has too few; at least one is held out."
            raise InputError("data", expected="folders of at least two different images each", hint=hint)
    return chosen


class Pictures(NamedTuple):
    """Images of one size, with their classes."""

    images: npt.NDArray[np.uint8]
    """(N, C, S, S)"""
    labels: npt.NDArray[np.int64]
    """(N,)"""
    classes: tuple[str, ...]
    hashes: tuple[str, ...]
    """The hash of each image, which decides whether it is held out."""
    fingerprint: str
    title: str


def read_digits() -> Pictures:
    """Return the 1797 handwritten digits of scikit-learn."""
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
    return Pictures(images, labels, classes, _hashes(documents), fingerprint(documents), "Handwritten digits")


def image_folder(source: str) -> str:
    """Return the absolute path of a folder of images. Raise InputError unless it has at least two class folders."""
    folder = expand_home(source).absolute()
    if not exists(folder):
        raise InputError("data", expected="a folder of images, or 'digits'", got=source, hint="It does not exist.")
    if not folder.is_dir() or len(_class_folders(folder)) < 2:
        expected = "a folder with one folder of images for each of two or more classes"
        raise InputError("data", expected=expected, got=source)
    return str(folder)


def read_image_folder(source: str, image_size: int) -> Pictures:
    """Return the images of a folder, resized by the shorter side and cropped by the longer one.

    They are gray if all of them are, else in color. Hidden files and files without a suffix of a supported format are
    skipped.
    """
    try:
        from PIL import Image
    except ImportError as error:
        hint = "Image files need the package pillow: pip install 'tidegate[lab]'."
        raise InputError("data", expected="'digits'", got=source, hint=hint) from error
    folders = _class_folders(Path(source))
    suffixes = frozenset(suffix for suffix, kind in Image.registered_extensions().items() if kind in _FORMATS)
    documents: list[Document] = []
    arrays: list[npt.NDArray[np.uint8]] = []
    labels: list[int] = []
    for label, folder in enumerate(folders):
        paths = sorted(path for path in files_below(folder) if path.suffix.lower() in suffixes)
        if len(paths) < 2:
            hint = f"{folder} has {len(paths)}; one is held out."
            raise InputError("data", expected="folders of at least two images each", hint=hint)
        for path in paths:
            content = read_bytes(path)
            # Keep hashes: together, the files may not fit into memory.
            documents.append(Document(path.relative_to(source).as_posix(), hashlib.sha256(content).digest()))
            arrays.append(_read_image(path, content, image_size))
            labels.append(label)
    channels = max(len(array) for array in arrays)
    images = np.stack([np.broadcast_to(array, (channels, image_size, image_size)) for array in arrays])
    names = tuple(folder.name for folder in folders)
    title = f"Images of {Path(source).name}"
    return Pictures(
        images, np.asarray(labels, dtype=np.int64), names, _hashes(documents), fingerprint(documents), title
    )


def _class_folders(folder: Path) -> list[Path]:
    """Return the folders of classes, without hidden ones and output folders of comparisons."""
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise unreadable(folder, error) from error
    return [path for path in folders if not holds_records(path)]


def _read_image(path: Path, content: bytes, image_size: int) -> npt.NDArray[np.uint8]:
    """Return an image as (1, S, S) if it is gray, else (3, S, S)."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    Image.init()
    known = [name for name in _FORMATS if name in Image.OPEN]
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(BytesIO(content), formats=known) as image:
            width, height = image.size
            if width * height > max(_MAX_PIXELS, _MAX_PIXELS_PER_BYTE * len(content)):
                expected = f"an image of at most {_MAX_PIXELS:,} pixels or {_MAX_PIXELS_PER_BYTE} per byte"
                hint = f"It declares {width} × {height} pixels in {len(content):,} bytes. Scale it down or remove it."
                raise InputError("data", expected=expected, got=path, hint=hint)
            is_gray = image.mode in ("1", "L", "LA")
            fitted = ImageOps.fit(image.convert("L" if is_gray else "RGB"), (image_size, image_size))
    except UnidentifiedImageError as error:
        hint = f"Supported formats are {', '.join(known)}. Convert it or remove it."
        raise InputError("data", expected="an image", got=path, hint=hint) from error
    except InputError:
        raise
    # Decoders raise errors of many classes.
    except Exception as error:
        reason = str(error).rstrip(".") or type(error).__name__
        hint = f"{reason}. Repair it or remove it."
        raise InputError("data", expected="an image", got=path, hint=hint) from error
    array = np.asarray(fitted, dtype=np.uint8)
    return array[None] if is_gray else np.moveaxis(array, -1, 0)


def _hashes(documents: Sequence[Document]) -> tuple[str, ...]:
    return tuple(hashlib.sha256(document.content).hexdigest() for document in documents)
