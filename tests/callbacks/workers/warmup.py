"""One worker that trains with a warm-up while batches grow, and prints what came out."""

from __future__ import annotations

import json

import tensorflow as tf

import tfscale
from tests.callbacks.warmups import compiled, momentum, numbers
from tfscale import schedules
from tfscale.callbacks import BatchGrowth, Warmup

HILL = schedules.Cosine(0.01, end=4, warmup=1.5, unit="epochs", base_batch=4)


def train(model, batch_per_replica):
    growth = BatchGrowth({0: 8, 3: 12, 7: 24})
    warmup = Warmup(HILL, batch_per_replica=batch_per_replica, momentum_correction=True)
    data = growth.batches(tf.data.Dataset.from_tensor_slices(numbers()))
    how = {"epochs": 4, "steps_per_epoch": 3, "verbose": 0}
    history = model.fit(data, callbacks=[growth, warmup], **how).history
    weights = [w.tolist() for w in model.get_weights()]
    return {"batch": history["batch_size"], "rate": history["learning_rate"], "weights": weights}


if __name__ == "__main__":
    strategy = tfscale.ScaleStrategy(algorithm="ring")
    with strategy.scope():
        model = compiled(momentum())
    print("TRAINED", json.dumps(train(model, batch_per_replica=4)))
