"""Trains nets with few bits as one of several workers, and runs them by integers."""

import sys

import tfscale
from tests.quantize.small_models import tuned

strategy = tfscale.ScaleStrategy("ring")
for name in sys.argv[1:]:
    with strategy.scope():
        weights, equal = tuned(*name.split("-"))
    print("TOLD", name, equal, weights.tobytes().hex(), flush=True)
