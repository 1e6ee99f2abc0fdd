"""One worker that checks everything that needs no failure; prints a digest of all its results."""

import hashlib
import os
import time

import numpy as np
import tensorflow as tf

DEVICES = int(os.environ.get("DEVICES", "1"))
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * DEVICES
)

from helpers import (  # noqa: E402
    ALGORITHMS,
    PATIENCE,
    WIRES,
    assert_conserved,
    assert_disagreement,
    integers,
    normal,
)

from tfscale.ops import (  # noqa: E402
    Group,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    reduce_scatter,
    transfer,
)
from tfscale.tools.bench.measure import leave  # noqa: E402

group = Group.cluster(deadline=PATIENCE)
ranks, mine = group.ranks, [c.rank for c in group.communicators]
digest = hashlib.sha256()


def call(body, *values):
    """Runs a body on this worker's ranks; one value per rank of the whole group each."""
    results = group.function(body)(*[[value[r] for r in mine] for value in values])
    return tf.nest.map_structure(lambda t: t.numpy(), results)


def same_on_all(results):
    """Local ranks are compared here, workers by the test: it compares digests."""
    for result in results:
        assert result.tobytes() == results[0].tobytes()
    digest.update(results[0].tobytes())


def check_all_reduces():
    sizes = (0, 1, 5, 20011)
    whole, rough = integers(ranks, max(sizes)), normal(ranks, max(sizes))
    for algorithm in ALGORITHMS:
        settings = {"schedule": algorithm, "piece_bytes": 4096}

        def body(c, x, z, settings=settings):
            exact = [all_reduce(x[:n], c, **settings) for n in sizes]
            return exact, [[all_reduce(z[:n], c, wire=w, **settings) for n in sizes] for w in WIRES]

        results = call(body, whole, rough)
        for s, n in enumerate(sizes):
            for exact, _ in results:
                np.testing.assert_array_equal(exact[s], sum(whole)[:n])
            for w, wire in enumerate(WIRES):
                same_on_all([lossy[w][s] for _, lossy in results])
                if wire in ("fp32", "bf16", "fp16", "int8"):
                    y = results[0][1][w][s]
                    np.testing.assert_allclose(y, sum(rough)[:n], atol=0.2 * ranks)
        print("checked", algorithm, flush=True)


def check_conservation():
    steps, n = 5, 3000
    for algorithm in ALGORITHMS:

        def body(c, x, residuals, algorithm=algorithm):
            return [
                all_reduce(x, c, schedule=algorithm, wire=w, residual=e, piece_bytes=2048)
                for w, e in zip(WIRES, residuals, strict=True)
            ]

        function = group.function(body)
        collect = group.function(lambda c, e: all_gather(tf.expand_dims(e, 0), c))
        local = [[tf.zeros([n])] * len(WIRES) for _ in mine]
        old = np.zeros((len(WIRES), ranks, n))
        for step in range(steps):
            xs = normal(ranks, n, seed=step)
            results = function([xs[r] for r in mine], local)
            local = [[kept for _, kept in result] for result in results]
            kept = collect([tf.stack(e) for e in local])[0].numpy()  # rank, wire, number
            for w, wire in enumerate(WIRES):
                y = results[0][w][0].numpy()
                assert_conserved(xs, old[w], [y], kept[:, w], case=(algorithm, wire, step))
                digest.update(y.tobytes())
            old = kept.transpose(1, 0, 2)


def check_the_others():
    xs = integers(ranks, 6 * ranks)

    def body(c, x):
        scattered = reduce_scatter(x, c)
        return scattered, all_gather(scattered, c), broadcast(x, c, root=ranks - 1)

    for rank, (scattered, gathered, given) in zip(mine, call(body, xs), strict=True):
        np.testing.assert_array_equal(scattered, sum(xs)[6 * rank : 6 * rank + 6])
        np.testing.assert_array_equal(gathered, sum(xs))
        np.testing.assert_array_equal(given, xs[-1])


