"""Sources of text: the embedded corpus, files, token arrays, or a dataset on the Hugging Face hub."""

from __future__ import annotations

import hashlib
import logging
import platform
import re
import sysconfig
import warnings
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from tidegate._validation import InputError
from tidegate.lab.tasks.documents import (
    Document,
    exists,
    expand_home,
    file_documents,
    fingerprint,
    is_pattern,
    read_bytes,
    record_text,
)
from tidegate.lab.tasks.shards import holds_shards

EMBEDDED = "stdlib"
"""The source that needs no path."""

_HUB = "hf:"
_EXPECTED = "a file, a folder, a pattern or hf:NAME"
_FIELD_HINT = "It is for JSON lines and datasets."
_MAX_VOCABULARY = 1 << 22

SourceKind: TypeAlias = Literal["embedded", "files", "tokens", "shards", "hub"]


class Corpus(NamedTuple):
    """Text, as documents."""

    documents: tuple[Document, ...]
    held_out: tuple[Document, ...] | None
    """Held-out documents; None if they are yet to be chosen from `documents`."""
    fingerprint: str
    title: str
    """A short description, as the subject of a sentence."""
    missing: tuple[str, ...] = ()
    """Names of documents that were not found."""


class TokenFile(NamedTuple):
    """Tokens from a file, memory-mapped."""

    tokens: npt.NDArray[np.integer[Any]]
    vocab_size: int
    fingerprint: str
    title: str


def source_kind(source: str) -> SourceKind:
    """Return the kind of a source. A name that neither exists nor looks like a path is a dataset on the hub."""
    if not source:
        raise InputError("data", expected=_EXPECTED, got=source)
    if source == EMBEDDED:
        return "embedded"
    if source.startswith(_HUB):
        return "hub"
    path = expand_home(source)
    if exists(path) or is_pattern(str(path)):
        if path.is_dir() and holds_shards(path):
            return "shards"
        return "tokens" if path.suffix == ".npy" and path.is_file() else "files"
    if _looks_like_path(source, path):
        raise InputError("data", expected=_EXPECTED, got=source, hint="It does not exist.")
    return "hub"


def resolve_source(source: str) -> str:
    """Return the source with an absolute path, so that any process finds it."""
    if source_kind(source) == "embedded":
        return source
    if source_kind(source) == "hub":
        return _HUB + source.removeprefix(_HUB)
    return str(expand_home(source).absolute())


def read_corpus(source: str, field: str | None) -> Corpus:
    """Return the documents of a text source; `field` holds the text in JSON lines and datasets, "text" if None."""
    kind = source_kind(source)
    if kind in ("tokens", "shards"):
        raise InputError("tokenizer", expected=f"'none' for {source}, which contains tokens instead of text")
    if kind == "embedded" and field is not None:
        raise InputError("field", expected="left out for the embedded corpus", got=field, hint=_FIELD_HINT)
    if kind == "embedded":
        return embedded_corpus()
    field_name, name = field or "text", source.removeprefix(_HUB)
    documents = tuple(hub_documents(name, field_name)) if kind == "hub" else file_documents(source, field_name)
    if not documents:
        raise InputError("field", expected=f"a field with text in {source}", got=field_name)
    if field is not None and kind == "files" and not any(".jsonl:" in document.name for document in documents):
        raise InputError("field", expected=f"left out for {source}", got=field, hint=_FIELD_HINT)
    return Corpus(documents, None, fingerprint(documents), _title(source, documents))


def read_tokens(source: str) -> TokenFile:
    """Map the integers of a one-dimensional `.npy` file."""
    path = Path(source)
    try:
        with warnings.catch_warnings(action="ignore"):
            tokens: Any = np.lib.format.open_memmap(source, mode="r")
    # The header is parsed as a Python literal, which raises errors of many classes.
    except Exception as error:
        reason = str(error).rstrip(".") or type(error).__name__
        raise InputError("data", expected="a NumPy array", got=path, hint=f"{reason}.") from error
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        hint = f"It has {tokens.ndim} dimensions of {tokens.dtype}."
        raise InputError("data", expected="a one-dimensional array of integers, one per token", got=path, hint=hint)
    if tokens.size == 0:
        raise InputError("data", expected="at least one token", got=path, hint="It is empty.")
    if (lowest := int(tokens.min())) < 0:
        raise InputError("data", expected="tokens of at least 0", got=path, hint=f"It has {lowest}.")
    if (largest := int(tokens.max())) >= _MAX_VOCABULARY:
        hint = f"It has {largest:,}. Number the tokens from 0, without gaps."
        raise InputError("data", expected=f"tokens below {_MAX_VOCABULARY:,}", got=path, hint=hint)
    digest = hashlib.sha256(f"{tokens.dtype.str} ".encode())
    digest.update(tokens)
    return TokenFile(tokens, largest + 1, digest.hexdigest()[:16], path.name)


