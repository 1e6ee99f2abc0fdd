"""Backups of a training on one device or two, by Keras's own callback, and what is sent of them."""

import json
import logging
import os

import keras
import numpy as np
import pytest

from tfscale import ScaleStrategy
from tfscale.strategy.workers import backup

EPOCHS, STEPS = 3, 2


class Stop(keras.callbacks.Callback):
    """Ends a training with the first step after some epochs, or after some steps."""

    def __init__(self, epochs=0, steps=0):
        super().__init__()
        self.left = epochs * STEPS + steps

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if self.left < 0:
            raise InterruptedError


def data():
    x = np.random.default_rng(0).standard_normal((16 * STEPS, 4), np.float32)
    return x, x.sum(1, keepdims=True)


def made(strategy):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input([4]), keras.layers.Dense(4), keras.layers.Dropout(0.3),
             keras.layers.Dense(1)]
        )  # fmt: skip
        model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def train(strategy, folder, *others, epochs=EPOCHS, **settings):
    model = made(strategy)
    callback = keras.callbacks.BackupAndRestore(str(folder), **settings)
    how = {"batch_size": 16, "shuffle": False, "verbose": 0, "validation_data": data()}
    try:
        history = model.fit(*data(), epochs=epochs, callbacks=[callback, *others], **how)
    except InterruptedError:
        return None
    return state(model), history.epoch, callback


def state(model):
    return [np.asarray(v.numpy()) for v in [*model.weights, *model.optimizer.variables]]


def assert_same(some, others):
    assert len(some) == len(others)
    for one, other in zip(some, others, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.fixture(scope="module")
def strategy():
    return ScaleStrategy("ring", devices=["CPU:0"])


@pytest.fixture(scope="module")
def uninterrupted(strategy, tmp_path_factory):
    return train(strategy, tmp_path_factory.mktemp("backup") / "whole")[0]


@pytest.mark.slow
def test_an_interrupted_training_ends_as_one_that_was_not(tmp_path):
    """Train on two devices, with a wire whose residuals come later."""
    strategy = ScaleStrategy("ring", wire="ternary", devices=["CPU:0", "CPU:1"])
    whole, _, _ = train(strategy, tmp_path / "whole")
    folder = tmp_path / "backup"
    train(strategy, folder, Stop(1))
    found, epochs, callback = train(strategy, folder)
    assert_same(found, whole)
    assert epochs == [1, 2]
    assert isinstance(callback, keras.callbacks.BackupAndRestore)
    assert not folder.exists()


def test_the_backup_before_is_taken_for_one_that_is_damaged(
    strategy, uninterrupted, tmp_path, caplog
):
    train(strategy, tmp_path, Stop(2), double_checkpoint=True)
    last = tmp_path / "latest.weights.h5"
    content = bytearray(last.read_bytes())
    content[len(content) // 2] ^= 1
    last.write_bytes(content)
    with caplog.at_level(logging.WARNING, "tfscale"):
        found, epochs, _ = train(strategy, tmp_path, double_checkpoint=True)
    assert_same(found, uninterrupted)
    assert epochs == [1, 2]
    assert "latest.weights.h5 cannot be restored" in caplog.text


def test_nothing_is_restored_from_a_folder_without_a_whole_backup(strategy, tmp_path):
    train(strategy, tmp_path, Stop(1))
    os.truncate(tmp_path / "latest.weights.h5", 2000)
    with pytest.raises(
        ValueError, match="(?s)No backup in .* can be restored: .*Copy an undamaged one"
    ):
        train(strategy, tmp_path)


def test_a_backup_that_keras_wrote_is_taken_and_told_of(strategy, uninterrupted, tmp_path, caplog):
    """Keras's two files say the same as ours, but may not belong together."""
    train(strategy, tmp_path, Stop(1))
    last = tmp_path / "latest.weights.h5"
    content = last.read_bytes()
    assert json.loads((tmp_path / "training_metadata.json").read_text())["epoch"] == 1
    last.write_bytes(content[: content.rindex(b'{"epoch"')])
    with caplog.at_level(logging.WARNING, "tfscale"):
        found, epochs, _ = train(strategy, tmp_path)
    assert_same(found, uninterrupted)
    assert epochs == [1, 2]
    assert "was written by Keras alone" in caplog.text


def test_keras_reads_the_weights_of_a_backup(strategy, tmp_path):
    train(strategy, tmp_path, Stop(1))
    train(strategy, tmp_path, delete_checkpoint=False)
    plain = keras.Sequential(
        [keras.Input([4]), keras.layers.Dense(4), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
    )
    plain.compile(keras.optimizers.Adam(0.01), "mse")
    plain.load_weights(tmp_path / "latest.weights.h5")
    found, _, _ = train(strategy, tmp_path)
    assert_same([v.numpy() for v in plain.weights], found[: len(plain.weights)])


def test_the_epoch_is_right_when_an_epoch_is_interrupted_twice(strategy, tmp_path):
    """After a restart, saves in the first epoch are of that epoch; Keras calls it 0."""
    for steps in (STEPS, 0):
        train(strategy, tmp_path, Stop(steps=steps), save_freq=1)
        content = (tmp_path / "latest.weights.h5").read_bytes()
        end = content[content.rindex(b'{"epoch"') :]
        assert end.startswith(b'{"epoch": 1, "batch": 0}'), end[:40]


def test_a_later_fit_of_the_model_begins_at_its_beginning(strategy, tmp_path):
    train(strategy, tmp_path / "backup", Stop(1))
    model = made(strategy)
    backups = keras.callbacks.BackupAndRestore(tmp_path / "backup")
    model.fit(*data(), epochs=EPOCHS, callbacks=[backups], verbose=0)
    assert model.fit(*data(), epochs=1, verbose=0).epoch == [0]


class Uploaded(keras.callbacks.BackupAndRestore):
    """A class of the user's own, which does something after each save."""

    saves = 0

    def _save_model(self):
        super()._save_model()
        self.saves += 1


def test_what_a_users_class_adds_is_kept(strategy, tmp_path):
    callback = Uploaded(str(tmp_path), delete_checkpoint=False)
    made(strategy).fit(*data(), epochs=2, callbacks=[callback], verbose=0)
    assert callback.saves == 2
    assert b"sealed by tfscale" in (tmp_path / "latest.weights.h5").read_bytes()[-40:]


# ---- what a worker is sent


def head(**parts):
    return json.dumps(parts).encode().ljust(200, b"\0")


def test_the_size_and_the_moment_of_a_backup_are_sent():
    moment = {"epoch": 3, "batch": 0}
    assert backup._checked(head(bytes=8, moment=moment)) == (8, moment)
    assert backup._checked(head(bytes=0, moment=None)) == (0, None)


@pytest.mark.parametrize(
    "sent",
    [b"3", b"[]", b'"bytes"', head(bytes=3), head(bytes=-1, moment=None),
     head(bytes="3", moment=None), head(bytes=3, moment=3), head(bytes=3, moment={}),
     head(bytes=3, moment={"epoch": -1}), head(bytes=3, moment={"epoch": "1"})],
)  # fmt: skip
def test_what_is_no_backup_is_refused(sent):
    with pytest.raises(ValueError, match="the first worker sent no backup"):
        backup._checked(sent)
