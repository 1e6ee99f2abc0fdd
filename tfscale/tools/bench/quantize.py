"""``tfscale bench quantize``: plans against published ones, and sensitivities against the truth.

Parts: ``programs`` (HAWQ's 18 programs, brute force, 200 layers), ``traces`` (estimates and exact
Hessians), ``order`` (predicted and measured rise of the loss, layer by layer), ``tuned`` (plans of
the same size after fine-tuning), ``faces`` (three real nets), ``search`` (few of 256 nets against
all of them), ``wires`` (gradients in the wires of a plan and in one wire, at equal bytes), and
``large`` (a study of ResNet50).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfscale.tools.bench import digits, faces, hawq, machine, space, tuned, wire_plans
from tfscale.tools.bench.command import bench_parser, list_of, make_console, one_of, whole_number
from tfscale.tools.bench.kept import Kept
from tfscale.tools.bench.table import table_of

WIDTHS = (2, 4, 8)
_LAYERS = 10  # of a program that brute force solves
_BITS = 4  # of one layer at a time
_MEASURES = ("trace", "fisher", "error")


def main(argv: Sequence[str]) -> int:
    """Run ``tfscale bench quantize``; return the exit status."""
    arguments = make_parser().parse_args(argv)
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
    about, console = machine.describe(), make_console()
    found: dict[str, Any] = {}
    for part in arguments.parts:
        for table, numbers in _PARTS[part](arguments):
            console.print(table)
            found.setdefault(part, []).extend([] if numbers is None else [numbers])
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    console.print(machine.signature(about, "quantize", argv))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the options of ``tfscale bench quantize``."""
    parser = bench_parser(
        "quantize", "Compare plans of bits with published ones, and sensitivities with the truth."
    )
    add = parser.add_argument
    add("--parts", type=list_of(one_of(_PARTS)), default="programs,traces,order",
        metavar="NAME,...", help=f"some of {', '.join(_PARTS)} (default: %(default)s)")  # fmt: skip
    add("--programs", type=whole_number, default=300, metavar="N",
        help="random programs that brute force solves (default: %(default)s)")  # fmt: skip
    add("--seeds", type=whole_number, default=3, metavar="N",
        help="trainings of each net, or searches (default: %(default)s)")  # fmt: skip
    add("--epochs", type=whole_number, default=30, metavar="N",
        help="epochs of the net of 20 layers (default: %(default)s)")  # fmt: skip
    add("--samples", type=whole_number, default=64, metavar="N",
        help="random vectors of a study (default: %(default)s)")  # fmt: skip
    add("--random", type=whole_number, default=20, metavar="N",
        help="random plans of the part tuned (default: %(default)s)")  # fmt: skip
    add("--float-epochs", type=whole_number, default=15, metavar="N",
        help="epochs in float in the part tuned (default: %(default)s)")  # fmt: skip
    add("--tuned-epochs", type=whole_number, default=3, metavar="N",
        help="epochs of fine-tuning in the part tuned (default: %(default)s)")  # fmt: skip
    add("--tasks", type=list_of(one_of(tuned.TASKS)), default=",".join(tuned.TASKS),
        metavar="NAME,...", help="tasks of the part tuned (default: %(default)s)")  # fmt: skip
    add("--rows", type=whole_number, default=1000, metavar="N",
        help="images of the part large (default: %(default)s)")  # fmt: skip
    add("--large-samples", type=whole_number, default=2, metavar="N",
        help="random vectors for each batch of the part large (default: %(default)s)")  # fmt: skip
    add("--large-batch", type=whole_number, default=100, metavar="N",
        help="images of a batch of the part large (default: %(default)s)")  # fmt: skip
    add("--kept", type=Path, metavar="FILE",
        help="file that keeps finished trainings, so that a stopped run goes on")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="write the results to FILE")
    return parser


# --------------------------------------------------------------------------- programs


