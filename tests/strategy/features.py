"""Checks of what else Keras does with a model, for any layout.

A check is a function of a strategy and of a folder, which every worker has for itself.
"""

from __future__ import annotations

import re
import time
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.strategy import all_metrics
from tests.strategy.models import ADAM, BATCH, classifier, numbers, own_metrics
from tfscale.sync import LocalSGD


def fresh(strategy, seed=1, ema=False, **how):
    keras.utils.set_random_seed(seed)
    with strategy.scope():
        return classifier(partial(ADAM, use_ema=ema), **how)()


def fit(model, epochs=2, **settings):
    x, y = numbers()
    how = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    return model.fit(x, y, epochs=epochs, **how, **settings)


def bits(model):
    return [w.tobytes() for w in model.get_weights()]


def predictions(model):
    return model.predict(numbers(37)[0], batch_size=BATCH, verbose=0)


def save_and_load(strategy, folder):
    """A file can be read without a strategy, and trained on in one."""
    model = fresh(strategy)
    fit(model)
    model.save(folder / "model.keras")
    alone = keras.models.load_model(folder / "model.keras")
    assert bits(alone) == bits(model)
    np.testing.assert_allclose(predictions(alone), predictions(model), atol=1e-6)
    with strategy.scope():
        again = keras.models.load_model(folder / "model.keras")
    fit(model)
    fit(again)
    assert bits(again) == bits(model)


def load_what_one_device_saved(strategy, folder):
    alone = classifier(ADAM)()
    fit(alone)
    alone.save(folder / "model.keras")
    with strategy.scope():
        model = keras.models.load_model(folder / "model.keras")
    assert bits(model) == bits(alone)
    fit(alone)
    fit(model)
    for mine, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)


def save_and_load_weights(strategy, folder):
    model, other = fresh(strategy), fresh(strategy, seed=2)
    fit(model)
    model.save_weights(folder / "model.weights.h5")
    assert bits(other) != bits(model)
    other.load_weights(folder / "model.weights.h5")
    assert bits(other) == bits(model)
    np.testing.assert_array_equal(predictions(other), predictions(model))


def export(strategy, folder):
    model = fresh(strategy)
    fit(model)
    model.export(folder / "exported", verbose=False)
    x = numbers(37)[0]
    loaded = tf.saved_model.load(str(folder / "exported"))
    np.testing.assert_allclose(loaded.serve(x), predictions(model), atol=1e-6)


def model_checkpoint(strategy, folder):
    model = fresh(strategy)
    whole, weights = folder / "epoch-{epoch}.keras", folder / "last.weights.h5"
    saver = keras.callbacks.ModelCheckpoint
    fit(model, callbacks=[saver(whole), saver(weights, save_weights_only=True)])
    other = fresh(strategy, seed=2)
    if not is_first(strategy):
        assert not list(folder.iterdir())  # the first worker alone writes
        return
    assert bits(keras.models.load_model(folder / "epoch-2.keras")) == bits(model)
    assert bits(keras.models.load_model(folder / "epoch-1.keras")) != bits(model)
    other.load_weights(weights)
    assert bits(other) == bits(model)


class StopBefore(keras.callbacks.Callback):
    def __init__(self, epoch):
        super().__init__()
        self._epoch = epoch

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self._epoch:
            raise InterruptedError


def backup_and_restore(strategy, folder):
    """Interrupted and taken up again is the same, bit for bit, as never interrupted."""
    backup = keras.callbacks.BackupAndRestore(folder / "backup", delete_checkpoint=False)
    with pytest.raises(InterruptedError):
        fit(fresh(strategy), 4, callbacks=[backup, StopBefore(2)])
    resumed, whole = fresh(strategy, seed=2), fresh(strategy)
    history = fit(resumed, 4, callbacks=[keras.callbacks.BackupAndRestore(folder / "backup")])
    fit(whole, 4)
    assert history.epoch == [2, 3]
    assert bits(resumed) == bits(whole)


class Remember(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.weights = []

    def on_epoch_end(self, epoch, logs=None):
        self.weights.append(bits(self.model))


def early_stopping(strategy, folder):
    """Labels that are not those of training get worse with every epoch."""
    x, y = numbers(37)
    model, remember = fresh(strategy), Remember()
    stop = keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True)
    history = fit(model, 9, validation_data=(x, (y + 1) % 3), callbacks=[remember, stop]).history
    best = int(np.argmin(history["val_loss"]))
    assert len(history["val_loss"]) == best + 3 < 9
    assert bits(model) == remember.weights[best]


def is_first(strategy):
    return strategy.extended.first_rank == 0


def written(folder):
    """Files, without what is different in each run."""
    found = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    return {re.sub(r"out\.tfevents.*|profile/.*", "*", str(path)) for path in found}


class Mirrored(keras.callbacks.TensorBoard):
    """A class of the user's own."""

    def on_epoch_end(self, epoch, logs=None):
        super().on_epoch_end(epoch, {**logs, "twice": 2 * logs["loss"]})


