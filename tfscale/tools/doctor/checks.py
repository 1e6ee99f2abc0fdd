"""All checks, in the order of the report."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tfscale.native import transport
from tfscale.tools.doctor import all_reduce, cluster, library, machine, network, probe, versions
from tfscale.tools.doctor.check import PROBLEM, Check

if TYPE_CHECKING:
    from tfscale.native.toolchain import TensorFlow


@dataclasses.dataclass(frozen=True)
class Wanted:
    """The options of the command line.

    Args:
        quick: whether to skip the all-reduce, and the build that it needs.
        hosts: hosts of the all-reduce; empty for two processes of this host.
        ssh: the command that reaches them.
        seconds: time limit of the all-reduce.
    """

    quick: bool
    hosts: str
    ssh: str
    seconds: float


class Checks:
    """An iterable that runs all checks.

    Attributes:
        all_reduce: what the all-reduce found; None if there was none.
    """

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        self.all_reduce: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Check]:
        possible = True
        for check in self._machine_checks():
            possible = possible and check.state != PROBLEM
            yield check
        yield from self._cluster_checks()
        if possible and not self.wanted.quick:
            yield self._all_reduce_check()

    def _machine_checks(self) -> Iterator[Check]:
        yield versions.of_tfscale()
        yield versions.of_python()
        seen = probe.look()
        yield versions.of_tensorflow(seen)
        yield versions.of_keras(seen)
        yield versions.of_numpy(seen)
        if seen.tensorflow is not None:
            yield from self._library_checks(seen.tensorflow)
            yield machine.devices(seen)
        yield machine.cores()
        yield machine.memory()
        if seen.keeps_memory is not None:
            yield machine.pages(seen.keeps_memory)
        yield machine.shm(len(seen.gpus or ()))
        yield network.ways(os.environ)
        yield network.host_name()

    def _library_checks(self, tensorflow: TensorFlow) -> Iterator[Check]:
        needed = not library.is_there(tensorflow)
        before = [library.compiler(needed), library.cache(needed)]
        yield from before
        can = all(check.state != PROBLEM for check in before)
        yield library.library(tensorflow, may_build=can and not self.wanted.quick)

    def _cluster_checks(self) -> Iterator[Check]:
        yield cluster.order(os.environ)
        source, check = cluster.find(os.environ)
        yield check
        addresses = (source.addresses or []) if source else []
        if source:
            yield from cluster.workers(source)
        try:
            streams = transport.attributes("auto", "", os.environ)["streams"]
        except ValueError:
            return  # reported by an earlier check
        yield network.interface(os.environ, addresses, source.index if source else 0)
        yield machine.descriptors(source.count - 1 if source else 0, streams)

    def _all_reduce_check(self) -> Check:
        wanted = self.wanted
        where = f"between {wanted.hosts}" if wanted.hosts else "between two processes of this host"
        logging.getLogger("tfscale").info("an all-reduce %s ...", where)
        from tfscale.tools.bench.command import ended_by_signals

        try:
            with ended_by_signals():
                if wanted.hosts:
                    self.all_reduce = all_reduce.between(wanted.hosts, wanted.ssh, wanted.seconds)
                else:
                    self.all_reduce = all_reduce.on_this_host(wanted.seconds)
        except all_reduce.Failed as error:
            return all_reduce.failed(error, where)
        return all_reduce.check(self.all_reduce)
