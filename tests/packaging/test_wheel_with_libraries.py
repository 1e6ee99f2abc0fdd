"""A wheel that holds native libraries, for machines without a compiler."""

import platform
import shutil
import sysconfig
import zipfile

import pytest

from tests.packaging.conftest import build_packages
from tests.packaging.test_stranger import PROGRAM
from tfscale import __version__
from tfscale.native import build, toolchain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

VARIABLE = "TFSCALE_WHEEL_LIBRARIES"
LOADED = "\nfrom tfscale.ops import library\nprint(library._file.path)"


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Build the library for the TensorFlow that runs the tests, as ``tfscale build --out`` does."""
    return build.build(tmp_path_factory.mktemp("built"))


@pytest.fixture(scope="module")
def wheel(library, copy_of_checkout, tmp_path_factory):
    out = tmp_path_factory.mktemp("wheel")
    done = build_packages(copy_of_checkout, out, "--wheel", **{VARIABLE: str(library)})
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


def place(version):
    return f"tfscale/libraries/tensorflow-{version}/libtfscale.so"


def test_the_wheel_is_for_this_kind_of_machine_and_holds_what_was_asked_for(wheel, library):
    import tensorflow as tf

    system = sysconfig.get_platform().replace("-", "_")
    assert system == f"linux_{platform.machine()}"
    assert wheel.name == f"tfscale-{__version__}-py3-none-{system}.whl"
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if "/libraries/" in name}
        assert held == {place(tf.version.VERSION), f"{place(tf.version.VERSION)}.sha256"}
        assert archive.read(place(tf.version.VERSION)) == library.read_bytes()


def copy_with(library, folder, old, new):
    """A copy of a library with other words in its tag."""
    folder.mkdir()
    content = library.read_bytes()
    assert content.count(old.encode()) == 1
    copy = folder / library.name
    copy.write_bytes(content.replace(old.encode(), new.encode()))
    return copy


def test_only_libraries_of_these_sources_get_into_a_wheel(library, copy_of_checkout, tmp_path):
    sources = build.read_tag(library)["sources"]
    other = copy_with(library, tmp_path / "other", f"sources={sources}", "sources=" + "0" * 16)
    refused = {
        "libtfscale.so": "'libtfscale.so', expected the absolute path of a file",
        f"{tmp_path}/none.so": "none.so', expected the absolute path of a file",
        str(other): "was built for another version of tfscale",
        f"{library}:{library}": "names two libraries for one version of TensorFlow",
    }
    for asked, reason in refused.items():
        done = build_packages(copy_of_checkout, tmp_path, "--wheel", **{VARIABLE: asked})
        assert done.returncode != 0 and reason in done.stdout + done.stderr
    assert not list(tmp_path.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel, fresh):
    import tensorflow

    environment = fresh("ready")
    environment.install("--no-deps", "--no-index", wheel)
    environment.borrow(tensorflow)
    return environment


@pytest.mark.full
def test_a_machine_without_compiler_trains(environment, tmp_path):
    bare = {"PATH": str(tmp_path), "CXX": "", "TFSCALE_CACHE": str(tmp_path / "cache")}
    *_, ours, loaded = environment.run("python", "-c", PROGRAM + LOADED, **bare).splitlines()
    assert ours.startswith(str(environment.folder))
    assert "/tfscale/libraries/tensorflow-" in loaded
    assert loaded.startswith(str(environment.folder))
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.full
def test_another_patch_version_is_built_for_or_is_an_error(environment, tmp_path):
    version = toolchain.find_tensorflow().version
    (packages,) = (environment.folder / "venv" / "lib").glob("python*/site-packages")
    held = (packages / place(version)).parent
    held.rename(held.with_name("tensorflow-0.0.1"))
    try:
        cache = {"TFSCALE_CACHE": str(tmp_path / "cache")}
        why = f"this package has no library for TensorFlow {version}, only for 0.0.1"
        load = "from tfscale.ops import library; library.load(); print(library._file.path)"
        done = environment.try_to_run("python", "-c", load, PATH=str(tmp_path), CXX="", **cache)
        assert done.returncode != 0
        assert f"{why}; and no C++ compiler for tfscale's native library" in done.stderr
        compiled = environment.try_to_run("python", "-c", load, **cache)
        assert compiled.returncode == 0, compiled.stderr
        assert f"tfscale: {why}" in compiled.stderr
        assert compiled.stdout.strip().startswith(str(tmp_path / "cache"))
    finally:
        held.with_name("tensorflow-0.0.1").rename(held)
    shutil.rmtree(tmp_path / "cache")
