"""Programs as strangers write them: each form of data, labels, weights, models and callbacks."""

import functools

import keras
import numpy as np
import pytest
import scipy.sparse
import tensorflow as tf

import tfscale
from tests.extreme.models import CLASSES, FULLY, QUICK, WIDTH, build, mach, samples
from tfscale.extreme import MACH, HashedFeatures, propensities
from tfscale.training.extreme.labels import Labels

X, Y = samples()
NAMES = [f"name {i}" for i in range(CLASSES)]
ONE = {"repetitions": 1}


def weights_of(made):
    return np.concatenate([w.ravel() for m in made.models.values() for w in m.get_weights()])


@pytest.fixture(scope="module")
def trained():
    """Four repetitions that have learned the task."""
    x, y = samples(2000)
    made = mach()
    made.fit(x, y, epochs=8, batch_size=50, verbose=0)
    return made


class Batches(keras.utils.PyDataset):
    """Batches of arrays."""

    ended = 0

    def __len__(self):
        return 6

    def __getitem__(self, index):
        rows = slice(100 * index, 100 * index + 100)
        return X[rows], Y[rows]

    def on_epoch_end(self):
        self.ended += 1


def batches():
    dataset = Batches()
    for index in range(len(dataset)):
        yield dataset[index]


def of_arrays():
    return {"x": X, "y": Y, "batch_size": 100, "shuffle": False}


@functools.cache
def trained_on_arrays():
    """The weights that one repetition has then."""
    made = mach(**ONE)
    made.fit(**of_arrays(), verbose=0)
    return weights_of(made)


