"""Documents of a dataset on the Hugging Face hub, or in its cache on this machine."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

from tidegate._validation import InputError
from tidegate.lab.tasks.documents import Document, record_text


def hub_documents(name: str, field: str) -> tuple[Document, ...]:
    """The rows of the split `train` of `NAME` or `NAME@CONFIGURATION`, one document each; empty ones are dropped.

    What the cache of `datasets` holds is read without the network. Raise InputError if the package is missing, or if
    the dataset cannot be had.
    """
    rows = _rows(name, field)
    documents = (Document(str(number), record_text(row, field, f"hf:{name}")) for number, row in enumerate(rows))
    kept = tuple(document for document in documents if document.content)
    if not kept:
        raise InputError("field", expected=f"one that holds text in hf:{name}", got=field)
    return kept


def stream_hub_documents(name: str, field: str) -> Iterator[Document]:
    """The same documents one after another, as they are fetched: a dataset may be larger than memory and disk.

    A name that is the path of a folder with a dataset in it is read from there.
    """
    for number, row in enumerate(_rows(name, field, streaming=True)):
        document = Document(str(number), record_text(row, field, f"hf:{name}"))
        if document.content:
            yield document


def _rows(name: str, field: str, *, streaming: bool = False) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        hint = "Reading from the Hugging Face hub needs the package datasets: pip install 'tidegate[hf]'."
        raise InputError("data", expected="a file or folder that exists", got=name, hint=hint) from error
    dataset, _, configuration = name.partition("@")
    try:
        with _quiet():
            rows: Any = cast("Any", datasets).load_dataset(
                dataset, configuration or None, split="train", streaming=streaming
            )
    # The hub's libraries raise errors of a dozen unrelated classes, their own and those of what they call.
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        hint = f"{type(error).__name__}: {reason}. Check the name and the network, or give a file."
        expected = "a file or folder that exists, or a dataset on the Hugging Face hub"
        raise InputError("data", expected=expected, got=name, hint=hint) from error
    # Other columns may be images, that take long to decode.
    # A stream may not know its columns before its first row.
    return rows.select_columns([field]) if field in (rows.column_names or ()) else rows


@contextmanager
def _quiet() -> Generator[None]:
    """Silence the hub's client, which logs every attempt: the error at the end says it all."""
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
