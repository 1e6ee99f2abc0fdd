"""Trainings that get SIGTERM, and are started again."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

import keras
import numpy as np
import pytest
from helpers import PATIENCE

import tfscale
from tfscale.callbacks import Preempted, Preemption, sigterm

EPOCHS, STEPS = 3, 4


class Signal(keras.callbacks.Callback):
    """Sends SIGTERM to this process, at a step or when the last epoch has ended."""

    def __init__(self, step=None):
        super().__init__()
        self.left = step

    def send(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)  # the main thread gets it, and has to wake up first

    def on_train_batch_end(self, batch, logs=None):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                self.send()

    def on_epoch_end(self, epoch, logs=None):
        if self.left is None and epoch == EPOCHS - 1:
            self.send()


class Fails(keras.callbacks.Callback):
    def __init__(self, told):
        super().__init__()
        self.told = told

    def on_train_batch_end(self, batch, logs=None):
        if self.told:
            os.kill(os.getpid(), signal.SIGTERM)
        raise KeyError("no such row")


def train(scope, folder, *others, steps_per_execution=1, preemption=None, **settings):
    """The epochs that were trained and the state at the end; None if it was preempted."""
    keras.utils.set_random_seed(1)
    with scope.scope() if scope else threading.Lock():
        model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", steps_per_execution=steps_per_execution)
    x = np.random.default_rng(0).standard_normal((8 * STEPS, 4), np.float32)
    callbacks = [*others, preemption or Preemption(str(folder), **settings)]
    how = {"batch_size": 8, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    try:
        history = model.fit(x, x.sum(1, keepdims=True), callbacks=callbacks, **how)
    except Preempted:
        return None
    return history.epoch, [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


def assert_same(some, others):
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return train(None, tmp_path_factory.mktemp("whole"))[1]


@pytest.fixture
def spared():
    """List the SIGTERMs that arrive outside of ``fit``."""
    heard = []
    before = signal.signal(signal.SIGTERM, lambda *_: heard.append(True))
    yield heard
    signal.signal(signal.SIGTERM, before)


def in_a_thread(body):
    """Run a function in a thread, and return its result."""
    returned = []
    thread = threading.Thread(target=lambda: returned.append(body()))
    thread.start()
    thread.join()
    return returned[0]


def test_two_devices_of_one_host(tmp_path, spared):
    strategy = tfscale.ScaleStrategy("ring", devices=["CPU:0", "CPU:1"])
    whole = train(strategy, tmp_path / "whole")
    assert train(strategy, tmp_path / "backup", Signal(step=STEPS - 1), check_every=1) is None
    epochs, found = train(strategy, tmp_path / "backup")
    # The epoch begins again, for the save was before its end.
    assert epochs == [0, 1, 2] and len(found) == len(whole[1])
    iterations = found[4]
    assert iterations == (EPOCHS + 1) * STEPS - 1
    assert not spared


@pytest.mark.one_in(2)
@pytest.mark.parametrize("steps_per_execution", [1, 3])
def test_a_signal_in_the_last_step_of_an_epoch_trains_none_twice(
    tmp_path, uninterrupted, spared, steps_per_execution
):
    settings = {"steps_per_execution": steps_per_execution, "check_every": 1}
    assert train(None, tmp_path, Signal(step=-(-STEPS // steps_per_execution)), **settings) is None
    epochs, found = train(None, tmp_path)
    assert epochs == [1, 2]
    assert_same(found, uninterrupted)


def test_a_thread_that_is_not_the_main_one(tmp_path, uninterrupted, spared):
    def body():
        told = train(None, tmp_path, Signal(step=STEPS), check_every=10**6)
        return told, train(None, tmp_path)

    told, (epochs, found) = in_a_thread(body)
    assert told is None
    assert epochs == [1, 2]
    assert_same(found, uninterrupted)
    assert not spared


def test_a_signal_after_the_last_step_is_not_lost(tmp_path, uninterrupted, spared):
    """Send the signal at the end of the last epoch, after the callback has looked."""

    class Late(Signal):
        def on_epoch_end(self, epoch, logs=None):
            pass

        def on_train_end(self, logs=None):
            self.send()

    assert train(None, tmp_path, Late(), check_every=10**6) is None
    epochs, found = train(None, tmp_path)
    assert epochs == [] and not spared
    assert_same(found, uninterrupted)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("save_freq", ["epoch", 10**6])
def test_the_end_of_an_epoch_is_looked_at(tmp_path, uninterrupted, save_freq, spared):
    assert train(None, tmp_path, Signal(), check_every=10**6, save_freq=save_freq) is None
    epochs, found = train(None, tmp_path)
    assert epochs == [] and not spared
    assert_same(found, uninterrupted)


def test_a_training_that_was_stopped_early_stays_stopped(tmp_path, spared):
    class Stop(Signal):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = True

        def on_train_end(self, logs=None):
            self.send()

    assert train(None, tmp_path, Stop(), check_every=10**6) is None
    assert train(None, tmp_path)[0] == []


def test_after_fit_the_signal_does_what_it_did_before(tmp_path, spared):
    train(None, tmp_path)
    os.kill(os.getpid(), signal.SIGTERM)
    assert spared == [True]


MANY_SIGNALS = """
import os, sys, threading
from tfscale.callbacks.sigterm import Sigterm

def deep(n):
    return deep(n - 1) if n else [shallow(i) for i in range(3)]

def shallow(i):
    return sum(k * i for k in range(5))

def work():
    while not ended:
        deep(15)

ended = False
sigterm = Sigterm(None)
workers = [threading.Thread(target=work) for _ in range(2)]
for thread in workers:
    thread.start()
