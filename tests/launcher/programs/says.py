"""A worker without TensorFlow: does what its arguments say, one after the other.

``RANK:WORD`` is for one worker. Words: a number of seconds to sleep, ``exit=3``, ``kill=SIGKILL``
(or a number), ``print=text``, ``error=text``, ``bytes=text`` (as UTF-8), ``raise``, ``pid``,
``environment=NAME``, ``cores``, ``child`` (a process in a session of its own, that nothing but a
kill ends), ``deaf`` (to SIGTERM), ``unheard`` (SIGINT), ``handle`` (signals: says so, and ends at
SIGTERM), ``wait`` (for signals), ``once=FILE`` (what follows is for the first time only),
``lines=N``, ``forever`` (prints), ``saves`` (for a while after SIGTERM), ``zombies`` (how many of
its orphans are left).
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
        os.kill(os.getpid(), int(value) if value.isdigit() else getattr(signal, value))
    elif name == "print":
        print(value + "\n", end="")  # at once, whatever another stream says
    elif name == "error":
        print(value + "\n", end="", file=sys.stderr)
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
    elif name == "unheard":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
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
    elif name == "bytes":
        sys.stdout.buffer.write(f"{value}\n".encode())
    elif name == "lines":
        print("\n".join(f"line {i} " + "x" * 50 for i in range(int(value))))
    elif name == "forever":
        while True:
            print("x" * 1000)
    elif name == "saves":
        signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1.5), print("saved"), sys.exit(0)))
        print("ready")
    elif name == "zombies":
        for _ in range(20):
            subprocess.run(["sh", "-c", "sleep 0.01 &"], check=True)
        time.sleep(1)
        its = subprocess.run(["ps", "-o", "stat=", "--ppid", str(os.getppid())],
                             capture_output=True, text=True).stdout  # fmt: skip
        print("zombies", its.count("Z"))
    else:
        raise SystemExit(f"what is {word!r}?")
