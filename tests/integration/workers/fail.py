"""One worker of a loop of all-reduces, in which one worker (VICTIM) fails in one WAY.

Prints EVENT at the failure and ERROR with what the others were told.
"""

import os
import signal
import sys
import threading
import time

import tensorflow as tf

from tfscale.ops import Group, all_reduce

rank, victim = int(os.environ["RANK"]), int(os.environ["VICTIM"])
way, deadline = os.environ["WAY"], float(os.environ["DEADLINE"])


def die(number):
    print(f"EVENT {time.time()}", flush=True)
    os.kill(os.getpid(), number)


def fail_in_tensorflow(x):
    time.sleep(0.3)
    print(f"EVENT {time.time()}", flush=True)
    raise ValueError("a failure of the user's own")


def wait(x):
    time.sleep(1)
    return x


def main():
    group = Group.cluster(deadline=deadline)
    if way == "absent" and rank == victim:
        print(f"EVENT {time.time()}", flush=True)
        time.sleep(60)  # the test ends it

    @group.function
    def step(communicator, x, last):
        y = all_reduce(x, communicator, name="gradients")
        if way == "error":
            # The victim fails while the others' next contribution is still to come.
            late = fail_in_tensorflow if rank == victim else wait
            y = tf.cond(last, lambda: tf.py_function(late, [y], y.dtype), lambda: y)
            y.set_shape(x.shape)
        if rank == victim:
            return all_reduce(x, communicator, name="more"), y
        return all_reduce(y, communicator, name="more")

    x = tf.ones([500_000])
    number = 0
    try:
        while True:
            number += 1
            if rank == victim and number == 6 and way in ("kill", "stop"):
                which = signal.SIGKILL if way == "kill" else signal.SIGSTOP
                threading.Timer(0.02, die, [which]).start()
            step([x], [tf.constant(number == 6)])
    except (tf.errors.OpError, ValueError) as error:
        text = " ".join(str(error).split())
        print(f"ERROR {time.time()} step {number} {type(error).__name__} {text}", flush=True)
        if way == "error":
            time.sleep(3)  # it lives on, as a process that catches its error does


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
