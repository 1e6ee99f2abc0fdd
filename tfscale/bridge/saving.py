"""Files of Keras that are whole, even if several workers write to one path.

Keras writes straight to the path that it gets. So workers of one host, or with a shared folder,
that save to the same path write into each other's file. Here each worker writes a file of its own
beside the path and then renames it. The last one has the name; all have the same model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfscale.bridge.hooks import ROOM_FOR_FILES, SAVE_HDF5, SAVE_MODEL, SAVE_WEIGHTS
from tfscale.bridge.installed import KERAS_2
from tfscale.support.files import replacing

if not KERAS_2:
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib
    from keras.src.utils.file_utils import is_remote_path

_ENDINGS = (".keras", ".weights.h5", ".h5", ".hdf5")


def write_whole_files(strategy: Any) -> None:
    """Make Keras write a model's file beside its path and rename it, as long as a strategy lives.

    Does nothing with Keras 2.
    """
    if KERAS_2:
        return
    for hook, module in (
        (SAVE_MODEL, saving_lib),
        (SAVE_WEIGHTS, saving_lib),
        (SAVE_HDF5, legacy_h5_format),
    ):
        hook.put(module, _save, while_lives=strategy)


def write_through_files(strategy: Any) -> None:
    """Make Keras write and read models weight by weight, as long as a strategy lives.

    Where the host has room for a model, Keras makes all of a ``.keras`` file in memory, twice, and
    reads it whole. But workers that share out a model do so because it is too large for each, and
    Keras does not count the optimizer's slots, nor other workers of the host, nor limits.
    """
    if not KERAS_2 and hasattr(saving_lib, "is_memory_sufficient"):
        ROOM_FOR_FILES.put(saving_lib, lambda original, model: False, while_lives=strategy)


def _save(save: Callable[..., Any], model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
    if not _is_local_file(filepath):
        return save(model, filepath, *args, **kwargs)
    target = Path(os.path.realpath(filepath))  # a link stays, as when Keras writes
    with replacing(target) as fresh:
        return save(model, str(fresh), *args, **kwargs)


def _is_local_file(path: Any) -> bool:
    """Whether a path is one local file, and not a folder, a set of shards, or an open file."""
    if not isinstance(path, str | os.PathLike) or is_remote_path(path):
        return False
    return str(path).endswith(_ENDINGS) and os.path.isdir(os.path.dirname(path) or ".")