def programs(options: argparse.Namespace) -> Any:
    """Yield tables about integer programs."""
    rows = []
    for case in hawq.cases():
        start = time.perf_counter()
        found = case.program().solve()
        seconds = time.perf_counter() - start
        same = found.bits == case.published
        rows.append((str(case), case.published_cost, found.cost, same, 1e3 * seconds))
    yield table_of(
        "HAWQ's published programs",
        ["program", "published sensitivity", "ours", "same widths", "ms"],
        [[name, f"{a:.5f}", f"{b:.5f}", "yes" if same else "no", f"{ms:.0f}"]
         for name, a, b, same, ms in rows],
    ), rows  # fmt: skip
    equal = 0
    for seed in range(options.programs):
        program = random_program(seed)
        least = brute_force(program)
        equal += abs(program.solve().cost - least) <= 1e-9 * least
    title = f"{options.programs} random programs of {_LAYERS} layers x {len(WIDTHS)} widths"
    yield table_of(title, ["equal to brute force"], [[str(equal)]]), equal
    times = []
    for seed in range(10):
        program = random_program(seed, 200, (2, 4, 6, 8))
        start = time.perf_counter()
        found = program.solve()
        times.append((time.perf_counter() - start, found.proven))
    yield table_of(
        "200 layers x 4 widths x 3 limits, 10 random programs",
        ["median, s", "longest, s", "proven optimal"],
        [[f"{np.median([t for t, _ in times]):.2f}", f"{max(t for t, _ in times):.2f}",
          str(sum(proven for _, proven in times))]],
    ), times  # fmt: skip


def random_program(seed: int, layers: int = _LAYERS, widths: Sequence[int] = WIDTHS) -> Any:
    """Return a random program with three limits that bind, and a pair of tied layers."""
    from tfscale.analysis.quantize.program import Program, Resource

    rng = np.random.default_rng(seed)
    numbers = rng.integers(100, 1_000_000, layers)
    products = numbers * rng.integers(1, 100, layers)
    curvature = 10 ** rng.uniform(-6, -2, layers)
    costs = [
        {b: float(h * n * 4.0**-b * rng.uniform(0.5, 2)) for b in widths}
        for h, n in zip(curvature, numbers, strict=True)
    ]
    tables = {
        "size": [{b: int(n) * b / 8 for b in widths} for n in numbers],
        "bops": [{b: float(m * b * b) for b in widths} for m in products],
        "latency": [
            {b: float(1e-12 * m * (b + 2) * rng.uniform(0.9, 1.1) + 1e-5) for b in widths}
            for m in products
        ],
    }
    resources = []
    for name, table in tables.items():
        low, high = (sum(f(uses.values()) for uses in table) for f in (min, max))
        resources.append(Resource(name, table, low + rng.uniform(0.2, 0.9) * (high - low)))
    return Program(costs, resources, [rng.choice(layers, 2, replace=False).tolist()])


_CHOICES = np.array(list(itertools.product(range(len(WIDTHS)), repeat=_LAYERS)), np.int8)


def brute_force(program: Any) -> float:
    """Return the smallest cost of all choices of a program of 10 layers."""

    def sums(tables: Any) -> Any:
        return sum(
            np.array([table[b] for b in WIDTHS])[_CHOICES[:, i]] for i, table in enumerate(tables)
        )

    fits = np.ones(len(_CHOICES), bool)
    for group in program.groups:
        for other in group[1:]:
            fits &= _CHOICES[:, group[0]] == _CHOICES[:, other]
    for resource in program.resources:
        fits &= sums(resource.uses) <= resource.limit * (1 + 1e-12)
    return float(sums(program.costs)[fits].min())


# --------------------------------------------------------------------------- traces


def traces(options: argparse.Namespace) -> Any:
    """Yield a table of estimated mean eigenvalues, and those of exact Hessians."""
    from tfscale.analysis.curvature import Hessian
    from tfscale.analysis.quantize import sensitivity

    rows, within, count = [], 0, 0
    for name, build in _SMALL.items():
        for seed in range(options.seeds):
            model, x, y = _trained(build, seed, 4)
            study = sensitivity(
                model, x, y, samples=options.samples, accuracy=0, progress=False, seed=seed,
                batch_size=250,
            )  # fmt: skip
            kernels = [v for v in model.trainable_variables if len(v.shape) > 1]
            h = Hessian(
                model, x, y, variables=kernels, regularizers=False, progress=False, batch_size=250
            )
            exact = np.diag(h @ np.eye(h.size))
            off = []
            for layer, place in zip(study.layers, h.parts.values(), strict=True):
                true, found = float(exact[place].mean()), layer.curvature
                off.append(abs(found.value - true) / found.error)
            within += sum(one <= 3 for one in off)
            count += len(off)
            rows.append((name, seed, h.size, max(off), study.samples))
    yield table_of(
        f"mean eigenvalues of layers: {within} of {count} are within 3 reported errors of the "
        "exact ones", ["net", "seed", "numbers", "largest distance, errors", "vectors"],
        [[name, str(seed), f"{size:,}", f"{off:.1f}", str(n)] for name, seed, size, off, n in rows],
    ), {"within": within, "of": count, "rows": rows}  # fmt: skip