def only_the_first_worker_writes(strategy, folder):
    """Keras's callbacks write on the first worker only, to files and to servers."""
    pytest.importorskip("tensorboard")
    kinds, posted = keras.callbacks, []
    written_by = {
        kinds.TensorBoard(
            folder / "all", histogram_freq=1, write_images=True, update_freq=1,
            profile_batch=(2, 3), embeddings_freq=1,
        ): {
            "all/projector_config.pbtxt", "all/train/events.*", "all/train/plugins/*",
            "all/validation/events.*", "all/train/keras_embedding.ckpt-0.weights.h5",
        },
        Mirrored(folder / "own"): {"own/train/events.*", "own/validation/events.*"},
        kinds.CSVLogger(folder / "log.csv"): {"log.csv"},
        kinds.CSVLogger(folder / "more.csv", append=True): {"more.csv"},
        kinds.ModelCheckpoint(folder / "model.keras"): {"model.keras"},
        kinds.ModelCheckpoint(folder / "model.h5"): {"model.h5"},
        kinds.BackupAndRestore(folder / "backup", delete_checkpoint=False): {
            "backup/latest.weights.h5", "backup/training_metadata.json"
        },
        kinds.RemoteMonitor("http://nowhere", send_as_json=True): set(),
        kinds.SwapEMAWeights(): set(),
        kinds.LambdaCallback(on_epoch_end=lambda epoch, logs: None): set(),
    }  # fmt: skip
    model = fresh(strategy, ema=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("requests.post", lambda url, **sent: posted.append(sent["json"]["loss"]))
        history = fit(model, 1, callbacks=list(written_by), validation_data=numbers(37)).history
    expected = set.union(*written_by.values()) if is_first(strategy) else set()
    assert written(folder) == expected
    assert posted == (history["loss"] if is_first(strategy) else [])


def only_the_first_worker_writes_what_a_list_holds(strategy, folder):
    """Some callbacks write when they get their model, long before ``fit``."""
    pytest.importorskip("tensorboard")
    model, board = fresh(strategy), keras.callbacks.TensorBoard
    both = [board(folder / "fit"), keras.callbacks.CSVLogger(folder / "log.csv")]
    fit(model, 1, callbacks=keras.callbacks.CallbackList(both, add_history=True, model=model))
    model.evaluate(*numbers(37), callbacks=[board(folder / "evaluate")], verbose=0)
    model.predict(numbers(37)[0], callbacks=[board(folder / "predict")], verbose=0)
    expected = {"log.csv", "fit/train/events.*", "evaluate/validation/events.*"}
    expected |= {"evaluate/train/events.*", "predict/train/events.*"}
    assert written(folder) == (expected if is_first(strategy) else set())


def tensorboard(strategy, folder):
    pytest.importorskip("tensorboard")
    history = fit(fresh(strategy), callbacks=[keras.callbacks.TensorBoard(folder)]).history
    logged = []
    for path in folder.glob("train/*tfevents*"):
        for event in tf.compat.v1.train.summary_iterator(str(path)):
            values = [v for v in event.summary.value if v.tag == "epoch_loss"]
            logged += [float(tf.make_ndarray(value.tensor)) for value in values]
    expected = history["loss"] if is_first(strategy) else []
    np.testing.assert_allclose(logged, expected, rtol=1e-6)


def tensorboard_in_rounds(strategy, folder):
    """Replicas differ, and all workers gather what the first one saves."""
    pytest.importorskip("tensorboard")
    rounds = type(strategy)("ring", sync=LocalSGD(every=3), deadline=20)
    board = keras.callbacks.TensorBoard(folder, histogram_freq=1, embeddings_freq=1)
    fit(fresh(rounds), 1, callbacks=[board])  # of 10 steps: the fourth round has begun


def predict_keeps_the_order(strategy, folder):
    with strategy.scope():
        inputs = keras.Input([1])
        model = keras.Model(inputs, layers.Identity()(inputs))
    for rows in (1, 3, 16, 37, 64):
        x = np.arange(rows, dtype=np.float32)[:, None]
        for data in (
            {"x": x, "batch_size": 16},
            {"x": tf.data.Dataset.from_tensor_slices(x).batch(16)},
        ):
            np.testing.assert_array_equal(model.predict(**data, verbose=0), x)


def metrics_of_all_kinds(strategy, folder):
    """Give ``compile``, in the scope, metrics that were made before it."""
    _measures_the_same(strategy, "weighted_metrics", made_in_scope=False)


def metrics_of_the_scope(strategy, folder):
    _measures_the_same(strategy, "metrics", made_in_scope=True)


def _measures_the_same(strategy, how, made_in_scope):
    expected = all_metrics.seen(tf.distribute.get_strategy(), how, made_in_scope)
    found = all_metrics.seen(strategy, how, made_in_scope)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, 1e-5, 1e-6, err_msg=name)


