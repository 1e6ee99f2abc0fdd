"""Checks in several processes, in which all that were chosen run one after the other."""

import functools

from tests.strategy.groups import chosen, judge, take


def passing(request, worker, checks):
    """Gives what asks, of a layout and a check, whether it has passed on all workers."""

    @functools.cache
    def made(layout):
        return take(str(worker), "scale", layout, chosen(request, checks, [layout]))

    def ask(layout, case):
        def check(records):
            for number, record in enumerate(records):
                assert "error" not in record, f"worker {number}: {record['error']}"

        again = lambda: take(str(worker), "scale", layout, [case])[case]  # noqa: E731
        judge(check, made(layout)[case], again)

    return ask
