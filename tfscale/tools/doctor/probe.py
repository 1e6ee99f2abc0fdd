"""The versions and devices of TensorFlow and Keras, found in a separate process.

They take seconds to load, and a broken CUDA can end the process that loads them. The process prints
a line as soon as it knows something, so earlier results survive its end.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfscale.native.memory import keep_tensors
from tfscale.native.toolchain import BuildError, TensorFlow, find_tensorflow

SECONDS = 120
# Python searches the user's folder first: a json.py beside train.py would shadow Python's.
_PROGRAM = (
    "import sys; sys.path[:] = filter(None, sys.path); "
    "from tfscale.tools.doctor import probe; probe.tell_all()"
)
_MARK = "TFSCALE-DOCTOR "
_LINES = 3  # last lines of a process's output


@dataclasses.dataclass(frozen=True)
class Seen:
    """The results of the process.

    Args:
        tensorflow: TensorFlow's installation; None if it cannot be loaded.
        keras: Keras's version; None if it cannot be loaded.
        backend: Keras's backend.
        missing: features that tfscale needs and this Keras lacks, with advice.
        gpus: names of the GPUs; None if TensorFlow could not say.
        error: why the process ended before it knew all.
        keeps_memory: whether TensorFlow keeps the memory of tensors under a strategy; None if it
            could not say.
    """

    tensorflow: TensorFlow | None = None
    keras: str | None = None
    backend: str = ""
    missing: str = ""
    gpus: tuple[str, ...] | None = None
    error: str = ""
    keeps_memory: bool | None = None


def look(seconds: float = SECONDS) -> Seen:
    """Run the process and read its results."""
    command = [sys.executable, "-c", _PROGRAM]
    try:
        ran = subprocess.run(command, capture_output=True, timeout=seconds)
        output, errors, ended = ran.stdout, ran.stderr, _ended(ran.returncode)
    except subprocess.TimeoutExpired as error:
        output, errors = error.stdout or b"", error.stderr or b""
        ended = f"it gave no answer in {seconds:.0f} s"
    told: dict[str, Any] = {}
    for line in output.decode(errors="replace").splitlines():
        if line.startswith(_MARK):
            told |= json.loads(line.removeprefix(_MARK))
    if ended and "error" not in told:
        last = errors.decode(errors="replace").strip().splitlines()[-_LINES:]
        told["error"] = "\n  ".join(
            [f"{ended}; the end of what it said:", *last] if last else [ended]
        )
    return _seen(told)


def _ended(code: int) -> str:
    if code < 0:
        return f"the process was ended by {signal.Signals(-code).name}"
    return f"the process ended with {code}" if code else ""


def _seen(told: dict[str, Any]) -> Seen:
    if tensorflow := told.get("tensorflow"):
        flags = {name: tuple(tensorflow[name]) for name in ("compile_flags", "link_flags")}
        told["tensorflow"] = TensorFlow(**{**tensorflow, **flags})
    if "gpus" in told:
        told["gpus"] = tuple(told["gpus"])
    return Seen(**told)


# ------------------------------------------------------------------- within the process


def _tell(**known: Any) -> None:
    print(_MARK + json.dumps(known), flush=True)


def tell_all() -> None:
    """Print what there is, for ``look``."""
    # With a backend that is not installed, importing Keras would fail.
    asked = asked_backend(os.environ)
    os.environ["KERAS_BACKEND"] = "tensorflow"
    try:
        _tell(tensorflow=dataclasses.asdict(find_tensorflow()))
    except BuildError as error:
        _tell(error=str(error))
        return
    _tell_keras(asked)
    _tell(gpus=_gpus())
    _tell(keeps_memory=keep_tensors())


def asked_backend(environ: Mapping[str, str]) -> str:
    """Return the backend that Keras 3 would use, by Keras's own rules."""
    if asked := environ.get("KERAS_BACKEND"):
        return asked
    home = Path(environ.get("KERAS_HOME") or Path("~/.keras").expanduser())
    try:
        return str(json.loads((home / "keras.json").read_text())["backend"])
    except (OSError, ValueError, LookupError, TypeError):
        return "tensorflow"


def _tell_keras(asked: str) -> None:
    try:
        import keras

        from tfscale.bridge import installed
    except ImportError as error:
        _tell(missing=f"Keras cannot be imported: {error}\nInstall it: pip install 'keras==3.15.*'")
        return
    _tell(keras=keras.__version__, backend="tensorflow" if installed.KERAS_2 else asked)
    try:
        installed.check()
    except ImportError as error:
        _tell(missing=str(error))


def _gpus() -> list[str]:
    import tensorflow as tf

    found = []
    for gpu in tf.config.list_physical_devices("GPU"):
        details = tf.config.experimental.get_device_details(gpu)
        found.append(details.get("device_name", gpu.name))
    return found
