"""The user's request, in the options of ``tfscale launch``, ``torchrun`` and ``horovodrun``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tfscale.cluster.collect import collect_addresses
from tfscale.tools.launch import hosts as named, machine
from tfscale.tools.launch.hosts import Host

_PORT = 29400
_PATIENCE = 600.0  # seconds: somebody starts a launcher on each host by hand

# Options of torchrun and horovodrun without a meaning here, and what to type instead.
_SOCKETS = "gradients go over sockets of tfscale's own, or TFSCALE_TRANSPORT=grpc: leave it out"
_ELSEWHERE = {
    "--rdzv-backend": "launchers that are started by hand meet at the first one: leave it out, and "
    "give each --nnodes N --node-rank I --master-addr HOST",
    "--rdzv-id": "launchers meet at an address: leave it out, and give trainings that run at the "
    "same time different values of --master-port",
    "--rdzv-conf": "there is nothing to set: launchers wait 600 s for each other; leave it out",
    "--start-method": "each worker is a process of its own: leave it out",
    "--redirects": "--log-dir DIR keeps what workers print, and it is shown as well",
    "--tee": "--log-dir DIR keeps what workers print, and it is shown as well",
    "--local-addr": "set the variable TFSCALE_INTERFACE",
    "--gloo": _SOCKETS,
    "--mpi": f"{_SOCKETS}; or start workers by mpirun itself, without a launcher of ours: "
    "mpirun -np N python train.py",
    "--network-interface": "set the variable TFSCALE_INTERFACE",
    "--network-interfaces": "set the variable TFSCALE_INTERFACE",
    "--no-python": "a program that does not end with .py is a command: leave it out",
    "--monitor-interval": "workers are watched all the time: leave it out",
    "--role": "all workers are alike: leave it out",
    "--host-discovery-script": "name the hosts: --hosts a:2,b:2, or --hostfile FILE",
    "--max-np": "with --hosts, --restarts and --min-workers it continues with those that are "
    "left; more than it began with are never added: leave it out",
}

# Prefixes of variables that go to hosts over ssh, in addition to --env.
_CARRIED = ("CUDA_", "KERAS_", "NCCL_", "OMP_", "PYTHON", "TF_", "TFSCALE_", "XLA_")


@dataclass(frozen=True)
class Nodes:
    """Launchers started by hand, one on each host, that meet at the first one's address."""

    count: int
    rank: int
    master: tuple[str, int]

    async def meet(self, ports: Sequence[int], say: Callable[[str], None]) -> list[list[str]]:
        """Return the addresses of all nodes' workers; raise ``JoinError`` if some do not come."""
        job = self.master, self.rank, self.count, ports, "tfscale launch"
        return await collect_addresses(*job, _PATIENCE, who="node", say=say)


@dataclass(frozen=True)
class Request:
    """The command and all options; see the command line's help."""

    command: list[str]
    hosts: list[Host]
    folder: str
    devices: int | None
    environment: dict[str, str]
    nodes: Nodes | None
    ssh: str
    python: str
    bind: bool
    prefix: bool
    all_bars: bool
    log_dir: Path | None
    timeline: Path | None
    grace: float
    silence: float
    restarts: int
    least: int
    dry_run: bool


def parse(words: Sequence[str]) -> Request:
    """Parse the command line; end the process with a message if it is wrong."""
    parser = _parser()
    asked = parser.parse_args(words)
    try:
        return _request(asked)
    except ValueError as error:
        parser.error(str(error))


def _request(asked: argparse.Namespace) -> Request:
    hosts = _hosts(asked)
    workers = sum(host.workers for host in hosts)
    least = workers if asked.least is None else asked.least
    if asked.least is not None and _nodes(asked):
        raise ValueError(
            "--min-workers counts the workers of all hosts, and with --nnodes each launcher knows "
            "its own alone: start all from one host, by "
            "--hosts a:2,b:2 --restarts N --min-workers M"
        )
    if not 1 <= least <= workers:
        raise ValueError(f"--min-workers {least} is not between 1 and {workers}, the workers")
    return Request(
        command=_command(asked),
        hosts=hosts,
        folder=_folder(),
        devices=asked.devices,
        environment=_environment(asked.env),
        nodes=_nodes(asked),
        ssh=asked.ssh + (f" -p {asked.ssh_port}" if asked.ssh_port else ""),
        python=os.path.abspath(asked.python) if "/" in asked.python else asked.python,
        bind=asked.bind,
        prefix=not asked.no_prefix,
        all_bars=asked.all_bars,
        log_dir=asked.log_dir,
        timeline=asked.timeline,
        grace=asked.grace,
        silence=asked.silence,
        restarts=asked.restarts,
        least=least,
        dry_run=asked.dry_run,
    )


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ValueError("this folder is gone: change to another one") from None


