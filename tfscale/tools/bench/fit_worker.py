"""Worker of ``tfscale bench fit``: ``python -m tfscale.tools.bench.fit_worker SOCKET CONTESTANT``.

The worker builds its model and trains until everything is traced and chosen. Then it reports that
it is ready, and takes turns: it reads an order as a line of JSON from the socket, trains for the
steps of the order, and writes their time.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale import plan
from tfscale.callbacks import Recompute
from tfscale.collectives.choose import machine_fields
from tfscale.exchange.slots import Slots
from tfscale.exchange.trial import TURNS
from tfscale.plan.units import unit_fields
from tfscale.strategy import ScaleStrategy, auto_strategy
from tfscale.support.resident import highest_memory
from tfscale.tools.bench import machine, methods
from tfscale.tools.bench.fit_contestants import FitContestant
from tfscale.tools.bench.measure import page_faults

DEADLINE = 60.0
SETTLED = TURNS + 4  # steps until the strategy has tried all schedules
UNTIMED = 2  # first steps of each turn, since ranks do not start at the same moment

Layers = list[Any]


# ---------------------------------------------------------------------------
# Models: each function returns layers, the shape of a sample, and the samples per replica.


def conv() -> tuple[Layers, tuple[int, ...], int]:
    """Return a small convolutional network, as for MNIST or Fashion-MNIST."""
    layers = keras.layers
    return (
        [
            layers.Conv2D(16, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ],
        (28, 28, 1),
        32,
    )


def dense() -> tuple[Layers, tuple[int, ...], int]:
    """Return a layer of 25 million parameters and little computation: bound by communication."""
    return [keras.layers.Dense(5000)], (5000,), 8


def deep() -> tuple[Layers, tuple[int, ...], int]:
    """Return a VGG-like network for 32x32 pixels, which computes longer than it communicates."""
    widths = (64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512)
    body = [
        keras.layers.Conv2D(width, 3, padding="same", activation="relu")
        if width
        else keras.layers.MaxPooling2D()
        for width in widths
    ]
    return [*body, keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)], (32, 32, 3), 48


def tiny() -> tuple[Layers, tuple[int, ...], int]:
    """Return a toy model, to try the benchmark itself."""
    return [keras.layers.Dense(8), keras.layers.Dense(1)], (4,), 2


def stack() -> tuple[Layers, tuple[int, ...], int]:
    """Return six layers of together 25 million parameters and little computation."""
    return [keras.layers.Dense(2048) for _ in range(6)], (2048,), 8


def wide() -> tuple[Layers, tuple[int, ...], int]:
    """Return three layers of together 3 million parameters and some computation."""
    return [keras.layers.Dense(1000, "relu") for _ in range(3)], (1000,), 32


MODELS = {each.__name__: each for each in (conv, dense, deep, stack, tiny, wide)}


def make_model(name: str, optimizer: Any = None) -> Any:
    """Return a compiled model by its name in the benchmark."""
    layers, shape, _ = MODELS[name]()
    model = keras.Sequential([keras.Input(shape), *layers])
    model.compile(optimizer or keras.optimizers.SGD(0.001, momentum=0.9), "mse")
    return model


def make_data(model: Any, batch: int) -> tf.data.Dataset:
    """Return a data set that repeats one batch, so that reading data takes no time."""
    x = tf.random.stateless_normal([batch, *model.input_shape[1:]], [1, 2])
    y = tf.random.stateless_normal([batch, *model.output_shape[1:]], [3, 4])
    return tf.data.Dataset.from_tensors((x, y)).repeat()


# ---------------------------------------------------------------------------
# Trainings: each runs a number of steps and returns the time at which each step ended.

Ends = list[float]


class Clock(keras.callbacks.Callback):
    """Callback that records when each step ended, and calls ``note`` then."""

    def __init__(self, note: Callable[[], Any] | None = None) -> None:
        super().__init__()
        self.ends: Ends = []
        self.noted: list[Any] = []
        self._note = note

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the end of a step."""
        self.ends.append(time.perf_counter())
        if self._note is not None:
            self.noted.append(self._note())