def check_routes():
    """Each sends to the next in a ring of transfers, and to all; some have nothing for some."""
    xs = normal(ranks, 4000)
    counts = np.random.default_rng(0).integers(0, 900, (ranks, ranks)) * (
        1 - np.eye(ranks, dtype=int)
    )

    def body(c, x):
        ahead, behind = (c.rank + 1) % ranks, (c.rank - 1) % ranks
        transfer(x, c, source=c.rank, target=ahead, name=f"from {c.rank}")
        like = tf.TensorSpec([4000])
        came = transfer(like, c, source=behind, target=c.rank, name=f"from {behind}")
        shared = all_to_all(x[: 500 * ranks], c)
        sizes = counts[c.rank]
        tokens = tf.repeat(x[:ranks], sizes)
        return came, shared, *all_to_all(tokens, c, sizes=sizes)

    for _ in range(2):
        for rank, (came, shared, tokens, got) in zip(mine, call(body, xs), strict=True):
            np.testing.assert_array_equal(came, xs[(rank - 1) % ranks])
            own = [x[500 * rank : 500 * (rank + 1)] for x in xs]
            np.testing.assert_array_equal(shared, np.concatenate(own))
            np.testing.assert_array_equal(got, counts[:, rank])
            sent = [np.repeat(x[rank], n) for x, n in zip(xs, counts[:, rank])]
            np.testing.assert_array_equal(tokens, np.concatenate(sent))


def check_refusals():
    """The last rank differs; all are told, and then all go on."""
    odd = ranks - 1
    x = tf.range(12.0)
    cases = {
        "size": lambda c, x: all_reduce(x[: 5 if c.rank == odd else 6], c),
        "type": lambda c, x: all_reduce(tf.cast(x, "int32" if c.rank == odd else "float32"), c),
        "wire": lambda c, x: all_reduce(x, c, wire="int8" if c.rank == odd else "fp32"),
        "schedule": lambda c, x: all_reduce(x, c, schedule="tree" if c.rank == odd else "ring"),
        "reduction": lambda c, x: all_reduce(x, c, reduction="mean" if c.rank == odd else "sum"),
    }
    for what, body in cases.items():
        function = group.function(body)
        arguments = [x] * len(mine)
        call(lambda c, x: all_reduce(x, c), [x] * ranks)  # so that all begin together
        start = time.monotonic()
        try:
            function(arguments)
        except tf.errors.InvalidArgumentError as error:
            seconds = time.monotonic() - start
            message = str(error)
            assert_disagreement(message, odd)
            assert f"worker {odd // len(mine)} at 127.0.0.1:" in message, message
            print(f"MEASURED refusal of another {what}: {seconds:.2f} s", flush=True)
        else:
            raise AssertionError(f"another {what} was not refused")
        for _ in range(2):
            for y in call(lambda c, x: all_reduce(x, c), [x] * ranks):
                np.testing.assert_array_equal(y, ranks * x)


def check_two_groups():
    """Groups of this process alone and of all live side by side."""
    if DEVICES > 1:
        local = Group.local(deadline=PATIENCE)
        assert local.ranks == DEVICES
        for y in local.function(lambda c, x: all_reduce(x, c))([tf.ones([3])] * DEVICES):
            assert y.numpy().tolist() == [DEVICES] * 3


def main():
    assert mine == [int(os.environ["RANK"]) * DEVICES + i for i in range(DEVICES)]
    check_all_reduces()
    check_conservation()
    check_the_others()
    check_routes()
    check_two_groups()
    check_refusals()
    ways = {way.partition(" to ")[0] for c in group.communicators for way in c.ways()}
    print("WAYS", sorted(ways - {"itself", "the same process"}), flush=True)
    print("DIGEST", digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()
    leave(os.environ["MEETING"], "worker", int(os.environ["RANK"]), ranks // DEVICES)
