"""One worker that reduces once over whatever transport its environment says, and prints how."""

import os

import tensorflow as tf
from helpers import PATIENCE

from tfscale.ops import Group, all_reduce
from tfscale.tools.bench.measure import leave

rank, count = int(os.environ["RANK"]), int(os.environ["COUNT"])
transports = os.environ["TRANSPORTS"].split(",")  # by rank


def main():
    group = Group.cluster(deadline=PATIENCE, transport=transports[rank % len(transports)])
    try:
        (y,) = group.function(lambda c, x: all_reduce(x, c))([tf.ones([100_000])])
    except tf.errors.OpError as error:
        print("ERROR", type(error).__name__, " ".join(str(error).split()), flush=True)
        return
    assert set(y.numpy()) == {group.ranks}
    (communicator,) = group.communicators
    print("WAYS", communicator.ways(), flush=True)
    print("WHY NOT", communicator.why_not_sockets(), flush=True)


if __name__ == "__main__":
    main()
    leave(os.environ["MEETING"], "worker", rank, count)
