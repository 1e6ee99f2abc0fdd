"""Builds in a temporary folder: what an earlier build left there would get into the next wheel."""

import atexit
import shutil
import tempfile

from setuptools import setup

folder = tempfile.mkdtemp(prefix="tfscale-build-")
atexit.register(shutil.rmtree, folder, ignore_errors=True)
setup(options={"build": {"build_base": folder}, "egg_info": {"egg_base": folder}})
