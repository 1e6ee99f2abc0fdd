"""Handlers that end a worker within seconds of SIGTERM or Ctrl-C, and tell the other workers why.

With several workers, TensorFlow catches SIGTERM and does nothing. Python runs handlers in its main
thread, which may be waiting in an exchange for a late worker. So another thread waits for signals.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import signal
import sys
import threading
import time
from typing import Any, NoReturn

import tensorflow as tf

from tfscale.bridge.runtime import context
from tfscale.strategy.workers import shutdown
from tfscale.support import signals as system

_WHO_GOT_SIGTERM = "TF_DEFAULT_PREEMPTION_NOTICE_KEY"
# Number of polls, and seconds between two of them: TensorFlow polls once a second.
_LOOKS, _BETWEEN = 12, 0.25
_TO_RAISE = 1.0  # seconds for the main thread to raise KeyboardInterrupt by itself
_TO_MEET = 15.0  # most seconds that a missed signal waits until the other workers can be told
_TO_END = 5.0  # seconds for the process to end, after the other workers have got the message

_interrupt_raised, _too_late = threading.Event(), threading.Event()
_pipe: system.Pipe | None = None


def listen(task: str) -> None:
    """Restore the effect of signals, once this worker's TensorFlow server runs.

    The program's own handlers stay.

    Args:
        task: this worker's name in TensorFlow's cluster.
    """
    _listen()
    _Missed(task).start()


class _Missed(threading.Thread):
    """Thread that repeats a SIGTERM which this process got while TensorFlow's server started.

    TensorFlow's handler caught that signal. Within a second, a thread of TensorFlow writes the name
    of the worker that got the signal to a key of the coordination service.
    """

    def __init__(self, task: str) -> None:
        super().__init__(name="tfscale-missed-signal", daemon=True)
        self._task = task
        self._over = threading.Event()

    def start(self) -> None:
        """Start to poll the key; do nothing if this TensorFlow can only wait for the key."""
        if "timeout_in_ms" in inspect.signature(_key_value()).parameters:
            atexit.register(self._leave)
            super().start()

    def run(self) -> None:
        """Poll the key, and send the signal again if this worker had got it."""
        for _ in range(_LOOKS):
            if self._over.wait(_BETWEEN):
                return
            with contextlib.suppress(tf.errors.OpError):  # the key does not exist yet
                if _key_value()(_WHO_GOT_SIGTERM, timeout_in_ms=1) == self._task:
                    self._repeat()
                return

    def _repeat(self) -> None:
        until = time.monotonic() + _TO_MEET
        while not shutdown.can_say() and time.monotonic() < until:
            if self._over.wait(_BETWEEN):
                return
        os.kill(os.getpid(), signal.SIGTERM)

    def _leave(self) -> None:
        self._over.set()
        self.join()  # the thread must end before TensorFlow does


def _key_value() -> Any:
    return context().get_config_key_value


def _listen() -> None:
    if threading.current_thread() is not threading.main_thread():
        system.install(signal.SIGTERM, signal.SIG_DFL)  # other threads cannot set Python handlers
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
    _pipe = system.Pipe()
    before = signal.set_wakeup_fd(_pipe.writer, warn_on_full_buffer=False)
    _pipe.start(functools.partial(_hear, _pipe, before), "tfscale-signals")


def _forget() -> None:
    """Remove the handlers in a forked process: it is not a worker, and must send no messages."""
    global _pipe
    if _pipe is None:
        return
    signal.set_wakeup_fd(-1)
    _pipe.close()
    _pipe = None  # processes that this one forks must not close the numbers again
    for number, own in ((signal.SIGTERM, _wait_for_the_end), (signal.SIGINT, _raise_interrupt)):
        if signal.getsignal(number) is own:
            default = signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler
            signal.signal(number, default)


system.forget_in_child(_forget)


def _hear(pipe: system.Pipe, before: int) -> None:
    while True:
        pipe.wait()
        for number in pipe.read():
            if before != -1:  # the program's earlier wakeup descriptor
                with contextlib.suppress(OSError):
                    os.write(before, bytes([number]))
            _react(number)


def _react(number: int) -> None:
    if number == signal.SIGTERM and signal.getsignal(number) is _wait_for_the_end:
        shutdown.say("it got SIGTERM")
        _die_of(signal.SIGTERM)
    if number == signal.SIGINT and signal.getsignal(number) is _raise_interrupt:
        _interrupt()


def _interrupt() -> None:
    """End the process if the main thread does not raise KeyboardInterrupt in time.

    The main thread may be waiting for other workers, or for data, and then runs no handlers.
    """
    if not _interrupt_raised.wait(_TO_RAISE):
        _too_late.set()
        shutdown.say("it was interrupted (Ctrl-C)")
        _die_of(signal.SIGINT)
    _interrupt_raised.clear()


def _raise_interrupt(number: int, frame: Any) -> None:
    if _too_late.is_set():
        _wait_for_the_end(number, frame)
    _interrupt_raised.set()
    raise KeyboardInterrupt


def _wait_for_the_end(number: int, frame: Any) -> None:
    """Block the main thread until the program ends, so that its exchange raises no error."""
    time.sleep(shutdown.LINGER + _TO_END)


def _die_of(number: signal.Signals) -> NoReturn:
    """End this process by a signal, as a program without any handler ends."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    system.install(number, signal.SIG_DFL)  # works in any thread
    os.kill(os.getpid(), number)
    time.sleep(_TO_END)  # the signal ends the process meanwhile
    os._exit(128 + number)
