"""Methods on replicas, fed with gradients that are known, and the same in numpy."""

import json
import os
import re
import sys
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf

from tfscale import ScaleStrategy
from tfscale.exchange.slots import Slots
from tfscale.launch import LocalWorkers

ROOT = Path(__file__).resolve().parents[2]


def of_two_processes(worker, **environment):
    """Return what each of two processes prints of its training; both must have trained alike.

    Args:
        worker: the name of their program, in workers/.
        environment: variables of their environment.
    """
    environment |= {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "TF_CPP_MIN_LOG_LEVEL": "2",
    }
    program = Path(__file__).parent / "workers" / worker
    with LocalWorkers([sys.executable, str(program)], 2, environment=environment) as workers:
        outputs = workers.wait(200)
    first, second = (json.loads(re.search("^TRAINED (.*)$", o, re.MULTILINE)[1]) for o in outputs)
    assert first == second
    return first


class Trial:
    """Variables whose gradients the test makes up.

    Args:
        method: for all of them.
        shapes: shapes of the variables.
        replicas: how many.
    """

    def __init__(self, method, shapes, replicas=2, algorithm="ring", paths=None, **how):
        devices = [f"CPU:{i}" for i in range(replicas)]
        if not isinstance(method, dict):
            method = {"": method}
        self.strategy = ScaleStrategy(algorithm, None, devices, method=method, **how)
        self.replicas = replicas
        with self.strategy.scope():
            names = paths or [f"v{i}" for i in range(len(shapes))]
            self.variables = [
                keras.Variable(np.zeros(shape, "float32"), name=name)
                for name, shape in zip(names, shapes)
            ]
            self.optimizer = keras.optimizers.SGD(1.0)
            self.optimizer.build(self.variables)
        self.state = Slots.of(self.optimizer, self.strategy)

    def sums(self, gradients):
        """Return all replicas' equal sums of one step, of ``gradients[variable][replica]``."""
        found = self._step([tf.stack(each) for each in gradients])
        every = [self.strategy.experimental_local_results(each) for each in found]
        for of_replicas in every:
            for other in of_replicas[1:]:
                np.testing.assert_array_equal(of_replicas[0].numpy(), other.numpy())
        return [of_replicas[0].numpy() for of_replicas in every]

    @tf.function
    def _step(self, gradients):
        def part():
            me = tf.distribute.get_replica_context().replica_id_in_sync_group
            own = [each[me] for each in gradients]
            reducer = self.strategy.reducer
            reducer.prepare(self.state, self.optimizer, self.variables, own)
            return reducer.reduce(own, self.variables, self.optimizer, self.state)

        return self.strategy.run(part)

    def kept(self, name):
        """Return a state by variable: one value for each replica, or a common one."""
        return [v.numpy() for _, v in sorted(self.state.named(name).items())]


def gradients(shapes, replicas=2, seed=0):
    random = np.random.default_rng(seed)
    return [
        [random.standard_normal(shape).astype("float32") for _ in range(replicas)]
        for shape in shapes
    ]


def assert_conserved(trial, given, steps, name="residual"):
    """All that was given was summed, or is kept."""
    summed = [np.zeros(g[0].shape) for g in given[0]]
    for step in range(steps):
        for total, found in zip(summed, trial.sums(given[step % len(given)])):
            total += found
    wanted = [
        sum(np.sum(given[step % len(given)][i], 0, dtype=float) for step in range(steps))
        for i in range(len(summed))
    ]
    for total, rest, all_of_it in zip(summed, trial.kept(name), wanted):
        scale = np.abs(all_of_it).max() + np.abs(rest).max()
        np.testing.assert_allclose(total + rest.sum(0), all_of_it, rtol=0, atol=1e-5 * scale)
