"""Environment variables of launchers: this worker's index, and the number of workers.

Nothing here opens a file or a connection. ``find_source`` decides which source counts, and refuses
sources that contradict each other: a worker that believes the wrong one trains something else.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tfscale.cluster import config, slurm
from tfscale.cluster.ancestors import ancestor

TF_CONFIG, TORCHRUN, OPEN_MPI, MPICH, SLURM = ORDER = (
    "TF_CONFIG",
    "torchrun",
    "Open MPI",
    "MPICH (PMI)",
    "Slurm",
)
ALL_BARS = "TFSCALE_ALL_BARS"  # if set, every worker shows Keras's bars, not only the first
ONLY_TF_CONFIG = "TFSCALE_LAUNCH"  # if set, no other source counts
# These launchers may run inside another one, whose variables then do not describe this process.
_INNERMOST = {
    TORCHRUN: "TORCHELASTIC_RUN_ID",
    OPEN_MPI: "OMPI_COMM_WORLD_SIZE",
    MPICH: "MPI_LOCALNRANKS",
}
_SHOWN = 300  # largest number of shown characters of a variable
_T = TypeVar("_T")


@dataclass(frozen=True)
class Source:
    """The data of one launcher about this process."""

    name: str
    index: int
    count: int
    addresses: list[str] | None  # of all workers, "host:port"; None if unknown
    master: tuple[str, int] | None  # where workers without addresses exchange them
    local_index: int  # index among the workers of this host
    local_count: int
    identity: str  # equal for all processes of a job, and unique to it
    evidence: dict[str, str]  # the variables that say so
    shares_gpus: bool = True  # whether workers of one host see the same GPUs


def find_source(environ: Mapping[str, str]) -> Source | None:
    """Return the source that counts; None if this process is alone, or not a worker.

    Raises ``ValueError`` if two sources contradict each other, or a variable is broken or missing.
    """
    cluster = _cluster(environ)
    own = _tf_config(environ)
    if cluster and own is None:
        return None  # an evaluator
    if environ.get(ONLY_TF_CONFIG):
        return own
    sources = [*([own] if own else []), *_launched(environ)]
    if not sources:
        return None
    first, *others = sources
    for other in others:
        if (first.index, first.count) != (other.index, other.count):
            raise ValueError(_contradiction(first, other))
    if first.addresses is None and first.master is None:
        raise ValueError(_no_master(first))
    return first


def find_sources(environ: Mapping[str, str]) -> list[Source]:
    """Return all sources, in the order of precedence."""
    return [source for name in ORDER if (source := _READERS[name](environ))]


def _launched(environ: Mapping[str, str]) -> list[Source]:
    """Return the sources other than ``TF_CONFIG``, up to the innermost launcher."""
    sources = []
    for name in ORDER[1:]:
        source = _READERS[name](environ)
        if source:
            sources.append(source)
        if environ.get(_INNERMOST.get(name, "")):
            break
    return sources


class _Variables:
    """A reader of variables, which remembers what it has read."""

    def __init__(self, environ: Mapping[str, str], source: str) -> None:
        self._environ = environ
        self._source = source
        self.read: dict[str, str] = {}

    def text(self, name: str) -> str:
        value = self._environ.get(name, "")
        if value:
            self.read[name] = value
        return value

    def needed(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise ValueError(
                f"{name} is not set, though other variables of {self._source} are: "
                f"{_shown(self.read)}. Set it, too, or unset these."
            )
        return value

    def number(self, name: str, below: int | None = None, least: int = 0) -> int:
        value = self.needed(name)
        if not (value.isascii() and value.isdecimal() and int(value) >= least):
            raise ValueError(f"{name} is a number, {least} or more; got {value!r}.")
        if below is not None and int(value) >= below:
            raise ValueError(
                f"{name}={value} is not below {below}, though it is counted from 0: "
                f"{_shown(self.read)}."
            )
        return int(value)

    def parsed(self, name: str, parse: Callable[[str], _T]) -> _T:
        value = self.needed(name)
        try:
            return parse(value)
        except ValueError as problem:
            raise ValueError(f"{name}={value!r} {problem}.") from None


# ---------------------------------------------------------------------- TF_CONFIG


def _cluster(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the whole ``TF_CONFIG``, if it has a cluster."""
    text = environ.get("TF_CONFIG") or "{}"
    config.check(text)
    found = json.loads(text)
    return found if found.get("cluster") else None


