"""Routes: ops that send each number to one rank, and add nothing."""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfscale import collectives
from tfscale.collectives import Schedule
from tfscale.native import collective
from tfscale.native.bucket import Name, bucket_id
from tfscale.native.group import Communicator
from tfscale.support import arguments


def transfer(
    x: Any,
    communicator: Communicator,
    *,
    source: int,
    target: int,
    wire: str = "fp32",
    stochastic: bool | None = None,
    seed: Any = 0,
    piece_bytes: int = 0,
    gradient: bool = False,
    name: Name | None = None,
) -> Any:
    """Send the source's ``x`` to the target; no other rank calls this."""
    made = _transfer(communicator.ranks, source, target)
    rank = communicator.rank
    if rank not in (source, target):
        expected = f"called on ranks {source} and {target} only"
        raise arguments.wrong(rank, "communicator.rank", expected)
    like = x if not isinstance(x, tf.TensorSpec) else tf.zeros(x.shape, x.dtype)
    like = collective._checked(like, communicator)
    common = collective.common_arguments(
        communicator, made, "transfer", wire, stochastic, seed, piece_bytes, name
    )

    if not gradient:
        found = collective._run("broadcast", x=tf.stop_gradient(like), **common)
        return like if rank == source else tf.stop_gradient(found)

    @tf.custom_gradient
    def routed(x: tf.Tensor) -> Any:
        y = collective._run("broadcast", x=x, **common)

        def back(dy: tf.Tensor) -> tf.Tensor:
            label = f"gradient of {bucket_id(name)}" if name else None
            other = transfer(dy, communicator, source=target, target=source, wire=wire, name=label)
            return dy + other if rank == source else tf.zeros_like(dy)

        return (tf.identity(x) if rank == source else y), back

    return routed(like)


def all_to_all(
    x: Any,
    communicator: Communicator,
    *,
    wire: str = "fp32",
    stochastic: bool | None = None,
    seed: Any = 0,
    piece_bytes: int = 0,
    name: Name | None = None,
) -> Any:
    """Give each rank its share of the rows of each rank's ``x``, in rank order."""
    ranks, me = communicator.ranks, communicator.rank
    x = collective._checked(x, communicator, has_rows=True)
    label = bucket_id(name or communicator.new_bucket("all_to_all"))

    @tf.custom_gradient
    def routed(x: tf.Tensor) -> Any:
        shares = tf.split(x, ranks)

        def one(source: int, target: int) -> Any:
            part = shares[target] if source == me else shares[source]
            return transfer(
                part,
                communicator,
                source=source,
                target=target,
                wire=wire,
                stochastic=stochastic,
                seed=seed,
                piece_bytes=piece_bytes,
                name=label._replace(label=f"{label.label}: {source} to {target}"),
            )

        def back(dy: tf.Tensor) -> tf.Tensor:
            back_name = label._replace(label=f"gradient of {label.label}")
            return all_to_all(dy, communicator, wire=wire, name=back_name)

        for step in range(1, ranks):
            one(me, (me + step) % ranks)
        return tf.concat([shares[s] if s == me else one(s, me) for s in range(ranks)], 0), back

    return routed(x)


@functools.lru_cache(maxsize=1024)
def _transfer(ranks: int, source: int, target: int) -> Schedule:
    return collectives.transfer(ranks, source, target)
