"""A training that says nothing of a cluster; prints how many replicas trained, and the weights."""

import json
import logging
import sys

import keras
import numpy as np

import tfscale
from tfscale.launch import cluster

logging.basicConfig(level="INFO", format="%(message)s")
keras.utils.set_random_seed(1)
strategy = tfscale.auto_strategy() if "auto" in sys.argv else tfscale.ScaleStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.1), "mse")
x = np.random.default_rng(0).standard_normal((32, 4)).astype("float32")
model.fit(x, x.sum(1, keepdims=True), batch_size=8, epochs=2, shuffle=False, verbose=0)
assert cluster.configure() == cluster.configure()  # nothing is left to do
weights = np.concatenate([np.ravel(weight) for weight in model.get_weights()]).tolist()
print(f"TRAINED {strategy.num_replicas_in_sync} {json.dumps(weights)}", flush=True)
