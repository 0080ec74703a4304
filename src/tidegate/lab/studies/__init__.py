"""Studies: one folder per question; `catalogue` lists all of them.

This file imports no single study, so that the command of one does not load the others.
"""

from __future__ import annotations

from tidegate.lab.studies.study import Study, page_of, read_record, record_of, save_record

__all__ = ["Study", "page_of", "read_record", "record_of", "save_record"]