sender = f"import os, time; [(os.kill({os.getpid()}, 15), time.sleep(0.0005)) for _ in range(2000)]"
os.spawnl(os.P_WAIT, sys.executable, sys.executable, "-c", sender)
ended = True
for thread in workers:
    thread.join()
assert sigterm.heard
"""


@pytest.mark.slow
def test_the_signal_may_come_while_other_threads_run():
    done = subprocess.run([sys.executable, "-c", MANY_SIGNALS], timeout=PATIENCE, check=False)
    assert done.returncode == 0


SIGNALS_FOR_A_THREAD = """
import os, subprocess, sys, threading
from tfscale.callbacks.sigterm import Sigterm

def deep(n):
    return deep(n - 1) if n else sorted(numbers(), key=lambda x: -x)

def numbers():
    yield from range(5)

made = []
thread = threading.Thread(target=lambda: made.append(Sigterm(None)))
thread.start()
thread.join()
sender = f"import os, time; [(os.kill({os.getpid()}, 15), time.sleep(0.0002)) for _ in range(5000)]"
with subprocess.Popen([sys.executable, "-c", sender]) as process:
    while process.poll() is None:
        deep(15)
assert made[0].heard
"""


@pytest.mark.full
def test_the_signal_of_a_training_in_a_thread_may_interrupt_the_main_one_anywhere():
    done = subprocess.run(
        [sys.executable, "-c", SIGNALS_FOR_A_THREAD], timeout=PATIENCE, check=False
    )
    assert done.returncode == 0


def test_the_signal_may_come_while_the_main_thread_cannot_take_it(tmp_path, spared):
    """glibc blocks signals while it starts a thread; the system then interrupts another one."""

    class Blocked(Signal):
        def send(self):
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            super().send()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    assert train(None, tmp_path, Blocked(step=1), check_every=1) is None
    assert not spared


@pytest.mark.one_in(2)
@pytest.mark.parametrize("where", [in_a_thread, lambda body: body()], ids=["thread", "main"])
def test_a_training_within_another_leaves_it_the_signal(tmp_path, spared, where):
    class Probe(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            train(None, tmp_path / f"probe{epoch}")

    def both():
        return train(None, tmp_path / "whole", Probe(), Signal(step=STEPS + 1), check_every=1)

    assert where(both) is None
    assert not spared


@pytest.mark.slow
def test_a_training_after_one_that_raised_gives_the_signal_back(tmp_path, spared):
    with pytest.raises(KeyError):
        train(None, tmp_path / "failed", Fails(told=False))
    train(None, tmp_path / "well")
    os.kill(os.getpid(), signal.SIGTERM)
    assert spared == [True]


def failed_before(folder):
    """Train again with the callback of a fit that failed, as a notebook's cell does."""
    preemption = Preemption(str(folder), check_every=1)
    with pytest.raises(KeyError):
        train(None, folder, Fails(told=False), preemption=preemption)
    return train(None, folder, Signal(step=2), preemption=preemption)


def failed_within(folder):
    class Probe(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            with pytest.raises(KeyError):
                train(None, folder / "probe", Fails(told=False))

    return train(None, folder / "whole", Probe(), Signal(step=2), check_every=1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("run", [failed_before, failed_within])
def test_a_signal_that_was_heeded_is_not_sent_again(tmp_path, spared, run):
    assert run(tmp_path) is None
    end = time.monotonic() + PATIENCE
    while sigterm._process._trainings and time.monotonic() < end:
        time.sleep(0.01)
    assert not sigterm._process._trainings
    assert not spared
    os.kill(os.getpid(), signal.SIGTERM)
    assert spared == [True]


def handler_of_c():
    action = ctypes.create_string_buffer(1024)
    ctypes.CDLL(None).sigaction(signal.SIGTERM, None, action)
    return action.raw[:8]


def test_a_handler_that_python_does_not_know_is_there_again_after_fit(tmp_path, spared):
    """TensorFlow installs such a handler in a program with several workers."""
    ctypes.CDLL(None).signal(signal.SIGTERM, 1)  # to ignore it
    before = handler_of_c()
    train(None, tmp_path)
    assert handler_of_c() == before


DATA_FROM_PROCESSES = """
import sys, tempfile, threading
import keras, numpy as np, tfscale

class Data(keras.utils.PyDataset):
    def __len__(self):
        return 4

    def __getitem__(self, step):
        return np.ones([8, 4], "float32"), np.ones([8, 1], "float32")

def main():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with tempfile.TemporaryDirectory() as folder:
        callbacks = [tfscale.callbacks.Preemption(folder)]
        data = Data(workers=2, use_multiprocessing=True)
        print(model.fit(data, epochs=3, verbose=0, callbacks=callbacks).epoch)

if "thread" in sys.argv:
    thread = threading.Thread(target=main)
    thread.start()
    thread.join()
else:
    main()
"""


@pytest.mark.full
@pytest.mark.parametrize("where", ["main", "thread"])
def test_processes_that_load_data_end_and_are_not_the_training(where):
    """Keras ends them by SIGTERM after each epoch."""
    words = [sys.executable, "-c", DATA_FROM_PROCESSES, where]
    done = subprocess.run(words, timeout=PATIENCE, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, "[0, 1, 2]"), done.stderr


def test_an_interval_is_a_number_of_steps():
    with pytest.raises(ValueError, match="check_every is a number of steps, 1 or more; got 0"):
        Preemption("folder", check_every=0)


@pytest.mark.parametrize("told", [False, True])
def test_after_a_fit_that_raised_the_signal_is_for_whoever_took_it_before(tmp_path, spared, told):
    """The signal comes after the error, or nobody handled it before."""
    with pytest.raises(KeyError):
        train(None, tmp_path, Fails(told))
    if not told:
        os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + PATIENCE
    while not spared and time.monotonic() < end:
        time.sleep(0.01)
    assert spared == [True]
