"""Studies a net: alone until somebody kills it, or as one of several workers, in two parts."""

import sys

import tfscale
from tests.quantize import nets
from tfscale import quantize


def measured(model, x, y, samples, batch_size=32):
    return quantize.sensitivity(
        model, x, y, trained=True, accuracy=0, file=sys.argv[1], samples=samples,
        batch_size=batch_size,
    )  # fmt: skip


if sys.argv[2:] == ["workers"]:
    with tfscale.ScaleStrategy("ring").scope():
        parts = nets.dense(trained=False)
    for count in (4, 8):
        print("TOLD", *measured(*parts, count).rows[-1], flush=True)
else:
    measured(*nets.dense(trained=False), 10_000, 48)
