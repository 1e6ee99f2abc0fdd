"""Files that tfscale writes: whole or not at all, with the rights of the user's umask."""

import os
import stat

import pytest

from tfscale.support import records
from tfscale.support.files import replacing


@pytest.mark.parametrize("mask", [0o022, 0o027, 0o002, 0o077])
def test_a_file_has_the_rights_that_the_umask_gives(tmp_path, mask):
    before = os.umask(mask)
    try:
        records.write(tmp_path / "record.json", {"a": 1})
        with replacing(tmp_path / "text") as fresh:
            fresh.write_text("text")
    finally:
        os.umask(before)
    for name in ("record.json", "text"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "text"
    path.write_text("old")
    with pytest.raises(OSError, match="full"), replacing(path) as fresh:
        fresh.write_text("half")
        raise OSError("full")
    assert [p.name for p in tmp_path.iterdir()] == ["text"]
    assert path.read_text() == "old"
