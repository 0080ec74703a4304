"""Where images come from: scikit-learn's digits, or a folder with a folder for each class.

Legend: N images, C channels, S height and width.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tidegate._validation import InputError
from tidegate.lab.tasks.documents import (
    Document,
    exists,
    expand_home,
    files_below,
    fingerprint,
    holds_records,
    read_bytes,
    unreadable,
)

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
    paths = [(label, path) for label, folder in enumerate(folders) for path in _image_files(folder, endings)]
    labels = np.asarray([label for label, _ in paths], dtype=np.int64)
    _require_two_each(folders, labels)
    documents: list[Document] = []
    opened: list[npt.NDArray[np.uint8]] = []
    for _, path in paths:
        content = read_bytes(path)
        # Hashes stand for the files, which together may be larger than the memory.
        documents.append(Document(path.relative_to(source).as_posix(), hashlib.sha256(content).digest()))
        opened.append(_read_image(path, content, image_size))
    images = np.stack(opened if all(image.shape[0] == 1 for image in opened) else [_to_colour(each) for each in opened])
    names = tuple(folder.name for folder in folders)
    return Pictures(images, labels, names, _keys(documents), fingerprint(documents), f"Images of {Path(source).name}")


def _class_folders(folder: Path) -> list[Path]:
    """Leave out hidden folders, and those that a comparison wrote to."""
    try:
        folders = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise unreadable(folder, error) from error
    return [path for path in folders if not holds_records(path)]


def _image_files(folder: Path, endings: frozenset[str]) -> list[Path]:
    return sorted(path for path in files_below(folder) if path.suffix.lower() in endings)


def _require_two_each(folders: Sequence[Path], labels: npt.NDArray[np.int64]) -> None:
    for label, folder in enumerate(folders):
        if (count := int((labels == label).sum())) < 2:
            hint = f"{folder} has {count}; one is held out."
            raise InputError("data", expected="folders of at least two images each", hint=hint)


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


def _to_colour(image: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    return np.repeat(image, 3, axis=0) if image.shape[0] == 1 else image


def _keys(documents: Sequence[Document]) -> tuple[str, ...]:
    return tuple(hashlib.sha256(document.content).hexdigest() for document in documents)
