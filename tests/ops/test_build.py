"""The native library's build: found, built once, and refused with advice."""

import ctypes
import grp
import os
import pwd
import shutil
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tfscale.native import build, shipped, toolchain, trust
from tfscale.native.toolchain import BuildError, TensorFlow
from tfscale.tools import cli

CHECKOUT = Path(__file__).resolve().parents[2]

# A TensorFlow that needs no headers and no library: tests compile real C++ in no time.
FAKE_TF = TensorFlow("9.9.0", "v9.9.0-0-gabc", ("-D_GLIBCXX_USE_CXX11_ABI=1",), ())

PROGRAM_OF_A_PROCESS = """
import sys
from pathlib import Path
from tfscale.ops import build
from tfscale.native.toolchain import TensorFlow
tf = TensorFlow("9.9.0", "v9.9.0-0-gabc", ("-D_GLIBCXX_USE_CXX11_ABI=1",), ())
print(build.find_or_build(tf=tf, root=Path(sys.argv[1]), cache=Path(sys.argv[2])))
"""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in ("TFSCALE_LIBRARY", "TFSCALE_CACHE", "CXX"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sources(tmp_path):
    """A small source tree, shaped like the real one."""
    root = tmp_path / "sources"
    for folder in ("wire", "kernels"):
        (root / "custom_ops" / folder).mkdir(parents=True)
    (root / "custom_ops/wire/answer.h").write_text('extern "C" int answer();\n')
    (root / "custom_ops/wire/answer.cc").write_text(
        '#include "custom_ops/wire/answer.h"\nint answer() { return 42; }\n'
    )
    (root / "custom_ops/kernels/twice.cc").write_text(
        '#include "custom_ops/wire/answer.h"\nextern "C" int twice() { return 2 * answer(); }\n'
    )
    return root


@pytest.fixture
def compiler_calls(tmp_path, monkeypatch):
    """Counts the calls of g++ by a wrapper that CXX names; --version does not count."""
    calls = tmp_path / "calls"
    calls.touch()
    wrapper = tmp_path / "counting-g++"
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] || echo "$@" >> {calls}\nexec g++ "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(wrapper))
    return lambda: len(calls.read_text().splitlines())


def find_or_build(sources, cache, tf=FAKE_TF):
    said = []
    library = build.find_or_build(tf=tf, root=sources, cache=cache, say=said.append)
    return library, said


def test_builds_a_library_that_works(sources, tmp_path):
    library, said = find_or_build(sources, tmp_path / "cache")
    assert ctypes.CDLL(str(library)).twice() == 84
    assert any("TensorFlow 9.9.0" in line for line in said)
    assert any("1 of 2 files" in line for line in said)
    assert build.read_tag(library)["tensorflow"] == "9.9.0"


def test_second_run_calls_no_compiler_and_says_nothing(sources, tmp_path, compiler_calls):
    first, _ = find_or_build(sources, tmp_path / "cache")
    assert compiler_calls() == 3  # two files and the link
    second, said = find_or_build(sources, tmp_path / "cache")
    assert (second, said, compiler_calls()) == (first, [], 3)


def test_a_machine_without_compiler_uses_what_is_cached(sources, tmp_path, monkeypatch):
    library, _ = find_or_build(sources, tmp_path / "cache")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_or_build(sources, tmp_path / "cache") == (library, [])


def test_eight_processes_build_once(sources, tmp_path, compiler_calls):
    command = [sys.executable, "-c", PROGRAM_OF_A_PROCESS, str(sources), str(tmp_path / "cache")]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    processes = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    outputs = [p.communicate(timeout=250)[0] for p in processes]
    assert [p.returncode for p in processes] == [0] * 8
    assert len(set(outputs)) == 1
    assert compiler_calls() == 3


def test_an_edited_file_is_compiled_alone(sources, tmp_path, compiler_calls):
    first, _ = find_or_build(sources, tmp_path / "cache")
    answer = sources / "custom_ops/wire/answer.cc"
    answer.write_text(answer.read_text().replace("42", "43"))
    second, _ = find_or_build(sources, tmp_path / "cache")
    assert second != first
    assert compiler_calls() == 3 + 2  # the file and the link
    assert ctypes.CDLL(str(second)).twice() == 86


