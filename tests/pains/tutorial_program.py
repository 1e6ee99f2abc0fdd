"""Steps of TensorFlow's tutorial "Multi-worker training with Keras", in our words.

https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras

Every worker runs this script with its own ``TF_CONFIG``. It differs from the tutorial in this:
which strategy (``STRATEGY``), where files go (``MEETING``), digits that are drawn here instead of
downloaded, fewer of them and a smaller network, and who reads waits for who writes.
Prints TUTORIAL and a line of JSON.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import tensorflow as tf

from tfscale.tools.bench.measure import meet

ROWS, CLASSES, STEPS = 512, 10, 6
PER_WORKER = 16
FOLDER = Path(os.environ["MEETING"])


def load_data():
    """Images with a bright square whose place is the label, in the shapes of MNIST."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, CLASSES, ROWS)
    x = rng.integers(0, 100, (ROWS, 28, 28))
    for image, label in zip(x, y, strict=True):
        image[2 * label + 2 : 2 * label + 8, 10:18] = 255
    return x.astype(np.uint8), y.astype(np.uint8)


def dataset(batch):
    x, y = load_data()
    pairs = tf.data.Dataset.from_tensor_slices((x / np.float32(255), y.astype(np.int64)))
    return pairs.shuffle(60000).repeat().batch(batch)


def build_and_compile():
    model = tf.keras.Sequential(
        [
            tf.keras.layers.InputLayer(shape=(28, 28)),
            tf.keras.layers.Reshape(target_shape=(28, 28, 1)),
            tf.keras.layers.Conv2D(8, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(32, activation="relu"),
            tf.keras.layers.Dense(CLASSES),
        ]
    )
    model.compile(
        loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=tf.keras.optimizers.SGD(learning_rate=0.01),
        metrics=["accuracy"],
    )
    return model


def make_strategy():
    if os.environ["STRATEGY"] == "stock":
        return tf.distribute.MultiWorkerMirroredStrategy()
    import tfscale

    return tfscale.ScaleStrategy()


def own_place(path, index):
    """Return where a worker writes: all must, but only the files of worker 0 are kept."""
    return path if index == 0 else path.with_name(f"worker-{index}-{path.name}")


def wait_for_all(name, index):
    """The tutorial leaves that out; worker 1 would read what worker 0 has not written yet."""
    meet(str(FOLDER), name, index, len(json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]))


def without_sharding(batch):
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return dataset(batch).with_options(options)


def save_and_load(model, index, batch):
    """Save one file by all workers, load it outside of the strategy, and train on."""
    path = FOLDER / "model.keras"
    written = own_place(path, index)
    model.save(written)
    if index:
        written.unlink()
    wait_for_all("saved", index)
    loaded = tf.keras.models.load_model(path)
    same = furthest(model.get_weights(), loaded.get_weights())
    loaded.fit(dataset(batch), epochs=1, steps_per_epoch=2, verbose=0)
    return same


def checkpoint_and_restore(model, index):
    path = FOLDER / "checkpoints"
    written = own_place(path, index)
    checkpoint = tf.train.Checkpoint(model=model)
    tf.train.CheckpointManager(checkpoint, directory=str(written), max_to_keep=1).save()
    if index:
        shutil.rmtree(written)
    wait_for_all("checkpointed", index)
    before = model.get_weights()
    checkpoint.restore(tf.train.latest_checkpoint(str(path)))
    return furthest(before, model.get_weights())


def furthest(one, other):
    return max(float(np.max(np.abs(a - b))) for a, b in zip(one, other, strict=True))


def main():
    config = json.loads(os.environ["TF_CONFIG"])
    index = config["task"]["index"]
    strategy = make_strategy()
    batch = PER_WORKER * len(config["cluster"]["worker"])
    with strategy.scope():
        model = build_and_compile()
    history = model.fit(dataset(batch), epochs=3, steps_per_epoch=STEPS, verbose=0)
    model.fit(without_sharding(batch), epochs=1, steps_per_epoch=STEPS, verbose=0)
    judged = model.evaluate(dataset(batch), steps=STEPS, verbose=0, return_dict=True)
    lost = save_and_load(model, index, batch)
    unlike = checkpoint_and_restore(model, index)
    backup = tf.keras.callbacks.BackupAndRestore(backup_dir=str(FOLDER / "backup"))
    with strategy.scope():
        again = build_and_compile()
    again.fit(dataset(batch), epochs=2, steps_per_epoch=STEPS, callbacks=[backup], verbose=0)
    told = {"history": history.history, "judged": judged, "lost": lost, "unlike": unlike}
    told["weights"] = [float(np.sum(np.abs(each))) for each in again.get_weights()]
    print("\nTUTORIAL", json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