def _looks_like_path(source: str, path: Path) -> bool:
    """Return whether a source looks like a path: it is absolute, has a suffix, or starts with an existing folder."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?", source, re.ASCII):
        return True
    # Names on the hub may end in versions such as v1.2, files in letters.
    return source.startswith(".") or path.suffix[1:2].isalpha() or (len(path.parts) > 1 and path.parent.is_dir())


def _title(source: str, documents: Sequence[Document]) -> str:
    if source.startswith(_HUB):
        return f"the dataset {source.removeprefix(_HUB)}"
    name = Path(source).name
    return name if len(documents) == 1 else f"{len(documents)} documents of {name}"


def hub_documents(name: str, field: str, *, streaming: bool = False) -> Iterator[Document]:
    """Yield the rows of the split `train` of `NAME` or `NAME@CONFIGURATION` as documents; empty ones are dropped.

    Cached datasets need no network. A streamed dataset is fetched row by row and may exceed memory and disk. Raise
    InputError if the package is missing or the dataset cannot be loaded.
    """
    for number, row in enumerate(_rows(name, field, streaming)):
        if text := record_text(row, field, f"hf:{name}"):
            yield Document(str(number), text)


def _rows(name: str, field: str, streaming: bool) -> Iterable[dict[str, Any]]:
    try:
        import datasets
    except ImportError as error:
        hint = "Reading from the Hugging Face hub needs the package datasets: pip install 'tidegate[hf]'."
        raise InputError("data", expected="a file or folder that exists", got=name, hint=hint) from error
    dataset, _, configuration = name.partition("@")
    try:
        # The client of the hub logs every attempt; the final error is enough.
        with log_level("huggingface_hub", logging.ERROR):
            rows: Any = cast("Any", datasets).load_dataset(
                dataset, configuration or None, split="train", streaming=streaming
            )
    # The libraries of the hub raise errors of a dozen unrelated classes.
    except Exception as error:
        if isinstance(error, OSError) and error.filename is not None:
            expected = "a dataset that can be read and cached here"
            hint = (
                f"{error.strerror}: {error.filename}. If that path is in the cache of the package datasets, set "
                "HF_HOME to a writable folder."
            )
            raise InputError("data", expected=expected, got=name, hint=hint) from error
        reason = (str(error).strip().splitlines() or [""])[0].rstrip(".")
        hint = f"{type(error).__name__}: {reason}. Check the name and the network, or give a file."
        expected = "a file or folder that exists, or a dataset on the Hugging Face hub"
        raise InputError("data", expected=expected, got=name, hint=hint) from error
    # Other columns may be images, which take long to decode. A stream may not know its columns.
    return rows.select_columns([field]) if field in (rows.column_names or ()) else rows


@contextmanager
def log_level(name: str, level: int) -> Generator[None]:
    """Set the level of a logger temporarily."""
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(level)
    try:
        yield
    finally:
        logger.setLevel(before)


_TRAINING = """
_collections_abc.py _compat_pickle.py _markupbase.py _osx_support.py _pydecimal.py _pyio.py _strptime.py
argparse.py ast.py asyncio/base_events.py asyncio/base_subprocess.py asyncio/events.py asyncio/futures.py
asyncio/locks.py asyncio/proactor_events.py asyncio/selector_events.py asyncio/sslproto.py asyncio/streams.py
asyncio/taskgroups.py asyncio/tasks.py asyncio/transports.py asyncio/unix_events.py asyncio/windows_events.py
base64.py bdb.py bz2.py cmd.py code.py codecs.py collections/__init__.py compileall.py
concurrent/futures/_base.py concurrent/futures/process.py concurrent/futures/thread.py configparser.py
contextlib.py copy.py ctypes/__init__.py ctypes/util.py dataclasses.py dbm/dumb.py difflib.py dis.py doctest.py
email/_encoded_words.py email/_header_value_parser.py email/_parseaddr.py email/_policybase.py email/charset.py
email/contentmanager.py email/feedparser.py email/generator.py email/header.py email/headerregistry.py
email/message.py email/policy.py email/quoprimime.py email/utils.py enum.py filecmp.py fileinput.py ftplib.py
functools.py glob.py graphlib.py gzip.py hashlib.py html/parser.py http/client.py http/cookiejar.py
http/server.py imaplib.py importlib/_bootstrap.py importlib/_bootstrap_external.py
importlib/metadata/__init__.py importlib/util.py inspect.py ipaddress.py json/__init__.py json/decoder.py
logging/__init__.py logging/config.py logging/handlers.py lzma.py mailbox.py mimetypes.py modulefinder.py
multiprocessing/connection.py multiprocessing/context.py multiprocessing/forkserver.py multiprocessing/heap.py
multiprocessing/managers.py multiprocessing/pool.py multiprocessing/process.py multiprocessing/queues.py
multiprocessing/reduction.py multiprocessing/resource_tracker.py multiprocessing/spawn.py
multiprocessing/synchronize.py multiprocessing/util.py ntpath.py numbers.py operator.py optparse.py os.py pdb.py
pickle.py pickletools.py pkgutil.py platform.py plistlib.py poplib.py posixpath.py pprint.py profile.py
pstats.py pyclbr.py pydoc.py queue.py random.py re/__init__.py re/_compiler.py re/_parser.py runpy.py shelve.py
shutil.py site.py smtplib.py socket.py socketserver.py ssl.py statistics.py subprocess.py symtable.py
tabnanny.py tarfile.py tempfile.py threading.py timeit.py tokenize.py tomllib/_parser.py trace.py traceback.py
tracemalloc.py types.py typing.py unittest/case.py unittest/loader.py unittest/main.py unittest/mock.py
unittest/result.py unittest/runner.py unittest/suite.py urllib/parse.py urllib/request.py urllib/robotparser.py
uuid.py warnings.py weakref.py webbrowser.py wsgiref/handlers.py wsgiref/validate.py xml/dom/expatbuilder.py
xml/dom/minidom.py xml/dom/pulldom.py xml/dom/xmlbuilder.py xml/etree/ElementPath.py xml/etree/ElementTree.py
xml/sax/handler.py xml/sax/saxutils.py xml/sax/xmlreader.py xmlrpc/client.py xmlrpc/server.py zipimport.py
zoneinfo/_zoneinfo.py
"""

_HELD_OUT = """
calendar.py csv.py fractions.py gettext.py heapq.py http/cookies.py json/encoder.py
multiprocessing/shared_memory.py selectors.py shlex.py textwrap.py wave.py xml/sax/expatreader.py
"""

TRAINING: tuple[str, ...] = tuple(_TRAINING.split())
"""Modules of at least 8 kB in CPython 3.11 to 3.13, without tests, tables and separately packaged modules."""

HELD_OUT: tuple[str, ...] = tuple(_HELD_OUT.split())
"""Modules of many kinds and medium size; no training window comes from them."""


def embedded_corpus(folder: Path | None = None) -> Corpus:
    """Read the listed modules in `folder`, by default the standard library of this Python.

    Missing modules are listed. Raise InputError if all training or all held-out modules are missing.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    missing = tuple(name for name in (*TRAINING, *HELD_OUT) if not (folder / name).is_file())
    training, held_out = (
        tuple(Document(name, read_bytes(folder / name)) for name in names if name not in missing)
        for names in (TRAINING, HELD_OUT)
    )
    if not (training and held_out):
        hint = f"This Python has no source files of its standard library in {folder}."
        raise InputError("data", expected="your own text", hint=hint)
    title = f"sources of the standard library of Python {platform.python_version()}"
    return Corpus(training, held_out, fingerprint(training, held_out), title, missing)
