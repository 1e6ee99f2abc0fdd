"""A width for each layer: as few bits as the limits ask for, where they cost least."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tfscale.analysis.quantize.kernels import fingerprint, kernels_of, shapes_of
from tfscale.analysis.quantize.litert import Exported, to_litert
from tfscale.analysis.quantize.of_keras import to_keras
from tfscale.analysis.quantize.program import Program, Resource
from tfscale.analysis.quantize.study import FLOAT, LayerStudy, Study, checked_width, table
from tfscale.support import arguments, figures, records
from tfscale.support.sizes import amount, in_words

_BYTES = "a number of bytes, such as 25_000_000 or '25MB', or a share of the float32 model: '12.5%'"
_OPERATIONS = "a number of bit operations, more than 0, or a share of the float32 model: '6.25%'"
_SECONDS = "a number of seconds, more than 0, or a share of the widest plan's latency: '70%'"
_TABLE = "a measured latency for each layer's path and width: {'conv': {4: 1e-4, 8: 2e-4}}"
_TIES = "'sums', None, or lists of layers' paths that get the same width"


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """A layer of a plan.

    Args:
        path: path of the layer.
        shapes: shapes of its kernels.
        bits: width of its weights; 32 stands for float.
        cost: sensitivity at that width.
        products: multiplications for one sample.
    """

    path: str
    shapes: tuple[tuple[int, ...], ...]
    bits: int
    cost: float
    products: float

    @property
    def numbers(self) -> int:
        """Number of numbers in the kernels."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Widths of a model's layers.

    Args:
        layers: the layers, in the model's order.
        cost: sum of the layers' sensitivities.
        proven: whether no choice of widths within the limits has a smaller sum.
        limits: the limits that were asked for, by name: bytes, bit operations, seconds.
        latency: seconds by the measured table; None without one.
        activations: width of all layers' inputs; None for the width of the layer's weights.
        group: number of channels that share a scale; None for one scale for each channel.
        kept: paths of layers that stay in float.
        ranges: how the range of each scale is chosen.
    """

    layers: tuple[LayerPlan, ...]
    cost: float
    proven: bool
    limits: Mapping[str, float]
    latency: float | None = None
    activations: int | None = None
    group: int | None = None
    kept: tuple[str, ...] = ()
    ranges: str = "mse"

    @functools.cached_property
    def bits(self) -> dict[str, int]:
        """The width of each layer's weights, by the layer's path; 32 stands for float."""
        return {layer.path: layer.bits for layer in self.layers}

    @property
    def bytes(self) -> float:
        """Bytes of the quantized weights, packed; scales, biases and other weights come on top."""
        return sum(layer.numbers * layer.bits / 8 for layer in self.layers)

    @property
    def bit_operations(self) -> float:
        """Multiplications for one sample, times the bits of both factors."""
        return sum(
            layer.products * layer.bits * (self.activations or layer.bits) for layer in self.layers
        )

    @property
    def fingerprint(self) -> str:
        """A hash of the layers' paths and shapes."""
        return fingerprint({layer.path: layer.shapes for layer in self.layers})

    def check(self, model: Any) -> None:
        """Raise if the plan is for another model: if paths or shapes of layers differ."""
        there = shapes_of(kernels_of(model))
        mine = {layer.path: layer.shapes for layer in self.layers}
        if fingerprint(there) == self.fingerprint:
            return
        missing = [path for path in mine if path not in there]
        more = [path for path in there if path not in mine]
        other = [path for path in mine if path in there and there[path] != mine[path]]
        told = [
            *(f"it has no {path!r}" for path in missing[:3]),
            *(f"{path!r} is not in the plan" for path in more[:3]),
            *(f"{p!r} has the shapes {there[p]}, in the plan {mine[p]}" for p in other[:3]),
        ]
        raise ValueError(
            f"the plan is for another model than {model.name!r}: "
            f"{'; '.join(told) or 'its layers have another order'}. Make a study and a plan of "
            "this model"
        )

    def draw(self) -> Any:
        """Draw bytes and widths by layer; return a matplotlib figure."""
        figure = figures.figure(7, 1.2 + 0.28 * len(self.layers))
        axes, costs = figure.subplots(1, 2, sharey=True)
        places = range(len(self.layers))
        widths = sorted(set(self.bits.values()))
        for width in widths:
            mine = [i for i in places if self.layers[i].bits == width]
            label = "float" if width == FLOAT else f"{width} bits"
            axes.barh(mine, [self.layers[i].numbers * width / 8 / 1e3 for i in mine], label=label)
            costs.barh(mine, [self.layers[i].cost for i in mine])
        axes.set_yticks(places, [f"{one.path} ({one.bits})" for one in self.layers], fontsize=7)
        axes.set(xlabel="weights, kB")
        costs.set(xlabel="sensitivity")
        axes.invert_yaxis()
        axes.legend(fontsize=8)
        return figure

    def save(self, path: str | Path) -> None:
        """Write a JSON file, which holds a fingerprint of the layers' paths and shapes."""
        records.write(
            Path(arguments.path(path, "path")),
            {
                "kind": "quantize.Plan", "fingerprint": self.fingerprint, "cost": self.cost,
                "proven": self.proven, "limits": dict(self.limits), "latency": self.latency or 0,
                "activations": self.activations or 0, "group": self.group or 0,
                "kept": list(self.kept), "ranges": self.ranges,
                "layers": [_fields(layer) for layer in self.layers],
            },
        )  # fmt: skip

    @classmethod
    def load(cls, path: str | Path, model: Any = None) -> Plan:
        """Read a plan that ``save`` has written.

        Args:
            path: path of the file.
            model: a model that the plan must be for.
        """
        record = records.Record.read(Path(arguments.path(path, "path")))
        if record.text("kind") != "quantize.Plan":
            raise record.wrong("kind", "a plan of quantize.plan")
        limits = record.record("limits")
        names = [name for name in _UNITS if name in limits]
        plan = cls(
            tuple(_layer_from(one) for one in record.records("layers")),
            record.number("cost"), record.flag("proven"),
            {name: limits.number(name) for name in names}, record.number("latency") or None,
            record.integer("activations") or None, record.integer("group") or None,
            tuple(record.texts("kept")), record.text("ranges"),
        )  # fmt: skip
        if record.text("fingerprint") != plan.fingerprint:
            raise record.wrong("fingerprint", f"{plan.fingerprint!r}, that of the layers below it")
        if model is not None:
            plan.check(model)
        return plan

    def to_keras(self, model: Any, *, strict: bool = False) -> Any:
        """Return a copy of the model that Keras's own ``model.quantize`` has quantized.

        Keras has 8 and 4 bits for Dense, EinsumDense and Embedding, also within attention. Each
        width is one call, with ``filters=``. Other layers and widths stay in float.

        Args:
            model: the model of the plan, in float.
            strict: whether to raise ``NotExportableError`` if a layer of the plan would stay in
                float; else a warning lists these layers.
        """
        return to_keras(self, model, strict=strict)

    def to_litert(self, path: str | Path, model: Any, x: Any = None) -> Exported:
        """Write a file for LiteRT by ``ai-edge-quantizer``, check it, and say what is in it.

        - **Weights** have the plan's integers and scales. LiteRT rounds the inputs of each layer to
          8 bits while it runs (dynamic-range quantization), whatever the plan says of activations.
        - **Widths**: 2, 4 and 8 bits for Dense, Conv1D and Conv2D; 8 bits for depthwise, separable
          and transposed convolutions. ``NotExportableError`` lists other layers, with the nearest
          widths that LiteRT has, before anything is written.
        - **Checks**: the bytes of weights in the file are within 2% of the plan's. With ``x``,
          LiteRT's interpreter has the largest output where the quantized model has it, for 99.5% of
          the samples. ``ExportError`` says what differs; the file is not written then.

        Args:
            path: path of the file.
            model: the model of the plan, in float, or the trained result of ``quantize.apply``.
            x: samples whose answers are compared.
        """
        return to_litert(self, path, model, x)

    def __str__(self) -> str:
        numbers = sum(layer.numbers for layer in self.layers)
        mean = 8 * self.bytes / max(numbers, 1)
        head = (
            f"{len(self.layers)} layers, {in_words(self.bytes)} of weights ({mean:.3g} bits each, "
            f"{self.bytes / max(4 * numbers, 1):.1%} of float32), sensitivity {self.cost:.4g}"
        )
        proof = "no choice of widths has less" if self.proven else "time ran out before the proof"
        lines = [head, proof + "".join(
            f"; {name} at most {_UNITS[name](limit)}" for name, limit in self.limits.items()
        )]  # fmt: skip
        rows = [
            [one.path, f"{one.numbers:,}", "float" if one.bits == FLOAT else str(one.bits),
             in_words(one.numbers * one.bits / 8), f"{one.cost:.2g}"]
            for one in self.layers
        ]  # fmt: skip
        lines += table(["layer", "numbers", "bits", "bytes", "sensitivity"], rows)
        if self.kept:
            lines.append(f"stay in float: {', '.join(self.kept)}")
        return "\n".join(lines)


