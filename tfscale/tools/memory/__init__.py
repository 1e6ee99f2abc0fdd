"""``tfscale memory``: says before a training how much memory each replica takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tfscale.collectives.wires import WIRES
from tfscale.support.sizes import in_words, number_of_bytes
from tfscale.tools.model_file import ModelError, load_model

if TYPE_CHECKING:
    from tfscale.parallel.planned import Memory

SHARDS = ("optimizer", "all")  # of ScaleStrategy; named here because --help needs no TensorFlow


def main(argv: Sequence[str]) -> int:
    """Run the command; return 1 if the training does not fit, or an argument is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except (ModelError, ValueError, ImportError, OSError) as error:
        print(f"tfscale memory: error: {error}", file=sys.stderr)
        return 1


def _run(arguments: argparse.Namespace) -> int:
    from tfscale.parallel.memory import of_training

    limit = arguments.memory and number_of_bytes(arguments.memory, "--memory")
    found = of_training(
        load_model(arguments.model), arguments.batch, arguments.replicas, arguments.shard,
        wire=arguments.wire, optimizer=arguments.optimizer, input_shape=arguments.input_shape,
    )  # fmt: skip
    print(found)
    if not limit:
        return 0
    fits, size = found.fits(limit), in_words(found.most.total)
    print(f"\nIt {'fits' if fits else 'does not fit'}: {size} of {in_words(limit)}.")
    for advice in () if fits else _advice(found, limit):
        print(f"- {advice}")
    return 0 if fits else 1


def _advice(found: Memory, limit: int) -> Iterator[str]:
    """Yield what would need less memory."""
    for shard in SHARDS if found.ranks > 1 else ():
        if shard != found.shard:
            size = found.on(found.ranks, shard).most.total
            yield f"--shard {shard} needs {in_words(size)}"
    for shard in SHARDS:
        for ranks in (2**power for power in range(1, 11) if 2**power > found.ranks):
            more = found.on(ranks, shard)
            if more.fits(limit):
                yield f"--replicas {ranks} --shard {shard} needs about {in_words(more.most.total)}"
                break
    if found.most.activations > found.most.buffers:
        yield "activations need most in a step: use a smaller batch, or the callback Recompute"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfscale memory",
        description="Say how much memory a training takes on each replica, before it trains.",
        epilog="The exit status is 1 if it does not fit. See docs/memory.md for what is counted.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL",
        help="FILE.py:NAME, a model or a function that returns one; or a .keras file")  # fmt: skip
    add("--batch", type=whole_number, default=64, metavar="N",
        help="samples of a step on all replicas together (default: %(default)s)")  # fmt: skip
    add("--replicas", type=whole_number, default=1, metavar="P",
        help="number of replicas (default: %(default)s)")  # fmt: skip
    add("--shard", choices=SHARDS, help="what replicas share out, as for ScaleStrategy")
    add("--wire", choices=tuple(WIRES), help="format in which gradients are sent (default: fp32)")
    add("--memory", metavar="SIZE", help="memory of each replica, such as 16GB: does it fit?")
    add("--optimizer", default="adam", metavar="NAME",
        help="optimizer of a model that is not compiled (default: %(default)s)")  # fmt: skip
    add("--input-shape", type=_shape, metavar="N,...",
        help="shape of one sample, such as 224,224,3, if the model does not know it")  # fmt: skip
    return parser


def whole_number(text: str) -> int:
    """Read a whole number, 1 or more; an argparse type."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(whole_number(size.strip()) for size in text.split(","))
