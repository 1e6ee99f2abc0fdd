"""``tfscale bench``: measures all-reduces, and Keras models that train.

For all-reduces, the parent process (``run``) starts one set of workers for each number of
processes. The workers (``worker``) measure all contestants in turn, round after round, so that a
change of the machine's speed affects all contestants alike. See docs/benchmarks.md.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from tfscale.support.names import check_command

ALL_REDUCE = "allreduce"
BENCHES = {
    ALL_REDUCE: "all-reduces between processes, also those of other libraries",
    "devices": "all-reduces between logical devices of one process",
    "fit": "training with this strategy, with stock strategies, and with none",
    "adaptive": "a method chosen live, and fixed methods, while links change",
    "memory": "the memory of training steps, with and without Recompute",
    "budgets": "whether ten nets keep the budgets of Recompute",
    "checkmate": "largest batches with optimal recomputation, beside Checkmate's",
    "telemetry": "steps of fit, with and without telemetry",
    "first": "what the first step of a fit costs: tracing",
    "epochs": "how long a fit of few steps with validation takes",
    "optimizers": "updates of LARS, LAMB and other optimizers",
    "learning": "how well optimizers learn with small, large and full batches",
    "curvature": "sharpness by batch size, and batches that grow by curvature",
    "products": "products with a Hessian: time, memory, processes",
    "mach": "MACH, full and sampled softmax: accuracy, search, workers",
    "quantize": "plans of bits against published ones; sensitivities of layers",
    "pruning": "integers beside quantized nets; nets without half their channels",
    "convergence": "how well models learn with each wire and method",
    "plan": "forecasts of steps, and measured steps, by schedule and wire",
    "pipelines": "how long stages wait in each order, beside simulations",
    "experts": "a layer of experts beside one that computes all of them",
    "shares": "training with a slow worker, by shares of the batch",
    "rules": "how well models learn if replicas synchronize once in many steps",
}


def main(argv: Sequence[str]) -> int:
    """Run the command line; return the exit status."""
    check_command("tfscale bench", argv, BENCHES)
    if argv and argv[0] in ("-h", "--help"):
        _print_help()
        return 0
    if argv and argv[0] in BENCHES and argv[0] != ALL_REDUCE:
        return int(importlib.import_module(f"tfscale.tools.bench.{argv[0]}").main(argv[1:]))
    from tfscale.tools.bench import command

    return command.main(argv)


def _print_help() -> None:
    print("usage: tfscale bench [BENCH] [OPTION ...]\n")
    print(f"Run a benchmark on this machine (default: {ALL_REDUCE}).\n")
    for name, text in BENCHES.items():
        print(f"  {name:12} {text}")
    print("\n`tfscale bench BENCH --help` lists its options. See docs/benchmarks.md.")
