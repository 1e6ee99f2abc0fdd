"""Checks of the installed versions, and of their compatibility."""

from __future__ import annotations

import platform
import re
import sys
from importlib import metadata

from tfscale.native.toolchain import PACKAGE
from tfscale.support.version import __version__
from tfscale.tools.doctor.check import Check, of_error, ok, problem, warning
from tfscale.tools.doctor.probe import Seen

# Versions that tests run with; other versions may work.
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
KERAS_OF = {"2.15": "2.15", "2.20": "3.15", "2.21": "3.15"}  # by TensorFlow's version

_PACKAGES = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tf-nightly-cpu")


def of_tfscale() -> Check:
    """Return a check with the version and the place of tfscale."""
    return ok("tfscale", f"{__version__} in {PACKAGE}")


def of_python() -> Check:
    """Check whether tfscale is tested with this Python."""
    found = f"{platform.python_version()} ({sys.executable})"
    if _minor(platform.python_version()) in PYTHONS:
        return ok("Python", found)
    return warning(
        "Python",
        f"{found}; tfscale is tested with {', '.join(PYTHONS)}",
        f"If something fails, make a virtual environment with Python {PYTHONS[-1]} or older.",
    )


def of_tensorflow(seen: Seen) -> Check:
    """Check TensorFlow: its version, whether it can be imported, and whether it is the only one."""
    if seen.tensorflow is None:
        check = of_error("TensorFlow", RuntimeError(seen.error))
        return check if check.advice else problem("TensorFlow", check.found, _INSTALL_AGAIN)
    found = str(seen.tensorflow)
    several = [f"{name} {version}" for name in _PACKAGES if (version := _version_of(name))]
    if len(several) > 1:
        return warning(
            "TensorFlow",
            f"{found}; installed are {' and '.join(several)}, which overwrite each other's files",
            f"Uninstall all of them, then install one: pip uninstall {' '.join(_PACKAGES)}",
        )
    if _minor(seen.tensorflow.version) not in KERAS_OF:
        return warning(
            "TensorFlow",
            f"{found}; tfscale is tested with {', '.join(KERAS_OF)}",
            "If the native library cannot be built, or your tests fail, install one of these.",
        )
    return ok("TensorFlow", found)


_INSTALL_AGAIN = (
    "Try `python -c 'import tensorflow'`. If that fails, too, install TensorFlow again, into a new "
    "virtual environment."
)


def of_keras(seen: Seen) -> Check:
    """Check Keras: its version, and whether it has what tfscale needs."""
    if seen.missing:
        first, _, advice = seen.missing.partition("\n")
        found = f"{seen.keras}: {first}" if seen.keras else first
        return problem("Keras", found, advice or "Install the Keras that is named.")
    if seen.tensorflow is None:
        return problem("Keras", "needs TensorFlow", "See what to do about TensorFlow.")
    if seen.keras is None:
        return problem("Keras", seen.error, _INSTALL_AGAIN)
    if seen.backend != "tensorflow":
        return problem(
            "Keras",
            f"{seen.keras}, which computes with {seen.backend}",
            "Set KERAS_BACKEND=tensorflow, or change it in ~/.keras/keras.json.",
        )
    tensorflow = _minor(seen.tensorflow.version)
    wanted = KERAS_OF.get(tensorflow, _minor(seen.keras))
    if _minor(seen.keras) != wanted:
        return warning(
            "Keras",
            f"{seen.keras}; with TensorFlow {tensorflow}, tfscale is tested with Keras {wanted}",
            f"pip install 'keras=={wanted}.*'",
        )
    return ok("Keras", seen.keras)


def of_numpy(seen: Seen) -> Check:
    """Check NumPy: its version, and whether this TensorFlow can use it."""
    version = _version_of("numpy")
    if version is None:
        return problem("NumPy", "not installed", "pip install numpy")
    if seen.tensorflow and _minor(seen.tensorflow.version) == "2.15" and version[0] != "1":
        return problem(
            "NumPy", f"{version}; TensorFlow 2.15 needs NumPy 1", "pip install 'numpy<2'"
        )
    return ok("NumPy", version)


def _version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _minor(version: str) -> str:
    """Return major and minor version: ``"2.21"`` for ``"2.21.0-rc1"``."""
    found = re.match(r"\d+\.\d+", version)
    return found[0] if found else version
