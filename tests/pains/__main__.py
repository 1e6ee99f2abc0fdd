"""Runs the programs of all complaints under TensorFlow's own strategies and under ours, and prints
the table of docs/pains.md: ``python -m tests.pains``.
"""

from __future__ import annotations

import math
import platform
import re
import sys

import keras
import tensorflow as tf

import tfscale
from tests.pains import tutorial
from tests.pains.complaint import link
from tests.pains.complaints import COMPLAINTS, LAYOUTS, WORKER
from tests.strategy.compare import differences, spreads, unequal
from tests.strategy.groups import take
from tfscale.launch import WorkerFailed

STRATEGIES = {
    "1x2": "MirroredStrategy",
    "2x1": "MultiWorkerMirroredStrategy",
}
LONGEST = 100  # characters of an error


def reason(error):
    """The last error that is named, from its name on; or that nothing came."""
    if "Timeout (" in error or "did not end" in error:
        return "hangs"
    plain = re.sub(r"\x1b\[\d*m|[`|]", "", error)
    *_, named = re.split(r"^(?=(?:\w+\.)*\w+(?:Error|Exception): )", plain, flags=re.MULTILINE)
    words = " ".join(re.sub(r"^(\w+\.)+", "", named).split())
    short = words if len(words) <= LONGEST else words[:LONGEST].rsplit(" ", 1)[0] + " ..."
    return f"fails: `{short}`"


def finite(record):
    numbers = [*record["weights"].values(), *record["seen"].values()]
    return all(math.isfinite(number) for values in numbers for number in keras.tree.flatten(values))


def verdict(complaint, expected, found):
    """Return the outcome of a program in a few words."""
    for record in found:
        if "error" in record:
            refuses = complaint.refusal and complaint.refusal in record["error"]
            return reason(record["error"]).replace("fails", "refuses" if refuses else "fails", 1)
    if not all(map(finite, found)):
        return "NaN"
    if any(unequal(found)):
        return "replicas have different weights"
    if not complaint.equal:
        return "trains"
    if any(line for record in found for line in differences(complaint, expected, record)):
        off = max(o for r in found for k, _, o in spreads(expected, r) if not isinstance(o, str))
        return f"trains, but differs from one device by {off:.1g}"
    return "trains as one device does"


def of_tutorial(strategy):
    try:
        one, other = tutorial.follow(strategy)
    except WorkerFailed as failed:
        return reason(str(failed))
    restored = one["lost"] == one["unlike"] == 0 and one == other
    return "trains, saves and restores" if restored else "workers or files differ"


def outcomes(layout):
    """Return the outcomes of all complaints of a layout, under TensorFlow's strategy and ours."""
    names = [number for number, complaint in COMPLAINTS.items() if complaint.layout == layout]
    stock, scale = (take(WORKER, strategy, layout, names) for strategy in ("stock", "scale"))
    return {name: (stock[name], scale[name]) for name in names}


def main():
    alone = take(WORKER, "none", "1x1", list(COMPLAINTS))
    print(f"TensorFlow {tf.__version__}, Keras {keras.__version__}, tfscale {tfscale.__version__},")
    print(f"Python {platform.python_version()}, CPUs only.\n")
    for layout in LAYOUTS:
        print(f"| thread | title | `{STRATEGIES[layout]}` | `ScaleStrategy` |\n|---|---|---|---|")
        for number, found in outcomes(layout).items():
            complaint, (expected,) = COMPLAINTS[number], alone[number]
            words = [verdict(complaint, expected, each) for each in found]
            title = complaint.title.replace("|", "\\|")
            print(f"| [{number}]({link(number)}) | {title} |", " | ".join(words), "|", flush=True)
        print()
    words = [of_tutorial(strategy) for strategy in ("stock", "scale")]
    print("| tutorial | `MultiWorkerMirroredStrategy` | `ScaleStrategy` |\n|---|---|---|")
    print(f"| [{tutorial.TITLE}]({tutorial.LINK}) |", " | ".join(words), "|")


if __name__ == "__main__":
    sys.exit(main())
