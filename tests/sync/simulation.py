"""Each rule in numpy: linear regressions of several replicas, step by step, number by number."""

from __future__ import annotations

import math

import numpy as np

RATE, FEATURES, OUTPUTS, BATCH = 0.05, 6, 3, 8


def problem(samples=72, seed=3):
    random = np.random.default_rng(seed)
    x = random.standard_normal([samples, FEATURES]).astype("float32")
    y = random.standard_normal([samples, OUTPUTS]).astype("float32")
    return x, y


def beginning(seed=4):
    random = np.random.default_rng(seed)
    kernel = random.standard_normal([FEATURES, OUTPUTS]).astype("float32")
    return [kernel, np.zeros(OUTPUTS, "float32")]


def gradient(weights, x, y):
    """Return the gradient of Keras's mean squared error of ``x @ kernel + bias``."""
    kernel, bias = weights
    error = 2 * (x @ kernel + bias - y) / y.size
    return [x.T @ error, error.sum(0)]


class Momentum:
    """Keras's SGD."""

    def __init__(self, rate, momentum=0.0, nesterov=False):
        self.rate, self.momentum, self.nesterov = rate, momentum, nesterov
        self.kept = None

    def apply(self, weights, gradients):
        self.kept = self.kept or [np.zeros_like(w, "float64") for w in weights]
        updated = []
        for i, (w, g) in enumerate(zip(weights, gradients, strict=True)):
            self.kept[i] = self.momentum * self.kept[i] - self.rate * g
            step = self.momentum * self.kept[i] - self.rate * g if self.nesterov else self.kept[i]
            updated.append(w + step)
        return updated


