"""Weights of a strategy in parts: in slices by rules on their paths, or shared out equally."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tfscale.bridge.fit import ModelStep
from tfscale.bridge.objects import is_variable, native, path_of
from tfscale.bridge.protocols import Layer, Optimizer, Variable
from tfscale.bridge.tapes import inner_gradients_changed
from tfscale.exchange.team import Team
from tfscale.parallel.grid import DATA
from tfscale.strategy.grid.domain import SpreadLayers
from tfscale.strategy.grid.experts import SharedExperts
from tfscale.strategy.grid.gradients import GridGradients
from tfscale.strategy.grid.layers import SplitLayers, reading_before_loops
from tfscale.strategy.grid.teams import GridTeams
from tfscale.strategy.grid.weights import (
    FlatParts,
    SharesOfExperts,
    SlicesByRules,
    Slicing,
    is_split,
    part_of_gradient,
    share_of_gradient,
    summed_gradient,
    whole_gradient,
)
from tfscale.strategy.grid.whole import WholeWeights
from tfscale.strategy.losses.own_losses import target_of_team
from tfscale.strategy.placed import Placement
from tfscale.strategy.step import on_a_replica, this_step
from tfscale.strategy.teams import Teams


class Copies:
    """Weights of which each replica holds a copy, so that steps and updates are Keras's own.

    A step asks the weights of its strategy wherever parts need something else. Subclasses hold
    weights in parts.

    Attributes:
        gradients: what is to be done with gradients beside the sum over replicas.
        of_stage: team of the replicas that hold the same stage of a model, over which its layers
            and losses are summed; None if replicas hold whole models.
        have_whole_sums: whether each replica gets the whole sum of each gradient.
    """

    of_stage: Team | None = None
    have_whole_sums = True

    def __init__(self, gradients: GridGradients | None = None) -> None:
        self.gradients = gradients or GridGradients()

    @property
    def sums_in_backward_pass(self) -> bool:
        """Whether the backward pass sums gradients of replicas that read different rows."""
        return False

    def whole_weights(self) -> WholeWeights | None:
        """Return the whole weights of a step that begins; None if layers compute with parts."""
        return WholeWeights() if self.sums_in_backward_pass else None

    def placement(self, beside: Any) -> Placement | None:
        """Return how the variable is made that is made now: see ``Slicing.placement``."""
        return None

    def take(self, model: Any) -> None:
        """Take over a model that has been built, or compiled, in the strategy's scope."""

    def step(self, step: ModelStep, of_keras: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a replica does in a step of training or evaluation."""
        return of_keras

    def prediction(self, model: Any, of_keras: Callable[..., Any]) -> Callable[..., Any]:
        """Return what a replica does to predict."""
        return of_keras

    @contextlib.contextmanager
    def computing(self, model: Any, layers: Sequence[Layer]) -> Iterator[None]:
        """Make a model's layers compute with their parts, on replicas, within this context."""
        yield

    def notes(self) -> list[str]:
        """Return sentences about layers that compute with parts of activations."""
        return []

    # -- steps of users

    def whole_gradients(self, grads: list[Any], sources: list[Any]) -> list[Any]:
        """Return gradients as a user's step is to see them; None stays None.

        These are gradients of whole weights. The step notes them, since it may change them before
        an optimizer gets them; ``changed.py`` then puts sums in their place.
        """
        step = this_step()
        sums_differ = not step.is_single or step.gradients.come_late
        is_shown = sums_differ and self.of_stage is None
        return step.gradients.shown(grads, sources) if is_shown else grads

    def own_parts(self, grads: list[Any], variables: Sequence[Variable]) -> list[Any]:
        """Return this replica's parts of what ``whole_gradients`` has returned."""
        return grads

    def whole_sums(self, sums: list[Any], variables: Sequence[Variable]) -> list[Any]:
        """Return sums over all replicas as a user's step expects them: of whole weights."""
        every = zip(sums, variables, strict=True)
        return [whole_gradient(x, native(v)) if is_split(v) else x for x, v in every]

    def parts_of_sums(self, sums: list[Any], variables: Sequence[Variable]) -> list[Any]:
        """Return this replica's parts of whole sums; None stays None."""
        return [
            x if x is None or not is_split(v) else part_of_gradient(x, native(v))
            for x, v in zip(sums, variables, strict=True)
        ]

    # -- an update

    def begin_update(
        self, optimizer: Optimizer, grads: list[Any], variables: Sequence[Variable]
    ) -> list[Any]:
        """Return gradients that can be summed over the replicas that hold the same weights.

        Raises:
            ValueError: the optimizer cannot update parts.
        """
        self.gradients.refuse(optimizer, variables)
        if self.sums_in_backward_pass:
            return grads
        return self.gradients.sum_rows_of_copies(grads, variables)


class SplitWeights(Copies):
    """Weights in slices by the user's rules, or in equal parts; other layers read whole weights.

    Args:
        slicing: says which weights are in parts, and how.
        gradients: sums, norms and checks of gradients.
        layers: layers that compute with parts of weights; None if all layers read whole weights.
        spread: layers that compute with slices of activations; None if no rule names an axis.
    """

    have_whole_sums = False

    def __init__(
        self,
        slicing: Slicing,
        gradients: GridGradients,
        layers: SplitLayers | SharedExperts | None = None,
        spread: SpreadLayers | None = None,
    ) -> None:
        super().__init__(gradients)
        self._slicing, self._layers, self._spread = slicing, layers, spread

    @classmethod
    def by_rules(cls, teams: GridTeams, rules: Mapping[str, str]) -> SplitWeights:
        """Return weights in slices, by the user's argument ``tensor``."""
        assert teams.tensor is not None
        slicing = SlicesByRules(rules, teams.grid, teams.tensor)
        gradients = GridGradients(teams.tensor, teams.twins(DATA), teams.everybody)
        return cls(slicing, gradients, SplitLayers(teams, slicing), SpreadLayers(slicing))

    @classmethod
    def among(cls, everybody: Team) -> SplitWeights:
        """Return weights in equal parts, one for each replica: ``shard="all"``."""
        alone = Teams(None, [[rank] for rank in range(everybody.size)])
        return cls(FlatParts(everybody), GridGradients(everybody, alone, everybody))

    @classmethod
    def of_experts(cls, teams: GridTeams) -> SplitWeights:
        """Return experts that the replicas of a team share."""
        assert teams.experts is not None
        gradients = GridGradients(teams.experts, teams.twins(DATA), teams.everybody)
        slicing = SharesOfExperts(teams.grid, teams.experts)
        return cls(slicing, gradients, SharedExperts(teams.experts))

    @property
    def sums_in_backward_pass(self) -> bool:
        """See ``Copies``."""
        return self._slicing.reads_other_rows

    def placement(self, beside: Any) -> Placement | None:
        """See ``Copies``."""
        return self._slicing.placement(beside)

    @contextlib.contextmanager
    def computing(
        self, model: Any, layers: Sequence[Layer], in_turns: bool = False
    ) -> Iterator[None]:
        """See ``Copies``.

        Args:
            model: the model.
            layers: its layers.
            in_turns: whether the model runs in a pipeline, whose tapes differentiate by tensors.
        """
        self._slicing.check(model)
        with contextlib.ExitStack() as stack:
            if not self.sums_in_backward_pass:
                stack.enter_context(self._whole_gradients_by_tensors(not in_turns))
            stack.enter_context(reading_before_loops(layers))
            if self._layers is not None:
                stack.enter_context(self._layers.computing(layers))
            if self._spread is not None:
                stack.enter_context(self._spread.computing([model, *layers]))
            yield

    def _whole_gradients_by_tensors(
        self, by_tensors: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Let a user's tapes give whole gradients by tensors, which a team has in parts.

        The replicas of a team have the same tensors, and each has a part of the gradient.
        """
        team = self._slicing.team

        def whole(gradient: Any, source: Any) -> Any:
            if gradient is None or is_variable(source) or not on_a_replica():
                return gradient
            return summed_gradient(team, gradient, "the gradient by a tensor")

        def all_whole(grads: list[Any], sources: list[Any]) -> list[Any]:
            return [whole(g, x) for g, x in zip(grads, sources, strict=True)]

        def part(target: Any, sources: Any, is_inner: bool) -> Any:
            return (
                target_of_team(team.size, target, sources, is_inner) if on_a_replica() else target
            )

        return inner_gradients_changed(part, all_whole, by_tensors)

    def notes(self) -> list[str]:
        """See ``Copies``."""
        return [] if self._spread is None else self._spread.notes()

    def whole_gradients(self, grads: list[Any], sources: list[Any]) -> list[Any]:
        """See ``Copies``."""

        def whole(gradient: Any, source: Any) -> Any:
            if gradient is None or not is_variable(source):
                return gradient
            if is_split(source):
                return whole_gradient(gradient, native(source))
            # The replicas of a team hold parts of the gradient of their loss.
            if self.sums_in_backward_pass:
                return gradient
            return summed_gradient(
                self._slicing.team, gradient, f"the gradient of {path_of(source)}"
            )

        found = [whole(g, v) for g, v in zip(grads, sources, strict=True)]
        are_sums = self.gradients.are_of_one_model and not self.sums_in_backward_pass
        return found if are_sums else super().whole_gradients(found, sources)

    def own_parts(self, grads: list[Any], variables: Sequence[Variable]) -> list[Any]:
        """See ``Copies``."""

        def part(gradient: Any, variable: Variable) -> Any:
            if gradient is None:
                return None
            if is_split(variable):
                return part_of_gradient(gradient, native(variable))
            if self.sums_in_backward_pass:
                return gradient
            return share_of_gradient(gradient, self._slicing.team.size)

        return [part(g, v) for g, v in zip(grads, variables, strict=True)]
