"""LARS and LAMB in float64 numpy, written from the papers and from nothing else.

You, Gitman, Ginsburg (arXiv:1708.03888), algorithm 1; You et al. (arXiv:1904.00962), algorithm 2.
One object is one variable.
"""

from __future__ import annotations

import numpy as np


def length(x):
    return float(np.sqrt(np.sum(np.asarray(x, np.float64) ** 2)))


class Lamb:
    def __init__(
        self, w, *, b1=0.9, b2=0.999, eps=1e-6, decay=0.0, adapt=True, phi=lambda z: z, debias=True
    ):
        self.w = np.array(w, np.float64)
        self.mean, self.variance, self.t = np.zeros_like(self.w), np.zeros_like(self.w), 0
        self.b1, self.b2, self.eps, self.decay = b1, b2, eps, decay
        self.adapt, self.phi, self.debias = adapt, phi, debias

    def step(self, gradient, rate):
        g = np.asarray(gradient, np.float64)
        self.t += 1
        self.mean = self.b1 * self.mean + (1 - self.b1) * g
        self.variance = self.b2 * self.variance + (1 - self.b2) * g * g
        mean, variance = self.mean, self.variance
        if self.debias:
            mean = mean / (1 - self.b1**self.t)
            variance = variance / (1 - self.b2**self.t)
        r = mean / (np.sqrt(variance) + self.eps) + self.decay * self.w
        trust = 1.0
        if self.adapt and length(self.w) > 0 and length(r) > 0:
            trust = self.phi(length(self.w)) / length(r)
        self.w = self.w - rate * trust * r


class Lars:
    def __init__(
        self,
        w,
        *,
        momentum=0.9,
        decay=0.0,
        trust=0.001,
        eps=0.0,
        adapt=True,
        nesterov=False,
        popular=False,
        clip=False,
    ):
        self.w = np.array(w, np.float64)
        self.v = np.zeros_like(self.w)
        self.momentum, self.decay, self.trust, self.eps = momentum, decay, trust, eps
        self.adapt, self.nesterov, self.popular, self.clip = adapt, nesterov, popular, clip

    def local_rate(self, g, rate):
        if not self.adapt or length(self.w) == 0 or length(g) == 0:
            return 1.0
        local = self.trust * length(self.w) / (length(g) + self.decay * length(self.w) + self.eps)
        return min(local / rate, 1.0) if self.clip else local

    def step(self, gradient, rate):
        g = np.asarray(gradient, np.float64)
        term = self.local_rate(g, rate) * (g + self.decay * self.w)
        if not self.popular:
            term = rate * term
        self.v = self.momentum * self.v + term
        move = self.momentum * self.v + term if self.nesterov else self.v
        self.w = self.w - (rate * move if self.popular else move)
