"""Files that are whole or not there, and what is said of those that are not."""

import hashlib
import os
from pathlib import Path

import pytest
import tensorflow as tf

from tfscale.support import sealed

WORDS = {"epoch": 3}


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "file")


def write(path, content=b"content", words=WORDS, previous=None):
    sealed.write(path, memoryview(content), words, previous)


@pytest.mark.parametrize("content", [b"", b"content", b"x" * 100_000])
def test_content_and_words_come_back(path, content):
    write(path, content)
    data, words = sealed.read(path)
    assert data.startswith(content) and words == WORDS
    assert os.listdir(os.path.dirname(path)) == ["file"]


def test_a_file_is_replaced_and_the_one_before_is_kept_if_asked_for(path):
    write(path, b"first", {"epoch": 1})
    write(path, b"second", {"epoch": 2}, previous=f"{path}.bkp")
    write(path, b"third", {"epoch": 3}, previous=f"{path}.bkp")
    assert sealed.read(path)[1] == {"epoch": 3}
    assert sealed.read(f"{path}.bkp")[1] == {"epoch": 2}


def test_files_that_only_tensorflow_can_open_are_written_as_well(tmp_path):
    path = f"file://{tmp_path}/file"
    write(path, b"there", previous=f"{path}.bkp")
    write(path, b"and back", previous=f"{path}.bkp")
    assert sealed.read(path)[0].startswith(b"and back")
    assert sealed.read(f"{path}.bkp")[0].startswith(b"there")


def test_no_byte_may_differ(path):
    write(path)
    with open(path, "rb") as file:
        whole = file.read()
    for i in range(len(whole)):
        with open(path, "wb") as file:
            file.write(whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :])
        try:
            _, words = sealed.read(path)
        except sealed.Damaged:
            continue
        assert words is None, f"byte {i}"  # the mark itself


def test_a_file_that_was_cut_has_no_seal(path):
    write(path)
    size = os.path.getsize(path)
    for length in (0, 1, size // 2, size - 1):
        os.truncate(path, length)
        assert sealed.read(path)[1] is None
        write(path)


def test_a_file_of_somebody_else_has_no_seal(path):
    with open(path, "wb") as file:
        file.write(b"content" + hashlib.sha256(b"content").digest())
    assert sealed.read(path)[1] is None


def test_what_cannot_be_written_leaves_what_was_there(path, tmp_path):
    write(path)
    with pytest.raises(TypeError):
        write(path, b"other", {"epoch": object()})
    with pytest.raises(tf.errors.NotFoundError):
        sealed.write(path, memoryview(b"other"), {}, previous=str(tmp_path / "none" / "file"))
    assert sealed.read(path)[1] == WORDS
    assert os.listdir(tmp_path) == ["file"]


def test_what_reads_otherwise_than_it_was_written_does_not_count(path, monkeypatch, tmp_path):
    write(path)
    for wrong in (b"", b"othe", b"other and more"):
        monkeypatch.setattr(
            sealed, "_write", lambda path, parts, wrong=wrong: Path(path).write_bytes(wrong)
        )
        with pytest.raises(OSError, match="differs from what was written"):
            write(path, b"other")
    assert sealed.read(path)[0].startswith(b"content")
    assert os.listdir(tmp_path) == ["file"]


def test_what_a_killed_program_left_is_removed(path, tmp_path):
    write(path)
    (tmp_path / "file.partial-01234567").write_bytes(b"cont")
    (tmp_path / "other").touch()
    sealed.remove_partial(path)
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]
