"""Contents of the wheel and of the source package."""

import tarfile
import zipfile

import pytest
from helpers import ROOT


@pytest.fixture(scope="module")
def wheel(packages):
    return zipfile.ZipFile(packages.wheel)


@pytest.fixture(scope="module")
def source(packages):
    with tarfile.open(packages.source) as archive:
        return {name.split("/", 1)[-1] for name in archive.getnames()}


def native_files():
    return {str(p.relative_to(ROOT)) for p in (ROOT / "custom_ops").rglob("*.[ch]*")}


def test_the_wheel_carries_the_sources_and_nothing_beside_tfscale(wheel):
    names = set(wheel.namelist())
    assert {f"tfscale/{f}" for f in native_files()} <= names
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"tfscale"}
    assert "tfscale/py.typed" in names


def test_the_wheel_requires_no_tensorflow(wheel):
    metadata = wheel.read(next(n for n in wheel.namelist() if n.endswith("/METADATA"))).decode()
    required = [
        line.removeprefix("Requires-Dist: ")
        for line in metadata.splitlines()
        if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert sorted(required) == ["numpy", "rich"]


def test_a_build_leaves_nothing_beside_what_it_made(packages, copy_of_checkout):
    """The next wheel would contain all files in build/, also modules that were deleted since."""
    left = {path.name for path in copy_of_checkout.iterdir()}
    expected = {"setup.cfg", "setup.py", "pyproject.toml", "README.md", "LICENSE"}
    assert left == {*expected, "tfscale", "custom_ops"}


def test_the_source_package_carries_the_sources(source):
    assert native_files() <= source
    assert {"LICENSE", "README.md", "setup.cfg", "tfscale/native/build.py"} <= source


def test_every_python_package_is_listed_in_setup_cfg(wheel):
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "tfscale").rglob("*.py")}
    missing = modules - set(wheel.namelist())
    assert not missing, f"add their folders to `packages` in setup.cfg: {sorted(missing)}"


def test_names_of_the_packages_say_the_version(packages):
    from tfscale import __version__

    assert packages.wheel.name == f"tfscale-{__version__}-py3-none-any.whl"
    assert packages.source.name == f"tfscale-{__version__}.tar.gz"
