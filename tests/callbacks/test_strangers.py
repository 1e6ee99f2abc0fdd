"""Callbacks in programs of kinds that few have: other data, other optimizers, other callbacks."""

import json

import keras
import numpy as np
import pytest
import tensorflow as tf

import tfscale
from tfscale import schedules

X = np.random.default_rng(0).standard_normal((32, 3)).astype("float32")
Y = X[:, :1]


def compiled():
    model = keras.Sequential([keras.Input([3]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


class OwnOptimizer(keras.Model):
    """A model as the GANs of keras.io: the compiled optimizer makes no updates."""

    def __init__(self, uses_it=True):
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.uses_it = uses_it

    def compile(self, own):
        super().compile()
        self.own = own

    def call(self, x):
        return self.dense(x)

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x) - y))
        gradients = tape.gradient(loss, self.trainable_variables)
        optimizer = self.own if self.uses_it else self.optimizer
        optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss}


def own(uses_it=True):
    model = OwnOptimizer(uses_it)
    model.compile(keras.optimizers.SGD(0.01))
    model(X)
    return model


@pytest.mark.parametrize("uses_it", [True, False])
def test_warmup_sets_the_rate_of_what_trains(uses_it):
    model, warmup = own(uses_it), tfscale.callbacks.Warmup(schedules.Constant(0.5, warmup=4))
    if uses_it:
        with pytest.raises(RuntimeError, match="trains with optimizers of its own, such as SGD"):
            model.fit(X, Y, batch_size=4, verbose=0, callbacks=[warmup])
    else:
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[warmup])
        assert float(model.optimizer.learning_rate) == 0.5


def test_an_own_optimizer_counts_batches():
    growth = tfscale.callbacks.BatchGrowth({0: 4, 5: 8})
    data = growth.batches(tf.data.Dataset.from_tensor_slices((X, Y)))
    history = own().fit(data, epochs=3, steps_per_epoch=5, verbose=0, callbacks=[growth]).history
    assert history["batch_size"] == [4, 8, 8]


class Data(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return X[:4], Y[:4]


def test_telemetry_of_a_pydataset():
    telemetry = tfscale.callbacks.Telemetry()
    compiled().fit(Data(), verbose=0, callbacks=[telemetry])
    assert "steps" in telemetry.summary()


class Interrupt(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:
            raise InterruptedError


@pytest.mark.parametrize("backup_is_first", [True, False])
def test_a_resumed_training_goes_on_in_the_files(tmp_path, backup_is_first):
    def fit(file, *more):
        measured = tfscale.callbacks.Curvature(X, Y, samples=2, jsonl=tmp_path / "curvature")
        others = [measured, tfscale.callbacks.Telemetry(tmp_path / file)]
        backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
        listed = [backup, *others] if backup_is_first else [*others, backup]
        compiled().fit(X, Y, batch_size=8, epochs=4, verbose=0, callbacks=[*listed, *more])

    with pytest.raises(InterruptedError):
        fit("first", Interrupt())
    fit("second")
    lines = (tmp_path / "curvature").read_text().splitlines()
    assert sum(json.loads(line)["kind"] == "curvature" for line in lines) == 4
    assert json.loads((tmp_path / "second").read_text().splitlines()[0])["step"] == 8


def points(folder):
    files = [str(file) for file in folder.iterdir()]
    events = map(tf.compat.v1.Event.FromString, tf.data.TFRecordDataset(files).as_numpy_iterator())
    return sum(len(event.summary.value) for event in events)


def test_tensorboard_of_keras_leaves_out_its_own_steps_alone(tmp_path):
    found = []
    for frequency in ("epoch", 100):
        folder = tmp_path / str(frequency)
        both = [
            tfscale.callbacks.Curvature(X, Y, samples=2, tensorboard=folder / "curvature"),
            keras.callbacks.TensorBoard(str(folder / "keras"), update_freq=frequency),
        ]
        compiled().fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=both)
        found.append(points(folder / "curvature"))
    assert found[0] == found[1] > 0


@pytest.mark.parametrize("ours", [False, True])
def test_a_list_of_callbacks_without_parameters(tmp_path, ours):
    scope = tfscale.ScaleStrategy() if ours else tf.distribute.get_strategy()
    with scope.scope():
        model = compiled()
    made = [
        keras.callbacks.BackupAndRestore(str(tmp_path / "backup")),
        tfscale.callbacks.Warmup(steps=3),
    ]
    listed = keras.callbacks.CallbackList(made, add_history=True, model=model)
    model.fit(X, Y, batch_size=8, verbose=0, callbacks=listed)
    assert int(model.optimizer.iterations) == 4


def test_a_number_that_is_measured_later_has_a_column(tmp_path):
    both = [
        tfscale.callbacks.Curvature(X, Y, every=6, what=("top",)),
        keras.callbacks.CSVLogger(str(tmp_path / "log")),
    ]
    history = compiled().fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=both).history
    assert "curvature_top" in (tmp_path / "log").read_text()
    assert [bool(np.isnan(x)) for x in history["curvature_top"]] == [True, False]


def test_a_loop_of_a_users_own_without_epochs_has_its_measurements_in_a_file(tmp_path):
    measured = tfscale.callbacks.Curvature(X, Y, every=2, what=("top",), jsonl=tmp_path / "lines")
    model = compiled()
    listed = keras.callbacks.CallbackList([measured], model=model)
    listed.on_train_begin()
    for batch in range(4):
        listed.on_train_batch_begin(batch)
        model.train_on_batch(X, Y)
        listed.on_train_batch_end(batch)
    listed.on_train_end()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "lines").read_text().splitlines()]
    assert kinds == ["start", "curvature", "curvature"]
