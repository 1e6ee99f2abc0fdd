"""Slots: number arrays that outlive a step, such as residuals, in one registry for each optimizer.

The registry is saved wherever its optimizer is saved (in ``tf.train.Checkpoint``, in ``.keras`` and
``.weights.h5`` files, by ``BackupAndRestore``), and is freed with it. A SavedModel gets no slots: a
program that loads it does not continue the training. Without slots, files hold nothing of tfscale.

All workers save together, and their files are equal. Where a slot lives decides what a file holds
of it, and what another number of replicas makes of that:

- ``ON_EACH`` replica, an array of its own, which is a part of a sum. The file holds all arrays as
  rows. Another number of replicas shares the sum of the rows out anew, in equal parts.
- ``COMMON``: equal arrays. The file holds one, and all replicas read it.
- ``IN_SHARDS``: one array, of which each replica holds a part. The file holds the whole array, and
  any number of replicas splits it anew. A program may move a slot between here and ``COMMON``.
- ``WITH_OWNER``: a variable that its owner makes and holds, such as the seed of a layer. The file
  holds what the variable reads as outside of replicas.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import json
import logging
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfscale.bridge.objects import LAYER_SEED, Saveable
from tfscale.bridge.protocols import Model, Optimizer
from tfscale.bridge.tensorflow import first_copy

_log = logging.getLogger("tfscale")

ON_EACH, COMMON, IN_SHARDS, WITH_OWNER = "on each replica", "common", "in shards", "with its owner"

ATTRIBUTE = "_tfscale_memory"  # the registry's name in its optimizer, in checkpoints and in files
_INDEX = "slots"  # the entry of a file that describes the other entries, in JSON
_LAYER_SEEDS = "layer seed"

_OTHERS = (
    "What was kept of %s has another shape than this method keeps, and begins anew: the file comes "
    "from another method, or from one with other arguments."
)


@dataclasses.dataclass(frozen=True)
class Slot:
    """A number array that outlives a step.

    Args:
        name: name of the array, such as "residual".
        owner: index of the array's variable in its optimizer, or words for another owner.
            A variable's name would not do: if a model is built twice in one process, its variables
            have other names the second time.
        shape: shape of one replica's array; of the whole array if it is in shards.
        lives: place of the array, one of the four in the module.
        dtype: name of the type.
        start: makes the array with which the slot begins, equal on all replicas, from the shape;
            None if the slot keeps its values when a file is loaded that does not hold the slot.
            Shards are made as zeros.
        equals: weight that has the same values while all replicas agree, so that a worker can read
            the slot without the other workers; None if there is none.
    """

    name: str
    owner: str
    shape: tuple[int, ...] = ()
    lives: str = COMMON
    dtype: str = "float32"
    start: Callable[[tuple[int, ...]], Any] | None = np.zeros
    equals: Any = dataclasses.field(default=None, compare=False)

    @property
    def key(self) -> tuple[str, str]:
        """Name and owner, which identify the slot in its registry."""
        return self.name, self.owner


ROUNDING_SEED = Slot("rounding_seed", "optimizer", dtype="int64")

_creating: contextvars.ContextVar[str | None] = contextvars.ContextVar("creating", default=None)


@contextlib.contextmanager
def creating(lives: str) -> Iterator[None]:
    """Make all variables in this block slots that live there; see ``created_now``."""
    token = _creating.set(lives)
    try:
        yield
    finally:
        _creating.reset(token)


def created_now() -> str | None:
    """Return where the variable lives that is made now; None if no slot is made.

    A slot begins with the same values on every worker. Some slots are made while the first step is
    traced; if replicas make that step without communication, the first worker cannot send values.
    """
    return _creating.get()


class _Entry(NamedTuple):
    """Entry of a file: the array of a slot, and where the slot lived."""

    lives: str
    array: Any

    def slot(self, key: tuple[str, str]) -> Slot:
        """Return the slot as the file describes it."""
        shape = tuple(self.array.shape)[self.lives == ON_EACH :]  # without the rows of replicas
        return Slot(*key, shape, self.lives, self.array.dtype.name)

    def fits(self, slot: Slot) -> bool:
        """Return whether a slot can get the array."""
        rows = (self.lives == ON_EACH) == (slot.lives == ON_EACH)
        return rows and self.slot(slot.key).shape == slot.shape


class Slots(tf.Module, Saveable):
    """The slots of one optimizer: those of its methods and rules, and the seeds of its model.

    Keras itself saves no seeds. Without the seeds of layers, an interrupted training would go on
    with other dropout masks than an uninterrupted training.

    Attributes:
        observer: function that is called after a file was loaded.
        lacked: names of slots that the last loaded file did not hold; they have begun anew.
    """

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(name="memory")
        self._strategy = strategy
        self.observer: Callable[[], None] = lambda: None
        self.lacked: frozenset[str] = frozenset()
        self._variables: dict[str, dict[str, Any]] = {}  # by owner and name; TensorFlow saves them
        # TensorFlow takes a dict for variables to save; a namespace hides these two.
        self._own = types.SimpleNamespace(declared={}, waiting={})

    @classmethod
    def of(cls, optimizer: Optimizer, strategy: tf.distribute.Strategy) -> Slots:
        """Return the registry of an optimizer, after making it if there is none."""
        state = getattr(optimizer, ATTRIBUTE, None)
        if state is None:
            state = cls(strategy)
            setattr(optimizer, ATTRIBUTE, state)
        return state

    def declare(self, slots: Iterable[Slot]) -> None:
        """Say how slots are to be made, if ``prepare`` or a file asks for them.

        Raises:
            ValueError: a slot has a variable already, of another shape or another place to live.
        """
        for slot in slots:
            old = self._own.declared.get(slot.key, slot)
            if slot.name in self._variables.get(slot.owner, ()) and not self._is_made(slot):
                raise ValueError(
                    f"the slot {slot.key} has a variable of the shape {old.shape} that lives "
                    f"{old.lives}, but is declared with the shape {slot.shape} and lives "
                    f"{slot.lives}. Call prepare, which makes a new variable"
                )
            self._own.declared[slot.key] = slot

    def has(self, slots: Iterable[Slot]) -> bool:
        """Return whether ``prepare`` has nothing to do."""
        return all(self._is_made(s) and self._own.declared[s.key] == s for s in slots)

    def prepare(self, slots: Iterable[Slot]) -> None:
        """Make the slots that are missing, or had another shape; outside of replicas."""
        with tf.init_scope(), self._strategy.scope():
            for slot in sorted(slots, key=lambda slot: slot.key):
                if not self._is_made(slot):
                    self._hold(slot, self._made(slot))
                self.declare([slot])

    def adopt(self, owner: str, variables: Sequence[Any], begins: bool) -> None:
        """Save variables that their owner has made, as slots that are named by their numbers.

        Args:
            owner: words for the owner.
            variables: TensorFlow's variables.
            begins: whether the variables get the values that they have now, when a file is loaded
                that does not hold them; otherwise they stay as they are.
        """
        for place, variable in enumerate(variables):
            start = _as_now(variable) if begins else None
            shape, dtype = tuple(variable.shape), variable.dtype.name
            slot = Slot(str(place), owner, shape, WITH_OWNER, dtype, start)
            self._hold(slot, variable)
            waiting = self._own.waiting.pop(slot.key, None)
            if waiting and waiting.fits(slot):
                variable.assign(waiting.array)

    def watch(self, model: Model) -> None:
        """Save the seeds of this model's layers, too."""
        seeds = [v.value for v in model.variables if v.path.endswith(LAYER_SEED)]
        self.adopt(_LAYER_SEEDS, seeds, begins=False)
        waiting = self._own.waiting.items()
        self._own.waiting = {key: entry for key, entry in waiting if key[1] != _LAYER_SEEDS}

    def _is_made(self, slot: Slot) -> bool:
        """Return whether there is a variable for a slot of this shape that lives there."""
        old = self._own.declared.get(slot.key, slot)
        is_same = (old.shape, old.lives) == (slot.shape, slot.lives)
        return is_same and slot.name in self._variables.get(slot.owner, ())

    def _hold(self, slot: Slot, variable: Any) -> None:
        self._own.declared[slot.key] = slot
        if slot.owner not in self._variables:
            self._variables[slot.owner] = {}  # TensorFlow tracks what is assigned here
        self._variables[slot.owner][slot.name] = variable

    def _made(self, slot: Slot) -> Any:
        shape, start = slot.shape, slot.start or np.zeros
        if slot.lives == IN_SHARDS:
            shape = (size_of_shard(shape, self._strategy.extended.number_of_replicas),)
            start = np.zeros
        first = tf.cast(start(shape), slot.dtype)
        with creating(slot.lives):
            variable = tf.Variable(first, trainable=False, name=slot.name)
        variable.slot = slot
        return variable

    def named(self, name: str) -> Mapping[str, Any]:
        """Return the variables of all slots of this name, by owner."""
        return {owner: own[name] for owner, own in self._variables.items() if name in own}

    def whole(self, name: str, owner: str) -> Any:
        """Return the variable of a slot, with the values of all replicas."""
        return self._variables[owner][name]

    def kept(self, name: str, owner: str, replica: int) -> tf.Variable:
        """Return one replica's variable of a slot."""
        return self.whole(name, owner).values[replica]

    def next_seed(self, replica: int) -> tf.Tensor:
        """Return a seed that is new for each bucket and step, and equal on all replicas."""
        seed = self.kept(*ROUNDING_SEED.key, replica)
        return seed.assign_add(1, read_value=True).read_value()

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> Any:
        """Return the objects to save; TensorFlow calls this method."""
        return {} if save_type == "savedmodel" else super()._trackable_children(save_type, **kwargs)

    def _obj_type(self) -> str:
        return "Loss"  # Keras takes this for an object with state and without children

    def save_own_variables(self, store: Any) -> None:
        """Save the slots in a store; Keras calls this method."""
        index: list[dict[str, str]] = []
        for (name, owner), entry in self._entries():
            number = str(len(index))
            store[number] = entry.array
            index.append({"entry": number, "name": name, "owner": owner, "lives": entry.lives})
        if index:
            store[_INDEX] = np.frombuffer(json.dumps(index).encode(), np.uint8)

    def _entries(self) -> Iterator[tuple[tuple[str, str], _Entry]]:
        for slot in self._all_made():
            yield slot.key, _Entry(slot.lives, self.whole(*slot.key).numpy())
        yield from self._own.waiting.items()

    def _all_made(self) -> list[Slot]:
        every = sorted(self._own.declared.values(), key=lambda slot: slot.key)
        return [slot for slot in every if self._is_made(slot)]

    def load_own_variables(self, store: Any) -> None:
        """Load the slots from a store; Keras calls this method.

        A slot that nobody has declared is made as the file describes it. Slots that the file does
        not hold, or holds in another shape, begin anew: a method with other arguments has saved
        them, and variables cannot change their shapes, because steps may be traced already.
        """
        entries = _read(store)
        declared = self._own.declared
        self.prepare(
            declared.get(key, entry.slot(key))
            for key, entry in entries.items()
            if entry.lives != WITH_OWNER
        )
        self._own.waiting = {
            key: _Entry(entry.lives, entry.array[()])
            for key, entry in entries.items()
            if key not in declared
        }
        lacked, others = set(), []
        for slot in self._all_made():
            entry = entries.get(slot.key)
            if entry and entry.fits(slot):
                self.whole(*slot.key).assign(entry.array[()])
                continue
            self._begin_anew(slot)
            lacked.add(slot.name)
            others += [" ".join(slot.key)] if entry else []
        if others:
            _log.warning(_OTHERS, ", ".join(map(repr, others)))
        self.lacked = frozenset(lacked)
        self.observer()

    def _begin_anew(self, slot: Slot) -> None:
        if slot.start is None:
            return
        first = tf.cast(slot.start(slot.shape), slot.dtype)
        if slot.lives == ON_EACH:
            first = tf.stack([first] * self._strategy.extended.number_of_replicas)
        self.whole(*slot.key).assign(first)


def size_of_shard(shape: Sequence[int], ranks: int) -> int:
    """Return how many numbers of an array each rank holds; zeros fill up the last shards."""
    return -(-math.prod(shape) // ranks)


def _as_now(variable: Any) -> Callable[[tuple[int, ...]], Any]:
    """Return a function that makes the present value of a variable again."""
    now = first_copy(variable).numpy()
    return (lambda shape: now) if now.any() else np.zeros


def _read(store: Any) -> dict[tuple[str, str], _Entry]:
    """Return what a file holds, by name and owner."""
    index = json.loads(bytes(store[_INDEX][()])) if _INDEX in store else []
    return {(s["name"], s["owner"]): _Entry(s["lives"], store[s["entry"]]) for s in index}
