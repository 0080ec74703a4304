"""Studies: one folder, one question; `catalogue` lists them all.

This file imports what a study is, and none of them: the command of one does not load the others.
"""

from __future__ import annotations

from tidegate.lab.studies.study import Study, page_of, read_record, record_of, save_record

__all__ = ["Study", "page_of", "read_record", "record_of", "save_record"]
