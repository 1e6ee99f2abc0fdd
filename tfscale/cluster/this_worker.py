"""Conversion of a launcher's variables into ``TF_CONFIG``, which all other code reads."""

from __future__ import annotations

import json
import logging
import os
import socket
from collections.abc import MutableMapping

from tfscale.cluster.addresses import held_ports
from tfscale.cluster.collect import collect
from tfscale.cluster.sources import TF_CONFIG, Source, find_source

_log = logging.getLogger("tfscale")

_rank_of_resolver: int | None = None  # from a cluster resolver that the program has made
_sources_by_config: dict[str, Source] = {}  # by the TF_CONFIG that this process has set
_held_ports: list[socket.socket] = []  # open as long as the process lives


def configure(
    environ: MutableMapping[str, str] = os.environ, timeout: float = 300.0
) -> Source | None:
    """Set ``TF_CONFIG`` if a launcher has started this process as one of several workers.

    If the launcher gives no addresses, this waits until all workers have exchanged theirs, and
    raises ``JoinError`` if they do not come. A second call finds the work done.

    Args:
        environ: the variables to read and to set.
        timeout: number of seconds to wait for the others.

    Returns:
        The launcher's data; None if there is no launcher, or if ``TF_CONFIG`` was set from outside.
    """
    if environ.get("TF_CONFIG") == "":
        del environ["TF_CONFIG"]  # TensorFlow treats an empty one as broken JSON
    made = _sources_by_config.get(environ.get("TF_CONFIG", ""))
    if made is not None:
        return made
    source = find_source(environ)
    if source is None or source.name == TF_CONFIG:
        return None
    addresses = source.addresses
    if addresses is None:
        addresses = _collect_addresses(source, timeout)
        environ["TF_GRPC_REUSE_PORT"] = "1"  # TensorFlow's server shares the port with its holder
    task = {"type": "worker", "index": source.index}
    environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": task})
    _sources_by_config[environ["TF_CONFIG"]] = source
    _log.info(
        "cluster of %d workers found in the variables of %s; this is worker %d at %s",
        source.count, source.name, source.index, addresses[source.index],
    )  # fmt: skip
    return source


def rank() -> int:
    """Return the number of this worker, from 0.

    The number counts workers, which are processes, and not replicas: a worker that trains on 4 GPUs
    is one worker with 4 replicas. The number is 0 if the program runs alone, on one device or on
    several. It is known from the beginning of the program, before a strategy is made, from the
    launcher (``tfscale launch``, ``TF_CONFIG``, Slurm, MPI, torchrun). If you pass
    ``ScaleStrategy`` a ``cluster_resolver``, ask after you have made the strategy.

    Raises:
        ValueError: if variables of two launchers contradict each other, or one is missing.

    Example:
        >>> tfscale.rank()
        0
    """
    if _rank_of_resolver is not None:
        return _rank_of_resolver
    source = find_source(os.environ)
    return 0 if source is None else source.index


def is_first() -> bool:
    """Return whether this is the first worker, ``rank() == 0``: the one that prints and writes.

    Exactly one worker of a training is the first; a program that runs alone is the first, too.

    Example:
        >>> if tfscale.is_first():
        ...     print("only one worker prints this")
        only one worker prints this
    """
    return rank() == 0


def note_rank(index: int) -> None:
    """Remember the number of this worker, which comes from a cluster resolver of the program."""
    global _rank_of_resolver
    _rank_of_resolver = index


def _collect_addresses(source: Source, timeout: float) -> list[str]:
    assert source.master is not None
    (held,) = held_ports(1, "")
    _held_ports.append(held)
    port = held.getsockname()[1]
    job = source.master, source.index, source.count, [port], source.identity, timeout
    return [address for (address,) in collect(*job)]