_UNITS: dict[str, Any] = {
    "size": in_words,
    "bops": lambda value: f"{value:.4g} bit operations",
    "latency": lambda value: f"{value:.4g} s",
}


def plan(
    study: Study,
    bits: Iterable[int] | None = None,
    *,
    size: float | str | None = None,
    bops: float | str | None = None,
    latency: float | str | None = None,
    table: Mapping[str, Mapping[int, float]] | None = None,
    first: int | None = None,
    last: int | None = None,
    pinned: Mapping[str, int] | None = None,
    ties: str | Sequence[Sequence[str]] | None = None,
    activations: int | None = None,
    seconds: float = 60.0,
) -> Plan:
    r"""Choose a width for each layer: the smallest sum of sensitivities within all limits.

    .. math::
        \min_b \sum_l \Omega_{l b_l} \quad \text{with} \quad
        \sum_l n_l b_l / 8 \le \text{size}, \quad
        \sum_l m_l b_l a_l \le \text{bops}, \quad
        \sum_l t_{l b_l} \le \text{latency}

    with :math:`n_l` weights, :math:`m_l` multiplications for a sample, inputs of :math:`a_l` bits
    and measured times t (HAWQ-V3). HiGHS solves this integer program exactly.

    Args:
        study: sensitivities, from ``quantize.sensitivity``.
        bits: widths that layers may have, of those in the study; 32 stands for float. By default
            all of the study.
        size: largest size of the weights: bytes, such as ``"25MB"``, or a share of the float32
            weights, such as ``"12.5%"``.
        bops: largest number of bit operations for a sample, or a share of the float32 model's.
        latency: largest sum of the times in ``table``, or a share of the widest plan's.
        table: measured seconds of each layer at each width, by path and width.
        first: width of the first layer, which papers often keep at 8 bits.
        last: width of the last layer.
        pinned: widths of further layers, by path.
        ties: ``"sums"`` gives layers that feed one sum the same width, branches that down-sample
            included, as integer additions need (HAWQ-V3); or lists of paths.
        activations: width of all layers' inputs; by default that of the layer's weights.
        seconds: time limit of HiGHS.

    Raises:
        InfeasibleError: if no widths keep all limits; it says the smallest possible.

    Example:
        >>> _ = model.fit(x, y, verbose=0)
        >>> study = tfscale.quantize.sensitivity(model, x, y, bits=(2, 4, 8), samples=8)
        >>> plan = tfscale.quantize.plan(study, size="12.5%", last=8)
        >>> plan.bytes <= 0.125 * 4 * 520, plan.proven, list(plan.bits.values())[-1]
        (True, True, 8)

    Reference: Yao et al., HAWQ-V3: Dyadic Neural Network Quantization,
    https://arxiv.org/abs/2011.10680.
    """
    arguments.instance(study, "study", Study, "a study of quantize.sensitivity")
    widths = checked_widths(bits, study)
    arguments.optional(arguments.whole, activations, "activations", 2, FLOAT, what="a width")
    arguments.seconds(seconds, "seconds")
    choices = _choices(study, widths, first, last, pinned)
    if size is None and bops is None and latency is None:
        raise ValueError(
            "size, bops and latency are None, and without a limit each layer gets the widest "
            "width: give one of them"
        )
    resources = [
        *_size(study.layers, choices, size),
        *_bops(study.layers, choices, bops, activations),
        *_latency(study.layers, choices, latency, table),
    ]
    costs = [
        {b: layer.cost(b) for b in allowed}
        for layer, allowed in zip(study.layers, choices, strict=True)
    ]
    found = Program(costs, resources, _ties(study, ties)).solve(seconds)
    layers = tuple(
        LayerPlan(one.path, one.shapes, width, one.cost(width), one.products)
        for one, width in zip(study.layers, found.bits, strict=True)
    )
    used = next((one.used(found.bits) for one in resources if one.name == "latency"), None)
    limits = {one.name: float(one.limit) for one in resources}
    return Plan(
        layers, found.cost, found.proven, limits, used, activations, study.group, study.kept,
        study.ranges,
    )  # fmt: skip


