"""Steps that replicas make, which make ``fit`` on k replicas equal to ``fit`` on one device.

Keras passes every step to ``Strategy.run``. While a step is traced, or runs eagerly, hooks are on
some objects of the model, and on a few functions of Keras and TensorFlow: see ``bridge/hooks.py``.
No hook is saved with a model. The strategy changes four things:

- An optimizer applies gradients that have been summed over all replicas: ``_apply``. Clipping,
  decay and loss scaling then get the same gradients as on one device. Accumulated gradients are
  summed once, at the end of their window.
- A user's own step that changes gradients gets sums over all replicas first: changed.py.
- Losses are weighted by the replica's share of the samples, the unmasked steps or the sample
  weights of the global batch: keras_losses.py, own_losses.py.
- Statistics of layers are averaged, and batch normalization normalizes by the global batch:
  statistics.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge import hooks
from tfscale.bridge.fit import TRAINING, ModelStep, fitted
from tfscale.bridge.functions import inlined
from tfscale.bridge.losses import reducing
from tfscale.bridge.models import may_change_gradients
from tfscale.bridge.objects import (
    innermost,
    layers_of,
    measures_curvature,
    optimizers_of,
    read_value,
    trained_by,
)
from tfscale.bridge.protocols import Optimizer
from tfscale.bridge.tapes import after_backward_passes, gradients_changed
from tfscale.bridge.tensorflow import replica_id
from tfscale.exchange.reducer import Reducer
from tfscale.exchange.slots import Slots
from tfscale.native.cell import Cell
from tfscale.strategy import changed, gather, gradients, inexact, statistics
from tfscale.strategy.batch.balance import Clock
from tfscale.strategy.batch.rows import News, shared_out
from tfscale.strategy.building import refuse_foreign
from tfscale.strategy.grid.batch import of_first_replica
from tfscale.strategy.grid.parts import Copies
from tfscale.strategy.losses import keras_losses, own_losses
from tfscale.strategy.protocols import Strategy
from tfscale.strategy.shards import sharding
from tfscale.strategy.share import Share
from tfscale.strategy.step import (
    Assigned,
    Losses,
    Step,
    begin_in_this_thread,
    during,
    on_a_replica,
    this_step,
)
from tfscale.strategy.step_graph import StepGraph

_CHANGED_BEFORE_LATE_SUMS = (
    "with sync={0!r} an optimizer gets sums of gradients some steps after the replicas have "
    "computed them, but this step changes its gradients before it passes them to the optimizer, as "
    "by a clipping of its own: each replica would change its own part of a sum. Pass the gradients "
    "as the tape gives them, and let the optimizer change the sums (clipnorm, global_clipnorm, "
    "clipvalue, or a method apply of your own class); or use sync=tfscale.sync.EveryStep()"
)


@contextlib.contextmanager
def hooks_of_step(strategy: Strategy, step: ModelStep) -> Iterator[None]:
    """Make a model's step a part of the global batch's step, within this context."""
    model, layers = step.model, layers_of(step.model)
    with contextlib.ExitStack() as stack:
        stack.enter_context(strategy.parts.computing(model, layers))
        stack.enter_context(keras_losses.weighted(model, layers))
        if step.kind == TRAINING:
            refuse_foreign(strategy, model)
            replicas = strategy.extended.number_of_replicas
            inexact.warn(layers, replicas, strategy.synchronizes_batch_norm)
            for reducer in strategy.reducers:
                reducer.check_rules(model.trainable_variables)
            stack.enter_context(summing(strategy, {*optimizers_of(model), *strategy.optimizers}))
        if step.kind == TRAINING and strategy.synchronizes_batch_norm:
            for layer in layers:
                if isinstance(layer, keras.layers.BatchNormalization):
                    stack.enter_context(hooks.MOMENTS.on(layer, statistics.moments))
        yield


def step_of_replica(strategy: Strategy, step: ModelStep, fn: Callable[..., Any]) -> Any:
    """Return a model's step that knows its replica's share of the global batch."""
    model, parts, rounds = step.model, strategy.parts, strategy.rounds
    own_rounds = rounds.of(model) if rounds is not None and step.changes_weights else None
    spare = None if own_rounds is None else own_rounds.spare_row

    @tf.autograph.experimental.do_not_convert
    def made(data: Any) -> Any:
        # Rows are known only after a sum over the team, and the step begun here has that team.
        begun = _begun(strategy, step)
        assigned = Assigned()
        if own_rounds is not None:  # replicas may make the step alone
            with _only_with(data):
                begun = dataclasses.replace(
                    begun, alone=own_rounds.before_step(), group=own_rounds.team
                )
                data = own_rounds.thinned(data)
        elif rounds is not None:
            rounds.before_evaluation(model)
        data = _rows_of_team(strategy, data)
        of_stage = dataclasses.replace(begun, stage=parts.of_stage)
        with during(begun), gather.over_team(of_stage, strategy.extended.team):
            full, data = _with_rows(strategy, step, begun, data, spare)
            with during(dataclasses.replace(full, assigned=assigned)):
                with reducing(keras_losses.reduced), _tapes_of(full, parts), inlined():
                    result = fn(data)
                statistics.average(assigned.differ_by_replica)
                result = _result(strategy, step, result)
            if own_rounds is not None:
                with _only_with(data):
                    own_rounds.after_step(assigned.every)
            return result

    return made


def _begun(strategy: Strategy, step: ModelStep) -> Step:
    """Return the step that a replica begins, before it knows its rows."""
    return Step(
        model=step.model,
        is_own=step.is_own,
        sees_gradients=step.is_own or may_change_gradients(step.model),
        losses=Losses(results={}),
        whole_weights=strategy.parts.whole_weights(),
        gradients=changed.Gradients(
            None if strategy.sync.bound else functools.partial(_sum_of_own, strategy), _are_alike
        ),
    )


def _with_rows(
    strategy: Strategy,
    step: ModelStep,
    begun: Step,
    data: Any,
    spare: Callable[[int, tf.Tensor], Cell] | None,
) -> tuple[Step, Any]:
    """Return a begun step that knows its rows, and this replica's part of the batch.

    Args:
        strategy: the strategy.
        step: the step of the model.
        begun: this replica's step.
        data: what the replica has got of the batch.
        spare: function that gives cells for rows of earlier batches; see ``shared_out``.
    """
    extended = strategy.extended
    news, clock = _measuring(strategy, step, is_late=begun.alone is not False)
    rows, data = shared_out(data, extended.number_of_replicas, spare, news)
    if clock is not None:
        data = clock.start(rows.local, rows.total, data)
    rows = rows.of_stage(extended.grid.stages)
    full = dataclasses.replace(
        begun,
        rows=rows,
        share=Share(
            extended.number_of_replicas, rows.local, rows.total, copies=extended.grid.tensor
        ),
        graph=StepGraph(data),
        counts=extended.gives_outputs(),
        stage=strategy.parts.of_stage,
        clock=clock,
    )
    return full, data


def _result(strategy: Strategy, step: ModelStep, result: Any) -> Any:
    """Return what Keras gets from a step: tensors, and logs of the whole batch."""
    if step.makes_logs:
        result = own_losses.logged(*keras_losses.with_results_of_all(result))
    result = tf.nest.map_structure(read_value, result)
    if step.makes_logs:
        return result
    return tf.nest.map_structure(functools.partial(_of_team, strategy.extended), result)


def loop_steps(strategy: Strategy) -> contextlib.AbstractContextManager[None]:
    """Let steps of a custom loop see gradients as steps in ``fit`` do, within this context.

    Each replica makes such a step in a thread of its own, which ends with the step.
    """

    def shown(grads: list[Any], sources: list[Any]) -> list[Any]:
        if not on_a_replica():
            return grads
        if not this_step().sees_gradients:
            sums = changed.Gradients(functools.partial(_sum_of_own, strategy))
            begin_in_this_thread(Step(sees_gradients=True, gradients=sums))
        whole: list[Any] = strategy.parts.whole_gradients(grads, sources)
        return whole

    return gradients_changed(shown, in_thread=False)


def _measuring(
    strategy: Strategy, step: ModelStep, is_late: bool
) -> tuple[News | None, Clock | None]:
    """Return what this replica tells others of its last step, and a clock of this one.

    Args:
        strategy: the strategy.
        step: a step of a model.
        is_late: whether what replicas tell each other travels with late sums.
    """
    if strategy.balance is None or not step.changes_weights:
        return None, None
    replica = replica_id()
    news = None if is_late else strategy.balance.news(replica)
    return news, strategy.balance.clock(replica)


def prediction_of_replica(strategy: Strategy, fn: Callable[..., Any]) -> Any:
    """Return a function that predicts on a replica's part of a batch."""
    model, parts = fitted(), strategy.parts

    @tf.autograph.experimental.do_not_convert
    def made(data: Any) -> Any:
        if strategy.rounds is not None and model is not None:
            strategy.rounds.before_evaluation(model)
        data = _rows_of_team(strategy, data)
        rows, data = shared_out(data, strategy.extended.number_of_replicas)
        shown = rows if strategy.extended.gives_outputs() else rows.as_absent()
        with contextlib.ExitStack() as stack:
            if model is not None:
                stack.enter_context(parts.computing(model, layers_of(model)))
                stack.enter_context(during(Step(whole_weights=parts.whole_weights())))
            if parts.of_stage is not None:
                rows = rows.of_stage(strategy.extended.grid.stages)
                stack.enter_context(during(Step(model, rows=rows, stage=parts.of_stage)))
            return tf.nest.map_structure(shown.kept, fn(data))

    return made


