"""Output of Keras during a training: progress bars, and warnings about its own defaults."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping
from typing import Any

from keras.callbacks import ProgbarLogger

from tfscale.bridge.fit import callbacks_of_fit
from tfscale.bridge.hooks import BAR_OF_BATCH, BAR_OF_EPOCH, BAR_PARAMS
from tfscale.bridge.installed import KERAS_2

_AUTO = "auto"
# ``fit`` passes shuffle=True unless its caller says otherwise, and then warns that it did.
_OWN_DEFAULT = r"`shuffle=True` was passed, but will be ignored since the data `x` was provided as"


def ignore_warning_about_shuffle() -> None:
    """Silence Keras's warning that ``fit`` ignores ``shuffle=True``, which is its own default."""
    warnings.filterwarnings("ignore", message=_OWN_DEFAULT)


def show_no_bars_by_default(strategy: Any) -> None:
    """Make ``verbose="auto"`` mean 0 as long as a strategy lives; other values stay as they are.

    Keras makes a new ``ProgbarLogger`` in each ``fit``, ``evaluate`` and ``predict``, so there is
    no object whose attribute could be set before it draws. Does nothing with Keras 2.
    """
    if not KERAS_2:
        BAR_PARAMS.put(ProgbarLogger, _set_params, while_lives=strategy)


def _set_params(set_params: Callable[..., None], bar: Any, params: Mapping[str, Any]) -> None:
    shown = params["verbose"] != _AUTO
    set_params(bar, params if shown else {**params, "verbose": 0})


def keep_out_of_bar(names: Collection[str]) -> None:
    """Hide these names of ``logs`` from the progress bar of the ``fit`` that calls.

    ``History`` and other callbacks still see them. A callback calls this when training begins.
    """

    def without(
        show: Callable[..., None], bar: Any, number: int, logs: Mapping[str, Any] | None = None
    ) -> None:
        shown = {name: value for name, value in (logs or {}).items() if name not in names}
        show(bar, number, shown)

    for callback in callbacks_of_fit():
        if isinstance(callback, ProgbarLogger):
            BAR_OF_BATCH.put(callback, without)
            BAR_OF_EPOCH.put(callback, without)
