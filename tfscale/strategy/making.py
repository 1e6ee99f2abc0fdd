"""Parts of a ``ScaleStrategy`` as it is made: it joins the workers, and gets its reducers.

The order matters. Workers compare their settings before they exchange anything else; links are
measured once all have joined; buckets depend on the measured links.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable

from tfscale.bridge import output, saving
from tfscale.bridge.callbacks import before_callbacks_get_their_model
from tfscale.cluster.sources import ALL_BARS
from tfscale.collectives.choose import Chooser
from tfscale.collectives.halves import has_halves
from tfscale.compression.policy import MethodPolicy
from tfscale.exchange import backends
from tfscale.exchange.collective_schedules import (
    CollectiveSchedules,
    Fixed,
    bucket_bytes,
    of_hosts,
    of_replicas,
)
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.team import Team
from tfscale.exchange.tensorflow_team import TensorFlowTeam
from tfscale.exchange.trial import Trials
from tfscale.strategy import restoring
from tfscale.strategy.batch import predictions
from tfscale.strategy.extended import Extended
from tfscale.strategy.grid.parts import Copies, SplitWeights
from tfscale.strategy.grid.teams import GridTeams
from tfscale.strategy.pipeline.pipelined import Pipelined
from tfscale.strategy.protocols import Strategy
from tfscale.strategy.rounds.rounds import Rounds
from tfscale.strategy.settings import ALL, OPTIMIZER, Settings
from tfscale.strategy.shards.sharding import Sharding
from tfscale.strategy.teams import Teams, size_of_teams
from tfscale.strategy.workers import backup, join, shutdown

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
    if extended.number_of_replicas == 1:
        _say_that_nothing_travels(settings)
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


def _connect(strategy: Strategy, settings: Settings) -> Team:
    """Return the collectives of all replicas, and give them to what TensorFlow calls."""
    extended = strategy.extended
    if settings.backend == backends.TENSORFLOW:
        team: Team = TensorFlowTeam(extended.group)
    else:
        wire, file = settings.policy.method.wires[0], settings.schedule_file
        schedules = of_replicas(settings.algorithm, extended.group, wire, file)
        team = Team(extended.group, schedules)
    extended.connect(team, of_hosts(team.schedules, extended.hosts))
    before_callbacks_get_their_model(backup.arrange, strategy)
    output.ignore_warning_about_shuffle()
    restoring.restore_on_all_replicas(strategy)
    if extended.worker > 0 and not os.environ.get(ALL_BARS):
        output.show_no_bars_by_default(strategy)
    if extended.number_of_workers > 1:
        predictions.share_batches_out(strategy)
        saving.write_whole_files(strategy)
        _log.info("gradients go from this worker's first replica to the others: %s", team.ways())
    return team


def make_reducers(
    strategy: Strategy, settings: Settings
) -> tuple[Reducer, Reducer, Reducer, Sharding | None, Rounds | None]:
    """Return the reducers of gradients, moves and curvature; sharding and rounds, if there are any.

    Args:
        strategy: the strategy that is being made.
        settings: its settings.
    """
    policy, extended = settings.policy, strategy.extended
    # One schedule cannot be for a team and for all replicas: this must be said before it is used.
    of_team = size_of_teams(settings.sync, extended, settings.algorithm, policy)
    everybody = _connect(strategy, settings)
    schedules, size = everybody.schedules, settings.bucket_bytes
    size = bucket_bytes(schedules, everybody.size) if size is None else size
    if settings.in_rounds:
        _say_if_without_effect(extended, settings, of_team)
    team, trials = everybody, Trials(schedules, enabled=isinstance(schedules, Chooser))
    teams = None
    if of_team < everybody.size:
        every = range(everybody.size)
        ranks = [every[start : start + of_team] for start in every[::of_team]]
        teams = Teams.of(extended, ranks, settings.algorithm, schedules)
        if teams.team is not None:
            # Trials in each team could choose different schedules.
            team, trials = teams.team, Trials(teams.team.schedules, enabled=False)
    reducer = functools.partial(Reducer, bucket_bytes=size)
    of_gradients = reducer(team, policy, trials=trials)
    # The policy is for gradients that are applied. Curvature and moves are summed exactly: the
    # optimizer divides by curvature, and a move's rounding error must not enter a later update.
    exact = functools.partial(reducer, team, MethodPolicy(), trials=trials)
    of_moves = exact(what="moves", suffix="/move")
    of_curvature = exact(what="curvature", suffix="/curvature")
    of_weights = functools.partial(reducer, everybody, what="weights")
    sharding, rounds = None, None
    if teams is not None:
        rounds = _rounds(strategy, settings, teams, of_weights)
    elif settings.shard == OPTIMIZER and everybody.size > 1:
        _refuse_without_halves(settings, schedules)
        sharding = Sharding(of_weights(settings.weights_policy, trials=trials, suffix="/weights"))
    return of_gradients, of_moves, of_curvature, sharding, rounds


def _rounds(
    strategy: Strategy, settings: Settings, teams: Teams, reducer: Callable[..., Reducer]
) -> Rounds:
    """Return the rounds at whose ends teams agree; ``reducer`` makes one of weights."""
    rule, trials = settings.sync.round_rule, Trials(strategy.extended.team.schedules, enabled=False)
    keeps_as = "" if teams.team is None else "outer_"
    # Weights are sent too rarely for trials.
    return Rounds(strategy, rule, reducer(rule.policy, trials=trials, keeps_as=keeps_as), teams)


def make_parts(strategy: Strategy, settings: Settings) -> tuple[GridTeams | None, Copies]:
    """Return the teams of a strategy's grid, None without a grid; and how it holds weights."""
    extended, team = strategy.extended, strategy.extended.team
    if settings.shard is not None or not extended.grid.is_plain:
        saving.write_through_files(strategy)
    if settings.shard == ALL and team.size > 1:
        return None, SplitWeights.among(team)
    if extended.grid.is_plain:
        return None, Copies()
    teams = GridTeams(extended, extended.grid, team, settings.algorithm, team.schedules)
    return teams, _parts_of(strategy, teams, settings)


