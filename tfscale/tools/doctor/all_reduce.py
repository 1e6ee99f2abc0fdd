"""A real all-reduce between processes of this host, or of several hosts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from typing import Any

from tfscale.tools.doctor.check import Check, ok, problem, warning
from tfscale.tools.doctor.worker import MARK
from tfscale.tools.launch import LocalWorkers, WorkerFailed

MODULE = "tfscale.tools.doctor.worker"
PROCESSES = 2

_END_SECONDS = 20  # seconds that a launcher gets to end its workers
_LINES = 12  # lines of a failed worker's output

Found = dict[str, Any]


class Failed(RuntimeError):
    """Raised if there was no all-reduce; the message says why."""


def on_this_host(seconds: float) -> Found:
    """Run an all-reduce between two processes of this host; return what they found."""
    try:
        with LocalWorkers([sys.executable, "-m", MODULE], PROCESSES) as workers:
            outputs = workers.wait(seconds)
    except WorkerFailed as error:
        raise Failed(_shortened(str(error))) from error
    return _read(outputs[0])


def between(hosts: str, ssh: str, seconds: float) -> Found:
    """Run an all-reduce between a process on each host; return what they found."""
    command = [sys.executable, "-m", "tfscale", "launch", "--no-prefix"]
    # Use a file instead of a pipe: a process that outlives the launcher would hold the pipe open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        words = ["--hosts", hosts, "--ssh", ssh, "-m", MODULE]
        launcher = subprocess.Popen([*command, *words], stdout=output, stderr=output)
        try:
            ended = f"`tfscale launch` ended with {launcher.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ended = f"the all-reduce still runs after {seconds:.0f} s"
        finally:
            _end(launcher)
        output.seek(0)
        said = output.read()
    if launcher.returncode != 0:
        raise Failed(_shortened(f"{ended}. The end of its output:\n{said}"))
    return _read(said)


def _end(launcher: subprocess.Popen[bytes]) -> None:
    """Terminate a launcher, which ends its workers first; kill it if it takes too long."""
    launcher.terminate()
    try:
        launcher.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()


def _read(output: str) -> Found:
    for line in output.splitlines():
        if line.startswith(MARK):
            found: Found = json.loads(line.removeprefix(MARK))
            return found
    raise Failed(_shortened(f"worker 0 has not said what it found. Its output:\n{output}"))


def _shortened(message: str) -> str:
    """Return the first line of a message, and the last lines of the output below it."""
    first, *output = [line.rstrip() for line in message.splitlines() if line.strip()]
    return "\n  ".join([first, *output[-_LINES:]])


def check(found: Found) -> Check:
    """Return the check that reports an all-reduce."""
    auto = "; ".join(_choice(choice) for choice in found["auto"])
    rate = found["bytes_per_second"]
    speed = f"{rate / 1e9:.2f} GB/s" if rate else "more bytes per second than can be measured"
    said = (
        f"{found['workers']} workers, {found['ways']}: latency "
        f"{1e6 * found['latency_seconds']:.0f} µs, {speed}; sums are right\n"
        f"auto would choose: {auto}"
    )
    if found["why_not_sockets"]:
        return warning(
            "all-reduce",
            said,
            "Gradients go over TensorFlow's gRPC, which is slower than sockets: open ports for "
            "TFSCALE_PORTS in the firewall, or set TFSCALE_INTERFACE to the network that works.",
        )
    return ok("all-reduce", said)


def _choice(choice: dict[str, Any]) -> str:
    return f"{choice['numbers']:,} numbers by {choice['algorithm']} in {_time(choice['seconds'])}"


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"


def failed(error: Failed, where: str) -> Check:
    """Return the check of an all-reduce that failed."""
    return problem(
        "all-reduce",
        f"failed {where}: {error}",
        "A training of several workers would fail like this. The lines above are the end of the "
        "worker's output; docs/faults.md says what such errors mean. A slow machine may need "
        "--time-limit.",
    )
