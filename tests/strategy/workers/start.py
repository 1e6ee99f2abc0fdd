"""A worker that starts, in a wrong WAY if it is worker 1, and takes steps with the others.

Prints JOINED, STEP after the third step, DONE when a file called GO is there, and ERROR.
"""

import json
import os
import signal

import tensorflow as tf

import tfscale
from tfscale.launch import JoinError
from tfscale.ops import group

ME = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
WAY, WRONG = os.environ["WAY"], ME == 1


def stop_before_joining(self):
    os.kill(os.getpid(), signal.SIGSTOP)


def start():
    if WRONG and WAY == "stop before joining":
        group.Group.join = stop_before_joining
    seconds = {"deadline": float(os.environ["DEADLINE"])}
    seconds["join_timeout"] = float(os.environ["JOIN_TIMEOUT"])
    return tfscale.ScaleStrategy("ring", slow_after=0, **seconds)


def main():
    strategy = start()
    print("JOINED", flush=True)
    steps = 0
    while not strategy.reduce("SUM", float(os.path.exists(os.environ["GO"])), axis=None):
        steps += 1
        if steps == 3:
            print("STEP", flush=True)
    print(f"DONE with {strategy.num_replicas_in_sync} replicas", flush=True)


if __name__ == "__main__":
    try:
        main()
    except (JoinError, ValueError, tf.errors.OpError) as error:
        print(f"ERROR {type(error).__name__} {' '.join(str(error).split())}", flush=True)
    os._exit(0)
