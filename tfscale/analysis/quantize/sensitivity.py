"""Measurement of sensitivities: one pass over the data for a few random vectors, for all widths."""

from __future__ import annotations

import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.analysis.curvature import Fisher, Hessian
from tfscale.analysis.curvature.of_model import OfModel
from tfscale.analysis.curvature.operator import Operator
from tfscale.analysis.curvature.results import Estimate, student
from tfscale.analysis.curvature.samples import AT_ONCE, FEWEST, checked_samples, random_signs
from tfscale.analysis.quantize.kernels import (
    Kernel,
    kernels_of,
    products_of,
    shapes_of,
    unknown_of,
    watching,
)
from tfscale.analysis.quantize.numbers import METHODS, as_rows, quantized
from tfscale.analysis.quantize.study import MEASURES, Inputs, LayerStudy, Study
from tfscale.analysis.quantize.sums import sums_of
from tfscale.bridge.data import batches_of
from tfscale.bridge.objects import native
from tfscale.cluster.this_worker import is_first
from tfscale.support import arguments

WIDTHS = (2, 3, 4, 6, 8)
_WIDEST = 16
_CALIBRATION = 8  # batches that ranges of inputs are read from
_SAME = 1e-3  # the losses of two runs may differ by this share, because of rounding


def sensitivity(
    model: keras.Model,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    bits: Iterable[int] = WIDTHS,
    by: str = "trace",
    group: int | None = None,
    ranges: str = "mse",
    samples: int = 64,
    accuracy: float = 0.05,
    file: str | Path | None = None,
    strict: bool = False,
    trained: bool = False,
    batch_size: int | None = None,
    steps: int | None = None,
    loss: Any = None,
    memory: float | str = "2GB",
    progress: bool | None = None,
    seed: int = 0,
) -> Study:
    r"""Measure how much the loss rises if a layer's weights get few bits, for each layer and width.

    .. math:: \Omega_{l b} = \frac{\mathrm{tr} H_l}{n_l} \, \|Q_b(W_l) - W_l\|^2

    with the Hessian :math:`H_l` of the loss by the :math:`n_l` weights of layer l (HAWQ-V2 and V3).
    Near a minimum, random errors of the weights raise the loss by :math:`\Omega / 2` on average.
    :math:`Q_b` rounds to b bits, with one scale for each channel, as ``quantize.apply`` does with a
    plan of this study.

    - **Cost.** Random vectors z of signs give :math:`E[z_l^T (H z)_l] = \mathrm{tr} H_l` for all
      layers at once, and for all widths. Each batch has vectors of its own, so that a pass over
      many batches gives the accuracy of many vectors.
    - **End.** Sampling ends when the order of layers is known (with 95% confidence for each pair
      of neighbours), when all standard errors are within ``accuracy``, or after ``samples``
      vectors for each batch. The study says which.
    - **Replicas.** If the model was made in the scope of a strategy, its replicas share each batch.
      All workers must make the same call; they get the same study.
    - **Layers**: Dense, EinsumDense, Embedding, all convolutions, and those within other layers,
      such as attention. Other layers with matrices stay in float, and the study lists them.

    Args:
        model: a compiled model that was trained.
        x: inputs; or a ``tf.data.Dataset`` or ``keras.utils.PyDataset`` of all, in batches.
        y: targets.
        sample_weight: weight of each row.
        bits: widths to measure, from 2 to 16.
        by: what multiplies the squared error: ``"trace"``; ``"eigenvalue"``, the largest one of the
            layer (HAWQ-V1), which takes some tens of products for each layer; ``"fisher"``, the
            trace of the empirical Fisher information instead of the Hessian's; or ``"error"``, the
            squared error alone.
        group: number of consecutive channels that share a scale. Each group is then multiplied by
            the mean eigenvalue of its own weights (Q-BERT: 128 groups for each matrix).
        ranges: how the range of each scale is chosen: ``"mse"``, ``"minmax"`` or ``"percentile"``,
            as in ``quantize.apply``.
        samples: largest number of random vectors for each batch.
        accuracy: stop when each layer's standard error is at most this share of its curvature.
        file: path of a file that holds the study while it is measured. If it exists, the study goes
            on from there. The first worker writes it.
        strict: whether to raise if there are layers that nobody knows how to quantize.
        trained: whether the model was trained, although its optimizer has made no step: because its
            weights were loaded.
        batch_size: rows of a global batch, if data are arrays; 32 by default, as in Keras.
        steps: how many batches to read; all by default.
        loss: replaces the compiled loss, as for ``curvature.Hessian``.
        memory: largest size of Lanczos's basis, for ``by="eigenvalue"``.
        progress: whether to show the progress; by default if stderr is a terminal.
        seed: seed of the random vectors.

    Example:
        >>> _ = model.fit(x, y, verbose=0)
        >>> study = tfscale.quantize.sensitivity(model, x, y, bits=(4, 8), samples=8)
        >>> study.widths, len(study.layers)
        ((4, 8), 9)

    Reference: Dong et al., HAWQ-V2: Hessian Aware trace-Weighted Quantization of Neural Networks,
    https://arxiv.org/abs/1911.03852.
    """
    widths = arguments.items(bits, "bits", "a list of widths, such as (2, 4, 8)", _checked_width)
    arguments.choice(by, "by", tuple(MEASURES))
    arguments.optional(arguments.whole, group, "group", 1, what="a number of channels")
    arguments.choice(ranges, "ranges", METHODS)
    checked_samples(samples)
    arguments.real(accuracy, "accuracy", 0)
    file = None if file is None else Path(arguments.path(file, "file"))
    arguments.flag(strict, "strict")
    arguments.flag(trained, "trained")
    seed = arguments.whole(seed, "seed", 0)
    arguments.instance(model, "model", keras.Model, "a keras.Model that is compiled")
    given = {
        "batch_size": batch_size, "steps": steps, "loss": loss, "memory": memory,
        "progress": progress, "regularizers": False,
    }  # fmt: skip
    kind = Fisher if by == "fisher" else Hessian
    # The first operator builds the model, if nobody has.
    kernels = kernels_of(kind(model, x, y, sample_weight, **given).model)
    _refuse_unquantizable(model, kernels, strict)
    _refuse_untrained(model, trained)
    operator = kind(
        model, x, y, sample_weight, variables=[one.variable for one in kernels], **given
    )
    task = _Task(operator, kernels, tuple(dict.fromkeys(widths)), by, group, ranges, seed)
    seen = _Seen(kernels)
    seen.look(model, x, y, batch_size, steps)
    return task.run(samples, accuracy, file, seen)


