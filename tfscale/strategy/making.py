"""Parts of a ``ScaleStrategy`` as it is made: it joins the workers, and gets its reducers.

The order matters. Workers compare their settings before they exchange anything else; links are
measured once all have joined; buckets depend on the measured links.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os

from tfscale.bridge import output, saving
from tfscale.bridge.callbacks import before_callbacks_get_their_model
from tfscale.cluster.sources import ALL_BARS
from tfscale.collectives.choose import Chooser
from tfscale.compression.policy import MethodPolicy
from tfscale.exchange import backends
from tfscale.exchange.collective_schedules import bucket_bytes, of_hosts, of_replicas
from tfscale.exchange.exchange import Exchange
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.tensorflow_exchange import TensorFlowExchange
from tfscale.exchange.trial import Trials
from tfscale.strategy import backup, join, shutdown
from tfscale.strategy.extended import Extended
from tfscale.strategy.groups import Groups, refuse_methods, refuse_schedule, size_of
from tfscale.strategy.protocols import Strategy
from tfscale.strategy.rounds import Rounds
from tfscale.strategy.settings import Settings
from tfscale.sync import Hierarchical
from tfscale.sync.hierarchical import rule_of_rounds

_NOTHING_TRAVELS = (
    "%s has no effect: there is one replica, so no gradients are sent. For several replicas "
    "use several GPUs, logical CPUs or workers"
)
_ONE_GROUP = (
    "%r has no effect: all %d replicas are of one group, and train as under EveryStep. Say how "
    "many make a group, such as group=1"
)
_GROUPS_OF_ONE = (
    "%r has no effect: it says how gradients are sent within groups, and with %r each has one "
    "replica"
)

_log = logging.getLogger("tfscale")


def join_workers(extended: Extended, settings: Settings) -> Settings:
    """Wait for all workers, compare their settings, and return settings with the chosen backend."""
    if settings.backend == backends.AUTO:
        chosen = backends.TENSORFLOW if extended.on_gpus else backends.ENGINE
        settings = dataclasses.replace(settings, backend=chosen)
    _say_who_trains(extended)
    if settings.policy != MethodPolicy():
        wire, method = settings.wire, settings.method
        asked = f"wire={wire!r}" if method is None else f"method={method!r}"
        _say_if_nothing_travels(extended, asked)
    if settings.in_rounds:
        _say_if_nothing_travels(extended, f"sync={settings.sync!r}")
    hosts, group = extended.hosts, extended.group
    devices = [name.rsplit("device:", 1)[-1] for name in extended.devices]
    own = {"list of devices": devices, **settings.of_all_workers()}
    if hosts is not None:
        hosts.join()
    join.same_start(hosts, own)
    if group is not None:
        group.join()  # only ranks that have joined learn of another one's failure
        if hosts is not None:
            shutdown.announce([group, hosts])
    return settings


def connect(strategy: Strategy, settings: Settings) -> Exchange:
    """Return the collectives of all replicas, and give them to what TensorFlow calls."""
    extended = strategy.extended
    if settings.backend == backends.TENSORFLOW:
        exchange: Exchange = TensorFlowExchange(extended.group)
    else:
        refuse_schedule(settings.sync, settings.algorithm, extended)
        wire, file = settings.policy.method.wires[0], settings.schedule_file
        schedules = of_replicas(settings.algorithm, extended.group, wire, file)
        exchange = Exchange(extended.group, schedules)
    extended.connect(exchange, of_hosts(exchange.schedules, extended.hosts))
    before_callbacks_get_their_model(backup.arrange, strategy)
    output.ignore_warning_about_shuffle()
    if extended.worker > 0 and not os.environ.get(ALL_BARS):
        output.show_no_bars_by_default(strategy)
    if extended.number_of_workers > 1:
        saving.write_whole_files(strategy)
        _log.info(
            "gradients go from this worker's first replica to the others: %s", exchange.ways()
        )
    return exchange


def summing(
    strategy: Strategy, everybody: Exchange, settings: Settings
) -> tuple[Reducer, Reducer, Rounds | None]:
    """Return the reducers of gradients and of curvature, and the rounds, if there are any.

    Args:
        strategy: the strategy that is being made.
        everybody: collectives of all replicas.
        settings: its settings.
    """
    schedules, policy = everybody.schedules, settings.policy
    size = settings.bucket_bytes
    size = bucket_bytes(schedules, everybody.ranks) if size is None else size
    team, trials = everybody, Trials(schedules, enabled=isinstance(schedules, Chooser))
    of_group = _replicas_of_a_group(strategy.extended, settings) if settings.in_rounds else 1
    groups = None
    if 1 < of_group < everybody.ranks:
        groups = Groups.of(strategy.extended, of_group, settings.algorithm, schedules)
        within = [each for each in (strategy.extended.group, strategy.extended.hosts) if each]
        shutdown.announce(groups.parts, within)
        # Trials in each group could choose different schedules.
        team, trials = groups.exchange, Trials(groups.exchange.schedules, enabled=False)
    reducer = functools.partial(Reducer, bucket_bytes=size)
    of_gradients = reducer(team, policy, trials=trials)
    # The policy is for gradients only: steps are divided by curvature, so it is not rounded.
    of_curvature = reducer(
        team, MethodPolicy(), trials=trials, what="curvature", suffix="/curvature"
    )
    if not settings.in_rounds or everybody.ranks <= of_group:
        return of_gradients, of_curvature, None
    rule = rule_of_rounds(settings.sync)
    no_trials = Trials(schedules, enabled=False)  # weights are sent too rarely
    keeps_as = "" if groups is None else "outer_"
    of_weights = reducer(
        everybody, rule.policy, trials=no_trials, what="weights", keeps_as=keeps_as
    )
    return of_gradients, of_curvature, Rounds(strategy, rule, of_weights, groups)


def _replicas_of_a_group(extended: Extended, settings: Settings) -> int:
    """Return how many replicas make each step together; 1 if there are no groups."""
    rule, replicas = settings.sync, extended.number_of_replicas
    if not isinstance(rule, Hierarchical) or replicas == 1:
        return 1
    size = size_of(rule, extended)
    if 1 < size < replicas:
        refuse_methods(rule, settings.policy)
    if size == replicas > 1:
        _log.warning(_ONE_GROUP, rule, size)
    if size == 1 and settings.policy != MethodPolicy():
        _log.warning(_GROUPS_OF_ONE, settings.policy, rule)
    return size


def _say_who_trains(extended: Extended) -> None:
    replicas, workers = extended.number_of_replicas, extended.number_of_workers
    here = ", ".join(name.rsplit("device:", 1)[-1] for name in extended.devices)
    where = here if workers == 1 else f"{workers} workers, each on its {here}"
    word = "replica trains" if replicas == 1 else "replicas train"
    _log.info("ScaleStrategy: %d %s, on %s", replicas, word, where)


def _say_if_nothing_travels(extended: Extended, asked: str) -> None:
    if extended.number_of_replicas == 1:
        _log.warning(_NOTHING_TRAVELS, asked)