def _tf_config(environ: Mapping[str, str]) -> Source | None:
    """Read ``TF_CONFIG``: the chief is the first worker; tasks of other kinds do not train."""
    tf_config = _cluster(environ)
    if tf_config is None or tf_config["task"]["type"] not in ("chief", "worker"):
        return None
    jobs = {job: _listed(tf_config["cluster"].get(job, [])) for job in ("chief", "worker")}
    own = tf_config["task"]["type"], int(tf_config["task"]["index"])
    tasks = [(job, index) for job, listed in jobs.items() for index in listed]
    addresses = [address for listed in jobs.values() for address in listed.values()]
    evidence = {"TF_CONFIG": environ["TF_CONFIG"]}
    identity = ",".join(addresses)
    return Source(
        TF_CONFIG, tasks.index(own), len(tasks), addresses, None, 0, 1, identity, evidence
    )


def _listed(addresses: Any) -> dict[int, str]:
    """Return addresses by index, from a list or from an object whose keys are indices."""
    if isinstance(addresses, dict):
        return {int(index): addresses[index] for index in sorted(addresses, key=int)}
    return dict(enumerate(addresses))


# ---------------------------------------------------------------------- launchers


def _torchrun(environ: Mapping[str, str]) -> Source | None:
    """Read variables of torchrun and similar launchers; by default one process on each host."""
    if not all(environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")):
        return None
    variables = _Variables(environ, TORCHRUN)
    count = variables.number("WORLD_SIZE", least=1)
    index = variables.number("RANK", below=count)
    if count == 1:
        return None
    local_index, local_count = 0, 1
    if environ.get("LOCAL_RANK") or environ.get("LOCAL_WORLD_SIZE"):
        local_count = variables.number("LOCAL_WORLD_SIZE", least=1)
        local_index = variables.number("LOCAL_RANK", below=local_count)
    host, port = _master(variables)
    # Do not use TORCHELASTIC_RESTART_COUNT: after a failure on one host, other hosts' may be lower.
    run = variables.text("TORCHELASTIC_RUN_ID")
    identity = f"{TORCHRUN} {run} at {port}"  # some may know the host by another name
    return Source(
        TORCHRUN, index, count, None, (host, port), local_index, local_count, identity,
        variables.read,
    )  # fmt: skip


def _open_mpi(environ: Mapping[str, str]) -> Source | None:
    if not environ.get("OMPI_COMM_WORLD_SIZE"):
        return None
    variables = _Variables(environ, OPEN_MPI)
    names = tuple(
        f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    )
    job = variables.text("PMIX_NAMESPACE") or variables.text("OMPI_MCA_ess_base_jobid")
    return _mpi_source(variables, OPEN_MPI, names, job)


def _mpich(environ: Mapping[str, str]) -> Source | None:
    """Read MPICH's variables.

    ``srun --mpi=pmi2`` sets the first two as well, but Slurm's own variables say more.
    """
    by_slurm = _in_a_step(environ) and not environ.get("MPI_LOCALNRANKS")
    if not environ.get("PMI_SIZE") or by_slurm:
        return None
    variables = _Variables(environ, MPICH)
    names = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    # No variable names the job; but its processes on one host have a common ancestor.
    job = "" if environ.get("MASTER_ADDR") else ancestor("hydra_pmi_proxy")
    return _mpi_source(variables, MPICH, names, job)


def _mpi_source(
    variables: _Variables, name: str, names: tuple[str, ...], job: str
) -> Source | None:
    """Read MPI's variables: index and number of this process, in all and on its host."""
    of_index, of_count, of_local_index, of_local_count = names
    count = variables.number(of_count, least=1)
    index = variables.number(of_index, below=count)
    if count == 1:
        return None
    local_count = variables.number(of_local_count, least=1)
    local_index = variables.number(of_local_index, below=local_count)
    identity = f"{name} {job}"
    master = None
    if variables.text("MASTER_ADDR") or variables.text("MASTER_PORT"):
        master = _master(variables)
        identity += f" at {master[1]}"
    elif local_count == count and job:
        master = "127.0.0.1", slurm.FIRST_PORT + zlib.crc32(identity.encode()) % slurm.PORTS
    return Source(
        name, index, count, None, master, local_index, local_count, identity, variables.read
    )


def _master(variables: _Variables) -> tuple[str, int]:
    host = variables.needed("MASTER_ADDR")
    return host, variables.number("MASTER_PORT", below=65536, least=1)


# ---------------------------------------------------------------------- Slurm


def _in_a_step(environ: Mapping[str, str]) -> bool:
    return bool(environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEP_NODELIST"))


def _slurm(environ: Mapping[str, str]) -> Source | None:
    """Read Slurm's variables, if srun has started several tasks."""
    if not _in_a_step(environ):
        return None
    variables = _Variables(environ, SLURM)
    count = variables.number("SLURM_STEP_NUM_TASKS", least=1)
    if count == 1:
        return None
    index = variables.number("SLURM_PROCID", below=count)
    hosts = variables.parsed("SLURM_STEP_NODELIST", slurm.hosts)
    tasks = variables.parsed("SLURM_STEP_TASKS_PER_NODE", slurm.tasks)
    if len(tasks) != len(hosts) or sum(tasks) != count:
        raise ValueError(
            f"Slurm's variables speak of {len(hosts)} hosts, {len(tasks)} numbers of tasks with "
            f"the sum {sum(tasks)}, and {count} tasks: {_shown(variables.read)}. Use one srun for "
            "all workers, or set TF_CONFIG."
        )
    places = _places(variables, tasks)
    _check_place(variables, places[index])
    job, step = variables.number("SLURM_JOB_ID"), variables.number("SLURM_STEP_ID")
    ports = _ports(variables, max(tasks), job, step)
    addresses = [f"{hosts[host]}:{ports[local]}" for host, local in places]
    host, local_index = places[index]
    of_tasks = environ.get("SLURM_GPUS_PER_TASK") or "gpu" in environ.get("SLURM_TRES_PER_TASK", "")
    bound = environ.get("SLURM_GPU_BIND", "none") != "none"
    return Source(
        SLURM, index, count, addresses, None, local_index, tasks[host], f"{SLURM} {job}.{step}",
        variables.read, not (of_tasks or bound),
    )  # fmt: skip


def _places(variables: _Variables, tasks: list[int]) -> list[tuple[int, int]]:
    if variables.text("SLURM_DISTRIBUTION"):
        return variables.parsed("SLURM_DISTRIBUTION", lambda kind: slurm.places(tasks, kind))
    return slurm.places(tasks, "block")


def _check_place(variables: _Variables, place: tuple[int, int]) -> None:
    reported = variables.number("SLURM_NODEID"), variables.number("SLURM_LOCALID")
    if place != reported:
        raise ValueError(
            "by Slurm's lists this is process {1} of host {0}, but SLURM_NODEID and SLURM_LOCALID "
            "say process {3} of host {2} (counted from 0): {4}. Its tasks are distributed in a way "
            "that is not known here: use srun --distribution=block, or set TF_CONFIG.".format(
                *place, *reported, _shown(variables.read)
            )
        )


def _ports(variables: _Variables, most: int, job: int, step: int) -> list[int]:
    """Return a port for each worker of a host, equal on all hosts."""
    if not variables.text("SLURM_STEP_RESV_PORTS"):
        return [slurm.unreserved_port(job, step, local) for local in range(most)]
    ports = variables.parsed("SLURM_STEP_RESV_PORTS", slurm.ports)
    if len(ports) < most:
        raise ValueError(
            f"SLURM_STEP_RESV_PORTS={variables.text('SLURM_STEP_RESV_PORTS')} has {len(ports)} "
            f"ports, and a host has {most} workers: use srun --resv-ports={most}."
        )
    return ports


_READERS: dict[str, Callable[[Mapping[str, str]], Source | None]] = {
    TF_CONFIG: _tf_config,
    TORCHRUN: _torchrun,
    OPEN_MPI: _open_mpi,
    MPICH: _mpich,
    SLURM: _slurm,
}

# ---------------------------------------------------------------------- messages


def _shown(variables: Mapping[str, str]) -> str:
    def short(value: str) -> str:
        return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}..."

    return ", ".join(f"{name}={short(value)}" for name, value in variables.items())


def _contradiction(one: Source, other: Source) -> str:
    says = " ".join(
        f"{each.name} says that this is worker {each.index} of {each.count}: "
        f"{_shown(each.evidence)}."
        for each in (one, other)
    )
    unset = "; ".join(
        f"if {each.name}'s are, `unset {' '.join(each.evidence)}`" for each in (one, other)
    )
    return (
        f"{one.name} and {other.name} contradict each other. {says} "
        f"Variables of one of them are left over from something else: {unset}. "
        f"Or set {ONLY_TF_CONFIG}=1, and TF_CONFIG alone counts."
    )


def _no_master(source: Source) -> str:
    set_by = "-x {}={}" if source.name == OPEN_MPI else "-genv {} {}"
    example = " ".join(
        set_by.format(name, value)
        for name, value in (("MASTER_ADDR", "<host of rank 0>"), ("MASTER_PORT", "29400"))
    )
    return (
        f"{source.name} has started this process as worker {source.index} of {source.count}, but "
        f"does not say where the others are: {_shown(source.evidence)}. Name a host and a free "
        f"port where worker 0 tells all: mpirun {example} ..."
    )
