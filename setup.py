"""Builds in a temporary folder: what an earlier build left there would get into the next wheel.

``TFSCALE_WHEEL_LIBRARIES`` asks for native libraries in the wheel: it names files that
`tfscale build --out DIR` has made, one for each version of TensorFlow, with a colon in between.
Such a wheel is for this kind of machine alone; a wheel without libraries is for all.
"""

import atexit
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
VARIABLE = "TFSCALE_WHEEL_LIBRARIES"
LIBRARIES = [Path(name) for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


class BuildWithLibraries(build_py):
    """Adds the libraries that were asked for to the package."""

    def run(self):
        super().run()
        if not self.editable_mode:
            for library in LIBRARIES:
                add(library, Path(self.build_lib) / "tfscale")


def add(library, package):
    """Copy a library to its place in the package, if it was built from these very sources."""
    sys.path.insert(0, str(HERE))
    from tfscale.native import build, shipped, toolchain, trust

    # What builds a wheel changes folders before it comes here.
    if not (library.is_absolute() and library.is_file()):
        sys.exit(f"{VARIABLE} has {str(library)!r}, expected the absolute path of a file")
    sources = toolchain.find_sources(HERE).short_hash()
    if reason := build.misfit(library, {"machine": platform.machine(), "sources": sources}):
        sys.exit(
            f"{VARIABLE} names a library that is of no use in this wheel. {reason}\n"
            "Build it again, from this checkout, with `tfscale build --out DIR`."
        )
    place = shipped.place(build.read_tag(library)["tensorflow"], package)
    if place.exists():
        sys.exit(f"{VARIABLE} names two libraries for one version of TensorFlow: {library}")
    place.parent.mkdir(parents=True)
    shutil.copyfile(library, place)
    trust.checksum_file(place).write_bytes(trust.checksum_of(place.name, place.read_bytes()))


folder = tempfile.mkdtemp(prefix="tfscale-build-")
atexit.register(shutil.rmtree, folder, ignore_errors=True)
options = {"build": {"build_base": folder}, "egg_info": {"egg_base": folder}}
if LIBRARIES:
    options["bdist_wheel"] = {"plat_name": sysconfig.get_platform()}
setup(options=options, cmdclass={"build_py": BuildWithLibraries})