class Training:
    """P replicas that make their steps alone; or P groups, each as one replica.

    Args:
        replicas: P.
        steps: steps of each round.
        end: called with this at the end of a round.
        settle: called at the end.
        momentum: momentum of the inner optimizers.
        devices: devices of each of the P.

    Attributes:
        workers: how many processes the replicas are in. A batch is cut in as many parts as there
            are devices, which go to workers in turn.
    """

    def __init__(self, replicas, steps, end, settle=None, momentum=0.9, devices=1):
        self.weights = [[w.astype("float64") for w in beginning()] for _ in range(replicas)]
        self.inner = [Momentum(RATE, momentum) for _ in range(replicas)]
        self.began = self.centre = self.mean()
        self.replicas, self.steps, self.end, self.settle = replicas, steps, end, settle
        self.workers = 1
        self.after_step = lambda training, position: None
        self.rounds = 0
        self.devices = devices

    def mean(self):
        return [np.mean(parts, 0) for parts in zip(*self.weights, strict=True)]

    def run(self, epochs=1, batch=BATCH, samples=72):
        x, y = problem(samples)
        position = rounds = 0
        for _ in range(epochs):
            for first in range(0, len(x), batch):
                self.step(x[first : first + batch], y[first : first + batch])
                position += 1
                self.after_step(self, position)
                if position == self.steps(rounds):
                    self.end(self)
                    position, rounds = 0, rounds + 1
        if position:
            self.end(self)
        if self.settle:
            self.settle(self)
        return self.mean()

    def step(self, x, y):
        for r in range(self.replicas):
            devices = range(r * self.devices, (r + 1) * self.devices)
            part = np.concatenate([self.part_of(device, len(x)) for device in devices])
            if len(part):
                g = gradient(self.weights[r], x[part], y[part])
                self.weights[r] = self.inner[r].apply(self.weights[r], g)

    def part_of(self, device, rows):
        """Return a device's rows; of a short batch the last devices have fewer, or none."""
        devices = self.replicas * self.devices
        worker, place = divmod(device, devices // self.workers)
        most = math.ceil(rows / devices)
        first = (place * self.workers + worker) * most
        return np.arange(min(first, rows), min(first + most, rows))


def take_mean(training):
    training.weights = [training.mean() for _ in range(training.replicas)]


def take_mean_of_optimizers(training):
    take_mean(training)
    means = [np.mean(parts, 0) for parts in zip(*(one.kept for one in training.inner))]
    for one in training.inner:
        one.kept = [m.copy() for m in means]


def outer_step(outer):
    def end(training):
        changes = [began - mean for began, mean in zip(training.began, training.mean())]
        training.began = outer.apply(training.began, changes)
        training.weights = [[w.copy() for w in training.began] for _ in range(training.replicas)]

    return end


class Stream:
    """DiLoCo in fragments, whose changes come in some steps after they were sent.

    Args:
        fragments: positions of the weights in each.
        delay: steps.
        blend: share of a replica's own weights.
    """

    def __init__(self, fragments, delay, blend):
        self.fragments, self.delay, self.blend = fragments, delay, blend
        self.outer = [Momentum(0.7, 0.9, True) for _ in fragments]
        self.ended, self.flight = 0, None

    def training(self, replicas, steps, devices=1):
        made = Training(replicas, of_steps(steps), self.end, self.settle, devices=devices)
        made.after_step = self.after_step
        return made

    def after_step(self, training, position):
        if position == self.delay:
            self.land(training, self.blend)

    def end(self, training):
        self.land(training, self.blend)
        self.send(training, self.ended % len(self.fragments))
        self.ended += 1
        if not self.delay:
            self.land(training, self.blend)

    def send(self, training, number):
        means = training.mean()
        changes = [training.began[i] - means[i] for i in self.fragments[number]]
        self.flight = (number, changes)

    def land(self, training, blend):
        if self.flight is None:
            return
        number, changes = self.flight
        places, self.flight = self.fragments[number], None
        moved = self.outer[number].apply([training.began[i] for i in places], changes)
        for i, new in zip(places, moved, strict=True):
            training.began[i] = new
            for own in training.weights:
                own[i] = blend * own[i] + (1 - blend) * new

    def steps(self, training, steps, position=0):
        """Makes some steps of an epoch; gives how many of them come after the last round."""
        x, y = problem()
        for step in steps:
            rows = slice(step * BATCH, (step + 1) * BATCH)
            training.step(x[rows], y[rows])
            position += 1
            self.after_step(training, position)
            if position == training.steps(0):
                self.end(training)
                position = 0
        return position

    def finish(self, training, position):
        if position:
            self.end(training)
        self.settle(training)

    def settle(self, training):
        self.land(training, 0.0)
        for number in range(len(self.fragments)):
            if number != (self.ended - 1) % len(self.fragments):
                self.send(training, number)
                self.land(training, 0.0)


def of_steps(*steps):
    return lambda rounds: steps[min(rounds, len(steps) - 1)]


def elastic(alpha):
    def end(training):
        changes = [[w - c for w, c in zip(own, training.centre)] for own in training.weights]
        training.weights = [
            [w - alpha * d for w, d in zip(own, change)]
            for own, change in zip(training.weights, changes)
        ]
        pulls = [alpha * np.sum(each, 0) for each in zip(*changes)]
        training.centre = [c + pull for c, pull in zip(training.centre, pulls)]

    return end


def mix(rounds, rounded=lambda x: x):
    """Each round's equal shares by its pairs (sender, receiver), in turn.

    A sender keeps what rounding takes from those to whom it sends.
    """

    def end(training):
        p, pairs = training.replicas, rounds[training.rounds % len(rounds)]
        sent = [sum(s == r for s, _ in pairs) for r in range(p)]
        those = [[s for s, receiver in pairs if receiver == r] for r in range(p)]
        own = [[x / (1 + sent[r]) for x in training.weights[r]] for r in range(p)]
        theirs = [[rounded(x) for x in parts] for parts in own]

        def mixed(r, i):
            kept = own[r][i] + sent[r] * (own[r][i] - theirs[r][i])
            return np.sum([kept, *(theirs[s][i] for s in those[r])], 0)

        training.weights = [[mixed(r, i) for i in range(len(own[r]))] for r in range(p)]
        training.rounds += 1

    return end


def take_centre(training):
    training.weights = [[c.copy() for c in training.centre] for _ in range(training.replicas)]
