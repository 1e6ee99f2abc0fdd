"""One worker of a loop of all-reduces, or of routes, in which one worker (VICTIM) fails in one WAY.

Prints EVENT at the failure, ERROR with what the others were told, and BACK when one that was
stopped has done more steps.
"""

import os
import signal
import threading
import time

import tensorflow as tf

from tfscale.ops import Group, all_reduce, all_to_all, transfer
from tfscale.tools.bench.measure import leave, meet

came_back = threading.Event()
rank, victim = int(os.environ["RANK"]), int(os.environ["VICTIM"])
way, deadline = os.environ["WAY"], float(os.environ["DEADLINE"])


def die(number):
    if way == "kill beside a child" and os.fork() == 0:
        time.sleep(30)  # with all that was open in its parent
        os._exit(0)
    print(f"EVENT {time.time()}", flush=True)
    os.kill(os.getpid(), number)
    came_back.set()


def fail_in_tensorflow(x):
    time.sleep(0.3)
    print(f"EVENT {time.time()}", flush=True)
    raise ValueError("a failure of the user's own")


def wait(x):
    time.sleep(1)
    return x


def main():
    if way == "absent" and rank == victim:
        print(f"EVENT {time.time()}", flush=True)
        time.sleep(600)  # the test ends it

    @group.function
    def route(communicator, x, last):
        y = all_to_all(x[:499_998], communicator, name="tokens")
        ends = {"source": victim, "target": (victim + 1) % group.ranks}
        if rank not in ends.values():
            return y
        return transfer(y, communicator, name="activation", **ends)

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
    number = later = 0
    try:
        while True:
            number += 1
            if number == 6 and way == "stop":
                # In the middle of a step some would wait in the next bucket, for those who wait.
                meet(os.environ["MEETING"], "before-6", rank, group.ranks)
                if rank == victim:
                    die(signal.SIGSTOP)
            if number == 6 and way.startswith("kill") and rank == victim:
                threading.Timer(0.02, die, [signal.SIGKILL]).start()
            run = route if way == "kill among routes" else step
            run([x], [tf.constant(number == 6)])
            later += came_back.is_set()
            if later == 10:
                print("BACK", flush=True)
    except (tf.errors.OpError, ValueError) as error:
        text = " ".join(str(error).split())
        print(f"ERROR {time.time()} step {number} {type(error).__name__} {text}", flush=True)


def leave_together():
    """All who live: one that ends before others know why is missed by these, too."""
    dead = [] if way == "error" else [victim]
    alive = [each for each in range(group.ranks) if each not in dead]
    leave(os.environ["MEETING"], "worker", alive.index(rank), len(alive))


if __name__ == "__main__":
    group = Group.cluster(deadline=deadline)
    main()
    leave_together()