def _rows_of_team(strategy: Strategy, data: Any) -> Any:
    """Return the data of the first replica of the model team, which read the same rows."""
    readers = None if strategy.teams is None else strategy.teams.readers
    return data if readers is None else of_first_replica(readers, data)


@contextlib.contextmanager
def _tapes_of(step: Step, parts: Copies) -> Iterator[None]:
    """Weight losses for the tapes of a step, and give whole gradients, within this context.

    The losses of Keras's own steps are weighted already, and unless an optimizer of the user's may
    change gradients, these steps pass them on as they are. Whole weights are gathered again for all
    backward passes.
    """
    with contextlib.ExitStack() as stack:
        if step.sees_gradients:
            target = own_losses.target_of_gradients if step.is_own else None
            stack.enter_context(gradients_changed(parts.whole_gradients, target))
        if step.whole_weights is not None:
            stack.enter_context(after_backward_passes(step.whole_weights.gather_again))
        yield


def _only_with(data: Any) -> Any:
    """Return a context whose operations run only if the step has data.

    Keras ends some epochs with a step without data.
    """
    tensors = tf.nest.flatten(data, expand_composites=True)
    return tf.control_dependencies([x for x in tensors if tf.is_tensor(x)])


def _of_team(extended: Any, result: Any) -> Any:
    """Return a metric's result so that the mean over all replicas is that over their teams.

    One replica of each team has counted, and Keras logs the mean over all replicas.
    """
    if extended.grid.team == 1 or not tf.is_tensor(result):
        return result
    counted = result if this_step().counts else tf.zeros_like(result)
    return counted * tf.cast(extended.grid.team, result.dtype)