class _Seen:
    """Multiplications and ranges of inputs of layers, seen while some batches pass the model."""

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self._kernels = kernels
        self.products: dict[str, float] = {}
        self._low: dict[str, float] = {}
        self._high: dict[str, float] = {}
        self._powers: dict[str, list[float]] = {}
        self._is_first_batch = True

    def look(self, model: Any, x: Any, y: Any, batch_size: int | None, steps: int | None) -> None:
        """Call the model on the first batches."""
        with watching([kernel.layer for kernel in self._kernels], self._note):
            for batch in itertools.islice(batches_of(x, y, batch_size, steps), _CALIBRATION):
                inputs = keras.utils.unpack_x_y_sample_weight(batch)[0]
                model(inputs, training=False)
                self._is_first_batch = False

    def inputs(self, path: str) -> Inputs | None:
        """Return the range of a layer's inputs."""
        if path not in self._powers:
            return None
        return Inputs(self._low[path], self._high[path], float(np.mean(self._powers[path])))

    def _note(self, layer: Any, inputs: Any, outputs: Any) -> None:
        for kernel in self._kernels:
            if kernel.layer is not layer:
                continue
            path = kernel.path
            if self._is_first_batch:
                known = self.products.get(path, 0.0)
                self.products[path] = known + products_of(kernel, inputs, outputs)
            if inputs.dtype.is_floating:
                numbers = tf.cast(inputs, tf.float32).numpy()
                self._low[path] = min(float(numbers.min()), self._low.get(path, np.inf))
                self._high[path] = max(float(numbers.max()), self._high.get(path, -np.inf))
                self._powers.setdefault(path, []).append(float(np.square(numbers).mean()))