def test_an_edited_header_compiles_what_includes_it(sources, tmp_path, compiler_calls):
    (sources / "custom_ops/wire/other.cc").write_text("int other;\n")
    find_or_build(sources, tmp_path / "cache")
    assert compiler_calls() == 4
    header = sources / "custom_ops/wire/answer.h"
    header.write_text("// new\n" + header.read_text())
    find_or_build(sources, tmp_path / "cache")
    assert compiler_calls() == 4 + 3  # two files and the link


@pytest.fixture
def tensorflow_with_headers(sources, tmp_path):
    """Two of three files include it."""
    headers = tmp_path / "include" / "tensorflow"
    headers.mkdir(parents=True)
    (headers / "two.h").write_text("#pragma once\nstatic inline int Two() { return 2; }\n")
    (sources / "custom_ops/kernels/twice.cc").write_text(
        '#include "custom_ops/wire/answer.h"\n#include "tensorflow/two.h"\n'
        'extern "C" int twice() { return Two() * answer(); }\n'
    )
    (sources / "custom_ops/kernels/two.cc").write_text(
        '#include "tensorflow/two.h"\nextern "C" int two() { return Two(); }\n'
    )
    return replace(FAKE_TF, compile_flags=(*FAKE_TF.compile_flags, f"-I{headers.parent}"))


def test_the_files_that_include_tensorflow_are_compiled_at_once(
    sources, tmp_path, compiler_calls, tensorflow_with_headers
):
    cache = tmp_path / "cache"
    library, _ = find_or_build(sources, cache, tensorflow_with_headers)
    assert (ctypes.CDLL(str(library)).twice(), ctypes.CDLL(str(library)).two()) == (84, 2)
    assert compiler_calls() == 3  # they, the other one, and the link


def test_another_tensorflow_compiles_only_what_includes_it(
    sources, tmp_path, compiler_calls, tensorflow_with_headers
):
    cache = tmp_path / "cache"
    find_or_build(sources, cache, tensorflow_with_headers)
    find_or_build(sources, cache, replace(tensorflow_with_headers, version="9.10.0"))
    assert compiler_calls() == 3 + 2


def test_an_error_in_one_of_them_names_its_file(sources, tmp_path, tensorflow_with_headers):
    file = sources / "custom_ops/kernels/two.cc"
    file.write_text(file.read_text() + "oops\n")
    with pytest.raises(BuildError, match="could not compile the files that") as error:
        find_or_build(sources, tmp_path / "cache", tensorflow_with_headers)
    assert "custom_ops/kernels/two.cc:3:" in str(error.value)


def test_a_log_gets_few_lines_of_progress(sources, tmp_path):
    for number in range(20):
        (sources / f"custom_ops/wire/more{number}.cc").write_text(f"int more{number};\n")
    _, said = find_or_build(sources, tmp_path / "cache")
    begin, *progress, end = said
    assert begin.startswith("building the native library") and end.startswith("built ")
    assert progress == [f"compiled {done} of 22 files" for done in (6, 11, 17)]


