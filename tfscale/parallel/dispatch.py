"""Rows of tokens in the order of the experts that are to compute them, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """An order of assignments of tokens to experts, in which those of one expert are neighbours.

    Assignment c T + t is the c-th choice of token t, of T tokens. An expert's assignments keep
    their order. An assignment to the expert that follows the last one is nobody's: it has no row.

    Attributes:
        choices: number of choices of each token.
        counts: number of rows of each expert.
        order: assignment of each row.
        places: row of each assignment; an assignment without a row has one behind the last row.
        lacks_some: whether an assignment may have no row.
    """

    choices: int
    counts: tf.Tensor
    order: tf.Tensor
    places: tf.Tensor
    lacks_some: bool

    @classmethod
    def of(
        cls, assigned: tf.Tensor, experts: int, choices: int = 1, *, lacks_some: bool = False
    ) -> Dispatch:
        """Return the order of assignments, given the expert of each.

        Args:
            assigned: the expert of each assignment, as an int32 vector.
            experts: number of experts.
            choices: number of choices of each token.
            lacks_some: whether an assignment may be nobody's.
        """
        kinds = experts + lacks_some
        parts = tf.dynamic_partition(tf.range(tf.size(assigned)), assigned, kinds)
        order = tf.concat(parts, 0)
        counts = tf.stack([tf.size(part) for part in parts[:experts]])
        places = tf.math.invert_permutation(order)
        if lacks_some:
            order = order[: tf.reduce_sum(counts)]
        return cls(choices, counts, order, places, lacks_some)

    @property
    def ranks_of_assignments(self) -> tf.Tensor:
        """Number of earlier assignments to the same expert, for each assignment."""
        before = tf.repeat(tf.cumsum(self.counts, exclusive=True), self.counts)
        own = tf.range(tf.size(self.order)) - before
        return self._assignments(own)

    def rows(self, tokens: tf.Tensor) -> tf.Tensor:
        """Return a row for each assignment to an expert: its token."""

        @tf.custom_gradient
        def forward(tokens: tf.Tensor) -> Any:
            token_of_row = self.order
            if self.choices > 1:
                token_of_row %= tf.shape(tokens)[0]

            def backward(of_rows: tf.Tensor) -> tf.Tensor:
                return tf.reduce_sum(self.results(of_rows), 0)

            return tf.gather(tokens, token_of_row), backward

        return forward(tokens)

    def results(self, rows: tf.Tensor) -> tf.Tensor:
        """Return the row of each choice of each token; zeros if an assignment has no row.

        The result has the shape (choices, tokens, width).
        """

        @tf.custom_gradient
        def forward(rows: tf.Tensor) -> Any:
            every = self._assignments(rows)
            width = rows.shape[-1]

            def backward(of_results: tf.Tensor) -> tf.Tensor:
                return tf.gather(tf.reshape(of_results, [-1, width]), self.order)

            return tf.reshape(every, [self.choices, -1, width]), backward

        return forward(rows)

    def _assignments(self, rows: tf.Tensor) -> tf.Tensor:
        if self.lacks_some:
            missing = tf.size(self.places) - tf.shape(rows)[0]
            rows = tf.pad(rows, [[0, missing], *([0, 0] for _ in rows.shape[1:])])
        return tf.gather(rows, self.places)
