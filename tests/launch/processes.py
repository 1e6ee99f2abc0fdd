"""Processes of these tests, and ports for them."""

import contextlib
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 100  # seconds, longer than anything here takes


class Process:
    """One of the processes, and what it prints."""

    def __init__(self, *command):
        self.process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self.lines = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)

    def until(self, pattern):
        end = time.monotonic() + PATIENCE
        while True:
            found = re.search(pattern, self.said)
            if found:
                return found
            assert time.monotonic() < end and self.reader.is_alive(), self.said
            time.sleep(0.01)

    @property
    def said(self):
        return "".join(self.lines)

    def end(self):
        self.process.wait(PATIENCE)
        self.reader.join(PATIENCE)
        return self.said


@contextlib.contextmanager
def processes():
    """A function that starts them; they end with the block."""
    with contextlib.ExitStack() as stack:

        def start(*command):
            one = Process(*command)
            stack.callback(one.process.wait)
            stack.callback(one.process.kill)
            return one

        yield start


def free_ports(count):
    """Return ports that nobody uses while the test lasts."""
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


@contextlib.contextmanager
def squatter(port, answer=b""):
    """Another program that has the port, and what it says; yields what it is sent."""
    with socket.create_server(("127.0.0.1", port)) as server:
        talking, heard = [], []

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    one = server.accept()[0]
                    talking.append(one)
                    one.sendall(answer)
                    threading.Thread(target=listen, args=(one,), daemon=True).start()

        def listen(one):
            with contextlib.suppress(OSError):
                while data := one.recv(1000):
                    heard.append(data)

        threading.Thread(target=serve, daemon=True).start()
        yield heard
