"""The list of files that a worker is sent before it restores them."""

import json

import pytest

from tfscale.strategy.backup import _checked, _list


def test_files_of_a_folder_are_listed_with_their_sizes(tmp_path):
    (tmp_path / "latest.weights.h5").write_bytes(b"123")
    (tmp_path / "folder").mkdir()
    assert _checked(_list(str(tmp_path)).ljust(4096, b"\0")) == [("latest.weights.h5", 3)]


def test_a_folder_that_is_not_there_is_an_empty_one(tmp_path):
    assert _checked(_list(str(tmp_path / "none"))) == []


@pytest.mark.parametrize(
    "files",
    [{"../x": 1}, {"/etc/x": 1}, {"a/b": 1}, {"..": 1}, {"": 1}, {"a": "1"}, {"a": -1}, ["a"], 3],
)
def test_names_outside_of_the_folder_are_refused(files):
    with pytest.raises(ValueError, match="the first worker's backup"):
        _checked(json.dumps(files).encode())


def test_a_folder_with_too_many_files_is_no_backup(tmp_path):
    for i in range(300):
        (tmp_path / f"a-file-with-a-long-name-{i}").touch()
    with pytest.raises(ValueError, match="holds 300 files; a backup needs a folder of its own"):
        _list(str(tmp_path))
