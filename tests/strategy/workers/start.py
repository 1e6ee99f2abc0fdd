"""A worker that starts, in a wrong WAY if it is worker 1, and takes steps with the others.

Prints its ENVIRONMENT, STEP after the third step, DONE when a file called GO is there, and ERROR.
"""

import json
import os
import signal

import tensorflow as tf

import tfscale
from tfscale.launch import JoinError
from tfscale.ops import group
from tfscale.strategy.workers import signals

ME = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
WAY, WRONG = os.environ["WAY"], ME == 1
meet, listen = group.meet, signals.listen


def leave_after_the_meeting(*arguments, **settings):
    meet(*arguments, **settings)
    os._exit(7)


def stop_before_joining(self):
    os.kill(os.getpid(), signal.SIGSTOP)


def listen_after_a_signal(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)  # TensorFlow's handler takes it
    listen(*arguments)


def start():
    if WRONG and WAY == "never come":
        os._exit(0)
    if WRONG and WAY == "leave after the meeting":
        group.meet = leave_after_the_meeting
    if WRONG and WAY == "stop before joining":
        group.Group.join = stop_before_joining
    if WRONG and WAY == "get SIGTERM while servers start":
        signals.listen = listen_after_a_signal
    if WAY == "make a tensor first":
        tf.constant(1)
    seconds = {"deadline": float(os.environ["DEADLINE"])}
    seconds["join_timeout"] = float(os.environ["JOIN_TIMEOUT"])
    return tfscale.ScaleStrategy("ring", slow_after=0, **seconds)


def main():
    print("ENVIRONMENT", json.dumps(dict(os.environ)), flush=True)
    strategy = start()
    steps = 0
    while not strategy.reduce("SUM", float(os.path.exists(os.environ["GO"])), axis=None):
        steps += 1
        if steps == 3:
            print("STEP", flush=True)
    print(f"DONE with {strategy.num_replicas_in_sync} replicas", flush=True)
    signal.pause()  # until the test ends all: another may still be in the last step


if __name__ == "__main__":
    try:
        main()
    except (JoinError, RuntimeError, ValueError, tf.errors.OpError) as error:
        print(f"ERROR {type(error).__name__} {' '.join(str(error).split())}", flush=True)
    os._exit(0)
