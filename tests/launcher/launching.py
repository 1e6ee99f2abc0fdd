"""``tfscale launch`` as a user runs it: a process with a terminal's or a file's output."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 120  # seconds, many times what anything here takes


class Launched:
    """A running ``tfscale launch``, and what it has printed: ``out`` and ``err``."""

    def __init__(self, *words, folder=PROGRAMS, prefix=(), **environment):
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "tfscale", "launch", *map(str, words)],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
        )  # fmt: skip
        self._lines = {"out": [], "err": []}
        self._readers = [
            threading.Thread(target=self._read, args=each, daemon=True)
            for each in ((self.process.stdout, "out"), (self.process.stderr, "err"))
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream, name):
        for line in stream:
            self._lines[name].append(line)

    @property
    def out(self):
        return "".join(self._lines["out"])

    @property
    def err(self):
        return "".join(self._lines["err"])

    @property
    def said(self):
        return f"{self.out}\n--- errors\n{self.err}"

    def until(self, pattern, count=1):
        """All matches, once there are so many."""
        end = time.monotonic() + PATIENCE
        while len(found := re.findall(pattern, self.out + self.err)) < count:
            assert time.monotonic() < end and self.process.poll() is None, self.said
            time.sleep(0.02)
        return found

    def signal(self, number):
        self.process.send_signal(number)

    def end(self):
        """The exit status."""
        try:
            status = self.process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"runs after {PATIENCE} s: {self.said}") from None
        for reader in self._readers:
            reader.join(PATIENCE)
        return status

    def __enter__(self):
        return self

    def __exit__(self, *_):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def launch(*words, **more):
    """Run it to its end; the status, and the object that has all it printed."""
    with Launched(*words, **more) as launched:
        return launched.end(), launched


def runs(process):
    """Whether there is such a process, and it is no zombie."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def all_end(processes):
    end = time.monotonic() + PATIENCE
    while left := [each for each in processes if runs(each)]:
        if time.monotonic() > end:
            return left
        time.sleep(0.05)
    return []