def checked_widths(bits: Any, study: Study) -> tuple[int, ...]:
    """Return the widths that layers may have; None stands for all of the study."""
    if bits is None:
        return study.widths
    check = functools.partial(checked_width, widths=study.widths)
    found = arguments.items(bits, "bits", "a list of widths, such as (2, 4, 8)", check)
    return tuple(dict.fromkeys(found))


def _choices(
    study: Study, widths: tuple[int, ...], first: Any, last: Any, pinned: Any
) -> list[tuple[int, ...]]:
    """Return the widths that each layer may have."""
    found = {layer.path: widths for layer in study.layers}
    expected = "a width for some layers, by path, such as {'head': 8}"
    fixed = arguments.optional(arguments.mapping, pinned, "pinned", expected) or {}
    for place, name, value in ((0, "first", first), (-1, "last", last)):
        if value is not None:
            found[study.layers[place].path] = (checked_width(value, name, study.widths),)
    for path, value in fixed.items():
        if path not in found:
            raise arguments.wrong(
                path, "a path in pinned", f"that of a layer of the study: {', '.join(found)}"
            )
        found[path] = (checked_width(value, f"pinned[{path!r}]", study.widths),)
    return list(found.values())


def _ties(study: Study, ties: Any) -> list[list[int]]:
    if ties is None:
        return []
    if isinstance(ties, str):
        arguments.choice(ties, "ties", ("sums",), "lists of paths")
        ties = study.sums
    places = {layer.path: i for i, layer in enumerate(study.layers)}

    def index(path: Any, name: str) -> int:
        if not isinstance(path, str) or path not in places:
            raise arguments.wrong(path, name, f"the path of a layer: {', '.join(places)}")
        return places[path]

    def tied(paths: Any, name: str) -> list[int]:
        return list(arguments.items(paths, name, "a list of layers' paths", index))

    return list(arguments.items(ties, "ties", _TIES, tied, least=0))


