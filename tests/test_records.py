"""Files of JSON that cannot be read: one error, which names the file."""

from pathlib import Path

import pytest

from tfscale.collectives.choose import Chooser
from tfscale.support.records import LARGEST, Record, RecordError

GOOD = '{"ranks": 2, "link": {"alpha": 1e-5, "beta": 1e-9}, "gamma": 0, "table": []}'

BAD = {
    "nested": (b"[" * 100_000 + b"]" * 100_000, "of a few levels"),
    "nested objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "of a few levels"),
    "binary": (bytes(range(256)), "binary or in another encoding"),
    "UTF-16": (GOOD.encode("utf-16"), "binary or in another encoding"),
    "UTF-16 without a mark": (GOOD.encode("utf-16-le"), "in UTF-16"),
    "zeros": (bytes(100), "zero bytes"),
    "nothing": (b"", "line 1, column 1: this is not JSON"),
    "half": (GOOD[:30].encode(), "this is not JSON"),
    "large": (b" " * LARGEST + GOOD.encode(), "at most 1,048,576 bytes"),
    "a list": (b"[]", "expected an object"),
    "a long number": (b'{"ranks": ' + b"1" * 9999 + b"}", "cannot be read|finite number"),
    "a large number": (GOOD.replace("0,", "1" * 400 + ",").encode(), "gamma: expected a finite"),
    "no number": (GOOD.replace("0,", "NaN,").encode(), "gamma: expected a finite"),
}


@pytest.mark.parametrize("what", BAD)
def test_what_cannot_be_read_is_one_error_with_the_name(tmp_path: Path, what: str) -> None:
    file = tmp_path / "schedules.json"
    content, why = BAD[what]
    file.write_bytes(content)
    with pytest.raises(RecordError, match=f"schedules.json.*({why})") as error:
        Chooser.load(file, 2)
    assert len(str(error.value)) < 1000


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="expected a file, and this is something else"):
        Record.read(tmp_path)


def test_a_mark_of_utf_8_is_no_part_of_the_text(tmp_path: Path) -> None:
    file = tmp_path / "schedules.json"
    file.write_bytes(GOOD.encode("utf-8-sig"))
    assert Chooser.load(file, 2).ranks == 2
