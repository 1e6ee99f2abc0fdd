"""A worker without TensorFlow: does what its arguments say, one after the other.

``RANK:WORD`` is for one worker. Words: a number of seconds to sleep, ``exit=3``, ``kill=SIGKILL``,
``print=text``, ``error=text``, ``raise``, ``pid``, ``environment=NAME``, ``cores``, ``child`` (a
process in a session of its own, that nothing but a kill ends), ``deaf`` (to SIGTERM), ``handle``
(signals: says so, and ends at SIGTERM), ``wait`` (for signals), ``once=FILE`` (what follows is for
the first time only), ``bar=N``, ``torn`` (a bar without an end).
"""

import json
import os
import signal
import subprocess
import sys
import time

rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]


def handle(number, frame):
    print("heard", signal.Signals(number).name)
    if number == signal.SIGTERM:
        sys.exit(0)


for word in sys.argv[1:]:
    head, colon, rest = word.partition(":")
    if colon and head.isdigit():
        if int(head) != rank:
            continue
        word = rest
    name, _, value = word.partition("=")
    if name.replace(".", "").isdigit():
        time.sleep(float(name))
    elif name == "exit":
        sys.exit(int(value))
    elif name == "kill":
        os.kill(os.getpid(), getattr(signal, value))
    elif name == "print":
        print(value)
    elif name == "error":
        print(value, file=sys.stderr)
    elif name == "raise":
        raise ValueError("on purpose")
    elif name == "pid":
        print("process", os.getpid())
    elif name == "environment":
        print(name, value, os.environ.get(value))
    elif name == "cores":
        print("cores", sorted(os.sched_getaffinity(0)))
    elif name == "child":
        child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
        print("process", child.pid)
    elif name == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    elif name == "handle":
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, handle)
        print("ready")
    elif name == "wait":
        print("waits")
        while True:
            time.sleep(0.1)
    elif name == "once":
        if os.path.exists(value):
            break
        if rank == 0:
            open(value, "w").close()
    elif name == "bar":
        for i in range(int(value)):
            sys.stdout.write("\b" * 9 + f"\r{i + 1}/{value} of a bar")
            sys.stdout.flush()
            time.sleep(0.02)
        sys.stdout.write("\n")
    elif name == "torn":
        sys.stdout.write("\rbar without an end")
        sys.stdout.flush()
    else:
        raise SystemExit(f"what is {word!r}?")
