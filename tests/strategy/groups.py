"""Groups of workers that take cases in turn: what came out, by case and worker.

A test module of any folder gives its cases to a group: a script that calls ``turns.take`` with
what one case does, and here

    records = take("exact.py", "scale", "2x1", ["adam", "sgd"])  # {case: [of worker 0, of 1]}
    judge(check, records["adam"], lambda: take("exact.py", "scale", "2x1", ["adam"])["adam"])

The processes are warm, and live until their group has taken all its cases.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import tempfile
import time
import warnings
from pathlib import Path

from tests import warm
from tfscale.launch import WorkerFailed

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
    with tempfile.TemporaryDirectory() as meeting:
        own |= {"MEETING": meeting, **environment}
        with warm.Workers([str(WORKERS / script)], workers, environment=own) as group:
            yield group


def finish(group, seconds):
    """Return the output of the workers, whether they ended well, and what was wrong if not."""
    try:
        return group.wait(seconds), ""
    except WorkerFailed as failed:
        return [group.output(i) for i in range(len(group.processes))], str(failed)


def chosen(request, cases, layouts):
    """Return the cases that selected tests of these layouts ask the requested fixture for.

    A fixture of a module has the tests of that module only: other modules may use the same names of
    cases, and would have them trained once more.
    """
    items = [item for item in request.session.items if hasattr(item, "callspec")]
    if request.scope == "module":
        items = [item for item in items if item.path == request.path]
    tests = [item.callspec.params for item in items if request.fixturename in item.fixturenames]
    wanted = {test.get("case") for test in tests if test.get("layout") in layouts}
    return [case for case in cases if case in wanted]


_alone: dict[tuple[str, str], list] = {}  # what one device has left, by script and case


def trained_once(request, script, cases, layouts):
    """``outcome(strategy, layout)``: records of what the selected tests need, trained when asked
    for the first time. One device trains for all ``layouts``, and a case once for all modules.
    """

    @functools.cache
    def outcome(strategy, layout):
        if strategy != "none":
            return take(script, strategy, layout, chosen(request, cases, [layout]))
        wanted = chosen(request, cases, layouts)
        if missing := [case for case in wanted if (script, case) not in _alone]:
            found = take(script, strategy, layout, missing)
            _alone.update({(script, case): found[case] for case in missing})
        return {case: _alone[script, case] for case in wanted}

    return outcome


def records(output):
    found = [json.loads(line) for line in re.findall(r"^CASE (.*)$", output, re.MULTILINE)]
    return {record["case"]: record for record in found}


def judge(check, found, again):
    """``check`` what a case has left in a group that took others before it.

    If that fails, the case is run ``again`` by processes that have taken no other; that decides.
    A warning tells of a case which failed after others alone: pytest lists it at the end.
    """
    try:
        check(found)
    except AssertionError as failure:
        check(again())
        warnings.warn(f"passed in fresh processes only; before that: {failure}", stacklevel=2)


def take(script, strategy, layout, cases):
    """Records of all workers for each case.

    A case that ends its group (it hung, or a worker failed) costs the others only a new start.

    Args:
        script: a file of this folder's ``workers``, or a path; it calls ``turns.take``.
        strategy: "scale", "stock" or "none", as ``turns`` has them.
        layout: workers x devices of each, as in "2x1".
        cases: names that the script knows.
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