def _parts_of(strategy: Strategy, teams: GridTeams, settings: Settings) -> Copies:
    """Return how the replicas of a grid hold weights."""
    if teams.experts is not None:
        return SplitWeights.of_experts(teams)
    slices = None if settings.tensor is None else SplitWeights.by_rules(teams, settings.tensor)
    if settings.pipeline is None:
        return slices or Copies()
    return Pipelined(strategy, teams, settings.pipeline, slices)


def _refuse_without_halves(settings: Settings, schedules: CollectiveSchedules) -> None:
    if isinstance(schedules, Fixed) and not has_halves(schedules.schedule("")):
        raise ValueError(
            f"shard={settings.shard!r} shares sums out, and algorithm={settings.algorithm!r} "
            "cannot: rank c must own chunk c. Take ring, direct, halving with a power of two of "
            "replicas, or auto"
        )


def _say_if_without_effect(extended: Extended, settings: Settings, of_team: int) -> None:
    """Warn if all replicas make each step together, or if no step sums gradients."""
    rule, policy, replicas = settings.sync, settings.policy, extended.number_of_replicas
    if of_team == replicas > 1:
        _log.warning(_ONE_GROUP, rule, of_team)
    if 1 == of_team < replicas and policy != MethodPolicy() and not (rule.start or rule.bound):
        _log.warning(_GROUPS_OF_ONE, policy, rule)


def _say_who_trains(extended: Extended) -> None:
    replicas, workers = extended.number_of_replicas, extended.number_of_workers
    here = ", ".join(name.rsplit("device:", 1)[-1] for name in extended.devices)
    where = here if workers == 1 else f"{workers} workers, each on its {here}"
    word = "replica trains" if replicas == 1 else "replicas train"
    _log.info("ScaleStrategy: %d %s, on %s", replicas, word, where)


def _say_that_nothing_travels(settings: Settings) -> None:
    asked = {
        "wire" if settings.method is None else "method": settings.policy != MethodPolicy(),
        "weights_wire": settings.weights_policy != MethodPolicy(),
        "sync": settings.in_rounds,
        "shares": settings.shares is not None,
        "grid": settings.grid is not None and not settings.grid.is_plain,
    }
    for name, is_asked in asked.items():
        if is_asked:
            _log.warning(_NOTHING_TRAVELS, f"{name}={getattr(settings, name)!r}")
