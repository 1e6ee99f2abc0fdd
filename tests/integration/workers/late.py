"""A worker of two all-reduces, between which one worker (VICTIM) sleeps.

For three seconds, and until there is a file GO.
"""

import os
import time

import tensorflow as tf
from helpers import PATIENCE

from tfscale.ops import Group, all_reduce
from tfscale.tools.bench.measure import leave

rank, victim = int(os.environ["RANK"]), int(os.environ["VICTIM"])


def main():
    group = Group.cluster(deadline=PATIENCE, slow_after=float(os.environ["SLOW_AFTER"]))
    step = group.function(lambda c, x: all_reduce(x, c, name="gradients"))
    x = tf.ones([1000])
    step([x])
    if rank == victim:
        time.sleep(3)
        while not os.path.exists(os.environ["GO"]):
            time.sleep(0.05)
    step([x])


if __name__ == "__main__":
    main()
    leave(os.environ["MEETING"], "worker", rank, 3)
