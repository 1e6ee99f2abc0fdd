"""Loads the native library into TensorFlow, once per process."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

from tfscale.ops import build, toolchain, trust

_lock = threading.Lock()
_loaded: Any = None
_file: trust.OpenFile | None = None  # open while the process lives, for its name
_native: ctypes.CDLL | None = None


def load() -> Any:
    """The module of ops that TensorFlow makes of the library; builds it when there is none yet."""
    global _loaded, _file, _native
    with _lock:
        if _loaded is None:
            _file = build.open_library()
            _loaded = _load(_file)
            _native = ctypes.CDLL(_file.name)  # which is loaded already
        return _loaded


def signal_writer(pipe: int) -> int:
    """Return the address of a handler of signals, which writes a byte for each into this pipe.

    It is for all signals of the process, and may be installed by any thread.
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
        loaded = tf.load_op_library(library.name)  # the file that was checked
    except (tf.errors.OpError, OSError) as error:
        said = str(error).replace(library.name, str(library.path))
        raise toolchain.BuildError(
            f"TensorFlow {tf.version.VERSION} refuses {library.path}: {said}\n"
            "Its tag says that it was built for this TensorFlow. Remove the file and try again; if "
            "that does not help, report this message."
        ) from error
    _let_overlap()
    return loaded


def known_to_all(error: BaseException) -> bool:
    """Whether all ranks get to know an error without a farewell, or cannot be reached by one.

    Our ops mark such errors, and what has ended TensorFlow's own collectives is in
    ``told_by_others``. Keras replaces some by others, whose causes lead back to ours.
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

    They meet by name, so their order does not matter; one after the other they
    could not overlap.
    """
    from tensorflow.python.framework import auto_control_deps_utils

    for op in ("AllReduce", "ReduceScatter", "AllGather", "Broadcast", "Mix"):
        auto_control_deps_utils.register_read_only_resource_op(f"Tfscale{op}")
