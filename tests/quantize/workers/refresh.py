"""Trains a net as one of several workers, which choose the wires of gradients again."""

import numpy as np

import tfscale
from tests.quantize import nets
from tfscale import quantize

strategy = tfscale.ScaleStrategy("ring", wire="int4")
with strategy.scope():
    model, x, y = nets.dense(trained=False)
refresh = quantize.RefreshWires(
    x, y, every=1, budget="60%", wires=("fp32", "int8"), batch_size=48, samples=4
)
model.fit(x, y, batch_size=24, epochs=3, verbose=0, callbacks=[refresh])
wires = sorted(row.wire for row in strategy.explain())
weights = np.concatenate([np.ravel(v) for v in model.get_weights()])
print("TOLD", *refresh.policies, *wires, weights.tobytes().hex())