def _trained(build: Callable[[], Any], seed: int, epochs: int) -> tuple[Any, Any, Any]:
    """Return a trained model, and its data.

    Smoothed labels give the loss a minimum, and the rate decays, so the model is near it.
    """
    import keras

    keras.utils.set_random_seed(seed)
    (x, y), _ = digits.load()
    y = np.eye(10, dtype=np.float32)[y]
    model, batch = build(), 40
    rate = keras.optimizers.schedules.CosineDecay(0.005, epochs * len(x) // batch)
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    model.fit(x, y, batch_size=batch, epochs=epochs, verbose=0)
    return model, x, y


def _perceptron() -> Any:
    import keras

    layers = keras.layers
    hidden = [layers.Dense(12, activation="tanh"), layers.Dense(12, activation="relu")]
    return keras.Sequential([keras.Input((8, 8, 1)), layers.Flatten(), *hidden, layers.Dense(10)])


def _small_convolution() -> Any:
    import keras

    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Conv2D(6, 3, activation="relu"),
            layers.DepthwiseConv2D(3),
            layers.BatchNormalization(),
            layers.Activation("gelu"),
            layers.Conv2D(12, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )


_SMALL = {"dense": _perceptron, "convolution": _small_convolution}


# --------------------------------------------------------------------------- order


def order(options: argparse.Namespace) -> Any:
    """Yield a table of correlations between predicted and measured rises of the loss."""
    from tfscale.analysis.quantize import sensitivity

    rows = []
    for seed in range(options.seeds):
        model, x, y = _trained(twenty_layers, seed, options.epochs)
        rises = _rises(model, x, y)
        each = []
        for measure in _MEASURES:
            study = sensitivity(
                model, x, y, by=measure, bits=[_BITS], samples=options.samples, progress=False,
                batch_size=250,
            )  # fmt: skip
            costs = [study[path].cost(_BITS) for path in rises]
            each.append(spearman(costs, list(rises.values())))
        rows.append((seed, model.evaluate(x, y, verbose=0, batch_size=250)[1], each))
    yield table_of(
        f"20 layers, one at {_BITS} bits: Spearman's correlation of predicted and measured rise of "
        "the loss", ["seed", "accuracy, %", *_MEASURES],
        [[str(seed), f"{100 * accuracy:.1f}", *(f"{one:.2f}" for one in each)]
         for seed, accuracy, each in rows],
    ), rows  # fmt: skip


def twenty_layers() -> Any:
    """Return a small MobileNet: a convolution, 9 separable ones in two layers each, a dense one."""
    import keras

    layers = keras.layers

    def normalized(layer: Any, x: Any) -> Any:
        return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(layer(x)))

    inputs = keras.Input((8, 8, 1))
    x = normalized(layers.Conv2D(8, 3, padding="same", use_bias=False), inputs)
    for width, stride in zip([16, 16, 16, 32, 32, 32, 64, 64, 64], [1, 1, 1, 2, 1, 1, 2, 1, 1]):
        depthwise = layers.DepthwiseConv2D(3, strides=stride, padding="same", use_bias=False)
        x = normalized(depthwise, x)
        y = normalized(layers.Conv2D(width, 1, use_bias=False), x)
        x = layers.Add()([x, y]) if x.shape == y.shape else y
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10)(x))


