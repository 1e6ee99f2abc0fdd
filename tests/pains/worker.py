"""One worker that runs the programs of complaints and says what came of each."""

from tests.pains.complaints import COMPLAINTS
from tests.strategy.turns import take
from tests.strategy.workers.exact import record


def train(strategy, number):
    return record(strategy, COMPLAINTS[number])


if __name__ == "__main__":
    take(train)
