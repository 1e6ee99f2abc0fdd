"""Keras's files, whole where several workers write to one path.

Keras writes straight to the path it is given, so workers of one host, or of one shared folder, that
save to the same path write into each other's file. Here each writes a file of its own beside it and
then renames that: whoever is last has the name, and as all have the same model, it doesn't matter.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tfscale.bridge.installed import KERAS_2
from tfscale.files import replacing

if not KERAS_2:
    from keras.src.legacy.saving import legacy_h5_format
    from keras.src.saving import saving_lib
    from keras.src.utils.file_utils import is_remote_path

_ENDINGS = (".keras", ".weights.h5", ".h5", ".hdf5")


@functools.cache
def write_whole_files() -> None:
    """From now on; does nothing with Keras 2."""
    if KERAS_2:
        return
    for module, name in (
        (saving_lib, "save_model"),
        (saving_lib, "save_weights_only"),
        (legacy_h5_format, "save_model_to_hdf5"),
    ):
        setattr(module, name, _whole(getattr(module, name)))


def _whole(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def saved(model: Any, filepath: Any, *args: Any, **kwargs: Any) -> Any:
        if not _is_one_file(filepath):
            return save(model, filepath, *args, **kwargs)
        target = Path(os.path.realpath(filepath))  # a link stays, as when Keras writes
        with replacing(target) as fresh:
            return save(model, str(fresh), *args, **kwargs)

    return saved


def _is_one_file(path: Any) -> bool:
    """Of this machine, and no folder, no parts, and nothing that is open already."""
    if not isinstance(path, str | os.PathLike) or is_remote_path(path):
        return False
    return str(path).endswith(_ENDINGS) and os.path.isdir(os.path.dirname(path) or ".")
