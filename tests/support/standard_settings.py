"""Make the settings that come with the package, from the records in docs/records/compare.

`python tests/support/standard_settings.py` writes them: learning rates and starts that the blocks of the first arm
chose, and how far differences scatter at them, in the default comparison or, of variants that it lacks, in the second
arm. A test makes them again.
"""

import json
from dataclasses import asdict
from pathlib import Path

from tidegate._files import write_content
from tidegate._json import add_checksum
from tidegate.lab.compare.settings import STANDARD_SETTINGS, TunedSettings, settings_of_records, with_noise_of
from tidegate.lab.training.records import RecordFile, records_path

RECORDS = Path(__file__).parents[2] / "docs" / "records" / "compare"


def made_from_records() -> TunedSettings:
    tuned, longer, default = (
        RecordFile(records_path(RECORDS / name)).read() for name in ("first-arm", "second-arm", "default")
    )
    settings = settings_of_records(tuned, source="the settings that come with Tidegate")
    return with_noise_of(with_noise_of(settings, longer), default)


if __name__ == "__main__":
    write_content(STANDARD_SETTINGS, (json.dumps(add_checksum(asdict(made_from_records())), indent=2) + "\n").encode())
    print(f"wrote {STANDARD_SETTINGS}")