class Fit:
    """Training by ``model.fit``, as users call it.

    Attributes:
        batch: number of samples of a batch.
        sent: for each step of the last turn, the bytes that the first replica of this process had
            sent by its end; empty if not measured.
        behind: for each step of the last turn, the seconds waited for background exchanges by its
            end, and the seconds that these exchanges took; empty if not measured.
        faults: page faults of this process in a step of the last turn.
    """

    settled = SETTLED  # steps before the first turn
    faults = 0.0
    sent: Sequence[int] = ()
    behind: Sequence[tuple[float, float]] = ()

    def __init__(self, contestant: FitContestant, strategy: Any, batch: int) -> None:
        self.strategy, self.batch = strategy, batch
        with strategy.scope():
            self.model = make_model(contestant.model, self.make_optimizer())
            self.model.optimizer.build(self.model.trainable_variables)
        self.data = make_data(self.model, batch)

    def make_optimizer(self) -> Any:
        """Return the optimizer; None for the benchmark's usual one."""
        return None

    def steps(self, count: int) -> Ends:
        """Run steps of ``fit`` and return the time at which each step ended."""
        clock = Clock()
        callbacks = [clock, *self.make_callbacks()]
        self.model.fit(self.data, steps_per_epoch=count, verbose=0, callbacks=callbacks)
        return clock.ends

    def make_callbacks(self) -> list[keras.callbacks.Callback]:
        """Return more callbacks of ``fit``."""
        return []


class Recomputed(Fit):
    """Training by ``fit`` that computes all layers again in the backward pass."""

    def make_callbacks(self) -> list[keras.callbacks.Callback]:
        """Return the callback of the recomputation."""
        names = [layer.name for layer in self.model.layers]
        return [Recompute(layers=names, verbose=0)]


class ByRule(Fit):
    """Training by ``fit`` with a sync rule; it records the bytes sent by the end of each step."""

    settled = UNTIMED  # few, since links may be slow; this strategy tries no schedules

    def steps(self, count: int) -> Ends:
        """Run steps of ``fit`` and return the time at which each step ended."""
        clock = Clock(lambda: (self._sent_now(), self._behind_now()))
        self.model.fit(self.data, steps_per_epoch=count, verbose=0, callbacks=[clock])
        self.sent, self.behind = zip(*clock.noted, strict=True)
        return clock.ends

    def _sent_now(self) -> int:
        own = self.strategy.extended.group.communicators[0]
        return sum(total.sent for total in own.totals().values())

    def _behind_now(self) -> tuple[float, float]:
        rounds = self.strategy.rounds
        return (0.0, 0.0) if rounds is None else rounds.behind()


class OfAdam(ByRule):
    """Training by ``fit`` with Adam, whose state is twice as large as the weights."""

    def make_optimizer(self) -> Any:
        """Return Adam."""
        return keras.optimizers.Adam(1e-4)


class Called(Fit):
    """Training that calls a function for each step."""

    def __init__(self, contestant: FitContestant, strategy: Any, batch: int) -> None:
        super().__init__(contestant, strategy, batch)
        self.step = tf.function(self.make_step(), autograph=False)

    def make_step(self) -> Callable[[], Any]:
        """Return the function that runs one step."""
        raise NotImplementedError

    def steps(self, count: int) -> Ends:
        """Run steps and return the time at which each step ended."""
        ends = []
        for _ in range(count):
            self.step()
            ends.append(time.perf_counter())
        return ends


class Loop(Called):
    """Custom loop of TensorFlow's guides, for stock TensorFlow with several workers.

    Keras 3's ``fit`` fails there.
    """

    def make_step(self) -> Callable[[], Any]:
        """Return a step of a custom training loop."""
        strategy, model, replicas = self.strategy, self.model, self.strategy.num_replicas_in_sync
        data = iter(strategy.experimental_distribute_dataset(self.data))

        def part(x: Any, y: Any) -> Any:
            with tf.GradientTape() as tape:
                total = keras.losses.MeanSquaredError("sum")(y, model(x, training=True))
                loss = total / (replicas * x.shape[0])
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            return loss

        def step() -> Any:
            return strategy.reduce("SUM", strategy.run(part, next(data)), axis=None)

        return step


class Sums(Called):
    """Exchange of a step's gradients, without training."""

    def make_step(self) -> Callable[[], Any]:
        """Return a step that sums gradients and does nothing else."""
        variables, optimizer = self.model.trainable_variables, self.model.optimizer
        memory = Slots.of(optimizer, self.strategy)

        def part() -> Any:
            gradients = [tf.convert_to_tensor(v.value) for v in variables]
            sums = self.strategy.reducer.reduce(gradients, variables, optimizer, memory)
            return tf.add_n([total[(0,) * len(total.shape)] for total in sums])

        return lambda: self.strategy.run(part)


class Horovod(Fit):
    """Training by ``fit`` with Horovod's optimizer, as in Horovod's guide."""

    def __init__(self, contestant: FitContestant, strategy: Any, batch: int) -> None:
        import horovod.tensorflow.keras as horovod

        horovod.init()
        super().__init__(contestant, strategy, batch)
        optimizer = horovod.DistributedOptimizer(self.model.optimizer)
        self.model.compile(optimizer, "mse")
        self.model.optimizer.build(self.model.trainable_variables)