class AllKinds(keras.Model):
    """Predicts tensors of each kind that TensorFlow has; the number of values differs by row."""

    def call(self, x):
        number = tf.cast(x[:, 0], tf.int32)
        name = tf.where(number % 3 == 0, "", tf.strings.join([tf.strings.as_string(number), "é\0"]))
        several = tf.ragged.range(number % 4)
        return {
            "numbers": x,
            "flags": x > 20,
            "waves": tf.complex(x, -x),
            "names": tf.stack([name, tf.strings.upper(name)], 1),
            "several": several,
            "several_names": tf.strings.as_string(several),
            "spread": tf.sparse.from_dense(tf.where(number[:, None] % 4 > 1, x, 0.0)),
        }


def values(output):
    if isinstance(output, tf.SparseTensor):
        output = tf.sparse.to_dense(output)
    return output.to_list() if isinstance(output, tf.RaggedTensor) else np.array(output).tolist()


def predict_joins_tensors_of_each_kind(strategy, folder):
    for rows, how in ((37, {}), (9, {}), (1, {}), (37, {"run_eagerly": True})):
        x = np.arange(2.0 * rows, dtype=np.float32).reshape(rows, 2)
        alone = AllKinds()
        with strategy.scope():
            model = AllKinds()
        found = [None, None]
        for place, one in enumerate((alone, model)):
            one.compile(**how)
            predicted = one.predict(x, batch_size=8, verbose=0)
            found[place] = {name: values(output) for name, output in predicted.items()}
        assert found[0] == found[1], (rows, how)


def own_loop(strategy, folder):
    """Train as TensorFlow's guide does: sum the replicas' losses, divided by the global batch."""

    def train(strategy):
        model = fresh(strategy)
        data = tf.data.Dataset.from_tensor_slices(numbers(5 * BATCH)).batch(BATCH)

        def step(x, y):
            with tf.GradientTape() as tape:
                losses = keras.losses.sparse_categorical_crossentropy(
                    y, model(x, training=True), from_logits=True
                )
                loss = tf.nn.compute_average_loss(losses, global_batch_size=BATCH)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss

        @tf.function
        def distributed_step(batch):
            return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

        seen = [distributed_step(b) for b in strategy.experimental_distribute_dataset(data)]
        return np.array(seen), model

    (losses, model), (expected, alone) = train(strategy), train(tf.distribute.get_strategy())
    np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
    for mine, one in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, one, rtol=0, atol=1e-6)


def gather_and_reduce(strategy, folder):
    replicas = strategy.num_replicas_in_sync

    def mine():
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        return tf.fill([number + 1, 2], tf.cast(number, tf.float32))

    rows = strategy.run(tf.function(mine))
    expected = np.concatenate([np.full([r + 1, 2], r) for r in range(replicas)])
    np.testing.assert_array_equal(strategy.gather(rows, axis=0), expected)

    sums = strategy.run(tf.function(lambda: tf.reduce_sum(mine())))
    assert strategy.reduce("SUM", sums, axis=None) == expected.sum()
    assert strategy.reduce("MEAN", sums, axis=None) == expected.sum() / replicas


def numbers_of_python(strategy, folder):
    """Read numbers as callbacks read a learning rate, and loops a count."""
    model = fresh(strategy)
    fit(model, epochs=1)
    assert float(model.optimizer.learning_rate) == np.float32(0.01)
    assert int(model.optimizer.iterations) == 10


def what_metrics_return_is_a_number(strategy, folder):
    """A result may be the metric's own variable, which goes on counting; it is a number, too."""
    with strategy.scope():
        model = own_metrics()
    told = fit(model, validation_data=numbers(37)).history
    assert {type(value) for values in told.values() for value in values} == {float}
    assert np.array(model.metrics[1].metrics[0].hits.value).shape == ()


def a_second_strategy(strategy, folder):
    """A worker may ask for it long before another one makes it."""
    if strategy.extended.first_rank == 0:
        time.sleep(2)
    another = type(strategy)("ring")
    total = another.reduce("SUM", another.run(lambda: tf.constant(1.0)), axis=None)
    assert total == another.num_replicas_in_sync == strategy.num_replicas_in_sync


def jit_is_refused(strategy, folder):
    model = fresh(strategy, jit_compile=True)
    with pytest.raises(Exception, match='Use jit_compile="auto"'):
        fit(model, 1)


CHECKS = {
    check.__name__: check
    for check in (
        save_and_load,
        load_what_one_device_saved,
        save_and_load_weights,
        export,
        model_checkpoint,
        backup_and_restore,
        early_stopping,
        only_the_first_worker_writes,
        only_the_first_worker_writes_what_a_list_holds,
        tensorboard,
        tensorboard_in_rounds,
        metrics_of_all_kinds,
        metrics_of_the_scope,
        predict_keeps_the_order,
        predict_joins_tensors_of_each_kind,
        own_loop,
        gather_and_reduce,
        numbers_of_python,
        what_metrics_return_is_a_number,
        a_second_strategy,
        jit_is_refused,
    )
}
