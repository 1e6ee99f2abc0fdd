"""One worker that trains programs of the gallery and says what came of each."""

from tests.gallery.programs import PROGRAMS
from tests.strategy.turns import take
from tests.strategy.workers.exact import record


def train(strategy, name):
    strategy.own_losses = PROGRAMS[name].own_losses
    return record(strategy, PROGRAMS[name])


if __name__ == "__main__":
    take(train)
