"""A worker of two all-reduces, between which one worker (VICTIM) sleeps for three seconds."""

import os
import sys
import time

import tensorflow as tf

from tfscale.ops import Group, all_reduce

rank, victim = int(os.environ["RANK"]), int(os.environ["VICTIM"])


def main():
    group = Group.cluster(deadline=60, slow_after=float(os.environ["SLOW_AFTER"]))
    step = group.function(lambda c, x: all_reduce(x, c, name="gradients"))
    x = tf.ones([1000])
    step([x])
    if rank == victim:
        time.sleep(3)
    step([x])


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