@pytest.mark.parametrize(
    "change",
    [
        {"version": "9.10.0"},
        {"git_version": "a vendor's"},
        {"compile_flags": ("-D_GLIBCXX_USE_CXX11_ABI=0",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_each_tensorflow_has_its_own_library(sources, tmp_path, change):
    first, _ = find_or_build(sources, tmp_path / "cache")
    second, _ = find_or_build(sources, tmp_path / "cache", replace(FAKE_TF, **change))
    assert second != first


def test_the_place_of_tensorflow_does_not_matter(sources, tmp_path):
    here = replace(FAKE_TF, compile_flags=(*FAKE_TF.compile_flags, "-I/one/include"))
    there = replace(FAKE_TF, compile_flags=(*FAKE_TF.compile_flags, "-I/another/include"))
    cache = tmp_path / "cache"
    assert find_or_build(sources, cache, here)[0] == find_or_build(sources, cache, there)[0]


def test_a_damaged_library_in_the_cache_is_built_again(sources, tmp_path):
    library, _ = find_or_build(sources, tmp_path / "cache")
    library.write_bytes(b"rubbish")
    again, said = find_or_build(sources, tmp_path / "cache")
    assert again == library and said
    assert ctypes.CDLL(str(again)).twice() == 84


def test_what_a_killed_build_left_is_cleared(sources, tmp_path):
    library, _ = find_or_build(sources, tmp_path / "cache")
    library.unlink()
    (library.parent / "work").mkdir()
    (library.parent / "work" / "0.o").write_bytes(b"half")
    find_or_build(sources, tmp_path / "cache")
    assert not (library.parent / "work").exists()


def test_an_edit_during_the_build_is_not_kept_under_the_old_key(sources, tmp_path):
    def edit(_):
        (sources / "custom_ops/wire/answer.cc").write_text("#error edited too late\n")

    with pytest.raises(BuildError, match="has changed during the build"):
        build.find_or_build(tf=FAKE_TF, root=sources, cache=tmp_path / "cache", say=edit)


@pytest.mark.parametrize("compiler", ["g++", "clang++"])
def test_both_compilers(sources, tmp_path, monkeypatch, compiler):
    if not shutil.which(compiler):
        pytest.skip(f"{compiler} is not installed here")
    monkeypatch.setenv("CXX", compiler)
    library, _ = find_or_build(sources, tmp_path / "cache")
    assert ctypes.CDLL(str(library)).twice() == 84


# ------------------------------------------------------------------ what is loaded


def objects_of(cache):
    return sorted((cache / "objects").glob("*.o"))


def truncate(path):
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


def flip(path):
    """One bit, far from the tag."""
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "truncated": truncate,
    "flipped": flip,
    "empty": lambda path: path.write_bytes(b""),
    "without checksum": lambda path: trust.checksum_file(path).unlink(),
    "with another's checksum": lambda path: trust.checksum_file(path).write_text("0" * 64),
    "written by others": lambda path: path.chmod(0o666),
    "its checksum written by others": lambda path: trust.checksum_file(path).chmod(0o666),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_may_not_be_what_was_built_is_built_again(sources, tmp_path, damage):
    library, _ = find_or_build(sources, tmp_path / "cache")
    DAMAGES[damage](library)
    again, said = find_or_build(sources, tmp_path / "cache")
    assert again == library and said
    assert ctypes.CDLL(str(again)).twice() == 84
    assert find_or_build(sources, tmp_path / "cache") == (again, [])


@pytest.mark.parametrize("damage", DAMAGES)
def test_so_is_an_object(sources, tmp_path, compiler_calls, damage):
    cache = tmp_path / "cache"
    library, _ = find_or_build(sources, cache)
    library.unlink()
    first, _ = objects_of(cache)
    DAMAGES[damage](first)
    find_or_build(sources, cache)
    assert compiler_calls() == 3 + 2  # the object and the link
    assert ctypes.CDLL(str(library)).twice() == 84


def test_an_object_under_the_name_of_another_is_compiled_again(sources, tmp_path, compiler_calls):
    cache = tmp_path / "cache"
    library, _ = find_or_build(sources, cache)
    library.unlink()
    one, other = objects_of(cache)
    for place in (lambda path: path, trust.checksum_file):
        shutil.copyfile(place(one), place(other))
    find_or_build(sources, cache)
    assert compiler_calls() == 3 + 2
    assert ctypes.CDLL(str(library)).twice() == 84


def test_nobody_else_may_read_or_write_what_is_built_whatever_the_umask(sources, tmp_path):
    cache = tmp_path / "above" / "cache"
    before = os.umask(0)
    try:
        library, _ = find_or_build(sources, cache)
        assert find_or_build(sources, cache) == (library, [])
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in cache.parent.rglob("*")}
    assert len(modes) > 8
    assert modes == {path: 0o700 if path.is_dir() else 0o600 for path in modes}
    assert stat.S_IMODE(cache.parent.stat().st_mode) == 0o700


def test_the_log_of_a_failed_build_is_private_too(sources, tmp_path):
    (sources / "custom_ops/wire/answer.cc").write_text("no C++\n")
    before = os.umask(0)
    try:
        with pytest.raises(BuildError, match="could not compile"):
            find_or_build(sources, tmp_path / "cache")
    finally:
        os.umask(before)
    logs = list((tmp_path / "cache").rglob("*.log"))
    assert logs and all(stat.S_IMODE(log.stat().st_mode) == 0o600 for log in logs)


def test_a_folder_that_others_may_write_is_closed(sources, tmp_path):
    library, _ = find_or_build(sources, tmp_path / "cache")
    library.parent.chmod(0o777)
    _, said = find_or_build(sources, tmp_path / "cache")
    assert not library.parent.stat().st_mode & 0o022
    assert said == []  # what is in it nobody else has written


def test_a_cache_that_others_may_write_is_refused(sources, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    find_or_build(sources, cache)
    monkeypatch.setenv("TFSCALE_CACHE", str(cache))
    cache.chmod(0o777)
    with pytest.raises(
        BuildError, match="may be written by others .*\n.*TFSCALE_CACHE.*chmod go-w"
    ):
        find_or_build(sources, cache)
    cache.chmod(0o1777)  # nobody can exchange what belongs to another, as in /tmp
    find_or_build(sources, cache)
    assert cache.stat().st_mode & 0o1777 == 0o1777


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="gives files to others, as root alone can")
SOMEBODY = 12345  # a user that is not there


@as_root
@pytest.mark.parametrize("what", ["above", "cache", "folder", "library", "checksum"])
def test_what_belongs_to_somebody_else_is_not_loaded(sources, tmp_path, what):
    cache = tmp_path / "above" / "cache"
    library, _ = find_or_build(sources, cache)
    places = {
        "above": cache.parent,
        "cache": cache,
        "folder": library.parent,
        "library": library,
        "checksum": trust.checksum_file(library),
    }
    os.chown(places[what], SOMEBODY, -1)
    if what in ("library", "checksum"):
        _, said = find_or_build(sources, cache)
        assert any("built" in line for line in said)
    else:
        with pytest.raises(BuildError, match=f"{places[what]} belongs to user {SOMEBODY}"):
            find_or_build(sources, cache)


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o757])
def test_a_folder_above_the_cache_that_others_may_write_is_refused(sources, tmp_path, mode):
    cache = tmp_path / "above" / "between" / "cache"
    find_or_build(sources, cache)
    above = tmp_path / "above"
    if mode == 0o775:
        os.chown(above, -1, os.getgid() + 54321) if os.geteuid() == 0 else pytest.skip("not root")
    above.chmod(mode)
    with pytest.raises(BuildError, match=f"{above} may be written by others .*{mode:o}"):
        find_or_build(sources, cache)
    above.chmod(mode | stat.S_ISVTX)  # as /tmp: nobody can exchange what belongs to another
    assert find_or_build(sources, cache)[1] == []


@as_root
def test_a_sticky_folder_of_somebody_else_is_refused(sources, tmp_path):
    above = tmp_path / "above"
    find_or_build(sources, above / "cache")
    above.chmod(0o1777)
    os.chown(above, SOMEBODY, -1)
    with pytest.raises(BuildError, match=f"{above} belongs to user"):
        find_or_build(sources, above / "cache")


def test_a_group_of_one_user_is_nobody_else(sources, tmp_path, monkeypatch):
    """Ubuntu and Fedora use umask 002: a user's own group may write all files of that user."""
    cache = tmp_path / "above" / "cache"
    find_or_build(sources, cache)
    cache.parent.chmod(0o775)
    group = cache.parent.stat().st_gid
    user = pwd.getpwuid(os.geteuid()).pw_name
    for members, refused in (([], False), ([user], False), ([user, "eve"], True)):
        private = grp.struct_group((user, "x", group, members))
        monkeypatch.setattr(trust.grp, "getgrgid", lambda _, private=private: private)
        trust._is_of_one_user.cache_clear()
        assert bool(trust.doubt_of_folders(cache)) == refused
    trust._is_of_one_user.cache_clear()


def test_a_container_does_not_know_whom_the_folders_above_belong_to(tmp_path, monkeypatch):
    nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    cache = tmp_path / "cache"
    cache.mkdir()
    found = os.lstat(tmp_path)
    of_nobody = os.stat_result([*found[:4], nobody, *found[5:10]])
    monkeypatch.setattr(trust, "_unknown_users", lambda: (nobody,))
    assert trust._doubt(of_nobody, tmp_path, leads=True) == ""
    assert "belongs to user" in trust._doubt(of_nobody, tmp_path)
    monkeypatch.undo()
    with open("/proc/self/uid_map") as file:
        if file.read().split() == ["0", "0", "4294967295"]:
            assert trust._unknown_users() == ()


def test_a_link_to_the_cache_is_followed_once(sources, tmp_path):
    library, _ = find_or_build(sources, tmp_path / "cache")
    (tmp_path / "link").symlink_to(tmp_path / "cache")
    assert find_or_build(sources, tmp_path / "link") == (library, [])
    moved = library.parent.rename(tmp_path / "moved")
    library.parent.symlink_to(moved)
    with pytest.raises(BuildError, match="is a link"):
        find_or_build(sources, tmp_path / "cache")


@as_root
def test_another_user_can_neither_write_nor_enter_what_root_has_built(sources, tmp_path):
    before = os.umask(0)
    try:
        library, _ = find_or_build(sources, tmp_path / "cache")
    finally:
        os.umask(before)
    open_to_all(tmp_path)
    for path in (library, library.with_name("new"), tmp_path / "cache" / "new"):
        tried = subprocess.run(
            ["sh", "-c", 'echo >> "$0"', str(path)],  # somebody may not enter this Python's folder
            user=SOMEBODY, group=SOMEBODY, extra_groups=[], capture_output=True, text=True,
            env={"LC_ALL": "C", "PATH": os.defpath},
        )  # fmt: skip
        assert "Permission denied" in tried.stderr


def open_to_all(folder):
    for each in (folder, *folder.parents):
        each.chmod(each.stat().st_mode | 0o011)


def test_what_is_loaded_is_what_was_checked(sources, tmp_path):
    """A file that is exchanged after the check is not loaded."""
    cache = tmp_path / "cache"
    find_or_build(sources, cache)
    with build.open_library(tf=FAKE_TF, root=sources, cache=cache) as opened:
        other = tmp_path / "other.so"
        other.write_bytes(b"of an attacker")
        other.replace(opened.path)
        assert Path(opened.name).read_bytes() == opened.content
        load = "import ctypes, sys; print(ctypes.CDLL(sys.argv[1]).twice())"
        command = [sys.executable, "-c", load, opened.name]
        assert subprocess.run(command, capture_output=True, text=True).stdout == "84\n"


@pytest.mark.slow
def test_the_file_that_is_loaded_stays_open():
    """Another library under its name would be taken for it by the dynamic loader."""
    program = (
        "import os; from tfscale.ops import library; library.load();"
        "assert os.path.samefile(library._file.name, library._file.path)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=600)


def test_a_pipe_in_the_place_of_a_library_stops_nobody(sources, tmp_path):
    library, _ = find_or_build(sources, tmp_path / "cache")
    library.unlink()
    os.mkfifo(library)
    again, said = find_or_build(sources, tmp_path / "cache")
    assert said and ctypes.CDLL(str(again)).twice() == 84


def test_a_library_built_ahead_is_refused_if_it_is_not_what_was_built(
    sources, tmp_path, monkeypatch
):
    library, _ = find_or_build(sources, tmp_path / "cache")
    ahead = tmp_path / "ahead" / library.name
    ahead.parent.mkdir()
    for place in (lambda path: path, trust.checksum_file):
        shutil.copyfile(place(library), place(ahead))
    use(monkeypatch, ahead)
    assert find_or_build(sources, tmp_path / "another") == (ahead, [])
    truncate(ahead)
    with pytest.raises(BuildError, match="is damaged: .*\n.*tfscale build --out"):
        find_or_build(sources, tmp_path / "another")


# --------------------------------------------------------------- libraries of a wheel


@pytest.fixture
def wheel(sources, tmp_path, monkeypatch):
    """Lay out a package as a wheel with libraries does: one library, for ``FAKE_TF``."""
    package = tmp_path / "package"
    monkeypatch.setattr(shipped, "PACKAGE", package)
    library, _ = find_or_build(sources, tmp_path / "cache of the wheel's maker")
    place = shipped.place(FAKE_TF.version)
    place.parent.mkdir(parents=True)
    for each in (lambda path: path, trust.checksum_file):
        shutil.copyfile(each(library), each(place))
    return place


def test_the_library_of_a_wheel_needs_no_compiler_and_no_cache(
    sources, tmp_path, wheel, monkeypatch
):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_or_build(sources, Path("/proc/tfscale")) == (wheel, [])


def test_an_installer_may_have_made_links(sources, tmp_path, wheel):
    """Make links as ``uv pip install --link-mode symlink`` does."""
    for each in (wheel, trust.checksum_file(wheel)):
        each.symlink_to(each.rename(tmp_path / each.name))
    assert find_or_build(sources, Path("/proc/tfscale")) == (wheel, [])


def test_what_the_user_names_comes_before_the_wheel(sources, tmp_path, wheel, monkeypatch):
    ahead = shutil.copy(wheel, tmp_path / "ahead.so")
    use(monkeypatch, ahead)
    assert find_or_build(sources, tmp_path / "cache") == (Path(ahead), [])


UNFIT = {
    "another patch version": ({"version": "9.9.1"}, None, "TensorFlow 9.9.1, only for 9.9.0"),
    "a vendor's": ({"git_version": "v9.9.0-vendor"}, None, "tensorflow-git: built for v9.9.0-0-g"),
    "another abi": ({"compile_flags": ("-D_GLIBCXX_USE_CXX11_ABI=0",)}, None, "abi: built for"),
    "flipped": ({}, flip, "is damaged"),
    "truncated": ({}, truncate, "is damaged"),
    "without checksum": ({}, DAMAGES["without checksum"], "has no checksum"),
}


@pytest.mark.parametrize("change, damage, reason", UNFIT.values(), ids=UNFIT)
def test_instead_of_a_library_that_does_not_fit_one_is_built(
    sources, tmp_path, wheel, monkeypatch, change, damage, reason
):
    if damage:
        damage(wheel)
    tf = replace(FAKE_TF, **change)
    library, said = find_or_build(sources, tmp_path / "cache", tf)
    assert library != wheel and ctypes.CDLL(str(library)).twice() == 84
    assert reason in said[0]
    assert find_or_build(sources, tmp_path / "cache", tf) == (library, [])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no g\+\+") as error:
        find_or_build(sources, tmp_path / "another cache", tf)
    assert reason in str(error.value)


def test_an_edit_makes_the_wheel_s_library_unfit(sources, tmp_path, wheel):
    (sources / "custom_ops/wire/answer.h").write_text('// new\nextern "C" int answer();\n')
    library, said = find_or_build(sources, tmp_path / "cache")
    assert library != wheel and "another version of tfscale" in said[0]


# ----------------------------------------------------------------------- errors


def test_no_compiler(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"no g\+\+") as error:
        find_or_build(sources, tmp_path / "cache")
    for advice in ("apt-get install g++", "tfscale build --out", "TFSCALE_LIBRARY"):
        assert advice in str(error.value)


def test_a_compiler_that_does_not_exist(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildError, match="'no-such-compiler', not on PATH"):
        find_or_build(sources, tmp_path / "cache")


def test_a_compiler_that_does_not_run(sources, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(BuildError, match="'false' does not run"):
        find_or_build(sources, tmp_path / "cache")


def test_a_cache_that_cannot_be_written(sources):
    with pytest.raises(BuildError, match="cannot write to its cache.*\n.*TFSCALE_CACHE"):
        find_or_build(sources, Path("/proc/tfscale"))


def test_a_cache_below_a_file(sources, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(BuildError, match="cannot write to its cache.*\n.*TFSCALE_CACHE"):
        find_or_build(sources, tmp_path / "file" / "cache")


def test_a_failed_build_shows_the_first_error_and_the_whole_log(sources, tmp_path):
    (sources / "custom_ops/wire/answer.cc").write_text("int answer( { }\n")
    with pytest.raises(BuildError, match=r"could not compile custom_ops/wire/answer\.cc") as error:
        find_or_build(sources, tmp_path / "cache")
    message = str(error.value)
    assert "answer.cc:1:" in message
    log = Path(message.split("Its whole output: ")[1].splitlines()[0])
    assert log.read_text().startswith("$ g++ ")
    assert not list((tmp_path / "cache").glob("*/work"))


def test_a_failed_link(sources, tmp_path):
    with pytest.raises(BuildError, match="could not link") as error:
        find_or_build(sources, tmp_path / "cache", replace(FAKE_TF, link_flags=("-lno-such",)))
    assert "install TensorFlow again" in str(error.value)


def test_headers_of_tensorflow_are_missing(sources, tmp_path):
    (sources / "custom_ops/kernels/twice.cc").write_text('#include "tensorflow/core/no.h"\n')
    with pytest.raises(BuildError, match="lacks its C\\+\\+ headers"):
        find_or_build(sources, tmp_path / "cache")


def test_no_sources(tmp_path):
    with pytest.raises(BuildError, match="no C\\+\\+ sources in"):
        find_or_build(tmp_path, tmp_path / "cache")


# -------------------------------------------------------------- libraries ahead


def use(monkeypatch, library):
    monkeypatch.setenv("TFSCALE_LIBRARY", str(library))


def test_a_library_built_ahead_is_used(sources, tmp_path, monkeypatch, compiler_calls):
    library, _ = find_or_build(sources, tmp_path / "cache")
    ahead = shutil.copy(library, tmp_path / "ahead.so")
    use(monkeypatch, ahead)
    assert find_or_build(sources, tmp_path / "another-cache") == (Path(ahead), [])
    assert compiler_calls() == 3


def test_a_library_for_another_tensorflow_is_refused_unloaded(sources, tmp_path, monkeypatch):
    library, _ = find_or_build(sources, tmp_path / "cache")
    use(monkeypatch, library)
    with pytest.raises(BuildError, match="built for another TensorFlow") as error:
        find_or_build(sources, tmp_path / "cache", replace(FAKE_TF, version="9.10.0"))
    assert "tensorflow: built for 9.9.0, here it is 9.10.0" in str(error.value)
    assert "tfscale build --out" in str(error.value)


def test_a_library_for_another_tfscale_is_refused(sources, tmp_path, monkeypatch):
    library, _ = find_or_build(sources, tmp_path / "cache")
    use(monkeypatch, library)
    (sources / "custom_ops/wire/answer.h").write_text("// another version\n")
    with pytest.raises(BuildError, match="another version of tfscale"):
        find_or_build(sources, tmp_path / "cache")


def test_a_library_for_another_machine_is_refused(sources, tmp_path, monkeypatch):
    library, _ = find_or_build(sources, tmp_path / "cache")
    use(monkeypatch, library)
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(BuildError, match="another kind of machine"):
        find_or_build(sources, tmp_path / "cache")


def test_a_file_that_is_no_library_of_ours(sources, tmp_path, monkeypatch):
    use(monkeypatch, __file__)
    with pytest.raises(BuildError, match="was not made by `tfscale build`"):
        find_or_build(sources, tmp_path / "cache")


def test_a_library_that_is_not_there(sources, tmp_path, monkeypatch):
    use(monkeypatch, tmp_path / "nothing.so")
    with pytest.raises(BuildError, match="there is no library at"):
        find_or_build(sources, tmp_path / "cache")


# ---------------------------------------------------------------------- command


@pytest.fixture
def small_world(sources, tmp_path, monkeypatch):
    """The command line, with small sources and a TensorFlow that costs nothing."""
    monkeypatch.setattr(toolchain, "PACKAGE", sources)
    monkeypatch.setattr(toolchain, "find_tensorflow", lambda: FAKE_TF)
    monkeypatch.setattr(build, "find_tensorflow", lambda: FAKE_TF)
    monkeypatch.setenv("TFSCALE_CACHE", str(tmp_path / "cache"))


def test_command_build(small_world, tmp_path, capsys):
    assert cli.main(["build", "--out", str(tmp_path / "out")]) == 0
    library = tmp_path / "out" / "libtfscale.so"
    assert capsys.readouterr().out.strip() == str(library)
    assert ctypes.CDLL(str(library)).twice() == 84


def test_command_build_says_what_is_wrong(small_world, monkeypatch, capsys):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert cli.main(["build"]) == 1
    assert "tfscale: error: no C++ compiler" in capsys.readouterr().err


def test_command_build_into_a_folder_that_cannot_be(small_world, capsys):
    assert cli.main(["build", "--out", "/proc/tfscale"]) == 1
    assert "cannot write /proc/tfscale" in capsys.readouterr().err


def test_help_does_not_import_tensorflow():
    program = (
        "import sys, tfscale.tools.cli\n"
        "try: tfscale.tools.cli.main(['--help'])\n"
        "except SystemExit: pass\n"
        "assert not {'tensorflow', 'keras', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=CHECKOUT, check=True, timeout=250)
