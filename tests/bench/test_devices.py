import subprocess
import sys

import pytest


@pytest.mark.timeout(960)
def test_devices_of_one_process_are_measured():
    words = ["bench", "devices", "--devices", "2", "--at-once", "1,3", "--algorithms", "tree"]
    done = subprocess.run(
        [sys.executable, "-m", "tfscale", *words],
        capture_output=True, text=True, timeout=900, check=True,
    )  # fmt: skip
    rows = [line for line in done.stdout.splitlines() if "at once" in line]
    assert [row.split(" at once")[0].split() for row in rows] == [
        ["nothing,", "1"], ["tree,", "1"], ["nothing,", "3"], ["tree,", "3"],
    ]  # fmt: skip
    assert "command: tfscale bench devices --devices 2" in done.stdout
