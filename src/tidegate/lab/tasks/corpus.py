"""The embedded corpus: sources of the running Python's standard library, a fixed list in a fixed order."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import NamedTuple

from tidegate._validation import InputError
from tidegate.lab.tasks.documents import Document, read_bytes

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
"""Modules of 8 kB and more that CPython 3.11 to 3.13 have in common: no tests, no tables, nothing packaged apart."""

HELD_OUT: tuple[str, ...] = tuple(_HELD_OUT.split())
"""Modules of many kinds and middling size, that no training window comes from."""


class EmbeddedCorpus(NamedTuple):
    """The documents, and the names that the running Python does not have."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]
    missing: tuple[str, ...]


def embedded_corpus(folder: Path | None = None) -> EmbeddedCorpus:
    """Read the listed modules below `folder`, the running Python's standard library by default.

    A module that is missing is left out and named. Raise InputError if all are missing on either side.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    missing = tuple(name for name in (*TRAINING, *HELD_OUT) if not (folder / name).is_file())
    training, held_out = (
        tuple(Document(name, read_bytes(folder / name)) for name in names if name not in missing)
        for names in (TRAINING, HELD_OUT)
    )
    if not (training and held_out):
        hint = f"This Python has no sources of its standard library in {folder}."
        raise InputError("data", expected="a text of your own", hint=hint)
    return EmbeddedCorpus(training, held_out, missing)
