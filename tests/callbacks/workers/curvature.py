"""A training in which curvature is measured and batches grow; as a worker, prints its history."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

import tfscale
from tests.callbacks.warmups import compiled, numbers
from tfscale.adversarial import FGSM
from tfscale.callbacks import Adversarial, BatchGrowth, Curvature


def model():
    return compiled(keras.optimizers.SGD(0.02))


def train(model, lines=None):
    x, y = numbers()
    growth = BatchGrowth.by_curvature(8, 24, x, y, samples=len(x), batch_size=16, patience=2)
    measured = Curvature(x, y, batch_size=16, samples=2, jsonl=lines)
    adversarial = Adversarial(FGSM(0.05), share=growth.share(0.5))
    data = growth.batches(tf.data.Dataset.from_tensor_slices((x, y)))
    callbacks = [growth, adversarial, measured]
    history = model.fit(data, epochs=6, verbose=0, callbacks=callbacks).history
    told = {name: history[name] for name in ("batch_size", "curvature_top", "curvature_trace")}
    rate = float(np.asarray(model.optimizer.learning_rate))
    return {**told, "rate": rate, "weights": [w.tolist() for w in model.get_weights()]}


if __name__ == "__main__":
    strategy = tfscale.ScaleStrategy(algorithm="ring")
    with strategy.scope():
        one = model()
    print("\nTOLD", json.dumps(train(one, Path(sys.argv[1]) / f"{strategy.extended.first_rank}")))
