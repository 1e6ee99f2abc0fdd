"""The result of a study: how much the loss rises if a layer's weights get few bits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tfscale.analysis.curvature.results import Estimate
from tfscale.analysis.quantize.kernels import fingerprint
from tfscale.support import arguments, figures, records
from tfscale.support.text import WIDTH, wrapped

FLOAT = 32  # width of a layer that is not quantized

MEASURES = {
    "trace": "mean eigenvalue of the Hessian",
    "eigenvalue": "top eigenvalue of the Hessian",
    "fisher": "mean eigenvalue of the Fisher information",
    "error": "nothing: the error alone",
}
ENDS = {
    "order": "the order of layers is known",
    "accuracy": "all error bars are as small as requested",
    "samples": "the order of layers is not known yet: error bars overlap. Raise samples",
    "exact": "nothing was sampled",
}
_STEEP = (
    "The model is not near a minimum of this loss: in most layers the gradient changes the loss "
    "more than the curvature does, so the order may not be that of the measured rises. Train it "
    "longer, with a rate that decays; batch normalization needs statistics of the final weights"
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Range of a layer's inputs, calibrated on data.

    Args:
        low: smallest number.
        high: largest number.
        power: mean of the squares.
    """

    low: float
    high: float
    power: float

    def error(self, bits: int) -> float:
        r"""Return the expected error of inputs that are rounded to ``2 ** bits`` values between
        ``low`` and ``high``, as a share of their power: :math:`s^2 / 12`, with the step s.
        """
        low, high = min(self.low, 0.0), max(self.high, 0.0)
        step = (high - low) / (2**bits - 1)
        return step**2 / 12 / self.power if self.power else 0.0


@dataclasses.dataclass(frozen=True)
class LayerStudy:
    """Sensitivity of a layer.

    Args:
        path: path of the layer.
        shapes: shapes of its kernels.
        products: multiplications for one sample.
        curvature: mean or top eigenvalue, with its standard error.
        errors: squared error of the quantized weights, by width.
        costs: sensitivity by width: curvature times squared error, with its standard error.
        slopes: first-order rise of the loss, by width: gradient times rounding error. It vanishes
            at a minimum, and plans do not count it.
        inputs: range of the layer's inputs; None if they are whole numbers, or were not seen.
    """

    path: str
    shapes: tuple[tuple[int, ...], ...]
    products: float
    curvature: Estimate
    errors: Mapping[int, float]
    costs: Mapping[int, Estimate]
    slopes: Mapping[int, float] = dataclasses.field(default_factory=dict)
    inputs: Inputs | None = None

    @property
    def numbers(self) -> int:
        """Number of numbers in the kernels."""
        return sum(math.prod(shape) for shape in self.shapes)

    def cost(self, bits: int) -> float:
        """Return the sensitivity that a plan counts with.

        A curvature that cannot be told from zero, or is negative because the model has not
        converged, counts as its standard error: a plan must not gain by rounding a layer.
        """
        if bits == FLOAT:
            return 0.0
        found = self.costs[bits]
        return max(found.value, 0.0 if math.isnan(found.error) else found.error, 0.0)


