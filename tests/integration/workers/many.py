"""A worker of many all-reduces of random sizes, several at once, with pauses of its own between.

Sizes are the same on all workers, pauses are not. Sums of whole numbers are exact.
"""

import os
import random
import time

import numpy as np
import tensorflow as tf
from helpers import PATIENCE

from tfscale.ops import Group, all_reduce
from tfscale.tools.bench.measure import leave

rank, count = int(os.environ["RANK"]), int(os.environ["COUNT"])
CALLS, AT_ONCE = int(os.environ["CALLS"]), 5


def main():
    group = Group.cluster(deadline=PATIENCE)
    schedules = ("ring", "direct", "halving", "tree", "ring")

    @tf.function(input_signature=[[tf.TensorSpec([None])] * AT_ONCE], autograph=False)
    def step(xs):
        (communicator,) = group.communicators
        with tf.device(communicator.device):
            return [
                all_reduce(x, communicator, name=f"bucket {i}", schedule=schedules[i])
                for i, x in enumerate(xs)
            ]

    sizes, pauses = random.Random(1), random.Random(rank)
    for call in range(CALLS // AT_ONCE):
        counts = [int(10 ** sizes.uniform(0, 6)) for _ in range(AT_ONCE)]
        if pauses.random() < 0.2:
            time.sleep(pauses.random() * 0.02)
        for i, y in enumerate(step([tf.fill([n], float(rank + call % 7)) for n in counts])):
            y = y.numpy()
            expected = count * (count - 1) / 2 + count * (call % 7)
            assert y.shape == (counts[i],), (call, i)
            np.testing.assert_array_equal(y, expected)
    print("ALL", CALLS, flush=True)


if __name__ == "__main__":
    main()
    leave(os.environ["MEETING"], "worker", rank, count)
