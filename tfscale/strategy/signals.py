"""SIGTERM and Ctrl-C end a worker within seconds, and the others are told why.

With several workers TensorFlow catches SIGTERM, and does nothing. Python runs handlers in its main
thread, which may be waiting in an exchange for a late worker; so another thread waits for signals.
"""

from __future__ import annotations

import atexit
import contextlib
import inspect
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

import tensorflow as tf

from tfscale import handlers
from tfscale.bridge.runtime import context
from tfscale.strategy import farewell

_WHO_GOT_SIGTERM = "TF_DEFAULT_PREEMPTION_NOTICE_KEY"
_LOOKS, _BETWEEN = 12, 0.25  # seconds: TensorFlow looks once a second
_TO_RAISE = 1.0  # seconds for the main thread to raise KeyboardInterrupt by itself
_TO_END = 5.0  # and for the process to end, once all have been told

_interrupt_raised, _too_late = threading.Event(), threading.Event()
_pipe: tuple[int, int] | None = None


def listen(task: str) -> None:
    """Called once this worker's server runs: make signals do again what they did before.

    The program's own handlers stay.

    Args:
        task: this worker's name in TensorFlow's cluster.
    """
    _listen()
    _Missed(task).start()


class _Missed(threading.Thread):
    """Sends this process a SIGTERM again that came while TensorFlow's server started.

    TensorFlow's handler had taken it. A thread of TensorFlow's tells all workers within a second
    who got it, by a key of the coordination service.
    """

    def __init__(self, task: str) -> None:
        super().__init__(name="tfscale-missed-signal", daemon=True)
        self._task = task
        self._over = threading.Event()

    def start(self) -> None:
        """Look for a while, unless this TensorFlow can only wait for the key."""
        if "timeout_in_ms" in inspect.signature(_key_value()).parameters:
            atexit.register(self._leave)
            super().start()

    def run(self) -> None:
        """Called by Python."""
        for _ in range(_LOOKS):
            if self._over.wait(_BETWEEN):
                return
            with contextlib.suppress(tf.errors.OpError):  # there is no such key yet
                if _key_value()(_WHO_GOT_SIGTERM, timeout_in_ms=1) == self._task:
                    os.kill(os.getpid(), signal.SIGTERM)
                return

    def _leave(self) -> None:
        self._over.set()
        self.join()  # TensorFlow ends after it


def _key_value() -> Any:
    return context().get_config_key_value


def _listen() -> None:
    if threading.current_thread() is not threading.main_thread():
        handlers.install(signal.SIGTERM, signal.SIG_DFL)  # all that another thread can do
        return
    own = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, _wait_for_the_end if own == signal.SIG_DFL else own)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _raise_interrupt)
    _start_thread()


def _start_thread() -> None:
    global _pipe
    if _pipe is not None:
        return
    _pipe = os.pipe()
    for end in _pipe:
        os.set_blocking(end, end == _pipe[0])
    before = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
    threading.Thread(
        target=_hear, args=(_pipe[0], before), name="tfscale-signals", daemon=True
    ).start()
    handlers.forget_in_child(_forget)


def _forget() -> None:
    """A process that this one forks is no worker, and must not send messages in its name."""
    if _pipe is None:
        return
    signal.set_wakeup_fd(-1)
    for number, own in ((signal.SIGTERM, _wait_for_the_end), (signal.SIGINT, _raise_interrupt)):
        if signal.getsignal(number) is own:
            default = signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler
            signal.signal(number, default)


def _hear(pipe: int, others: int) -> None:
    while number := os.read(pipe, 1):
        if others != -1:  # whoever listened before
            with contextlib.suppress(OSError):
                os.write(others, number)
        if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is _wait_for_the_end:
            farewell.say("it got SIGTERM")
            _die_of(signal.SIGTERM)
        if number[0] == signal.SIGINT and signal.getsignal(signal.SIGINT) is _raise_interrupt:
            _interrupt()


def _interrupt() -> None:
    """The main thread may wait for other workers, or for data, and hear nothing."""
    if not _interrupt_raised.wait(_TO_RAISE):
        _too_late.set()
        farewell.say("it was interrupted (Ctrl-C)")
        _die_of(signal.SIGINT)
    _interrupt_raised.clear()


def _raise_interrupt(number: int, frame: Any) -> None:
    if _too_late.is_set():
        _wait_for_the_end(number, frame)
    _interrupt_raised.set()
    raise KeyboardInterrupt


def _wait_for_the_end(number: int, frame: Any) -> None:
    """The main thread need not see its exchange fail: the program ends."""
    time.sleep(farewell.LINGER + _TO_END)


def _die_of(number: signal.Signals) -> NoReturn:
    """As a program without any handler."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    handlers.install(number, signal.SIG_DFL)  # any thread may be the one that ends it
    os.kill(os.getpid(), number)
    time.sleep(_TO_END)  # it ends meanwhile
    os._exit(128 + number)