class _Task:
    """A measurement of the sensitivities of a model's layers.

    A row has one sample's numbers, of which each batch had a random vector: for each stratum, which
    is a group of batches, and for each layer the curvature, then its cost at each width. Strata add
    up. Batches differ, but each sample has all of them, so the spread within strata alone makes the
    error; some strata have enough spread after few samples.

    By eigenvalues, a row has one layer's eigenvalue, its residual, and the number of products.
    """

    def __init__(
        self, operator: OfModel, kernels: Sequence[Kernel], widths: tuple[int, ...], by: str,
        group: int | None, ranges: str, seed: int,
    ) -> None:  # fmt: skip
        self._operator, self._kernels = operator, kernels
        self._widths, self._by, self._group, self._seed = widths, by, group, seed
        self._ranges = ranges
        self._shapes = shapes_of(kernels)
        self._paths = list(self._shapes)
        values = [_value(kernel.variable) for kernel in kernels]
        self._loss = operator.loss  # raises if it is not finite
        self._strata = min(operator.batches, FEWEST)
        self._width = len(self._paths) * (1 + len(self._widths))
        self._pieces = self._cut(values, operator.gradient)
        told = hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest()[:16]
        self._settings = {
            "by": by, "bits": " ".join(map(str, widths)), "group": str(group), "ranges": ranges,
            "seed": str(seed),
            "weights": told, "layers": " ".join(self._paths), "batches": str(operator.batches),
        }  # fmt: skip

    def run(self, samples: int, accuracy: float, file: Path | None, seen: _Seen) -> Study:
        """Measure, and write the study after each few vectors."""
        self._seen = seen
        self.rows = self._rows_before(file, samples)
        if self._by == "error":
            return self._told("exact", file)
        if self._by == "eigenvalue":
            return self._eigenvalues(file)
        fewest = 1 + -(-(FEWEST - 1) // self._strata)
        with self._operator.telling("sensitivity", max(samples - len(self.rows), 1)):
            while len(self.rows) < samples:
                if len(self.rows) >= fewest and self._end(accuracy) is not None:
                    break
                self._sample(min(AT_ONCE, fewest, samples - len(self.rows)))
                if file is not None:
                    self._told("samples", file)
        return self._told(self._end(accuracy) or "samples", file)

    def _sample(self, count: int) -> None:
        """Add rows, in one pass over the data."""
        first, signs = len(self.rows), functools.partial(random_signs, self._operator, self._seed)
        found = np.zeros((count, self._strata, self._width))
        passed = self._operator.products_of_batches(
            lambda batch: np.stack([signs(first + i, batch) for i in range(count)])
        )
        for batch, vectors, products in passed:
            products *= vectors
            for row, each in zip(found, products, strict=True):
                row[batch % self._strata] += self._row(each)
        rows = self._operator.summed_over_hosts(found.reshape(count, -1))
        self.rows += rows.tolist()

    # ------------------------------------------------------------- of weights

    def _cut(self, values: Sequence[np.ndarray], gradient: np.ndarray) -> list[list[_Piece]]:
        """Return for each layer the pieces of its kernels that have a curvature of their own."""
        places = list(self._operator.parts.values())
        order = {id(v): place for v, place in zip(self._operator.variables, places, strict=True)}
        found: dict[str, list[_Piece]] = {path: [] for path in self._paths}
        for kernel, value in zip(self._kernels, values, strict=True):
            found[kernel.path].append(
                _Piece(
                    order[id(kernel.variable)],
                    value,
                    kernel.axes,
                    self._group,
                    self._lost(kernel, value),
                    gradient,
                )
            )
        return list(found.values())

    def _lost(self, kernel: Kernel, value: np.ndarray) -> Iterator[np.ndarray]:
        """Yield the rounding errors of a kernel at each width."""
        for width in self._widths:
            yield (
                quantized(value, width, axis=kernel.axes, group=self._group, method=self._ranges)
                - value
            )

    def _row(self, each: np.ndarray) -> list[float]:
        """Return a row of numbers, from the terms of a sample of the trace."""
        row: list[float] = []
        for pieces in self._pieces:
            row.append(sum(float(each[piece.place].sum()) for piece in pieces))
            row += np.sum([piece.costs(each) for piece in pieces], axis=0).tolist()
        return row

    # ------------------------------------------------------------- when to end

    def _table(self) -> np.ndarray:
        """Return the rows as an array of samples, strata, layers, and curvature and widths."""
        return np.array(self.rows).reshape(
            len(self.rows), self._strata, len(self._paths), 1 + len(self._widths)
        )

    def _end(self, accuracy: float) -> str | None:
        """Return why sampling may end; None if it may not."""
        if len(self.rows) < 2:
            return None
        found = self._table()
        if self._is_order_known(found[..., 1 + self._widths.index(min(self._widths))]):
            return "order"
        means, errors = _of_strata(found[..., 0])
        return "accuracy" if np.all(errors <= accuracy * np.abs(means)) else None

    def _is_order_known(self, costs: np.ndarray) -> bool:
        """Return whether each layer's cost differs from its neighbour's, sample by sample."""
        order = np.argsort(_of_strata(costs)[0])
        means, errors = _of_strata(np.diff(costs[..., order], axis=-1))
        return bool(np.all(means > student(0.95, self._count() - 1) * errors))

    def _count(self) -> int:
        """Return the number of samples whose spread would be known as well."""
        return self._strata * (len(self.rows) - 1) + 1

    # ------------------------------------------------------------- results

    def _eigenvalues(self, file: Path | None) -> Study:
        for number in range(len(self.rows), len(self._paths)):
            block = _Block(self._operator, [piece.place for piece in self._pieces[number]])
            found = block.eigenvalues(top=1, tolerance=1e-2, seed=self._seed)
            self.rows.append([found.top[0], found.residuals[0], float(found.products)])
            if file is not None:
                self._told("exact", file)
        return self._told("exact", file)

    def _layers(self) -> list[LayerStudy]:
        made = []
        for number, path in enumerate(self._paths):
            errors = sum(piece.errors.sum(1) for piece in self._pieces[number])
            each = dict(zip(self._widths, map(float, errors), strict=True))
            curvature, costs = self._estimates(number, each)
            made.append(
                LayerStudy(
                    path,
                    self._shapes[path],
                    self._seen.products.get(path, 0.0),
                    curvature,
                    each,
                    costs,
                    self._slopes(number),
                    self._seen.inputs(path),
                )
            )
        return made

    def _slopes(self, number: int) -> dict[int, float]:
        found = np.sum([piece.slopes for piece in self._pieces[number]], axis=0)
        return dict(zip(self._widths, found.tolist(), strict=True))

    def _estimates(
        self, number: int, errors: dict[int, float]
    ) -> tuple[Estimate, dict[int, Estimate]]:
        if self._by in ("error", "eigenvalue"):
            curvature = Estimate(1.0, 0.0, 0)
            if self._by == "eigenvalue":
                rows = self.rows[number] if number < len(self.rows) else [np.nan, np.nan, 0.0]
                curvature = Estimate(rows[0], rows[1], int(rows[2]))
            return curvature, {
                width: Estimate(curvature.value * error, curvature.error * error, curvature.samples)
                for width, error in errors.items()
            }
        means, deviations = _of_strata(self._table()[:, :, number])
        curvature, *costs = (
            Estimate(mean, error, self._count())
            for mean, error in zip(means.tolist(), deviations.tolist(), strict=True)
        )
        numbers = sum(piece.numbers for piece in self._pieces[number])
        curvature = Estimate(curvature.value / numbers, curvature.error / numbers, self._count())
        return curvature, dict(zip(self._widths, costs, strict=True))

    def _told(self, ended: str, file: Path | None) -> Study:
        model = self._operator.model
        sampled = len(self.rows) if self._by in ("trace", "fisher") else 0
        study = Study(
            tuple(self._layers()), self._by, ended, sampled, float(self._loss),
            tuple(unknown_of(model)), tuple(sums_of(model, self._kernels)), self._group, self.rows,
            self._settings, self._ranges,
        )  # fmt: skip
        if file is not None and is_first():
            study.save(file)
        return study

    # ------------------------------------------------------------- a killed study

    def _rows_before(self, file: Path | None, samples: int) -> list[list[float]]:
        """Return the rows that a file holds; all workers get those of the first one."""
        if file is None:
            return []
        width = 3 if self._by == "eigenvalue" else self._strata * self._width
        most = len(self._paths) if self._by == "eigenvalue" else samples
        shared = np.zeros(2 + most * width)
        if is_first() and file.exists():
            try:
                rows = np.array(self._checked(Study.load(file))[:most]).reshape(-1, width)
                shared[0] = len(rows)
                shared[2 : 2 + rows.size] = rows.reshape(-1)
            except ValueError as error:
                shared[1], wrong = 1, error
        shared = self._operator.summed_over_hosts(shared)
        if shared[1]:
            if is_first():
                raise wrong
            raise ValueError(f"file={str(file)!r} of the first worker does not fit; see its error")
        count = int(shared[0])
        return [list(map(float, row)) for row in shared[2:].reshape(most, width)[:count]]

    def _checked(self, study: Study) -> Sequence[Sequence[float]]:
        for name, value in self._settings.items():
            if study.settings[name] != value:
                raise ValueError(
                    f"file holds a study with {name}={study.settings[name][:80]!r}, and this one "
                    f"has {name}={value[:80]!r}: give another file, or remove it to begin anew"
                )
        if abs(study.loss - self._loss) > _SAME * max(abs(study.loss), 1e-6):
            raise ValueError(
                f"file holds a study of other data: their loss is {study.loss:.6g}, and the loss "
                f"of these data is {self._loss:.6g}. Give another file, or remove it to begin anew"
            )
        return study.rows


def _of_strata(found: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return means and standard errors, from arrays of samples and strata."""
    means, count = found.mean(0).sum(0), len(found)
    if count < 2:
        return means, np.full_like(means, np.nan)
    return means, np.sqrt(found.var(0, ddof=1).sum(0) / count)


class _Piece:
    """A kernel, cut into groups of channels that have a curvature of their own.

    Args:
        place: the kernel's place in a vector.
        value: the kernel's numbers.
        axes: axes of the channels.
        group: number of channels in a group; None for one group.
        lost: the kernel's rounding errors at each width.
        gradient: the gradient of the loss by all kernels.
    """

    def __init__(
        self, place: slice, value: np.ndarray, axes: tuple[int, ...], group: int | None,
        lost: Iterable[np.ndarray], gradient: np.ndarray,
    ) -> None:  # fmt: skip
        self.place, self.numbers = place, value.size
        self._shape, self._axes = value.shape, axes
        self._starts = np.arange(0, len(as_rows(value, axes)), group or value.size)
        self._sizes = self._by_group(np.ones(value.shape))
        mine = gradient[place].reshape(value.shape)
        each = [(self._by_group(np.square(one)), float(np.vdot(mine, one))) for one in lost]
        self.errors = np.array([errors for errors, _ in each])
        self.slopes = [slope for _, slope in each]  # first-order rise of the loss

    def costs(self, each: np.ndarray) -> np.ndarray:
        """Return the costs at all widths, from the terms of a sample of the trace."""
        terms = self._by_group(each[self.place].reshape(self._shape))
        return np.asarray(self.errors @ (terms / self._sizes))

    def _by_group(self, numbers: np.ndarray) -> np.ndarray:
        """Return the sums of the groups."""
        rows = as_rows(numbers, self._axes).sum(1, dtype=np.float64)
        return np.add.reduceat(rows, self._starts)


class _Block(Operator):
    """The block of a layer's kernels on the diagonal of a matrix."""

    def __init__(self, whole: OfModel, places: Sequence[slice]) -> None:
        ends = list(itertools.accumulate((p.stop - p.start for p in places), initial=0))
        inside = [slice(*ends[i : i + 2]) for i in range(len(places))]
        super().__init__(dict(zip(map(str, places), inside)), whole.dtype, whole.memory)
        self._whole, self._places = whole, list(zip(places, inside, strict=True))

    def products(self, vectors: np.ndarray) -> np.ndarray:
        """Return the products with the rows of ``vectors``, as rows in float64."""
        padded = np.zeros((len(vectors), self._whole.size), self._whole.dtype)
        for place, inside in self._places:
            padded[:, place] = vectors[:, inside]
        found = self._whole.products(padded)
        return np.concatenate([found[:, place] for place, _ in self._places], axis=1)


def _value(variable: Any) -> np.ndarray:
    return np.asarray(tf.cast(tf.convert_to_tensor(native(variable)), tf.float32))


def _checked_width(value: Any, name: str) -> int:
    return arguments.whole(value, name, 2, _WIDEST, what="a number of bits")


def _refuse_unquantizable(model: Any, kernels: Sequence[Kernel], strict: bool) -> None:
    unknown = unknown_of(model)
    if not kernels:
        raise ValueError(
            f"model {model.name!r} has no layer that quantize knows: Dense, EinsumDense, "
            "Embedding, or a convolution, whose weights are trainable"
            + (f"; it has {', '.join(unknown)}" if unknown else "")
        )
    if strict and unknown:
        raise ValueError(
            f"quantize does not know the layers {', '.join(unknown)} of {model.name!r}, or their "
            "weights are not trainable, and strict=True: without strict=True they stay in float"
        )


def _refuse_untrained(model: Any, trained: bool) -> None:
    optimizer = getattr(model, "optimizer", None)
    if trained or optimizer is None:
        return
    if not int(_value(optimizer.iterations)):
        raise ValueError(
            f"the optimizer of {model.name!r} has made no step, so its weights may be random, and "
            "their sensitivities would say nothing: train the model first, or pass trained=True if "
            "its weights were loaded"
        )