@dataclasses.dataclass(frozen=True)
class Study:
    """Sensitivities of a model's layers; ``quantize.plan`` makes a plan of them.

    Args:
        layers: the layers, in the model's order.
        by: what the curvature is: "trace", "eigenvalue", "fisher" or "error".
        ended: why sampling ended: "order", "accuracy", "samples" or "exact".
        samples: number of random vectors for each batch.
        loss: the loss on the data.
        kept: paths of layers that stay in float, since nobody knows how to quantize them.
        sums: lists of layers that feed one sum.
        group: number of channels that share a scale.
        rows: the measured numbers, from which a study goes on.
        settings: what must be equal for the study to go on.
        ranges: how the range of each scale was chosen.
    """

    layers: tuple[LayerStudy, ...]
    by: str
    ended: str
    samples: int
    loss: float
    kept: tuple[str, ...] = ()
    sums: tuple[tuple[str, ...], ...] = ()
    group: int | None = None
    rows: Sequence[Sequence[float]] = dataclasses.field(default=(), repr=False)
    settings: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)
    ranges: str = "mse"

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths that were measured."""
        return tuple(self.layers[0].costs)

    @property
    def fingerprint(self) -> str:
        """A hash of the layers' paths and shapes."""
        return fingerprint({layer.path: layer.shapes for layer in self.layers})

    def __getitem__(self, path: str) -> LayerStudy:
        for layer in self.layers:
            if layer.path == path:
                return layer
        raise arguments.wrong(path, "path", f"one of {[layer.path for layer in self.layers]}")

    @property
    def is_steep(self) -> bool:
        """Whether the gradient decides how the loss changes, not the curvature: in most layers, at
        the middle width, the first-order rise exceeds the second-order one.
        """
        if self.by not in ("trace", "eigenvalue"):
            return False
        width = sorted(self.widths)[len(self.widths) // 2]
        steep = [abs(one.slopes[width]) > one.cost(width) / 2 for one in self.layers]
        return sum(steep) > len(steep) / 2

    def order(self, bits: int | None = None) -> list[str]:
        """Return the layers' paths, the most sensitive one first.

        Args:
            bits: the width, by default the smallest one.
        """
        width = min(self.widths) if bits is None else checked_width(bits, "bits", self.widths)
        return [one.path for one in sorted(self.layers, key=lambda one: -one.cost(width))]

    def draw(self) -> Any:
        """Draw the sensitivities by layer and width; return a matplotlib figure."""
        figure = figures.figure(7, 1.2 + 0.28 * len(self.layers))
        axes = figure.add_subplot()
        for width in self.widths:
            values = [max(layer.cost(width), 1e-30) for layer in self.layers]
            errors = [layer.costs[width].error for layer in self.layers]
            errors = [0.0 if math.isnan(one) else one for one in errors]
            axes.errorbar(
                values, range(len(values)), xerr=errors, fmt="o", markersize=4, capsize=2,
                label=f"{width} bits",
            )  # fmt: skip
        axes.set_yticks(range(len(self.layers)), [layer.path for layer in self.layers], fontsize=7)
        axes.set(xscale="log", xlabel="sensitivity")
        axes.invert_yaxis()
        axes.legend(fontsize=8)
        return figure

    def save(self, path: str | Path) -> None:
        """Write a JSON file, from which ``sensitivity`` goes on, and ``Study.load`` reads."""
        records.write(Path(arguments.path(path, "path")), {"kind": "Study", **self._fields()})

    @classmethod
    def load(cls, path: str | Path) -> Study:
        """Read a study that ``save`` has written."""
        path = Path(arguments.path(path, "path"))
        record = records.Record.read(path, path.read_bytes())
        if record.text("kind") != "Study":
            raise record.wrong("kind", "a study of quantize.sensitivity")
        group = record.integer("group")
        return cls(
            tuple(_layer_from(one) for one in record.records("layers")),
            record.text("by"), record.text("ended"), record.integer("samples"),
            float(record.text("loss")), tuple(record.texts("kept")),
            tuple(tuple(one.split("\n")) for one in record.texts("sums")), group or None,
            [[float(n) for n in row.split()] for row in record.texts("rows")],
            {key: record.record("settings").text(key) for key in SETTINGS}, record.text("ranges"),
        )  # fmt: skip

    def _fields(self) -> dict[str, Any]:
        return {
            "by": self.by, "ended": self.ended, "samples": self.samples, "loss": repr(self.loss),
            "kept": list(self.kept), "sums": ["\n".join(one) for one in self.sums],
            "group": self.group or 0, "settings": dict(self.settings), "ranges": self.ranges,
            "layers": [_layer_fields(one) for one in self.layers],
            "rows": [" ".join(map(repr, row)) for row in self.rows],
        }  # fmt: skip

    def __str__(self) -> str:
        head = f"sensitivity of {len(self.layers)} layers: squared error x {MEASURES[self.by]}"
        if self.samples:
            head += f" ({self.samples} random vectors for each batch)"
        lines = [f"{head}; loss {self.loss:.4g}; {ENDS[self.ended]}"]
        titles = ["layer", "numbers", "curvature", *(f"{b} bits" for b in self.widths)]
        rows = [
            [one.path, f"{one.numbers:,}", f"{one.curvature.value:.2g}",
             *(f"{one.costs[b].value:.2g}" for b in self.widths)]
            for one in self.layers
        ]  # fmt: skip
        lines += table(titles, rows)
        if self.is_steep:
            lines.append(wrapped(_STEEP))
        if self.kept:
            lines.append(wrapped(f"stay in float: {', '.join(self.kept)}"))
        return "\n".join(lines)


# Settings that must be equal for a study to go on, as texts.
SETTINGS = ("by", "bits", "group", "ranges", "seed", "weights", "layers", "batches")


def checked_width(value: Any, name: str, widths: Sequence[int]) -> int:
    """Return a width that a study has measured, or that of floats."""
    if arguments.is_number(value) and value in (*widths, FLOAT):
        return int(value)
    expected = f"a width of the study, one of {', '.join(map(str, (*widths, FLOAT)))}"
    raise arguments.wrong(value, name, expected)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table; the first column is on the left."""
    widths = [max(len(line[n]) for line in [titles, *rows]) for n in range(len(titles))]
    room = max(WIDTH - sum(widths[1:]) - 2 * len(widths), 24)
    widths[0] = min(widths[0], room)
    return [
        "  ".join([
            _end_of(line[0], widths[0]).ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True)),
        ])
        for line in [titles, *rows]
    ]  # fmt: skip


def _end_of(path: str, width: int) -> str:
    return path if len(path) <= width else f"..{path[2 - width :]}"


def _layer_fields(layer: LayerStudy) -> dict[str, Any]:
    inputs = layer.inputs
    return {
        "path": layer.path,
        "shapes": [" ".join(map(str, shape)) for shape in layer.shapes],
        "products": layer.products,
        "curvature": _estimate_text(layer.curvature),
        "widths": list(layer.costs),
        "errors": [repr(one) for one in layer.errors.values()],
        "costs": [_estimate_text(one) for one in layer.costs.values()],
        "slopes": [repr(one) for one in layer.slopes.values()],
        "inputs": "" if inputs is None else f"{inputs.low!r} {inputs.high!r} {inputs.power!r}",
    }


def _layer_from(record: records.Record) -> LayerStudy:
    widths = record.integers("widths")
    inputs = record.text("inputs").split()
    return LayerStudy(
        record.text("path"),
        tuple(tuple(int(n) for n in shape.split()) for shape in record.texts("shapes")),
        record.number("products"),
        _estimate_from(record.text("curvature")),
        dict(zip(widths, map(float, record.texts("errors")), strict=True)),
        dict(zip(widths, map(_estimate_from, record.texts("costs")), strict=True)),
        dict(zip(widths, map(float, record.texts("slopes")), strict=True)),
        Inputs(*map(float, inputs)) if inputs else None,
    )


def _estimate_text(estimate: Estimate) -> str:
    return f"{estimate.value!r} {estimate.error!r} {estimate.samples}"


def _estimate_from(text: str) -> Estimate:
    value, error, samples = text.split()
    return Estimate(float(value), float(error), int(samples))