# -------------------------------------------------------------------- gradients


@contextlib.contextmanager
def summing(strategy: Strategy, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Make these optimizers apply sums over all replicas within this context."""
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            apply = functools.partial(_apply, strategy)
            stack.enter_context(hooks.APPLY.on(optimizer, apply))
            stack.enter_context(hooks.CLIP_GRADIENTS.on(optimizer, _end_of_window))
        yield


def _apply(
    strategy: Strategy,
    keras_apply: Callable[..., Any],
    optimizer: Optimizer,
    grads: Any,
    trainable_variables: Any = None,
) -> Any:
    """Sum gradients over the team of the step, and apply the sums.

    A replica that makes the step alone applies its own gradients. ``seen`` are the tensors that the
    user's step holds, which may stand for sums; ``computed`` gives the replica's own.
    """
    step, original = this_step(), functools.partial(keras_apply, optimizer)
    is_sharded = strategy.sharding is not None
    if step.is_reduced or not on_a_replica() or (is_sharded and sharding.passes_on(optimizer)):
        return original(grads, trainable_variables)
    variables = list(trainable_variables or trained_by(optimizer))
    seen = grads = [read_value(g) for g in grads]  # a program may keep gradients in variables
    statistics.average_before_update(optimizer)
    if step.gradients.are_changed(grads) or _note_kept_sums(strategy, grads):
        if strategy.sync.bound:
            raise ValueError(_CHANGED_BEFORE_LATE_SUMS.format(strategy.sync))
        if not measures_curvature(innermost(optimizer)):
            return _apply_changed_sums(strategy, original, optimizer, grads, variables)
        inexact.warn_of_changed_gradients(step.model)
    grads = _weighted(strategy, step.gradients.computed(seen), variables)
    gradients.refuse(strategy, optimizer, variables)
    if strategy.sync.bound and not step.is_of_all:
        return strategy.rounds.of(step.model).sum_late(grads, variables)
    parts = strategy.parts
    if step.sees_gradients:
        grads = parts.own_parts(grads, variables)
    grads = parts.begin_update(optimizer, grads, variables)
    if is_sharded:

        def parts_of(*args: Any) -> list[Any]:
            sums = sharding.scattered(strategy, optimizer, *args)
            _restart_clock(strategy, sums)
            return sums

        return sharding.apply(strategy, original, optimizer, grads, variables, parts_of)
    grads, reduce = _prepare_sum(strategy, strategy.reducer, optimizer, grads, variables)
    curvature, window = gradients.measured_curvature(optimizer, grads, variables), None
    if innermost(optimizer).gradient_accumulation_steps:
        grads, window = gradients.accumulated(strategy, optimizer, grads, variables, reduce)
    elif reduce is not None:
        grads = reduce(grads, variables, scale=gradients.scale_of_losses(optimizer))
        if parts.have_whole_sums:
            step.gradients.show_sums(seen, grads)
    _restart_clock(strategy, grads)
    curvature = gradients.sum_of_curvature(strategy, optimizer, variables, curvature)
    sums = Sums(grads, curvature, window)
    return _apply_sums(strategy, original, optimizer, sums, variables, trainable_variables)


def _note_kept_sums(strategy: Strategy, grads: Sequence[Any]) -> bool:
    """Return whether gradients are computed from sums that a step has put into variables.

    If replicas add up the gradients instead, note that, so that no sums get into these variables
    later.
    """
    step = this_step()
    if tf.executing_eagerly() or not (step.sees_gradients or step.model is None):
        return False
    variables = step.gradients.variables_of(grads)
    are_kept: bool = strategy.kept.have(variables)
    if not are_kept and (step.model is None or strategy.own_losses in ("sum", "scaled")):
        strategy.kept.add_up(variables)
    return are_kept


def _apply_changed_sums(
    strategy: Strategy,
    original: Callable[..., Any],
    optimizer: Optimizer,
    grads: list[Any],
    variables: list[Any],
) -> Any:
    """Apply gradients that the user's step has computed from those of its tapes: see changed.py."""
    parts = strategy.parts
    gradients.refuse(strategy, optimizer, variables)
    given = this_step().gradients
    if not given.sum_first(grads, optimizer):
        may_differ = [None if given.is_sum(g) else g for g in grads]
        agree = changed.mean_of_all
        if given.differ_by_chance(may_differ):
            agree = functools.partial(statistics.of_first_replica, strategy.extended.team)
        with during(dataclasses.replace(this_step(), gradients=changed.Gradients())):
            same = agree(may_differ)
        grads = [g if x is None else x for g, x in zip(grads, same, strict=True)]
    elif given.are_from_before_a_branch:
        # Replicas in another branch do not reach this all-reduce, so that the step fails at the
        # deadline: otherwise replicas would go on with different weights.
        tf.distribute.get_replica_context().all_reduce("SUM", tf.constant(1.0))
    _restart_clock(strategy, grads)
    grads = parts.parts_of_sums(grads, variables)
    if strategy.sharding is not None:
        return sharding.apply(strategy, original, optimizer, grads, variables, sharding.cut_out)
    window = None
    if innermost(optimizer).gradient_accumulation_steps:
        grads, window = gradients.accumulated(strategy, optimizer, grads, variables, None)
    return _apply_sums(strategy, original, optimizer, Sums(grads, [], window), variables, variables)


def _apply_sums(
    strategy: Strategy,
    original: Callable[..., Any],
    optimizer: Optimizer,
    sums: Sums,
    variables: list[Any],
    trainable_variables: Any,
) -> Any:
    """Let an optimizer apply the sums of the team, which are the same on all its replicas.

    Args:
        strategy: the strategy.
        original: the optimizer's method ``apply``.
        optimizer: the optimizer.
        sums: what the optimizer gets.
        variables: the variables of the sums.
        trainable_variables: the variables that ``apply`` got.
    """
    if not this_step().is_of_all:
        return _apply_if_rows(optimizer, original, sums, trainable_variables)
    given = [v for g, v in zip(sums.grads, variables, strict=True) if g is not None]
    with sums.given_to(optimizer), strategy.parts.gradients.updating(optimizer, given):
        return original(sums.grads, trainable_variables)


def _sum_of_own(
    strategy: Strategy,
    grads: list[Any],
    weights: list[Any],
    optimizer: Optimizer | None,
    is_applied: bool,
) -> list[Any]:
    """Return the sums of whole gradients that replicas have computed.

    A step may compute with gradients of weights that another optimizer trains, as for one norm of
    two models, or that no optimizer trains.

    Args:
        strategy: the strategy.
        grads: gradients of this replica.
        weights: their weights.
        optimizer: optimizer that applies what is computed from the sums; None if they move weights.
        is_applied: whether the optimizer applies them in each step, so that it gets in the next one
            what a lossy sum leaves out.
    """
    is_lossy = optimizer is not None and is_applied
    reducer = strategy.reducer if is_lossy else strategy.move_reducer
    first = [] if optimizer is None else [optimizer]
    parts, left = strategy.parts, dict(enumerate(weights))
    own = parts.own_parts(_weighted(strategy, grads, weights), weights)
    sums: dict[int, Any] = {}
    for each in dict.fromkeys([*first, *_optimizers_of_step(strategy)]):
        known = [i for i, v in left.items() if gradients.is_known(each, v)]
        if not known:
            continue
        theirs = [left.pop(i) for i in known]
        given = parts.begin_update(each, [own[i] for i in known], theirs)
        given, reduce = _prepare_sum(strategy, reducer, each, given, theirs)
        if reduce is not None:
            given = reduce(given, theirs, scale=gradients.scale_of_losses(each))
        sums |= zip(known, given, strict=True)
    if left:
        rest = tf.distribute.get_replica_context().all_reduce("SUM", [own[i] for i in left])
        sums |= zip(left, rest, strict=True)
    found: list[Any] = parts.whole_sums([sums[i] for i in range(len(weights))], weights)
    return found


def _are_alike(grads: list[Any]) -> bool:
    """Return whether all losses of these gradients are scaled, or none is."""
    return len({*this_step().are_scaled(grads)}) == 1


def _optimizers_of_step(strategy: Strategy) -> list[Optimizer]:
    """Return the optimizers of the step, in the same order on all replicas."""
    model = this_step().model
    if model is not None:
        return list(optimizers_of(model))
    return sorted(strategy.optimizers, key=lambda each: str(each.name))


def _weighted(strategy: Strategy, grads: list[Any], variables: list[Any]) -> list[Any]:
    """Return gradients weighted by the replica's share of the batch: its part of a sum."""
    if this_step().is_own:
        grads = _scaled(strategy.parts, grads, variables)
    if (clock := strategy.extended.clock) is not None:
        clock.stop(grads)
    return grads


@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums that an optimizer gets in place of a replica's gradients.

    Attributes:
        grads: sums over the team of the step; with accumulation, gradients of this replica alone.
        curvature: the team's sums of measured curvature.
        window: function that sums accumulated gradients at the end of their window.
    """

    grads: list[Any]
    curvature: list[Any]
    window: Callable[[list[Any]], list[Any]] | None

    @contextlib.contextmanager
    def given_to(self, optimizer: Optimizer) -> Iterator[None]:
        """Let an optimizer apply the sums within this context, without summing again."""
        step = this_step().as_reduced(self.window)
        with during(step), gradients.given_to(optimizer, self.curvature):
            yield


def _prepare_sum(
    strategy: Strategy,
    reducer: Reducer,
    optimizer: Optimizer,
    grads: list[Any],
    variables: list[Any],
) -> tuple[list[Any], Callable[..., list[Any]] | None]:
    """Return this replica's gradients, and what sums them over the team of the step, if any."""
    step, of_parts = this_step(), strategy.parts.gradients
    grads = of_parts.sum_slices(grads, variables)
    copies = of_parts.of_copies(grads, variables)
    if step.is_single:
        return grads, None
    if not step.is_of_all:
        grads = copies = [None if g is None else step.counted(g) for g in grads]
    state, windows = Slots.of(optimizer, strategy), innermost(optimizer).gradient_accumulation_steps
    # Accumulated gradients are dense.
    reducer.prepare(state, optimizer, variables, copies, rows_too=not windows)
    reduce = functools.partial(
        reducer.reduce, optimizer=optimizer, state=state, skip=step.sums_nothing
    )
    return grads, of_parts.leaving_slices(reduce)


def _restart_clock(strategy: Strategy, sums: list[Any]) -> None:
    """Let the clock of this replica, if any, go on after the sums."""
    if (clock := strategy.extended.clock) is not None:
        is_of_a_loop = this_step().model is None
        if is_of_a_loop:
            strategy.balance.tell(replica_id())
        clock.go_on(sums, anew=is_of_a_loop)


def _scaled(parts: Any, grads: list[Any], variables: list[Any]) -> list[Any]:
    """Return gradients of a user's own step, whose losses are scaled.

    A replica without rows adds 0 to a sum over replicas. But if the backward pass has summed the
    gradient of a part, this replica alone has it: it must stay.
    """

    def scaled(grads: list[Any], variables: Any) -> list[Any]:
        return own_losses.scaled_gradients(grads)

    if this_step().sums_in_backward_pass and not tf.executing_eagerly():
        scaled = parts.gradients.leaving_slices(scaled)
    return scaled(grads, variables)


def _apply_if_rows(
    optimizer: Optimizer,
    original: Callable[..., Any],
    sums: Sums,
    trainable_variables: Any,
) -> None:
    """Apply gradients on a replica that others do not follow: without rows, it only counts.

    Args:
        optimizer: the optimizer.
        original: its method ``apply``.
        sums: what the optimizer gets.
        trainable_variables: the variables that ``apply`` got.
    """

    def apply() -> None:
        own = Sums(
            gradients.in_this_branch(sums.grads),
            gradients.in_this_branch(sums.curvature),
            sums.window,
        )
        with own.given_to(optimizer):
            original(own.grads, trainable_variables)

    # Keras ends some epochs with a step that has no data and no gradients: it must count nothing.
    with tf.control_dependencies([g for g in sums.grads if g is not None]):
        gradients.apply_unless(this_step().nobody_has_rows, apply, optimizer)


def _end_of_window(clip: Callable[..., Any], optimizer: Optimizer, grads: Any) -> Any:
    """Sum a window's gradients, then clip them.

    This replaces ``_clip_gradients``, the first method that Keras calls with a window's gradients.
    """
    window = this_step().window
    return clip(optimizer, grads if window is None else window(list(grads)))
