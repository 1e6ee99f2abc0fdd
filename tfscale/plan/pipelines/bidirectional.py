"""Orders in which microbatches enter the pipeline at both ends; each rank holds two stages."""

from __future__ import annotations

from tfscale.plan.pipelines.order import PipelineOrder
from tfscale.plan.pipelines.turns import Turn, Work
from tfscale.support import arguments

F, B, I, W = Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT  # noqa: E741


def chimera(stages: int, microbatches: int) -> PipelineOrder:
    """Return Chimera's order: half of the microbatches run from the last rank to the first.

    In each unit of time a rank takes a backward pass that is ready, else the oldest forward pass
    that is ready. Where the number of microbatches is a multiple of the stages, this gives the
    published length of ``2 * microbatches + stages - 2`` units (Li and Hoefler, 2021).
    """
    _check_even(stages, microbatches, least=1)
    half = microbatches // 2
    made: dict[tuple[Work, int, int], int] = {}
    left = [set[tuple[Work, int, int]]() for _ in range(stages)]
    for m in range(microbatches):
        for stage in range(stages):
            rank = stage if m < half else stages - 1 - stage
            left[rank] |= {(F, m, stage), (B, m, stage)}
    turns: list[list[Turn]] = [[] for _ in range(stages)]
    time = 0
    while any(left):
        taken = []
        for rank in range(stages):
            ready = [one for one in left[rank] if _is_ready(*one, stages, made)]
            if ready:
                taken.append((rank, min(ready, key=lambda one: _age(one, half))))
        for rank, one in taken:
            left[rank].remove(one)
            made[one] = time
            turns[rank].append(Turn(*one))
        time += 1
    return PipelineOrder("chimera", stages, microbatches, tuple(tuple(one) for one in turns))


def _is_ready(
    work: Work, m: int, stage: int, stages: int, made: dict[tuple[Work, int, int], int]
) -> bool:
    if work is F:
        return stage == 0 or (F, m, stage - 1) in made
    return (F, m, stage) in made and (stage == stages - 1 or (B, m, stage + 1) in made)


def _age(one: tuple[Work, int, int], half: int) -> tuple[bool, int, int]:
    """Return a key that orders the turns of a moment: backwards first, old microbatches first."""
    work, m, stage = one
    return work is F, m % half, -stage


def dualpipe(stages: int, microbatches: int) -> PipelineOrder:
    """Return DualPipe's order: forward and backward passes of two directions at the same time.

    The eight phases are those of DeepSeek's README and code (DeepSeek-AI, 2024). It needs an even
    number of stages, and at least two microbatches per stage.
    """
    _check_even(stages, microbatches, least=2 * stages)
    turns = tuple(_DualPipe(rank, stages, microbatches).turns for rank in range(stages))
    return PipelineOrder("dualpipe", stages, microbatches, tuple(map(tuple, turns)))


class _DualPipe:
    """The turns of one rank; direction 0 is the one whose first stage is nearer to this rank."""

    def __init__(self, rank: int, stages: int, microbatches: int) -> None:
        self.rank, self.stages, self.half = rank, stages, microbatches // 2
        self.outer = min(rank, stages - 1 - rank)  # distance to the nearer end of the pipeline
        self.inner = stages // 2 - 1 - self.outer  # distance to the middle
        self.count = {F: [0, 0], B: [0, 0]}
        self.late: list[Turn] = []
        self.turns: list[Turn] = []
        self._fill()
        self._work()
        self._empty()

    def _fill(self) -> None:
        for _ in range(2 * self.inner):
            self._forward(0)
        for _ in range(self.outer + 1):
            self._forward(0)
            self._forward(1)
        for _ in range(self.inner):
            self._backward(1, split=True)
            self._weights()
            self._forward(1)

    def _work(self) -> None:
        for step in range(self.half - self.stages + self.outer + 1):
            # The middle ranks don't overlap their first two passes: this shortens the bubble.
            self._forward(0, with_next=step > 0 or self.inner > 0)
            self._backward(1)
            self._forward(1, with_next=True)
            self._backward(0)
        for _ in range(self.inner):
            self._backward(1)
            self._forward(1, with_next=True)
            self._backward(0)

    def _empty(self) -> None:
        steps = self.outer + 1
        for step in range(steps):
            self._backward(1, split=2 * step >= steps if self.outer % 2 else 2 * step > steps)
            self._backward(0, split=2 * step + 1 >= steps)
        for _ in range(self.inner):
            self._weights()
            self._backward(0, split=True)
        for _ in range(steps):
            self._weights()

    def _forward(self, direction: int, with_next: bool = False) -> None:
        self.turns.append(self._turn(F, direction)._replace(with_next=with_next))

    def _backward(self, direction: int, split: bool = False) -> None:
        turn = self._turn(B, direction)
        if split:
            turn = turn._replace(work=I)
            self.late.append(turn)
        self.turns.append(turn)

    def _weights(self) -> None:
        self.turns.append(self.late.pop(0)._replace(work=W))

    def _turn(self, work: Work, direction: int) -> Turn:
        number = self.count[work][direction]
        self.count[work][direction] += 1
        reverse = direction ^ (self.rank >= self.stages // 2)
        stage = self.stages - 1 - self.rank if reverse else self.rank
        return Turn(work, number + reverse * self.half, stage)


def _check_even(stages: int, microbatches: int, least: int) -> None:
    for value, name, smallest in ((stages, "stages", 1), (microbatches, "microbatches", least)):
        arguments.whole(value, name, smallest)
        if value % 2:
            raise arguments.wrong(value, name, "an even number, because half of them run backwards")