# ------------------------------------------------------------------- resources


def _size(layers: Sequence[LayerStudy], choices: Any, size: Any) -> list[Resource]:
    if size is None:
        return []
    limit = amount(size, "size", _BYTES, 4.0 * sum(layer.numbers for layer in layers))
    uses = [{b: one.numbers * b / 8 for b in each} for one, each in zip(layers, choices)]
    return [Resource("size", uses, limit, in_words)]


def _bops(
    layers: Sequence[LayerStudy], choices: Any, bops: Any, activations: int | None
) -> list[Resource]:
    if bops is None:
        return []
    whole = sum(layer.products for layer in layers) * FLOAT**2
    limit = amount(bops, "bops", _OPERATIONS, whole, is_bytes=False)
    uses = [
        {b: one.products * b * (activations or b) for b in each}
        for one, each in zip(layers, choices, strict=True)
    ]
    return [Resource("bops", uses, limit, _UNITS["bops"])]


def _latency(
    layers: Sequence[LayerStudy], choices: Any, latency: Any, table: Any
) -> list[Resource]:
    if latency is None:
        if table is not None:
            raise arguments.wrong(table, "table", f"given together with latency, {_SECONDS}")
        return []
    if table is None:
        raise arguments.wrong(latency, "latency", f"given together with table, {_TABLE}")
    times = arguments.mapping(table, "table", _TABLE)
    uses = [
        {b: _time(times, layer.path, b) for b in each}
        for layer, each in zip(layers, choices, strict=True)
    ]
    widest = sum(each[max(each)] for each in uses)
    limit = amount(latency, "latency", _SECONDS, widest, is_bytes=False)
    return [Resource("latency", uses, limit, _UNITS["latency"])]


def _time(times: Mapping[Any, Any], path: str, bits: int) -> float:
    each = arguments.mapping(times.get(path), f"table[{path!r}]", _TABLE)
    return arguments.seconds(each.get(bits), f"table[{path!r}][{bits}]", least=0)


def _fields(layer: LayerPlan) -> dict[str, Any]:
    shapes = [" ".join(map(str, shape)) for shape in layer.shapes]
    return {
        "path": layer.path, "shapes": shapes, "bits": layer.bits, "cost": layer.cost,
        "products": layer.products,
    }  # fmt: skip


def _layer_from(record: records.Record) -> LayerPlan:
    shapes = [tuple(int(n) for n in shape.split()) for shape in record.texts("shapes")]
    return LayerPlan(
        record.text("path"), tuple(shapes), record.integer("bits"), record.number("cost"),
        record.number("products"),
    )  # fmt: skip
