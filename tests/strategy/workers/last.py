"""The last words of workers that fail, for tests that look for them; and how a test ends one."""

import atexit
import contextlib
import os
import signal
import time

import keras


def event():
    print(f"\nEVENT {time.time()}", flush=True)


class Kill(keras.callbacks.Callback):
    """End this worker before its third step."""

    def on_train_batch_begin(self, batch, logs=None):
        if batch == 2:
            event()
            os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def words():
    """Print ERROR with what an error says, and stay until the test ends the process.

    Nobody shall miss this worker, too, unless its program ends by itself.
    """
    try:
        yield
    except BaseException as error:
        said = " ".join(str(error).split())
        print(f"\nERROR {time.time()} {type(error).__name__} {said}", flush=True)
        if not isinstance(error, SystemExit):
            atexit.register(time.sleep, 600)
        raise
