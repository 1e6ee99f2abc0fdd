"""Loads the native library into TensorFlow, once per process."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import Any

from tfscale.native import build, toolchain, trust

_lock = threading.Lock()
_loaded: Any = None
_file: trust.OpenFile | None = None  # stays open, since its name is a path to the descriptor
_native: ctypes.CDLL | None = None


def load() -> Any:
    """Return the module of ops that TensorFlow makes of the library; build it if there is none."""
    global _loaded, _file, _native
    with _lock:
        if _loaded is None:
            _file = build.open_library()
            _loaded = _load(_file)
            _native = ctypes.CDLL(_file.name)  # the same library: TensorFlow has loaded it
        return _loaded


@functools.cache  # do not try a failed build again
def trouble() -> str:
    """Return why there is no native library; empty if there is one."""
    try:
        load()
    except toolchain.BuildError as error:
        return str(error)
    return ""


def signal_writer(pipe: int) -> int:
    """Return the address of a signal handler that writes a byte into this pipe for each signal.

    The process has one pipe for all signals. Any thread may install the handler.
    """
    load()
    assert _native is not None
    _native.tfscale_signals_go_to(pipe)
    address = ctypes.cast(_native.tfscale_write_signal, ctypes.c_void_p).value
    assert address is not None
    return address


def _load(library: trust.OpenFile) -> Any:
    import tensorflow as tf

    try:
        loaded = tf.load_op_library(library.name)  # the name leads to the file that was checked
    except (tf.errors.OpError, OSError) as error:
        said = str(error).replace(library.name, str(library.path))
        raise toolchain.BuildError(
            f"TensorFlow {tf.version.VERSION} refuses {library.path}: {said}\n"
            "Its tag says that it was built for this TensorFlow. Remove the file and try again. If "
            "that does not help, report this message."
        ) from error
    _let_overlap()
    return loaded


def known_to_all(error: BaseException) -> bool:
    """Return whether all ranks learn of an error by themselves, or can no longer be reached.

    This rank need not tell them of such an error. Our ops mark such errors; ``told_by_others`` has
    texts of those that end TensorFlow's own collectives. Keras replaces some errors by its own,
    whose causes lead back to ours.
    """
    chain: BaseException | None = error
    while chain is not None:
        marks = getattr(chain, "experimental_payloads", None)
        if isinstance(marks, dict) and _KNOWN_TO_ALL in marks:
            return True
        if any(told in str(chain) for told in told_by_others):
            return True
        chain = chain.__cause__ or chain.__context__
    return False


told_by_others: set[str] = set()
_KNOWN_TO_ALL = b"tfscale/known-to-all"  # as in custom_ops/transport/tensorflow.cc


def _let_overlap() -> None:
    """Take collectives out of TensorFlow's automatic ordering of ops on one resource.

    Ranks match collectives by name, so their order does not matter. In order, they could not
    overlap.
    """
    from tfscale.bridge.runtime import let_overlap

    kinds = ("AllReduce", "ReduceScatter", "AllGather", "Broadcast", "Mix", "Route")
    let_overlap(f"Tfscale{kind}" for kind in kinds)