def trainee(contestant: FitContestant) -> Fit:
    """Return the training of a contestant."""
    batch = contestant.replicas * MODELS[contestant.model]()[-1]
    make, kind, share = _WAYS[contestant.way]
    return kind(contestant, make(contestant), batch // (contestant.processes if share else 1))


def _scale(contestant: FitContestant) -> Any:
    method = methods.method_of(contestant.wire)
    return ScaleStrategy(contestant.algorithm, method=method, deadline=DEADLINE, backend="engine")


def _by_rule(contestant: FitContestant) -> Any:
    return ScaleStrategy("ring", sync=methods.rule_of(contestant.rule), deadline=DEADLINE)


def _of_adam(contestant: FitContestant) -> Any:
    sharded = contestant.way == "sharded"
    shard, wire = ("optimizer", contestant.wire) if sharded else (None, None)
    return ScaleStrategy(
        "ring", shard=shard, weights_wire=wire, deadline=DEADLINE, backend="engine"
    )


def _planned(contestant: FitContestant) -> Any:
    given = json.loads(contestant.arguments)
    return ScaleStrategy(**given, deadline=DEADLINE, backend="engine")


def _scale_by_tensorflow(contestant: FitContestant) -> Any:
    return ScaleStrategy(wire=contestant.wire, deadline=DEADLINE, backend="tensorflow")


_WAYS: dict[str, tuple[Callable[[FitContestant], Any], type[Fit], bool]] = {
    "none": (lambda _: tf.distribute.get_strategy(), Fit, False),
    "apart": (lambda _: tf.distribute.get_strategy(), Fit, True),
    "auto": (lambda _: auto_strategy(), Fit, False),
    "scale": (_scale, Fit, False),
    "tensorflow": (_scale_by_tensorflow, Fit, False),
    "planned": (_planned, Fit, False),
    "planned, recomputed": (_planned, Recomputed, False),
    "rules": (_by_rule, ByRule, False),
    "copies": (_of_adam, OfAdam, False),
    "sharded": (_of_adam, OfAdam, False),
    "sums": (_scale, Sums, False),
    "horovod": (lambda _: tf.distribute.get_strategy(), Horovod, True),
    "mirrored": (lambda c: tf.distribute.MirroredStrategy(_names(c.devices)), Fit, False),
    "stock": (lambda _: tf.distribute.MultiWorkerMirroredStrategy(), Loop, False),
}


def _names(devices: int) -> list[str]:
    return [f"CPU:{number}" for number in range(devices)]


# ---------------------------------------------------------------------------
# The process.


def main(address: str, text: str) -> None:
    """Train a contestant's model as one of its workers."""
    contestant = FitContestant(**json.loads(text))
    _make_devices(contestant.devices)
    training = trainee(contestant)
    training.steps(training.settled)
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(address)
        with line.makefile("rw") as talk:
            _send(talk, {"parameters": training.model.count_params()})
            for order in map(json.loads, talk):
                _send(talk, _answer(training, order))
    sys.stdout.flush()
    os._exit(0)  # TensorFlow's servers can hang or abort in a usual exit


def _send(talk: Any, message: Any) -> None:
    print(json.dumps(message), file=talk, flush=True)


def _answer(training: Fit, order: dict[str, int]) -> Any:
    if "explain" in order:
        rows = training.strategy.explain()
        large = [row for row in rows if row.elements >= order["explain"]]
        return [row.method for row in large or rows]
    if "links" in order:
        chooser = training.strategy.reducer.team.schedules
        return {**machine_fields(chooser.machine), "gamma": chooser.gamma, "ranks": chooser.ranks}
    if "batch" in order:
        return training.batch
    if "units" in order:
        return _units(training.model, order["units"])
    if "trace" in order:
        from tfscale.tools.bench import fit_trace

        communicator = training.strategy.reducer.team.communicators[0]
        return fit_trace.take(communicator, training.steps, UNTIMED, order["trace"])
    if "sent" in order:
        return training.sent[-1] - training.sent[-1 - order["sent"]]
    if "behind" in order:
        last, first = training.behind[-1], training.behind[-1 - order["behind"]]
        return [now - then for now, then in zip(last, first, strict=True)]
    if "memory" in order:
        return [training.faults, highest_memory() / 1e6]
    faults, steps = page_faults(), UNTIMED + order["steps"]
    ends = training.steps(steps)
    training.faults = (page_faults() - faults) / steps
    return (ends[-1] - ends[UNTIMED - 1]) / order["steps"]


def _units(model: Any, batch: int) -> Any:
    """Return what a plan needs to know of a model on this machine, for batches of a size."""
    found = plan.measured(model, batch)
    units = [unit_fields(unit) for unit in found.units]
    return {**dataclasses.asdict(found), "units": units}


def _make_devices(count: int) -> None:
    if count > 1:
        machine.split_cpu(count)


if __name__ == "__main__":
    main(*sys.argv[1:])