def _rises(model: Any, x: Any, y: Any) -> dict[str, float]:
    """Return by how much the loss rises if one layer has few bits."""
    from tfscale.analysis.quantize.kernels import kernels_of
    from tfscale.analysis.quantize.numbers import quantized

    def loss() -> float:
        return float(model.evaluate(x, y, verbose=0, batch_size=250)[0])

    before, found = loss(), {}
    for kernel in kernels_of(model):
        value = np.asarray(kernel.variable)
        kernel.variable.assign(quantized(value, _BITS, axis=kernel.axes, method="mse"))
        found[kernel.path] = loss() - before
        kernel.variable.assign(value)
    return found


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's correlation of numbers without ties."""
    first, second = (np.argsort(np.argsort(each)) for each in (one, other))
    return float(np.corrcoef(first, second)[0, 1])


# --------------------------------------------------------------------------- tuned


def tuned_plans(options: argparse.Namespace) -> Any:
    """Yield tables of plans of the same size, for each task."""
    kept = Kept(options.kept)
    for name in options.tasks:
        rows = [tuned.compare(options, name, seed, kept) for seed in range(options.seeds)]
        for measure, words, least in _FIGURES:
            yield table_of(
                f"{name}: {words}, at 12.5% of float32's bytes",
                ["seed", *_PLANS, "random, mean", "random, best", "random ones beaten"],
                [[str(seed), *_compared(row, measure, least)] for seed, row in enumerate(rows)],
            ), None  # fmt: skip
        yield _bits_of(name, rows), {name: rows}


_PLANS = ("float", "hessian", "error", "uniform", "reversed")
# A figure, its words, and which one of several is the best.
_FIGURES: list[tuple[str, str, Callable[..., float]]] = [
    ("accuracy after", "test accuracy after fine-tuning, %", max),
    ("loss after", "test loss after fine-tuning", min),
    ("loss before", "test loss before fine-tuning", min),
]


def _compared(row: Mapping[str, Any], measure: str, best: Callable[..., float]) -> list[str]:
    random = [one[measure] for name, one in row.items() if name.startswith("random")]
    ours, digits = row["hessian"][measure], 1 if best is max else 4
    shown = [*(row[name][measure] for name in _PLANS), np.mean(random), best(random)]
    beaten = sum(ours != one and best(ours, one) == ours for one in random)
    return [*(f"{one:.{digits}f}" for one in shown), f"{beaten} of {len(random)}"]


def _bits_of(name: str, rows: Sequence[Any]) -> Any:
    return table_of(
        f"{name}: bits of the layers, in the net's order", ["seed", "hessian", "error"],
        [[str(seed), *(" ".join(map(str, row[how]["bits"])) for how in ("hessian", "error"))]
         for seed, row in enumerate(rows)],
    )  # fmt: skip


# --------------------------------------------------------------------------- faces


def real_nets(options: argparse.Namespace) -> Any:
    """Yield a table of the nets of MTCNN with few bits, for each net."""
    for name in faces.NETS:
        rows = faces.compare(name)
        lines = []
        for row in rows:
            for how, (loss, accuracy, off, *bits) in list(row.items())[1:]:
                told = " ".join(map(str, np.ravel(bits))) if bits else "32"
                lines.append([row["size"], how, told, f"{loss:.3f}", f"{accuracy:.0f}",
                              f"{off:.4f}"])  # fmt: skip
        yield table_of(
            f"{name} of MTCNN, not trained further",
            ["size", "plan by", "bits", "test loss", "accuracy, %", "mean change of P(face)"],
            lines,
        ), {name: rows}  # fmt: skip


# --------------------------------------------------------------------------- search


