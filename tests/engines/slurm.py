"""A real Slurm of one machine, made of Debian's packages, for as long as tests need it."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tests.launch.processes import free_ports
from tests.launch.test_cluster import PLAIN

PATIENCE = 150  # seconds, many times what anything here takes
REQUEUE_AFTER = 5  # seconds, the least that Slurm takes; its default is 120
DAEMONS = ("munged", "slurmctld", "slurmd")
_PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"

_CONFIG = """
ClusterName=tests
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
NodeName={node} NodeAddr=127.0.0.1 Port={port} CPUs=64
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=2
"""  # it believes in more cores than there are, as scripts ask for many


def missing() -> str:
    """The programs that are not installed, as a list to read."""
    programs = (*DAEMONS, "srun", "sbatch")
    return ", ".join(each for each in programs if not shutil.which(each, path=_PATH))


class Slurm:
    """A controller, and a daemon for the one node, which is this machine.

    Attributes:
        folder: where jobs begin, and write.
        node: its name.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.node = socket.gethostname().partition(".")[0]
        self._own = Path(tempfile.mkdtemp(prefix="slurm-"))  # a socket's path must be short
        self._config = self._own / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._variables = {
            **{name: value for name, value in PLAIN.items() if not name.startswith("MUNGE")},
            "SLURM_CONF": str(self._config),
            "PATH": f"{Path(sys.executable).parent}:{_PATH}",
        }

    def __enter__(self) -> Slurm:
        try:
            self._start()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """A command of a user, to its end."""
        return subprocess.run(
            command, cwd=self.folder, env=self._variables, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip

    def submit(self, *words: str) -> str:
        """The number of a new job."""
        submitted = self.run("sbatch", "--parsable", *words)
        assert submitted.returncode == 0, submitted
        return submitted.stdout.strip()

    def state(self, job: str) -> str:
        """Return a job's state in Slurm's words: PENDING, RUNNING, COMPLETED, ..."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job).stdout
        return shown.partition("JobState=")[2].split()[0]

    def until(self, what: str, holds: Callable[[], bool]) -> None:
        """Wait for it; an error says what is waited for, and all that Slurm and its jobs say."""
        end = time.monotonic() + PATIENCE
        while not holds():
            ended = [each.args for each in self._daemons if each.poll() is not None]
            assert not ended and time.monotonic() < end, f"not yet: {what}. {ended}{self._said}"
            time.sleep(0.05)

    def _start(self) -> None:
        self._configure()
        files = ("key", "pid", "seed", "log")
        paths = [f"--{what}-file={self._own}/munge.{what}" for what in files]
        socket = self._own / "munge.socket"
        self._daemon("munged", "--foreground", "--force", f"--socket={socket}", *paths)
        self.until("munged listens", socket.exists)
        self._daemon("slurmctld", "-D", "-c")
        self._daemon("slurmd", "-D", "-N", self.node)
        self.until("the node is idle", lambda: "idle" in self.run("sinfo", "-h", "-o%T").stdout)

    def _configure(self) -> None:
        controller, port = free_ports(2)
        self._config.write_text(
            _CONFIG.format(
                node=self.node, controller=controller, port=port, user=getpass.getuser(),
                folder=self._own, requeue=REQUEUE_AFTER,
            )
        )  # fmt: skip
        (self._own / "state").mkdir()
        key = self._own / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    def _daemon(self, *command: str) -> None:
        with open(self._own / f"{command[0]}.log", "wb") as log:
            self._daemons.append(
                subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    env=self._variables, cwd=self._own,
                )
            )  # fmt: skip

    @property
    def _said(self) -> str:
        files = [*self._own.glob("*.log"), *self.folder.glob("*.out")]
        return "".join(f"\n--- {file.name}\n{file.read_text()}" for file in files)

    def _end(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(5)
            daemon.kill()
            daemon.wait()
        self._kill_what_is_left()
        shutil.rmtree(self._own)

    def _kill_what_is_left(self) -> None:
        """Jobs outlive the daemons. No process of another Slurm has the same configuration."""
        ours = f"SLURM_CONF={self._config}".encode()
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if ours in (process / "environ").read_bytes().split(b"\0"):
                    os.kill(int(process.name), signal.SIGKILL)
