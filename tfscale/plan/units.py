"""Units: the pieces of a model between which a plan may change the layout or cut the pipeline."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfscale.support import arguments
from tfscale.support.records import Record

CUTS = ("columns", "rows", "either", "heads", "vocabulary")
KINDS = ("dense", "pair", "conv", "embedding", "experts", "norm", "plain", "other")


@dataclasses.dataclass(frozen=True)
class Unit:
    """One layer or block of a model; all sizes are of one sample.

    Args:
        name: name of the layer.
        kind: what the layer is, which says how ranks can share it: ``"dense"``, ``"conv"``,
            ``"embedding"``; ``"norm"`` if it works token by token; ``"pair"`` if it ends with a sum
            over ranks, as attention or the two products of a perceptron do; ``"experts"`` if each
            token goes to a few of many perceptrons; ``"plain"`` if it works number by number and
            has no weights; ``"other"`` if ranks cannot share it.
        parameters: number of weights.
        inputs: bytes of its inputs.
        outputs: bytes of its outputs.
        flops: floating-point operations of the forward pass.
        backward_flops: operations of the backward pass; by default twice as many.
        kept: bytes that the backward pass needs of the forward pass; by default the inputs.
        pairs: how many sums over ranks a ``"pair"`` takes.
        halo: bytes that a rank needs of one neighbour if ranks split the height of images, in the
            forward and in the backward pass; None if they cannot.
        routed: bytes that ``"experts"`` send to the ranks that hold them, and get back.
        cuts: patterns of paths of weights, and how ranks may cut these: ``"columns"``, ``"rows"``,
            ``"either"`` of both, ``"heads"`` or ``"vocabulary"``.
    """

    name: str
    kind: str = "other"
    parameters: float = 0
    inputs: float = 0
    outputs: float = 0
    flops: float = 0
    backward_flops: float | None = None
    kept: float | None = None
    pairs: int = 1
    halo: tuple[float, float] | None = None
    routed: float = 0
    cuts: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        arguments.text(self.name, "name")
        arguments.choice(self.kind, "kind", KINDS)
        for name in ("parameters", "inputs", "outputs", "flops", "routed"):
            arguments.real(getattr(self, name), name, 0)
        for name, default in (("backward_flops", 2 * self.flops), ("kept", self.inputs)):
            found = arguments.optional(arguments.real, getattr(self, name), name, 0)
            object.__setattr__(self, name, default if found is None else found)
        arguments.whole(self.pairs, "pairs", 0)
        expected = "pairs of a pattern of paths and how ranks cut it, such as [('^up/', 'columns')]"
        object.__setattr__(
            self, "cuts", arguments.items(self.cuts, "cuts", expected, _cut, least=0)
        )
        if self.halo is not None:
            bytes_of = lambda value, name: arguments.real(value, name, 0)  # noqa: E731
            expected = "two numbers of bytes, or None"
            halo = arguments.items(self.halo, "halo", expected, bytes_of, least=2, most=2)
            object.__setattr__(self, "halo", halo)

    @property
    def all_flops(self) -> float:
        """Operations of both passes."""
        assert self.backward_flops is not None
        return self.flops + self.backward_flops

    @property
    def signature(self) -> Unit:
        """The unit without its name: equal blocks of a model have equal signatures."""
        # Whether a unit has rules counts, and the paths in them do not.
        cuts = tuple(("any", kind) for _, kind in self.cuts)
        return dataclasses.replace(self, name="any", cuts=cuts)


def _cut(value: object, name: str) -> tuple[str, str]:
    pair = arguments.items(
        value, name, "a pattern and a way to cut", arguments.text, least=2, most=2
    )
    arguments.pattern(pair[0], name)
    return pair[0], arguments.choice(pair[1], name, CUTS)


def transformer(
    blocks: int, hidden: int, heads: int, sequence: int, vocabulary: int, width: int = 4
) -> list[Unit]:
    """Return the units of a GPT-like model in float32: an embedding, blocks, and the output.

    Args:
        blocks: number of blocks, each of which has attention and a perceptron.
        hidden: width of the model.
        heads: number of attention heads.
        sequence: number of tokens of a sample.
        vocabulary: number of words.
        width: width of the perceptron, in widths of the model.

    Example:
        >>> units = transformer(blocks=24, hidden=2304, heads=24, sequence=2048, vocabulary=51200)
        >>> print(f"{sum(unit.parameters for unit in units) / 1e9:.2f} billion")
        1.77 billion
    """
    for name in ("blocks", "hidden", "heads", "sequence", "vocabulary", "width"):
        arguments.whole(locals()[name], name, 1)
    tokens = 4 * sequence * hidden
    scores = 4 * heads * sequence**2
    embedding = Unit(
        "embedding", "embedding", (vocabulary + sequence) * hidden, 4 * sequence, tokens, kept=0
    )
    attention = Unit(
        "attention", "pair", 4 * hidden**2 + 6 * hidden, tokens, tokens,
        8 * sequence * hidden**2 + 4 * sequence**2 * hidden, kept=6 * tokens + 2 * scores,
    )  # fmt: skip
    perceptron = Unit(
        "perceptron", "pair", 2 * width * hidden**2 + (width + 3) * hidden, tokens, tokens,
        4 * width * sequence * hidden**2, kept=(2 + 2 * width) * tokens,
    )  # fmt: skip
    both = [
        dataclasses.replace(unit, name=f"{unit.name}_{number}")
        for number in range(blocks)
        for unit in (attention, perceptron)
    ]
    head = Unit(
        "output", "dense", vocabulary * hidden, tokens, 4 * sequence * vocabulary,
        2 * sequence * hidden * vocabulary, kept=tokens + 4 * sequence * vocabulary,
    )  # fmt: skip
    return [embedding, *both, head]


def checked_units(units: Sequence[Unit], name: str = "units") -> tuple[Unit, ...]:
    """Return units as a tuple, or raise."""
    expected = "a list of Units that compute, such as tfscale.plan.read(model) returns"
    one = lambda value, name: arguments.instance(value, name, Unit, expected)  # noqa: E731
    found = arguments.items(units, name, expected, one)
    if not sum(unit.all_flops for unit in found):
        raise arguments.wrong(units, name, expected)
    return found


def unit_fields(unit: Unit) -> dict[str, Any]:
    """Return the fields of a file, which ``read_unit`` reads."""
    fields = {k: v for k, v in dataclasses.asdict(unit).items() if v is not None}
    fields["cuts"] = [{"path": path, "kind": kind} for path, kind in unit.cuts]
    if unit.halo is not None:
        fields["halo"] = dict(zip(("forward", "backward"), unit.halo))
    return fields


def read_unit(row: Record) -> Unit:
    """Return the unit that a file describes."""
    sizes = ("parameters", "inputs", "outputs", "flops", "backward_flops", "kept")
    row.only("name", "kind", *sizes, "pairs", "halo", "routed", "cuts")
    numbers: dict[str, Any] = {name: row.number(name) for name in sizes}
    halo = _halo(row.record("halo")) if "halo" in row else None
    return Unit(
        row.text("name"),
        row.text("kind"),
        **numbers,
        pairs=row.integer("pairs"),
        routed=row.number("routed"),
        halo=halo,
        cuts=tuple((cut.text("path"), cut.text("kind")) for cut in row.records("cuts")),
    )


def _halo(row: Record) -> tuple[float, float]:
    row.only("forward", "backward")
    return row.number("forward"), row.number("backward")