def _hosts(asked: argparse.Namespace) -> list[Host]:
    each = _number(asked.each, asked.devices)
    if asked.hosts and asked.hostfile:
        raise ValueError("--hosts and --hostfile both name hosts; give one of them")
    if asked.hosts or asked.hostfile:
        if asked.nnodes:
            raise ValueError(
                "--nnodes is for launchers that are started by hand on each host, and --hosts has "
                "this one start the others; give one of them"
            )
        text, path = asked.hosts, asked.hostfile
        hosts = named.listed(text, each) if text else named.in_file(path, each)
        return named.first(hosts, asked.total)
    if asked.total and asked.each:
        raise ValueError("-np is the total and -n is per host; without --hosts give one of them")
    return [Host("localhost", asked.total or each)]


def _number(text: str | None, devices: int | None) -> int:
    """Return the number of workers of a host: as given, or as many as fit on this host."""
    if text is None:
        return 1
    gpus, processors = len(machine.gpus()), machine.processors()
    if text == "auto":
        text = "gpu" if gpus else "cpu"
    if text == "gpu" and not gpus:
        raise ValueError("-n gpu: this host has no GPU; use a number, or -n cpu")
    if text in ("gpu", "cpu"):
        return max(1, (gpus if text == "gpu" else processors) // (devices or 1))
    if not text.isdecimal() or text == "0":
        raise ValueError(f"-n {text} is neither a number of workers nor one of cpu, gpu and auto")
    return int(text)


def _nodes(asked: argparse.Namespace) -> Nodes | None:
    if not asked.nnodes or asked.nnodes == "1":
        return None
    if not asked.nnodes.isdecimal():
        raise ValueError(
            f"--nnodes {asked.nnodes}: expected one number; for fewer workers after a failure use "
            "--hosts with --restarts and --min-workers"
        )
    place = asked.endpoint or asked.master_addr or ""
    host, colon, port = place.rpartition(":")
    if not colon or place.endswith("]") or (place.count(":") > 1 and not place.startswith("[")):
        host, port = place, ""
    if port and not port.isdecimal():
        raise ValueError(f"{place!r} is neither a host nor host:port")
    if not host or asked.node_rank is None:
        raise ValueError(
            "--nnodes needs --node-rank (0 on the first host) and --master-addr (the first host's "
            "name or address), the same on all hosts"
        )
    count = int(asked.nnodes)
    if not 0 <= asked.node_rank < count:
        raise ValueError(f"--node-rank {asked.node_rank} is not between 0 and {count - 1}")
    return Nodes(count, asked.node_rank, (host.strip("[]"), int(port or asked.master_port)))


def _command(asked: argparse.Namespace) -> list[str]:
    program: str = asked.program
    arguments: list[str] = asked.arguments
    if asked.module:
        return [asked.python, "-m", program, *arguments]
    if program.endswith(".py") or (Path(program).is_file() and not os.access(program, os.X_OK)):
        if not Path(program).is_file():
            raise ValueError(f"there is no {program} in {os.getcwd()}")
        return [asked.python, program, *arguments]
    if shutil.which(program) is None:
        raise ValueError(f"{program} is neither a file that ends with .py nor a command")
    return [program, *arguments]


def _environment(wanted: Sequence[str]) -> dict[str, str]:
    """Return variables for the workers of other hosts, in addition to their own environment."""
    chosen = {name: value for name, value in os.environ.items() if name.startswith(_CARRIED)}
    chosen.pop("TF_CONFIG", None)
    for word in wanted:
        name, assigned, value = word.partition("=")
        if not name:
            raise ValueError(f"--env {word}: expected NAME or NAME=VALUE")
        if not assigned and name not in os.environ:
            raise ValueError(f"--env {name}: there is no such variable here; or give NAME=VALUE")
        chosen[name] = value if assigned else os.environ[name]
    return chosen


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _positive(text: str) -> int:
    value = _count(text)
    if value == 0:
        raise argparse.ArgumentTypeError("at least 1")
    return value


class _Elsewhere(argparse.Action):
    """An action that ends the process with the replacement of another launcher's option."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"there is no {option_string} here: {self.const}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfscale launch",
        usage="tfscale launch [options] (train.py | -m package.module | command) [arguments]",
        description="Start a training on several devices, of this host or of several.",
        allow_abbrev=False,
    )
    where = parser.add_argument_group("how many workers, and where")
    where.add_argument("-n", "--nproc-per-node", "--nproc_per_node", dest="each", metavar="N",
        help="workers on each host: a number, cpu (one per core), gpu (one per GPU), "
        "auto (gpu if there are any, else cpu); default 1")  # fmt: skip
    where.add_argument("-np", "--num-proc", dest="total", type=_positive, metavar="N",
        help="workers on all hosts together")  # fmt: skip
    where.add_argument("-H", "--hosts", metavar="A:2,B:2",
        help="start workers on these hosts over ssh, A:2 means two on A")  # fmt: skip
    where.add_argument("-hostfile", "--hostfile", type=Path, metavar="FILE",
        help="read the hosts from a file, one per line: a:2 or 'a slots=2'")  # fmt: skip
    where.add_argument("--devices-per-worker", dest="devices", type=_positive, metavar="K",
        help="replicas of each worker: GPUs, or logical CPUs on a host without GPUs")  # fmt: skip
    where.add_argument("--bind", action="store_true", help="give each worker separate cores")

    ssh = parser.add_argument_group("over ssh")
    ssh.add_argument("--ssh", default="ssh", metavar="COMMAND",
        help="such as 'ssh -p 2222 -i key' (default: %(default)s)")  # fmt: skip
    ssh.add_argument("-p", "--ssh-port", type=_positive, metavar="PORT", help="ssh's port")
    ssh.add_argument("--silence", type=_positive, default=60, metavar="SECONDS",
        help="a host ends its workers after this time without a message from here "
        "(default: %(default)g)")  # fmt: skip
    ssh.add_argument("--python", default=sys.executable, metavar="PATH",
        help="the Python that runs on all hosts (default: this one)")  # fmt: skip
    ssh.add_argument("--env", action="append", default=[], metavar="NAME[=VALUE]",
        help="a variable for all workers; TF_, KERAS_, TFSCALE_, CUDA_, NCCL_, OMP_, XLA_ and "
        "PYTHON* are passed on by default")  # fmt: skip

    hand = parser.add_argument_group("started by hand on each host")
    hand.add_argument("--nnodes", metavar="N", help="number of hosts, each with its own launcher")
    hand.add_argument("--node-rank", "--node_rank", type=_count, metavar="I",
        help="number of this host, 0 for the first")  # fmt: skip
    hand.add_argument("--master-addr", "--master_addr", metavar="HOST",
        help="the first host, where all collect the addresses of workers once")  # fmt: skip
    hand.add_argument("--master-port", "--master_port", type=_positive, default=_PORT,
        metavar="PORT", help="(default: %(default)s)")  # fmt: skip
    hand.add_argument("--rdzv-endpoint", "--rdzv_endpoint", dest="endpoint", metavar="HOST:PORT",
        help="torchrun's name for both options")  # fmt: skip
    hand.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)

    shown = parser.add_argument_group("what is shown and kept")
    shown.add_argument("--no-prefix", action="store_true", help="lines without [rank]")
    shown.add_argument("--all-bars", action="store_true",
        help="progress bars of all workers, not of rank 0 alone")  # fmt: skip
    shown.add_argument("--log-dir", "--log_dir", "--output-filename", type=Path, metavar="DIR",
        help="keep what each worker prints: DIR/attempt-0/worker-0.log")  # fmt: skip
    shown.add_argument("--timeline", "--timeline-filename", type=Path, metavar="FILE",
        help="record some steps of all workers, for https://ui.perfetto.dev")  # fmt: skip
    shown.add_argument("--dry-run", action="store_true", help="print what would be started")

    end = parser.add_argument_group("when a worker fails")
    end.add_argument("--grace", type=_seconds, default=10.0, metavar="SECONDS",
        help="from SIGTERM to SIGKILL (default: %(default)g)")  # fmt: skip
    end.add_argument("--restarts", "--max-restarts", "--max_restarts", type=_count, default=0,
        metavar="N", help="largest number of restarts (default: %(default)s)")  # fmt: skip
    end.add_argument("--min-workers", "--min-np", dest="least", type=_positive, metavar="M",
        help="continue after a failure with at least M workers (default: all)")  # fmt: skip

    for name, advice in _ELSEWHERE.items():
        names = dict.fromkeys([name, "--" + name[2:].replace("-", "_")])
        parser.add_argument(
            *names, nargs="?", action=_Elsewhere, const=advice, help=argparse.SUPPRESS
        )

    what = parser.add_argument_group("the program")
    what.add_argument("-m", "--module", action="store_true", help="run a module, as python -m does")
    what.add_argument("program", help=argparse.SUPPRESS)
    what.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser
