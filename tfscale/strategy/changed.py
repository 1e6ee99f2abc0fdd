"""Gradients that a user's step changes before it uses them, as by ``tf.clip_by_global_norm``.

One device changes the gradient of the whole batch. A replica that changed its part of that gradient
would train differently: a norm of a part is not a part of a norm. So each gradient that a tape
gives to such a step passes through an operation of its own. If the optimizer gets something else
than these tensors, or if the step moves a weight by them, replicas sum them first, and the step's
own operations, which are in the graph already, get the sums in their place.

The changed sums are the same on all replicas, unless the step has used something else that differs
between replicas. Then replicas take the mean of the changed sums, or, if they differ by random
numbers alone, those of the first replica.
Eager steps have no graph to change, and there each replica changes its part.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

import tensorflow as tf

from tfscale.bridge.graphs import another, number_of, replace_input
from tfscale.bridge.objects import is_variable, native
from tfscale.exchange import dataflow

_APPLIED_BEFORE_KEPT = (
    "replicas add up gradients that are computed from {!r}, but a step adds gradients to this "
    "variable later, so that it holds sums over all replicas already. Let the step add up first, "
    "and then apply"
)

# It takes gradients, their weights, the optimizer that is to get them, or None, and whether that
# optimizer gets them in any case.
Sum = Callable[[list[Any], list[Any], Any, bool], list[Any]]

Alike = Callable[[list[Any]], bool]

# Operations whose result is a sum of their inputs, and those that may multiply one by a constant.
_ADDITIONS = ("Add", "AddN", "AddV2", "Identity", "Neg", "Sub")
_MULTIPLICATIONS = ("Mul", "RealDiv")

# Number of tensors after which a sum of gradients is taken for a change of another kind.
_SIMPLE = 1000


@dataclasses.dataclass(frozen=True)
class Shown:
    """A gradient as a step sees it.

    Attributes:
        weight: the weight.
        computed: the gradient that the tape has computed.
        tensors: what the step sees in its place: the gradient, or the values and indices of rows.
    """

    weight: Any
    computed: Any
    tensors: list[tf.Tensor]


class GradientVariables:
    """Variables to which steps have assigned sums of gradients, to apply them later.

    A later step, or another function, may compute gradients from these variables. They hold the
    same sums on all replicas, so nothing that is computed from them may be summed again.
    """

    def __init__(self) -> None:
        self._copies: MutableMapping[int, Any] = weakref.WeakValueDictionary()  # their handles
        self._added_up: MutableMapping[int, Any] = weakref.WeakValueDictionary()

    def add(self, variable: Any) -> None:
        """Note that a replica's copy of a variable, which is one of TensorFlow's, gets sums."""
        if self._find(self._added_up, variable.handle):
            raise ValueError(_APPLIED_BEFORE_KEPT.format(variable.name))
        self._copies[id(variable.handle)] = variable.handle

    def have(self, handles: Sequence[Any]) -> bool:
        """Return whether one of these handles of variables is that of a copy that gets sums."""
        return any(self._find(self._copies, handle) for handle in handles)

    def add_up(self, handles: Sequence[Any]) -> None:
        """Note that replicas add up gradients that are computed from these variables."""
        self._added_up.update((id(handle), handle) for handle in handles)

    @staticmethod
    def _find(found: Mapping[int, Any], handle: Any) -> bool:
        return found.get(id(handle)) is handle


class Gradients:
    """All gradients of weights that the tapes of a step have given to it.

    Args:
        total: function that sums gradients over the team of the step; None if sums come too late
            for the step.
        alike: function that returns whether a replica's part of a sum is the same share of each of
            these gradients.
    """

    def __init__(self, total: Sum | None = None, alike: Alike | None = None) -> None:
        self._total, self._alike = total, alike
        self._given: list[list[Shown]] = []  # by a tape at once
        self._summed: set[int] = set()  # ids of the gradients that the step sees as sums
        self._by_tensor: dict[Any, Shown] = {}
        self._bits: dict[tf.Operation, int] = {}  # a cache

    @property
    def are_from_before_a_branch(self) -> bool:
        """Whether a tape has given gradients before the branch or the loop that is being traced."""
        outside, graph = set(), tf.compat.v1.get_default_graph()
        while graph := getattr(graph, "outer_graph", None):
            outside.add(graph)
        return any(one.tensors[0].graph in outside for given in self._given for one in given)

    @property
    def come_late(self) -> bool:
        """Whether the team sums gradients after the step that has computed them."""
        return self._total is None

    def shown(self, grads: list[Any], sources: list[Any]) -> list[Any]:
        """Return gradients as the step is to see them; those of other sources stay as they are."""
        if tf.executing_eagerly():
            return grads
        seen, given = list(grads), []
        for place, (gradient, source) in enumerate(zip(grads, sources, strict=True)):
            if gradient is None or not is_variable(source):
                continue
            seen[place] = _shown(gradient)
            given.append(Shown(source, gradient, _tensors(seen[place])))
            self._by_tensor |= {tensor.ref(): given[-1] for tensor in given[-1].tensors}
        self._given.append(given)
        return seen

    def show_own_sums(self, grads: Sequence[Any], sums: Sequence[Any], share: Any) -> list[Any]:
        """Return sums of the step's own ``all_reduce``, as gradients that the step sees.

        An optimizer that gets such a sum gets that of what tapes have computed. All replicas apply
        it, so that without this they would add it up once more.

        Args:
            grads: what the step has passed to ``all_reduce``.
            sums: what it gets.
            share: function of a gradient that returns its part of what the step gets.
        """
        found, given = list(sums), []
        for place, (gradient, total) in enumerate(zip(grads, sums, strict=True)):
            shown = self._seen_as(gradient)
            if shown is not None and isinstance(shown.computed, tf.Tensor):
                found[place] = tf.identity(total)
                given.append(Shown(shown.weight, share(shown.computed), [found[place]]))
                self._by_tensor[found[place].ref()] = given[-1]
        if given:
            self._given.append(given)
        return found

    def computed(self, grads: Sequence[Any]) -> list[Any]:
        """Return what tapes have computed in place of what the step has seen; None stays None.

        What the step has seen may become a sum, now or later, for another optimizer. A sum of what
        it has seen, as over microbatches, is made again of what tapes have computed.
        """
        made: dict[Any, tf.Tensor] = {}

        def computed(gradient: Any) -> Any:
            if (shown := self._seen_as(gradient)) is not None:
                return shown.computed
            order = self._sum_behind(gradient) if _traced([gradient]) else None
            for x in order or ():
                inputs = [self._of_tape(y, made) for y in x.op.inputs]
                made[x.ref()] = another(x.op, inputs, f"{x.op.name}/own").outputs[0]
            return made[gradient.ref()] if order else gradient

        return [computed(gradient) for gradient in grads]

    def are_of(self, variable: Any) -> bool:
        """Return whether a tape has given a gradient of this variable of TensorFlow."""
        return any(weight is variable for weight in self._weights)

    @property
    def _weights(self) -> list[Any]:
        """Variables of TensorFlow by which tapes have differentiated."""
        return [native(one.weight) for given in self._given for one in given]

    def variables_of(self, values: Sequence[Any]) -> list[Any]:
        """Return the handles of variables behind values; what tapes have given does not count."""
        return dataflow.handles(_traced(values), self._by_tensor)

    def _seen_as(self, gradient: Any) -> Shown | None:
        """Return the gradient of a tape that the step sees as this one; None if there is none."""
        first = None if gradient is None else _tensors(gradient)[0]
        return self._by_tensor.get(first.ref()) if isinstance(first, tf.Tensor) else None

    def _of_tape(self, x: tf.Tensor, made: dict[Any, tf.Tensor]) -> Any:
        shown = self._seen_as(x)
        return made.get(x.ref(), x) if shown is None else shown.computed

    def _sum_behind(self, value: Any) -> list[tf.Tensor] | None:
        """Return all tensors between gradients of tapes and a sum of these, inputs first.

        Each gradient may be multiplied by a constant. The sum over replicas of such a sum is the
        sum of the sums, so that one of them is enough. None is returned for all other values.
        """
        between: dict[Any, tf.Tensor] = {}
        added: dict[Any, tf.Tensor] = {}
        waiting = [value]
        while waiting:
            x = waiting.pop()
            if isinstance(x, tf.IndexedSlices) or len(between) > _SIMPLE:
                return None
            if (shown := self._seen_as(x)) is not None:
                if isinstance(shown.computed, tf.IndexedSlices):
                    return None
                added[x.ref()] = shown.computed
                continue
            terms = _terms(x.op)
            if not terms:
                return None
            between[x.ref()] = x
            waiting += [y for y in terms if y.ref() not in between]
        if self._alike is not None and not self._alike(list(added.values())):
            return None
        return sorted(between.values(), key=lambda x: number_of(x.op))

    def are_changed(self, values: Sequence[Any]) -> bool:
        """Return whether the step has computed any of these values from gradients of its tapes.

        Gradients as they are, and sums of them, do not count: an optimizer gets the sums of these.
        But in a branch, gradients from before the branch count as changed: the step may have chosen
        the branch by them, as by their norm.
        """
        if tf.executing_eagerly():
            return False
        here = tf.compat.v1.get_default_graph()
        return self.are_used(
            tensor
            for tensor in _traced(values)
            if (tensor.graph is not here and not self.come_late)
            or (self._seen_as(tensor) is None and self._sum_behind(tensor) is None)
        )

    def are_used(self, values: Iterable[Any]) -> bool:
        """Return whether any of these values depends on gradients of the step's tapes."""
        if not self._by_tensor or tf.executing_eagerly():
            return False
        shown = {tensor.op for one in self._by_tensor.values() for tensor in one.tensors}
        traced = _traced(values)
        found = dataflow.gathered(traced, lambda op: op in shown, self._bits)
        users = [tensor for tensor, uses in zip(traced, found, strict=True) if uses]
        leaves = dataflow.leaves(users, self._by_tensor)
        # The step may have summed them by itself.
        return bool(leaves) and not any(dataflow.is_collective(x.op) for x in leaves)

    def sum_first(self, values: Sequence[Any], optimizer: Any = None, variable: Any = None) -> bool:
        """Sum the tapes' gradients that these values are computed from, in their place.

        A tape may differentiate what the step has computed from gradients of another tape, so that
        each tape has its own sums.

        Args:
            values: gradients that an optimizer gets, or values that a weight gets.
            optimizer: the optimizer.
            variable: TensorFlow's variable that gets the values.

        Returns:
            Whether the values are the same on all replicas of the team now.
        """
        if self.come_late:
            return False
        assert self._total is not None
        leaves = dataflow.leaves(_traced(values), self._by_tensor)
        behind = {id(self._by_tensor[x.ref()]) for x in leaves if x.ref() in self._by_tensor}
        for given in self._given:
            if behind.isdisjoint(map(id, given)):
                continue
            own = [one for one in given if id(one) not in self._summed]
            if not own:
                continue
            # The step may be in a branch that uses gradients from before it, or leaves them out.
            here, graph = tf.compat.v1.get_default_graph(), own[0].tensors[0].graph
            with graph.as_default():
                weights = [one.weight for one in own]
                computed = [one.computed for one in own]
                sums = self._total(computed, weights, optimizer, graph is here)
            for one, new in zip(own, sums, strict=True):
                self._show_sum(one, new)
        return all(x.ref() in self._by_tensor or self._agrees(x, variable) for x in leaves)

    def differ_by_chance(self, values: Sequence[Any]) -> bool:
        """Return whether random numbers are all that makes values differ between replicas."""
        traced = _traced(values)
        drawn = {
            x.ref() for x, _ in dataflow.behind(traced, self._by_tensor) if dataflow.is_random(x.op)
        }
        known = {*self._by_tensor, *drawn}
        leaves = dataflow.leaves(traced, known)
        return bool(drawn) and all(x.ref() in known or self._agrees(x, None) for x in leaves)

    def is_sum(self, gradient: Any) -> bool:
        """Return whether the step sees a gradient of a tape, unchanged, that is a sum already."""
        one = self._seen_as(gradient)
        return one is not None and id(one) in self._summed

    def show_sums(self, grads: Sequence[Any], sums: Sequence[Any]) -> None:
        """Let the step see sums over all replicas of gradients that an optimizer gets.

        So what the step computes from gradients beside, such as a norm for its logs, is that of the
        whole batch.
        """
        for gradient, total in zip(grads, sums, strict=True):
            one = self._seen_as(gradient)
            if one is None or id(one) in self._summed:
                continue
            # What was computed before a branch cannot get the sum of the branch.
            before, after = one.tensors, _tensors(total)
            if len(after) == len(before) and after[0].graph is before[0].graph:
                self._show_sum(one, total)

    def _show_sum(self, one: Shown, total: Any) -> None:
        for tensor, new in zip(one.tensors, _tensors(total), strict=True):
            replace_input(tensor.op, 0, new)
        self._summed.add(id(one))

    def _agrees(self, x: tf.Tensor, variable: Any) -> bool:
        """Return whether a tensor is a constant, the variable, or a weight of a tape."""
        if x.op.type != "ReadVariableOp":
            return bool(x.op.type == "Const")
        known = self._weights if variable is None else [*self._weights, variable]
        return any(x.op.inputs[0] is x.graph.capture(one.handle) for one in known)


