"""A worker of three steps; step FAILING fails on one worker (VICTIM) before its collective.

Prints EVENT at the failure, ERROR with what the others were told, and TOTALS of the steps
that all have done, the repeated one included.
"""

import os
import time

import tensorflow as tf
from helpers import PATIENCE

from tfscale.ops import Group, all_reduce
from tfscale.tools.bench.measure import leave, meet

meeting = os.environ["MEETING"]
rank, victim = int(os.environ["RANK"]), int(os.environ["VICTIM"])
failing = int(os.environ["FAILING"])


def load_data(number, broken):
    if broken and rank == victim and number == failing:
        print(f"EVENT {time.time()}", flush=True)
        raise ValueError("no more data")
    return tf.fill([1000], float(number))


def main():
    group = Group.cluster(deadline=PATIENCE)
    step = group.function(lambda c, x: all_reduce(x, c, name="gradients"))
    totals = []
    broken = True
    while len(totals) < 3:
        number = len(totals)
        meet(meeting, f"before-{number}", rank, 3)  # nobody is still in the step before
        try:
            x = load_data(number, broken)
        except ValueError as error:
            group.give_up(f"ValueError: {error}")
            broken = False
            continue
        try:
            totals.append(float(step([x])[0][0]))
        except tf.errors.OpError as error:
            text = " ".join(str(error).split())
            print(f"ERROR {time.time()} step {number} {type(error).__name__} {text}", flush=True)
    print("TOTALS", *totals, flush=True)


if __name__ == "__main__":
    main()
    leave(meeting, "worker", rank, 3)
