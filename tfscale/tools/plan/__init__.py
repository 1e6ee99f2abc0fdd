"""``tfscale plan``: prints how a model should be cut on a cluster, and how far it scales."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tfscale.collectives.wires import WIRES
from tfscale.plan import Cluster, MemoryLimitError, Plan, best, curve, measured
from tfscale.plan.draw import draw_curve
from tfscale.plan.scaling import KINDS, powers
from tfscale.support.records import RecordError
from tfscale.tools.memory import whole_number
from tfscale.tools.model_file import ModelError, load_model


def main(argv: Sequence[str]) -> int:
    """Run the command; return 1 if the model does not fit, or an argument is wrong."""
    arguments = _parser().parse_args(argv)
    try:
        run(arguments)
    except (ModelError, MemoryLimitError, RecordError, ValueError, ImportError, OSError) as error:
        print(f"tfscale plan: error: {error}", file=sys.stderr)
        return 1
    return 0


def run(arguments: argparse.Namespace) -> None:
    """Print what the arguments ask for, and write the files that they name."""
    plan = _plan(arguments)
    if plan is None:
        return
    if arguments.curve:
        _show_curve(plan, arguments)
    else:
        print(plan.table())
        print()
        print(plan.explain())
        _written(arguments.draw, lambda path: plan.draw().savefig(path, dpi=120))
    _written(arguments.save, plan.save)


def _plan(arguments: argparse.Namespace) -> Plan | None:
    """Return the plan; None on a worker that leaves the words to another one."""
    if arguments.model.endswith(".json"):
        return Plan.load(arguments.model)
    make = functools.cache(lambda: load_model(arguments.model))
    model: Any = None
    if arguments.here:
        from tfscale.tools.plan.here import measure

        here = measure(make, arguments.batch)
        if not here.speaks:
            return None
        model, machines = here.model, here.cluster
        print(f"Measured here: {machines}\n")
    else:
        text = arguments.cluster
        machines = Cluster.load(text) if text.endswith(".json") else Cluster.parse(text)
        if arguments.measure:
            model = measured(make(), max(1, arguments.batch // machines.devices))
            print(f"This machine reaches {model.rate / 1e9:.4g} GFLOPS with this model.")
            machines = dataclasses.replace(machines, hosts=list(map(model.on, machines.hosts)))
    return best(
        model or make(), arguments.batch, machines, wires=arguments.wires.split(","),
        runnable=arguments.runnable, diloco=arguments.diloco,
    )  # fmt: skip


def _show_curve(plan: Plan, arguments: argparse.Namespace) -> None:
    first, last = arguments.curve
    batch = plan.batch
    if arguments.scaling == "weak":
        batch = max(1, plan.batch // plan.cluster.devices)
    points = curve(plan.units, batch, plan.cluster, powers(first, last), arguments.scaling)
    print("devices  batch     step ms    speed-up  efficiency  bound by")
    for point in points:
        print(
            f"{point.ranks:<7}  {point.batch:<8}  {1e3 * point.seconds:<9.4g}  "
            f"{point.speed_up:<8.4g}  {point.efficiency:<10.0%}  {point.limit}"
        )
    title = f"{arguments.scaling} scaling of data parallelism, batch {points[0].batch}"
    _written(arguments.draw, lambda path: draw_curve(points, title).savefig(path, dpi=120))


def _written(path: Path | None, write: Callable[[Path], Any]) -> None:
    if path is not None:
        write(path)
        print(f"written: {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tfscale plan",
        description="Say how a model should be cut on a cluster: the best five cuts, and why.",
        epilog="See docs/plan.md for what is priced, and how.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL",
        help="FILE.py:NAME, a model or a function that returns one; a .keras file; or a .json file "
        "that --save has written")  # fmt: skip
    add("--batch", type=whole_number, default=64, metavar="N",
        help="samples of a step on all devices together (default: %(default)s)")  # fmt: skip
    add("--cluster", default="(1 device)", metavar="TEXT",
        help="such as '64 x (4 devices, 16GB, 90TFLOPS, 100GB/s), 25gbit', or a .json file "
        "(default: %(default)s)")  # fmt: skip
    add("--wires", default="fp32", metavar="NAME,...",
        help=f"formats in which gradients may be sent: {', '.join(WIRES)} (default: fp32; all "
        "others change results)")  # fmt: skip
    add("--runnable", action="store_true",
        help="leave out cuts that ScaleStrategy cannot run yet")  # fmt: skip
    add(
        "--measure",
        action="store_true",
        help="measure how long each layer takes on this machine, for all devices of the cluster",
    )
    add(
        "--here",
        action="store_true",
        help="measure layers, memory and links where this runs, instead of --cluster: of this "
        "machine, or of all workers that a launcher starts (tfscale launch -n 4 tfscale plan ...)",
    )
    add(
        "--diloco",
        type=whole_number,
        metavar="STEPS",
        help="also price DiLoCo: hosts, or racks, agree every STEPS steps, which changes results",
    )
    add("--curve", type=_range, metavar="FIRST:LAST",
        help="print how data parallelism scales from FIRST to LAST devices")  # fmt: skip
    add("--scaling", choices=KINDS, default="strong",
        help="with --curve: whether the batch stays, or grows with the devices "
        "(default: %(default)s)")  # fmt: skip
    add("--draw", type=Path, metavar="FILE", help="write a picture")
    add("--save", type=Path, metavar="FILE", help="write the plan as JSON")
    return parser


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition(":")
    if first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) <= 100_000:
        return int(first), int(last)
    raise argparse.ArgumentTypeError(f"{text!r} is not a range of devices such as 1:4096")
