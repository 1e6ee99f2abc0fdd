"""The parent of warm processes, and what its children do: see ``warm.py``.

    python tests/warm_parent.py SOCKET

Requests come from a socket, each a line of JSON: a command to run, with the file that gets its
output, which is answered by the number of the process; or the question whether one has ended.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LOADED = (
    "tensorflow",
    "keras",
    "pytest",
    "tfscale",
    "tfscale.strategy",
    "tfscale.optimizers",
    "tfscale.callbacks",
)
LONGEST = 1 << 20  # bytes of a request


def serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request; returns in the children alone, with what each has to run."""
    while True:
        message, files, _, _ = socket.recv_fds(requests, LONGEST, 1)
        if not message:
            os._exit(0)  # the tests are done
        request = json.loads(message)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                requests.close()
                return {**request, "output": files[0]}
            os.close(files[0])
        requests.send(json.dumps(answer).encode())


def become(request: dict[str, Any]) -> None:
    """Be the process that was asked for, but for what it runs."""
    os.setsid()
    os.dup2(request["output"], 1)
    os.dup2(request["output"], 2)
    os.close(request["output"])
    os.chdir(request["cwd"])
    # Where a shell has started the tests in its background, all of them ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = list(request["command"])
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:1] = [os.path.dirname(sys.argv[0]), *filter(None, paths)]
    import numpy

    numpy.random.seed()  # each its own, as in processes that start apart


def source(command: list[str]) -> tuple[str, str]:
    """The code of a command and what it is called."""
    if command[0] == "-c":
        return command[1], "<string>"
    return Path(command[0]).read_text(), command[0]


def main() -> None:
    """Load what tests use; then be a parent, or one of its children."""
    sys.path[0] = str(ROOT)
    for name in LOADED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # else each child's first collection copies all of it
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    become(request)
    text, name = source(request["command"])
    module = types.ModuleType("__main__")
    module.__file__ = name
    sys.modules["__main__"] = module
    exec(compile(text, name, "exec"), module.__dict__)  # an error ends it as any process


if __name__ == "__main__":
    main()
