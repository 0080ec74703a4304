"""Make the settings that ship with the package from the records of the first arm.

Run `python tests/support/standard_settings.py` to write them.
"""

import json
from dataclasses import asdict
from pathlib import Path

from tidegate._files import write_content
from tidegate._json import add_checksum
from tidegate.lab.compare.tuning import STANDARD_SETTINGS, settings_of_records
from tidegate.lab.training.records import RecordFile, records_path

RECORDS = Path(__file__).parents[2] / "docs" / "records" / "compare"


def made_from_records():
    lines = RecordFile(records_path(RECORDS / "first-arm")).read()
    return settings_of_records(lines, source="the settings that come with Tidegate")


if __name__ == "__main__":
    write_content(STANDARD_SETTINGS, (json.dumps(add_checksum(asdict(made_from_records())), indent=2) + "\n").encode())