def searched(options: argparse.Namespace) -> Any:
    """Yield a table of the nets that a search finds, and the best of all nets."""
    from tfscale.analysis.quantize import search

    kept = Kept(options.kept)
    # JSON has no whole numbers as keys, so the file has pairs.
    measured = kept.of("latencies", space.latencies)
    latencies = {block: dict(map(tuple, pairs)) for block, pairs in measured.items()}
    every = space.nets()
    used: list[float] = []  # kept trainings take no time now, so their times are the clock

    def score(net: dict[str, int], effort: float) -> float:
        found, took = kept.of(f"search {net} {effort}", lambda: space.score(net, effort))
        used.append(took)
        return float(found)

    def clock() -> float:
        return float(sum(used))

    scores = [score(net, 1.0) for net in every]
    whole = clock()
    seconds = np.array([sum(latencies[b][c] for b, c in net.items()) for net in every])
    rows = []
    for part in _LATENCIES:
        limit = float(np.quantile(seconds, part))
        best = max(s for s, each in zip(scores, seconds, strict=True) if each <= limit)
        found = [
            search(latencies, score, latency=limit, seed=seed, clock=clock)
            for seed in range(options.seeds)
        ]
        rows.append((limit, best, [_told(one, whole) for one in found]))
    yield table_of(
        f"a search among {len(every)} nets for digits, and the best of all of them: "
        f"{whole:.0f} s of processor time for all",
        ["latency, ms", "best, %", "found, %", f"within {_POINTS} points",
         "processor time: mean", "largest", "short trainings", "full ones"],
        [[f"{1e3 * limit:.2f}", f"{best:.1f}",
          " ".join(f"{one['best']:.1f}" for one in found),
          f"{sum(one['best'] >= best - _POINTS for one in found)} of {len(found)}",
          f"{np.mean([one['time'] for one in found]):.1%}",
          f"{max(one['time'] for one in found):.1%}",
          *(" ".join(str(one[kind]) for one in found) for kind in ("short", "full"))]
         for limit, best, found in rows],
    ), rows  # fmt: skip


def _told(found: Any, whole: float) -> dict[str, Any]:
    """Return the figures of a search; its time is a share of the time of all nets."""
    return {
        "best": found.best.score, "time": found.seconds / whole, "whole": found.whole / whole,
        "short": len(found.probes), "full": len(found.nets),
    }  # fmt: skip


_LATENCIES = (0.4, 0.6, 0.8)  # shares of the nets that are within the limit
_POINTS = 0.5


# --------------------------------------------------------------------------- wires


def wire_plans_of_gradients(options: argparse.Namespace) -> Any:
    """Yield a table of losses with wires by sensitivity and with one wire, for each task."""
    for name in wire_plans.TASKS:
        found = wire_plans.measure(name, range(options.seeds), options.kept)
        yield table_of(
            f"{name}: two workers, {wire_plans.RATE}; " + "; ".join(wire_plans.summary(found)),
            ["uniform wire", "seed", "plan's wires", "bytes a step", "plan's", "counted, off by",
             "loss", "plan's", "test loss", "plan's"],
            wire_plans.rows(found),
        ), {name: found}  # fmt: skip


# --------------------------------------------------------------------------- large


def large(options: argparse.Namespace) -> Any:
    """Yield a table of the time that a study of ResNet50 takes, on images of 64 x 64."""
    import keras

    from tfscale.analysis.quantize import plan, sensitivity

    keras.utils.set_random_seed(0)
    model = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3), classes=100)
    model.compile(loss="sparse_categorical_crossentropy")
    rng = np.random.default_rng(0)
    x = rng.standard_normal((options.rows, 64, 64, 3), np.float32)
    y = rng.integers(0, 100, options.rows)
    times = [(time.perf_counter(), time.process_time())]
    study = sensitivity(
        model, x, y, trained=True, samples=options.large_samples, batch_size=options.large_batch
    )
    times.append((time.perf_counter(), time.process_time()))
    plan(study, (2, 4, 8), size="12.5%")
    times.append((time.perf_counter(), time.process_time()))
    (measured, processor), (planned, _) = np.diff(times, axis=0).tolist()
    off = [one.curvature.error / abs(one.curvature.value) for one in study.layers]
    row = (
        model.count_params(), len(study.layers), options.rows, study.samples,
        float(np.median(off)), measured, processor, planned,
    )  # fmt: skip
    yield table_of(
        f"a study of ResNet50, weights as initialized, in batches of {options.large_batch}",
        ["parameters", "layers", "images", "vectors a batch", "median error of a layer", "study, s",
         "processor, s", "plan, s"],
        [[f"{row[0]:,}", str(row[1]), f"{row[2]:,}", str(row[3]), f"{row[4]:.1%}",
          f"{row[5]:.0f}", f"{row[6]:.0f}", f"{row[7]:.2f}"]],
    ), row  # fmt: skip


_PARTS = {
    "programs": programs, "traces": traces, "order": order, "tuned": tuned_plans,
    "faces": real_nets, "search": searched, "wires": wire_plans_of_gradients, "large": large,
}  # fmt: skip