def mean_of_all(grads: Sequence[Any]) -> list[Any]:
    """Return the means over replicas; None stays None."""
    dense = [tf.convert_to_tensor(g) for g in grads if g is not None]
    means = iter(tf.distribute.get_replica_context().all_reduce("MEAN", dense))
    return [None if g is None else next(means) for g in grads]


def _terms(op: tf.Operation) -> list[tf.Tensor]:
    """Return what an operation adds up, or multiplies by a constant; nothing for all others."""
    inputs = list(op.inputs)
    if op.type in _ADDITIONS:
        return inputs
    if op.type not in _MULTIPLICATIONS:
        return []
    others = [x for x in inputs if x.op.type != "Const"]
    divides_a_constant = op.type == "RealDiv" and inputs[0].op.type == "Const"
    return others if len(others) == 1 and not divides_a_constant else []


def _traced(grads: Iterable[Any]) -> list[tf.Tensor]:
    given = [tensor for gradient in grads if gradient is not None for tensor in _tensors(gradient)]
    return [x for x in given if isinstance(x, tf.Tensor) and hasattr(x, "graph")]


def _shown(gradient: Any) -> Any:
    """Return a gradient that can become another one: a sum of rows has another number of rows."""
    if not isinstance(gradient, tf.IndexedSlices):
        return tf.identity(gradient)
    values, indices = (
        tf.raw_ops.PlaceholderWithDefault(input=x, shape=[None, *x.shape[1:]])
        for x in (gradient.values, gradient.indices)
    )
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _tensors(gradient: Any) -> list[Any]:
    if isinstance(gradient, tf.IndexedSlices):
        return [gradient.values, gradient.indices]
    return [gradient]