FORMS = {
    "tf.data": lambda: {"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(100)},
    "PyDataset": lambda: {"x": Batches(), "shuffle": False},
    "generator": lambda: {"x": batches()},
}


def test_labels_are_numbers_of_any_kind():
    kinds = [Y[:, None], Y.astype("float32"), Y.tolist(), tf.constant(Y), Y.astype("uint16")]
    for y in [*kinds, Y.astype(object)]:
        assert np.array_equal(Labels(CLASSES, False).ids(y), Y)


def test_names_are_texts_or_the_bytes_that_tensorflow_makes_of_them():
    names = ["Größe", "b", "c"]
    texts = tf.constant(names * 2).numpy()
    assert texts.dtype == object
    for y in (texts, np.array(names * 2), [name.encode() for name in names * 2]):
        assert Labels(names, False).ids(y).numpy().tolist() == [0, 1, 2] * 2
    assert Labels(names, True).ids([[], []]).shape == (2, 0)


@pytest.mark.slow
def test_batches_may_be_empty():
    parts = [slice(0, 100), slice(100, 100), slice(100, 300)]
    kinds = tf.TensorSpec([None, WIDTH]), tf.TensorSpec([None], tf.int64)
    data = tf.data.Dataset.from_generator(
        lambda: ((X[part], Y[part]) for part in parts), output_signature=kinds
    )
    made = mach(**ONE)
    made.fit(data, verbose=0)
    assert np.isfinite(weights_of(made)).all()
    assert made.evaluate(data) == pytest.approx(made.evaluate(X[:300], Y[:300]))
    assert made.top(X[:0], 3)[1].shape == (0, 3)


@pytest.mark.slow
def test_a_label_that_is_given_twice_is_one():
    twice = np.stack([Y, Y], 1)
    made = mach(multilabel=True, **ONE)
    made.fit(X, twice, **QUICK)
    assert made.evaluate(X, twice) == made.evaluate(X, Y[:, None])


def test_each_form_of_data_gives_the_same_weights():
    assert not np.allclose(trained_on_arrays(), weights_of(_untrained()), atol=1e-3)
    for name, form in FORMS.items():
        made = mach(**ONE)
        made.fit(**form(), verbose=0)
        assert np.allclose(weights_of(made), trained_on_arrays(), atol=1e-6), name


def _untrained():
    made = mach(**ONE)
    made._ensemble.heads_of([0])
    return made


def test_names_are_labels():
    """Arrays and datasets of names train as numbers of the same classes do."""
    names = np.array(NAMES)[Y]
    dataset = tf.data.Dataset.from_tensor_slices((X, names)).batch(100)
    found = []
    for data in ({**of_arrays(), "y": list(names)}, {"x": dataset}):
        made = mach(NAMES, **ONE)
        made.fit(**data, verbose=0)
        found.append(weights_of(made))
    assert all(np.allclose(each, found[0], atol=1e-6) for each in found)
    _, labels = made.top(X[:5], 3)
    assert labels.shape == (5, 3) and set(labels.ravel()) <= set(NAMES)
    assert made.evaluate(X, names) == made.evaluate(dataset)


def test_sample_weights_and_class_weights_are_one_rule():
    """A weight of a class is the weight of each of its samples, in arrays and datasets."""
    weights = {int(c): 0.0 for c in range(0, CLASSES, 2)}
    of_samples = np.array([weights.get(int(label), 1.0) for label in Y], "float32")
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(100)
    given = [
        {**of_arrays(), "sample_weight": of_samples},
        {**of_arrays(), "class_weight": weights},
        {"x": dataset, "class_weight": weights},
    ]
    found = []
    for data in given:
        made = mach(**ONE)
        made.fit(**data, verbose=0)
        found.append(weights_of(made))
    assert not np.allclose(found[0], trained_on_arrays(), atol=1e-3)
    assert all(np.allclose(each, found[0], atol=1e-6) for each in found)


@pytest.mark.slow
def test_weights_are_the_same_rule_for_all_heads_of_one_trunk():
    """A weight of a sample, or of its class, counts in each repetition."""
    weights = {int(c): 0.0 for c in range(0, CLASSES, 2)}
    of_samples = np.array([weights.get(int(label), 1.0) for label in Y], "float32")
    dataset = tf.data.Dataset.from_tensor_slices((X, Y)).batch(100)
    found = []
    for data in (
        {**of_arrays(), "sample_weight": of_samples},
        {"x": dataset, "class_weight": weights},
    ):
        made = mach(repetitions=3, shared_trunk=True)
        made.fit(**data, validation_data=(X, Y, of_samples), verbose=0)
        found.append(weights_of(made))
    assert np.allclose(*found, atol=1e-6)
    kept = of_samples > 0
    assert 0 < kept.mean() < 1
    plain = mach(repetitions=3, shared_trunk=True)
    plain.fit(X, Y, batch_size=100, shuffle=False, verbose=0)
    assert not np.allclose(found[0], weights_of(plain), atol=1e-3)
    several = mach(repetitions=3, shared_trunk=True, multilabel=True)
    several.fit(X, Y[:, None], sample_weight=of_samples, **QUICK)


@pytest.mark.slow
def test_a_dataset_that_does_not_say_the_shape_of_labels():
    kinds = tf.TensorSpec([None, WIDTH]), tf.TensorSpec(None, tf.int64)
    for column in (Y, Y[:, None]):
        data = tf.data.Dataset.from_generator(
            lambda y=column: ((X[i : i + 100], y[i : i + 100]) for i in range(0, 600, 100)),
            output_signature=kinds,
        )
        made = mach(**ONE)
        made.fit(data, verbose=0)
        assert np.allclose(weights_of(made), trained_on_arrays(), atol=1e-6)


class Scored(keras.Model):
    """A model with a step of its own."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"loss": loss, "own": loss * 0}


def scored(ending=()):
    def made(outputs):
        inputs = keras.Input([WIDTH])
        logits = keras.layers.Dense(outputs)(inputs)
        for layer in ending:
            logits = layer(logits)
        return Scored(inputs, logits)

    return made


def test_a_step_of_its_own_trains_each_repetition_and_a_shared_trunk():
    reshaped = scored([keras.layers.Reshape([2, 16])])
    for how in ({"build": scored()}, {"build": reshaped, "shared_trunk": True}):
        made = mach(repetitions=2, **how)
        assert made.fit(X, Y, **QUICK).history["own"] == [0]
        assert made.top(X[:2], 3)[1].shape == (2, 3)
    with pytest.raises(ValueError, match=r"own train_step.*Reshape\(\[2, 16\]\)"):
        mach(build=scored(), repetitions=2, shared_trunk=True).fit(X, Y, **QUICK)


@pytest.mark.slow
def test_a_sequential_model_is_a_shared_trunk():
    made = mach(build=full_build, repetitions=2, shared_trunk=True)
    made.fit(X, Y, **QUICK)
    assert made.top(X[:2], 3)[1].shape == (2, 3)


@pytest.mark.slow
def test_losses_by_name_take_logits():
    """Keras's losses by name would take logits for probabilities."""
    named = {"dense": "sparse_categorical_crossentropy"}
    losses = [None, "sparse_categorical_crossentropy", keras.losses.sparse_categorical_crossentropy]
    found = []
    for loss in (*losses, [losses[1]], named):
        made = mach(**ONE, compiled=False)
        made.compile(keras.optimizers.Adam(0.02), loss)
        made.fit(**of_arrays(), verbose=0)
        found.append(weights_of(made))
    assert all(np.allclose(each, found[0], atol=1e-6) for each in found)
    several = []
    for loss in (None, "binary_crossentropy"):
        made = mach(**ONE, compiled=False, multilabel=True)
        made.compile(keras.optimizers.Adam(0.02), loss)
        made.fit(X, Y[:, None], shuffle=False, **QUICK)
        several.append(weights_of(made))
    assert np.allclose(*several, atol=1e-6)


class Renamed(keras.optimizers.SGD):
    """An optimizer whose ``get_config`` lacks an argument."""

    def __init__(self, own, **given):
        super().__init__(**given)
        self.own = own


@pytest.mark.slow
def test_functions_make_what_has_no_config():
    made = mach(repetitions=2, compiled=False)
    made.compile(lambda: Renamed(3, learning_rate=0.1), metrics=lambda: ["accuracy"])
    assert "accuracy" in made.fit(X, Y, **QUICK).history
    assert all(model.optimizer.own == 3 for model in made.models.values())
    by_class = mach(**ONE, compiled=False)
    by_class.compile(keras.optimizers.Adam)
    by_class.fit(X, Y, **QUICK)
    made = mach(repetitions=2, compiled=False)
    made.compile(Renamed(3))
    with pytest.raises(ValueError, match="optimizer has a Renamed .*a function that returns new"):
        made.fit(X, Y, **QUICK)


def test_it_learns_and_validation_measures_classes(trained):
    x, y = samples(300, seed=9)
    found = trained.evaluate(x, y, k=(1, 5))
    assert found["precision@1"] > 0.7
    assert found["recall@5"] >= found["precision@1"] == found["recall@1"]
    assert found["precision@5"] == pytest.approx(found["recall@5"] / 5)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(64)
    assert trained.evaluate(dataset) == pytest.approx(trained.evaluate(x, y))
    history = trained.fit(X, Y, validation_data=(x, y), validation_batch_size=300, **QUICK)
    assert set(history.history) == {
        "loss", "val_loss", "val_precision@1", "val_precision@5", "val_recall@1", "val_recall@5",
    }  # fmt: skip
    assert list(history.models) == [f"repetition_{r:04}" for r in range(4)]


def test_another_estimator_needs_no_training(trained):
    before, (scores, _) = trained.estimator, trained.top(X, 1)
    trained.estimator = "min"
    smaller, _ = trained.top(X, 1)
    trained.estimator = before
    assert (smaller <= scores + 0.1).all() and not np.allclose(smaller, scores)
    assert np.array_equal(trained.top(X, 1)[0], scores)
    with pytest.raises(ValueError, match="Did you mean 'mean'"):
        trained.estimator = "meen"


@pytest.mark.slow
def test_graphs_of_several_machs_are_no_retracing(trained, caplog):
    """TensorFlow counted the graphs of all of them together, and warned of the fifth."""
    before = trained.estimator
    for trained.estimator in ["min", "mean"] * 4:
        for rows in (3, 5):
            trained.top(X[:rows], 2)
        assert len(trained._ensemble._answers()[2].graphs) == 1
    trained.estimator = before
    assert "retracing" not in caplog.text


def test_one_graph_serves_batches_of_all_lengths():
    inputs = keras.Input([None], dtype="int32")
    hidden = keras.layers.GlobalAveragePooling1D()(keras.layers.Embedding(20, 8)(inputs))
    made = mach(build=lambda n: keras.Model(inputs, keras.layers.Dense(n)(hidden)), **ONE)
    made.fit(np.ones([100, 7], "int32"), Y[:100], **QUICK)
    for rows, length in ((3, 5), (3, 6), (4, 7), (2, 5)):
        made.top(np.ones([rows, length], "int32"), 2)
    assert len(made._ensemble._answers()[2].graphs) == 2


@pytest.mark.slow
def test_more_repetitions_are_better(trained):
    x, y = samples(300, seed=9)
    one = mach(**ONE)
    one.fit(*samples(2000), epochs=8, batch_size=50, verbose=0)
    assert one.evaluate(x, y)["precision@1"] < trained.evaluate(x, y)["precision@1"] - 0.3


def test_a_shared_trunk_measures_classes_in_each_epoch():
    made = mach(shared_trunk=True)
    early = keras.callbacks.EarlyStopping("val_precision@1", mode="max", patience=30)
    how = {**FULLY, "epochs": 12, "callbacks": [early]}
    history = made.fit(X, Y, validation_data=samples(100, seed=9), validation_freq=2, **how)
    assert len(made.models) == 1
    series = history.history["val_precision@1"]
    assert len(series) == 6 and series[-1] > series[0]
    assert made.top(X[:2], 4)[1].shape == (2, 4)
    (model,) = made.models.values()
    guesses = model.predict(X[:200], verbose=0).argmax(-1)
    assert (guesses == made.table()[:, Y[:200]].T).mean() > 0.6  # each head learns its own buckets


def several(rows):
    """Rows of up to 4 labels, as each kind of collection."""
    rng = np.random.default_rng(0)
    lists = [rng.choice(CLASSES, n, replace=False).tolist() for n in rng.integers(0, 5, rows)]
    padded = np.full([rows, 4], -1)
    matrix = scipy.sparse.lil_matrix((rows, CLASSES), dtype="float32")
    for i, row in enumerate(lists):
        padded[i, : len(row)] = row
        matrix[i, row] = 1
    names = tf.ragged.constant([[NAMES[label] for label in row] for row in lists])
    return {
        "padded": padded, "lists": lists, "ragged": tf.ragged.constant(lists),
        "sparse": matrix.tocsr(), "names": names, "padded names": names.to_tensor(""),
    }  # fmt: skip


def test_several_labels_are_rows_of_any_kind():
    kinds = several(50)
    expected = [set(row) for row in kinds["lists"]]
    for kind, y in kinds.items():
        ids = Labels(NAMES if "names" in kind else CLASSES, True).ids(y).numpy()
        assert [set(row) - {-1} for row in ids.tolist()] == expected, kind


def test_several_labels():
    """Two labels in one bucket are one; the loss is Keras's of rows of zeros and ones."""
    kinds = several(len(X))
    how, found = {"epochs": 1, "batch_size": 100, "verbose": 0, "shuffle": False}, []
    dataset = tf.data.Dataset.from_tensor_slices((X, kinds["ragged"])).batch(100)
    for data in ({"x": X, "y": kinds["sparse"], **how}, {"x": dataset}):
        made = mach(multilabel=True, **ONE)
        made.fit(**{"verbose": 0, **data})
        found.append(weights_of(made))
    assert np.allclose(found[0], found[1], atol=1e-6)
    true = np.zeros([len(X), 16], "float32")
    for i, row in enumerate(kinds["lists"]):
        true[i, made.table()[0, row]] = 1
    (model,) = made.models.values()
    padded = kinds["padded"]
    buckets = np.where(padded < 0, -1, made.table()[0, padded])
    expected = keras.losses.BinaryCrossentropy(from_logits=True)(true, model(X))
    assert model.evaluate(X, buckets, verbose=0) == pytest.approx(float(expected), rel=1e-4)
    assert made.evaluate(X, padded, k=2).keys() == {"precision@2", "recall@2"}


@pytest.mark.slow
@pytest.mark.parametrize("shared_trunk", [False, True])
def test_metrics_of_several_labels_see_rows_of_zeros_and_ones(shared_trunk):
    made = mach(multilabel=True, repetitions=2, shared_trunk=shared_trunk, compiled=False)
    recall = keras.metrics.Recall(thresholds=0.0, name="recall")
    made.compile("adam", metrics=["accuracy", recall, positives])
    two = np.stack([Y, np.where(Y < 100, -1, (Y + 1) % CLASSES)], 1)
    made.fit(X, two, **QUICK)
    buckets = np.where(two[None] < 0, -1, made.table()[:, two])
    expected = np.stack([rows_of(each) for each in buckets], 1)
    (model, *_) = made.models.values()
    y = buckets.transpose(1, 0, 2) if shared_trunk else buckets[0]
    found = model.evaluate(X, y, verbose=0, return_dict=True)
    expected = expected if shared_trunk else expected[:, 0]
    guesses = model.predict(X, verbose=0) > 0
    assert found["accuracy"] == pytest.approx((guesses == expected).mean(), abs=1e-5)
    assert found["recall"] == pytest.approx(guesses[expected > 0].mean(), abs=1e-5)
    assert found["positives"] == pytest.approx(expected.mean(), abs=1e-5)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("multilabel", [False, True])
def test_metrics_by_name_take_logits_and_have_one_name_in_all_models(multilabel):
    loss = "binary_crossentropy" if multilabel else "sparse_categorical_crossentropy"
    made = mach(multilabel=multilabel, repetitions=2, compiled=False)
    made.compile("sgd", metrics=[loss, *(["precision"] if multilabel else [])])
    made.fit(X, Y[:, None] if multilabel else Y, **QUICK)
    for model, of_buckets in zip(made.models.values(), made.table()[:, Y], strict=True):
        y = of_buckets[:, None] if multilabel else of_buckets
        found = model.evaluate(X, y, verbose=0, return_dict=True)
        assert found[loss] == pytest.approx(found["loss"], rel=1e-4)
        if multilabel:
            guesses, true = model.predict(X, verbose=0) > 0, rows_of(y) > 0
            assert found["precision"] == pytest.approx(true[guesses].mean(), abs=1e-5)


def test_a_loss_of_several_labels_may_be_a_lambda():
    made = mach(multilabel=True, compiled=False, **ONE)
    made.compile("adam", lambda y, p: keras.losses.binary_crossentropy(y, p, from_logits=True))
    assert np.isfinite(made.fit(X, Y[:, None], **QUICK).history["loss"]).all()


def positives(y_true, y_pred):
    return keras.ops.mean(y_true, axis=-1)


def rows_of(buckets):
    rows = np.zeros([len(buckets), 17])
    np.put_along_axis(rows, np.where(buckets < 0, 16, buckets), 1, axis=1)
    return rows[:, :16]


@pytest.mark.slow
def test_several_labels_and_a_shared_trunk():
    made = mach(multilabel=True, shared_trunk=True, estimator="mean")
    two = np.stack([Y, (Y + 1) % CLASSES], 1)
    made.fit(X, two, **{**FULLY, "epochs": 20})
    assert made.evaluate(X, two, k=2)["recall@2"] > 0.3


def sparse_build(buckets):
    inputs = keras.Input([4000], sparse=True)
    hidden = keras.layers.ReLU()(HashedFeatures(32, 512)(inputs))
    return keras.Model(inputs, keras.layers.Dense(buckets)(hidden))


def test_sparse_inputs_are_hashed(tmp_path):
    """The kernel has a row for each bucket, not for each of the inputs."""
    rng = np.random.default_rng(0)
    dense = (rng.random([200, 4000]) < 0.002).astype("float32")
    x, y = scipy.sparse.csr_matrix(dense), rng.integers(0, CLASSES, 200)
    made = mach(build=sparse_build, **ONE)
    made.fit(x, y, epochs=15, batch_size=50, verbose=0)
    made.export(tmp_path, k=3)
    served = tf.saved_model.load(tmp_path)
    labels = served.serve(tf.sparse.from_dense(dense[:5]))["labels"]
    assert np.array_equal(labels, made.top(x[:5], 3)[1])
    assert np.array_equal(labels, made.top(tf.sparse.from_dense(dense[:5]), 3)[1])
    (model,) = made.models.values()
    layer = next(each for each in model.layers if isinstance(each, HashedFeatures))
    assert layer.kernel.shape == (512, 32)
    guesses = model.predict(x, verbose=0).argmax(-1)
    assert (guesses == made.table()[0, y]).mean() > 0.5
    by_hand = np.zeros([200, 512])
    for column in range(4000):
        by_hand[:, layer._rows[column]] += dense[:, column] * layer._signs[column]
    expected = by_hand @ layer.kernel.numpy() + layer.bias.numpy()
    output = keras.Model(model.inputs, layer.output)(tf.sparse.from_dense(dense))
    assert np.allclose(output, expected, atol=1e-4)
    assert HashedFeatures.from_config(layer.get_config()).buckets == 512


class Recorded(keras.callbacks.Callback):
    """Notes the models that it was trained with."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_train_begin(self, logs=None):
        self.seen.append(self.model)


def full_build(buckets):
    return keras.Sequential(
        [
            keras.Input([WIDTH]),
            keras.layers.Dense(48, "relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(buckets),
        ]
    )


@pytest.mark.slow
def test_callbacks_metrics_dropout_and_normalization():
    made, recorded = mach(build=full_build, repetitions=2, compiled=False), Recorded()
    optimizer = keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(0.02, 100, 0.9))
    made.compile(optimizer, metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2)])
    history = made.fit(X, Y, callbacks=recorded, validation_split=0.2, **QUICK)
    assert {"accuracy", "val_accuracy", "sparse_top_k_categorical_accuracy"} <= set(history.history)
    assert recorded.seen == list(made.models.values())
    first, second = (model.optimizer for model in made.models.values())
    assert first is not second and type(first.learning_rate) is type(second.learning_rate)
    by_name = {}
    made.fit(X, Y, callbacks=lambda name: [by_name.setdefault(name, Recorded())], **QUICK)
    assert list(by_name) == list(made.models)
    scores, _ = made.top(X[:5], 2)
    assert np.array_equal(scores, made.top(X[:5], 2)[0])  # no dropout


@pytest.mark.slow
def test_mixed_precision():
    before = keras.mixed_precision.dtype_policy()
    keras.mixed_precision.set_dtype_policy("mixed_float16")
    try:
        made = mach(repetitions=2)
        made.fit(X, Y, **{**FULLY, "epochs": 6})
        scores, _ = made.top(X[:10], 3)
        assert made.evaluate(X, Y)["recall@5"] > 0.2
    finally:
        keras.mixed_precision.set_dtype_policy(before)
    assert scores.dtype == np.float32 and np.isfinite(scores).all()


def test_replicas_train_as_one_device():
    """A MACH in the scope of a strategy, with a last batch that does not divide."""
    alone = mach(repetitions=2)
    how = {"batch_size": 64, "epochs": 2, "verbose": 0, "shuffle": False}
    alone.fit(X, Y, **how)
    strategy = tfscale.ScaleStrategy(devices=["CPU:0", "CPU:1"])
    with strategy.scope():
        made = mach(repetitions=2, compiled=False)
        made.compile(keras.optimizers.Adam(0.02))
    made.fit(X, Y, **how)
    assert np.abs(weights_of(made) - weights_of(alone)).max() < 1e-5
    assert made.evaluate(X, Y) == pytest.approx(alone.evaluate(X, Y), abs=0.01)


def test_several_inputs():
    def two(buckets):
        inputs = {"a": keras.Input([WIDTH]), "b": keras.Input([WIDTH])}
        both = keras.layers.Concatenate()([inputs["a"], inputs["b"]])
        return keras.Model(inputs, keras.layers.Dense(buckets)(both))

    made = mach(build=two, repetitions=2)
    x = {"a": X, "b": X}
    made.fit(x, Y, **QUICK)
    assert made.top(x, 3)[1].shape == (len(X), 3)
    assert made.top(tf.data.Dataset.from_tensor_slices(x).batch(100), 3)[1].shape == (len(X), 3)


class Ragged(keras.Model):
    """The mean of the embeddings of a row."""

    def __init__(self, buckets):
        super().__init__()
        self.embedding, self.last = keras.layers.Embedding(9, 4), keras.layers.Dense(buckets)

    def call(self, x):
        return self.last(tf.reduce_mean(self.embedding(x.to_tensor()), 1))


@pytest.mark.slow
def test_rows_of_several_lengths():
    x = tf.ragged.constant([[i % 9] * (1 + i % 4) for i in range(len(Y))])
    made = mach(build=Ragged, **ONE)
    made.fit(tf.data.Dataset.from_tensor_slices((x, Y)).batch(100), verbose=0)
    assert made.top(x, 3)[1].shape == (len(Y), 3)


def test_classes_that_come_later_are_trained_on():
    made = mach(classes=200, repetitions=2)
    known = Y < 200
    made.fit(X[known], Y[known], **QUICK)
    before = made.table()
    made.add_classes(100)
    assert np.array_equal(made.table()[:, :200], before)
    made.fit(X, Y, **QUICK)
    assert made.top(X[:2], 300)[1].max() == 299


def test_the_saved_model_answers_as_top_does(trained, tmp_path):
    trained.export(tmp_path / "served", k=4)
    loaded = tf.saved_model.load(tmp_path / "served")
    served = loaded.serve(X[:9])
    scores, labels = trained.top(X[:9], 4)
    assert np.array_equal(served["labels"], labels)
    assert np.allclose(served["scores"], scores, atol=1e-6)
    none, of_none = trained.top(X[:0], 4)
    assert none.shape == of_none.shape == (0, 4)


@pytest.mark.slow
def test_the_saved_model_looks_into_the_best_buckets_first(tmp_path):
    """Samples that they prove nothing for, and parts of a batch, answer as ``top`` does."""
    made = mach(classes=20_000, buckets=500, repetitions=2)
    made.fit(X, Y, **QUICK)
    assert made._ensemble.search().candidates() > 0
    made.export(tmp_path, k=3)
    x = np.concatenate([X[:90], 100 * X[:9]])
    served = tf.saved_model.load(tmp_path)
    scores, labels = made.top(x, 3, candidates=0)
    found = served.serve(x)
    assert np.array_equal(found["labels"], labels)
    assert np.allclose(found["scores"], scores, atol=1e-6)


def test_propensities_weigh_rare_labels(trained):
    counts = np.bincount(Y, minlength=CLASSES)
    propensity = propensities(counts)
    assert (np.diff(propensity[np.argsort(counts)]) >= 0).all()
    found = trained.evaluate(X, Y, k=1, propensity=propensity)
    assert 0 < found["psp@1"] <= 1
    _, best = trained.top(X, 1)
    hits = (best[:, 0] == Y) / propensity[Y]
    assert found["psp@1"] == pytest.approx(hits.sum() / (1 / propensity[Y]).sum())


@pytest.mark.slow
def test_validation_can_weigh_rare_labels():
    made, propensity = mach(), propensities(np.bincount(Y, minlength=CLASSES))
    data = (X[:50], Y[:50])
    found = made.fit(X[:100], Y[:100], verbose=0, validation_data=data, propensity=propensity)
    expected = made.evaluate(*data, propensity=propensity)
    assert found.history["val_psp@5"][-1] == pytest.approx(expected["psp@5"])


def test_one_model_built_twice_is_refused():
    model = build(16)
    made = MACH(lambda buckets: model, CLASSES, 16, 2)
    made.compile("adam")
    with pytest.raises(ValueError, match="one model twice"):
        made.fit(X, Y, **QUICK)


class Subclassed(keras.Model):
    """A model whose outputs are known when it is called."""

    def __init__(self, buckets):
        super().__init__()
        self.last = keras.layers.Dense(buckets)

    def call(self, x):
        return self.last(x)


def trained_by(build):
    made = mach(build=build, **ONE)
    made.fit(X, Y, **QUICK)
    return made


def unbatched():
    return tf.data.Dataset.from_tensor_slices((X, Y))


def lossy(loss):
    made = mach(compiled=False)
    made.compile("adam", loss)
    return made


REFUSED = {
    "label outside": (lambda: mach().fit(X, Y + 1, **QUICK), "got 300 and"),
    "negative label": (lambda: mach().fit(X, Y - 1, **QUICK), "from 0 to 299; got -1"),
    "half a label": (lambda: mach().fit(X, Y + 0.5, **QUICK), "no class of this MACH"),
    "unknown name": (
        lambda: mach(NAMES).fit(X[:2], ["name 1", "nobody"], **QUICK), "got 'nobody'",
    ),
    "names for numbers": (lambda: mach().fit(X[:1], ["name 1"], **QUICK), "give numbers"),
    "numbers for names": (lambda: mach(NAMES).fit(X, Y, **QUICK), "y has numbers .*give names"),
    "weight of no class": (
        lambda: mach().fit(X, Y, class_weight={300: 2.0}), "class_weight has a label.*got 300",
    ),
    "one-hot": (lambda: mach().fit(X, np.eye(CLASSES)[Y], **QUICK), "give the numbers"),
    "one-hot of several": (
        lambda: mach(multilabel=True).fit(X, np.eye(CLASSES)[Y], **QUICK), "a column for each",
    ),
    "one sample": (lambda: trained_by(build).evaluate(unbatched()), "call batch"),
    "outputs that are known late": (
        lambda: trained_by(lambda _: Subclassed(20)).top(X), r"expected \(None, 16\)",
    ),
    "an iterator": (lambda: mach().fit(iter(unbatched().batch(9))), "can be read once"),
    "validation by a generator": (
        lambda: mach().fit(X, Y, validation_data=batches()), "validation_data is a generator",
    ),
    "no compile": (lambda: mach(compiled=False).fit(X, Y), "call compile"),
    "not trained": (lambda: mach().top(X), "repetitions 0, 1, 2, 3 of 4 are missing"),
    "as many buckets": (lambda: mach(buckets=300), "fewer than the 300 classes"),
    "a name twice": (lambda: mach(["a", "b", "a"]), "'a' twice"),
    "softmax": (
        lambda: mach(build=lambda b: keras.Sequential(
            [keras.Input([WIDTH]), keras.layers.Dense(b, "softmax")]
        )).fit(X, Y, **QUICK), "ends in softmax",
    ),
    "other outputs": (lambda: mach(build=lambda b: build(9)).fit(X, Y, **QUICK), r"\(None, 9\)"),
    "no model": (lambda: mach(build=lambda b: None).fit(X, Y, **QUICK), "is a keras.Model"),
    "generator for all": (lambda: mach().fit(batches()), "can be read once"),
    "dataset without labels": (
        lambda: mach().fit(tf.data.Dataset.from_tensor_slices((X,)).batch(9)), "1 part",
    ),
    "x alone": (lambda: mach().fit(X), "without y"),
    "class weights of many": (
        lambda: mach(multilabel=True).fit(X, Y[:, None], class_weight={0: 1.0}), "sample_weight",
    ),
    "k": (lambda: mach().top(X, 301), "from 1 to 300"),
    "a dict of labels": (lambda: mach().fit(X, {"out": Y}, **QUICK), r"the keys \['out'\]"),
    "no batches": (
        lambda: mach().fit(tf.data.Dataset.from_tensor_slices((X, Y)), verbose=0), "call batch",
    ),
    "nothing to compare with": (lambda: mach().evaluate(X), "arrays need y"),
    "a propensity of 0": (
        lambda: mach().evaluate(X, Y, propensity=np.zeros(CLASSES)), "above 0 and up to 1",
    ),
    "a propensity of 0 in fit": (
        lambda: mach().fit(X, Y, propensity=np.zeros(CLASSES)), "above 0 and up to 1",
    ),
    "a loss of probabilities": (
        lambda: lossy(keras.losses.SparseCategoricalCrossentropy()).fit(X, Y, **QUICK),
        r"SparseCategoricalCrossentropy\(from_logits=True\)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused(case):
    call, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        call()


def test_a_dataset_with_a_wrong_label_ends_with_the_label():
    dataset = tf.data.Dataset.from_tensor_slices((X, Y + 1)).batch(100)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no class of this MACH"):
        mach(**ONE).fit(dataset, verbose=0)
