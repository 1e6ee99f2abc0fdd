"""Groups of workers that take cases in turn: what came out, by case and worker."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
import time
from pathlib import Path

from tfscale.launch import LocalWorkers, WorkerFailed

WORKERS = Path(__file__).parent / "workers"
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 1800  # for a whole group, even on the busiest machine


@contextlib.contextmanager
def start(script, layout, **environment):
    """Workers that know their layout, and leave together; a single one has no cluster."""
    workers = int(layout.split("x")[0])
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONPATH": path, "TF_CPP_MIN_LOG_LEVEL": "2", "LAYOUT": layout}
    if workers == 1:
        own["TF_CONFIG"] = "{}"
    command = [sys.executable, str(WORKERS / script)]
    with tempfile.TemporaryDirectory() as meeting:
        own["MEETING"] = meeting
        with LocalWorkers(command, workers, environment={**own, **environment}) as group:
            yield group


def finish(group, seconds):
    """What the workers printed, whether they ended well or not, and what was wrong if not."""
    try:
        return group.wait(seconds), ""
    except WorkerFailed as failed:
        return [group.output(i) for i in range(len(group.processes))], str(failed)


def chosen(request, cases, layouts):
    """Those of the cases that selected tests of these layouts are about."""
    tests = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = {test.get("case") for test in tests if test.get("layout") in layouts}
    return [case for case in cases if case in wanted]


def records(output):
    found = [json.loads(line) for line in re.findall(r"^CASE (.*)$", output, re.MULTILINE)]
    return {record["case"]: record for record in found}


def take(script, strategy, layout, cases):
    """Records of all workers for each case.

    A case that ends its group (it hung, or a worker failed) costs the others only a new start.
    """
    done, left, end = {}, list(cases), time.monotonic() + SECONDS
    while left:
        with start(script, layout, STRATEGY=strategy, CASES=",".join(left)) as group:
            outputs, trouble = finish(group, max(1, end - time.monotonic()))
        printed = [records(output) for output in outputs]
        whole = [case for case in left if all(case in p for p in printed)]
        done |= {case: [p[case] for p in printed] for case in whole}
        left = [case for case in left if case not in done]
        # A failed case that all have told of has ended the group; the next one is not to blame.
        told = bool(whole) and any("error" in p[whole[-1]] for p in printed)
        if left and not told:
            culprit = left.pop(0)
            said = [p[culprit] for p in printed if culprit in p]
            done[culprit] = said if any("error" in s for s in said) else [{"error": trouble}]
        if left and time.monotonic() > end:
            late = {"error": f"not run: the {layout} group took more than {SECONDS} s"}
            return done | {case: [late] for case in left}
    return done
