"""Hooks: all functions and attributes of Keras and TensorFlow that tfscale replaces for a while.

A hook is declared once, at the end of this file, with its owner, its name, its end and its reason;
``tfscale doctor --hooks`` prints the list. It is put on one owner: an object, a class or a module.

- The hook that was put on last is called first, and calls the next one as its ``original``.
- Hooks leave in any order, in any thread. When the last one leaves, the original is back.
- A hook ends with its block, also by an error; or with the object that it was put on; or with
  another object, such as a strategy.
- If Keras or a user assigns the attribute meanwhile, that value stays.
- Several users of one replacement share it: it is called once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

STEP = "the step is traced"
CALL = "the call returns"
FIT = "the fit ends"
STRATEGY = "the last strategy is gone"
OBJECT = "the object is gone"

_changing = threading.Lock()
_declared: list[Hook] = []


@dataclasses.dataclass(frozen=True)
class Hook:
    """An attribute of Keras or TensorFlow that tfscale replaces.

    Attributes:
        whose: the class or the module that has the attribute, for readers.
        name: name of the attribute.
        until: when the original is back.
        why: what tfscale does there.
    """

    whose: str
    name: str
    until: str
    why: str

    @contextlib.contextmanager
    def on(
        self, owner: Any, replacement: Callable[..., Any], in_thread: bool = False
    ) -> Iterator[None]:
        """Replace a function while the block runs; see ``put``."""
        placed = self.put(owner, replacement, in_thread=in_thread)
        try:
            yield
        finally:
            placed.off()

    @contextlib.contextmanager
    def showing(self, owner: Any, value: Any) -> Iterator[None]:
        """Replace an attribute that is no function by a value while the block runs."""
        placed = _put(owner, _Value(self, value), weakly=False)
        try:
            yield
        finally:
            placed.off()

    def put(
        self,
        owner: Any,
        replacement: Callable[..., Any],
        *,
        in_thread: bool = False,
        while_lives: Any = None,
        weakly: bool = False,
    ) -> ActiveHook:
        """Replace a function: ``replacement(original, ...)`` is called in place of it.

        For an object and for a class, ``replacement(original, thing, ...)`` gets the object, and
        ``original(thing, ...)`` takes it.

        Args:
            owner: the object, class or module whose attribute is replaced.
            replacement: gets the original before all other arguments.
            in_thread: whether only calls from this thread get the replacement.
            while_lives: an object with which the hook ends; ``replacement`` must not refer to it.
            weakly: whether the owner must be freed as soon as nobody uses it; its replaced method
                then has no ``__self__``.

        Returns:
            An object whose ``off`` ends the hook earlier.
        """
        thread = threading.get_ident() if in_thread else None
        alive = None if while_lives is None else weakref.ref(while_lives)
        placed = _put(owner, _Function(self, replacement, thread, alive), weakly)
        if while_lives is not None:
            weakref.finalize(while_lives, _forget_dead, id(owner), self.name).atexit = False
        return placed

    def off(self, owner: Any) -> None:
        """Take this hook off an owner, if it is on."""
        with _changing:
            chain = _chains.get((id(owner), self.name))
            if chain is not None:
                chain.keep(lambda each: each.hook is not self)

    def replacements(self, owner: Any) -> list[Any]:
        """Return what replaces this attribute of an owner now, by this hook."""
        with _changing:
            chain = _chains.get((id(owner), self.name))
            living = () if chain is None or not chain.is_shown() else chain.living()
        return [
            each.replacement for each in living if each.hook is self and isinstance(each, _Function)
        ]


class ActiveHook:
    """A hook on one owner."""

    def __init__(self, chain: _Chain, replacement: _Replacement) -> None:
        self._chain, self._replacement = chain, replacement

    def off(self) -> None:
        """Put the original back, as far as this hook is concerned."""
        with _changing:
            self._chain.keep(lambda each: each is not self._replacement)


def declared() -> tuple[Hook, ...]:
    """Return all hooks, whether they are on or not."""
    return tuple(_declared)


def active() -> list[tuple[Hook, Any]]:
    """Return the hooks that are on, each with its owner."""
    with _changing:
        shown = [chain for chain in _chains.values() if chain.is_shown()]
        return [(each.hook, chain.owner()) for chain in shown for each in chain.living()]


def is_assigned(owner: Any, name: str) -> bool:
    """Whether somebody has given an object an attribute of its own, apart from our hooks."""
    with _changing:
        chain = _chains.get((id(owner), name))
        if chain is not None and chain.is_shown():
            return chain.before is not _NOTHING
        return name in vars(owner)


# ---------------------------------------------------------------------------- mechanism


@dataclasses.dataclass(frozen=True, eq=False)
class _Function:
    hook: Hook
    replacement: Callable[..., Any]
    thread: int | None
    alive: weakref.ref[Any] | None

    @property
    def lives(self) -> bool:
        return self.alive is None or self.alive() is not None


@dataclasses.dataclass(frozen=True, eq=False)
class _Value:
    hook: Hook
    value: Any
    lives: bool = True


_Replacement = _Function | _Value  # what a hook on an owner puts in place of the original


class _Chain:
    """One attribute of one owner, and the hooks on it, from the first to the last.

    The function that stands in refers to its chain, and so does the ``ActiveHook`` that can take a
    value off. Nothing else does: a chain ends with its owner, and keeps no owner alive.
    """

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = weakref.ref(owner)
        self.name = name
        self.replacements: tuple[_Replacement, ...] = ()
        self._shown: Any = _NOTHING
        self.before = vars(owner).get(name, _NOTHING)
        self._inherited = _NOTHING
        if isinstance(owner, type) and self.before is _NOTHING:
            self._inherited = getattr(owner, name)

    def living(self) -> tuple[_Replacement, ...]:
        return tuple(each for each in self.replacements if each.lives)

    def is_shown(self) -> bool:
        """Whether nobody else has assigned the attribute since."""
        owner = self.owner()
        return owner is not None and vars(owner).get(self.name, _NOTHING) is self._shown

    def keep(self, stays: Callable[[_Replacement], bool]) -> None:
        """Let hooks leave; the last one puts the original back."""
        self.replacements = tuple(filter(stays, self.living()))
        if not self.is_shown() or self._shown is self.before:
            return
        if not self.replacements:
            self._write(self.before)
            return
        last = self.replacements[-1]
        if isinstance(last, _Value):
            self._write(last.value)

    def add(self, replacement: _Replacement, weakly: bool) -> None:
        first, self.replacements = not self.replacements, (*self.living(), replacement)
        if isinstance(replacement, _Value):
            self._write(replacement.value)
        elif first:
            self._write(self._dispatcher(weakly))

    def _write(self, value: Any) -> None:
        owner = self.owner()
        self._shown = value
        if _has_attributes_of_its_own(owner):  # past Keras, which tracks what is assigned
            if value is _NOTHING:
                del vars(owner)[self.name]
            else:
                vars(owner)[self.name] = value
        elif value is _NOTHING:
            delattr(owner, self.name)
        else:
            setattr(owner, self.name, value)

    def _dispatcher(self, weakly: bool) -> Any:
        """Return the function that calls the hooks, which looks like the one that it replaces."""
        owner = self.owner()
        original = getattr(owner, self.name, None)
        if not _has_attributes_of_its_own(owner):

            @functools.wraps(original)  # type: ignore[arg-type]
            def function(*args: Any, **kwargs: Any) -> Any:
                return self.call(*args, **kwargs)

            return function
        method = getattr(original, "__func__", None)
        if method is None or weakly:

            def call(*args: Any, **kwargs: Any) -> Any:
                return self.call(self.owner(), *args, **kwargs)

            is_plain = isinstance(original, types.FunctionType)
            return functools.wraps(original)(call) if is_plain else call  # type: ignore[arg-type]

        @functools.wraps(method)
        def of_object(thing: Any, /, *args: Any, **kwargs: Any) -> Any:
            return self.call(thing, *args, **kwargs)

        return types.MethodType(of_object, owner)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call this thread's replacements, the last one first.

        Each gets the next one as ``original``, and may leave it out.
        """
        call = self._original()
        for replacement in self._called_here():
            call = functools.partial(replacement, call)
        return call(*args, **kwargs)

    def _called_here(self) -> list[Callable[..., Any]]:
        """Return replacements for calls of this thread, from the innermost to the outermost."""
        here = threading.get_ident()
        found: list[Callable[..., Any]] = []
        for one in reversed(self.replacements):
            if isinstance(one, _Value) or not one.lives or one.thread not in (None, here):
                continue
            if one.replacement not in found:
                found.append(one.replacement)
        return found[::-1]

    def _original(self) -> Callable[..., Any]:
        owner = self.owner()
        if not _has_attributes_of_its_own(owner):
            return self.before if self.before is not _NOTHING else self._inherited  # type: ignore[return-value]
        if self.before is _NOTHING:
            return getattr(type(owner), self.name)  # type: ignore[no-any-return]
        before: Any = self.before
        return lambda thing, *args, **kwargs: before(*args, **kwargs)


_NOTHING = object()
_chains: weakref.WeakValueDictionary[tuple[int, str], _Chain] = weakref.WeakValueDictionary()


def _has_attributes_of_its_own(owner: Any) -> bool:
    return not isinstance(owner, (type, types.ModuleType))


def _put(owner: Any, replacement: _Replacement, weakly: bool) -> ActiveHook:
    key = id(owner), replacement.hook.name
    with _changing:
        chain = _chains.get(key)
        if chain is None or not chain.replacements or not chain.is_shown():
            chain = _chains[key] = _Chain(owner, replacement.hook.name)
        chain.add(replacement, weakly)
        return ActiveHook(chain, replacement)


def _forget_dead(owner: int, name: str) -> None:
    """Put the original back after the end of an object that hooks live with.

    Python may call this anywhere, also while its thread changes hooks. Then this does nothing: each
    change leaves out dead hooks, and a chain does not call the dead hooks that remain.
    """
    if not _changing.acquire(blocking=False):
        return
    try:
        chain = _chains.get((owner, name))
        if chain is not None:
            chain.keep(lambda _: True)
    finally:
        _changing.release()


def _declare(whose: str, name: str, until: str, why: str) -> Hook:
    hook = Hook(whose, name, until, why)
    _declared.append(hook)
    return hook


# --------------------------------------------------------------------- what is replaced

_OPTIMIZER = "keras.optimizers.Optimizer"
_MODEL = "keras.Model"
_LAYER = "keras.layers.Layer"
_LOSSES = "keras.src.trainers.compile_utils.CompileLoss"
_EPOCHS = "keras.src.trainers.epoch_iterator.EpochIterator"

# While a step is traced, or runs eagerly.
APPLY = _declare(
    _OPTIMIZER,
    "apply",
    STEP,
    "gradients are summed over replicas before they are clipped; Recompute sees them before that",
)
CLIP_GRADIENTS = _declare(
    _OPTIMIZER, "_clip_gradients", STEP, "accumulated gradients are summed at the end of a window"
)
AVERAGE_WEIGHTS = _declare(
    _OPTIMIZER, "_update_model_variables_moving_average", STEP,
    "sharded state: averages are of the parts that a replica holds",
)  # fmt: skip
TAKE_AVERAGES = _declare(
    _OPTIMIZER, "_overwrite_model_variables_with_average_value", STEP,
    "sharded state: parts of weights become parts of averages",
)  # fmt: skip
CHECK_FINITE = _declare(
    "keras.optimizers.LossScaleOptimizer", "check_finite", STEP,
    "sharded state: the parts of all replicas are finite, or none is applied",
)  # fmt: skip
AGGREGATE_GRADIENTS = _declare(
    _OPTIMIZER, "aggregate_gradients", STEP, "Keras 2: gradients are summed in buckets"
)
LEGACY_AGGREGATE_GRADIENTS = _declare(
    "keras.optimizers.legacy.Optimizer", "_aggregate_gradients", STEP,
    "Keras 2: gradients are summed in buckets",
)  # fmt: skip
COMPUTE_LOSS = _declare(
    _MODEL, "compute_loss", STEP, "a user's own loss becomes a part of the global batch's loss"
)
ADDED_LOSSES = _declare(
    _MODEL, "_aggregate_additional_loss", STEP,
    "added losses become parts of the global batch's loss; a measured loss is kept part by part",
)  # fmt: skip
ADD_LOSS = _declare(
    _LAYER, "add_loss", STEP, "an eager step notes which losses are already divided"
)
RESULT = _declare(
    "keras.metrics.Metric", "result", STEP, "a step may return metrics of all replicas"
)
UPDATE_MEAN = _declare(
    "keras.metrics.Mean", "update_state", STEP, "a number of a batch is weighted by its samples"
)
UPDATE_SUM = _declare(
    "keras.metrics.Sum", "update_state", STEP, "a number of a batch is cut into replicas' parts"
)
MOMENTS = _declare(
    "keras.layers.BatchNormalization", "_moments", STEP, "statistics are of the global batch"
)
REDUCE_LOSSES = _declare(
    "keras.src.losses.loss", "reduce_weighted_values", STEP,
    "a loss object divides by what the global batch holds",
)  # fmt: skip
CALL_LOSS = _declare("keras.losses.Loss", "__call__", STEP, "a cross-entropy gets slices of logits")
LOSSES_OF_ROWS = _declare(
    "keras.losses.Loss", "call", CALL, "a cross-entropy computes with slices of logits"
)
TAPE_GRADIENT = _declare(
    "tf.GradientTape",
    "gradient",
    STEP,
    "losses of a user's own step become parts; Recompute notes gradients",
)
FUNCTION_CALL = _declare(
    "tf.function", "__call__", STEP, "functions are traced as parts of the step that calls them"
)
ALL_GATHER = _declare(
    "tf.distribute.ReplicaContext", "all_gather", STEP,
    "only replicas that make the step together gather",
)  # fmt: skip
LAYER_CALL = _declare(_LAYER, "call", STEP, "Recompute notes which operations a layer makes")
SPLIT_CALL = _declare(_LAYER, "call", STEP, "a layer computes with slices of its weights")
INPUT_SPEC = _declare(_LAYER, "_input_spec", STEP, "a layer may get a slice of its input")
SEED_OF_SLICE = _declare(
    "keras.random.SeedGenerator", "next", STEP, "dropout differs between slices of an array"
)

# During one call.
VARIABLE_CLASSES = _declare(
    "tensorflow.python.distribute.distribute_utils", "create_mirrored_variable", CALL,
    "variables get the class of what they hold: weights, statistics, seeds, metrics",
)  # fmt: skip
SYMBOLIC_BUILD = _declare(
    _MODEL, "_symbolic_build", CALL, "a model that cannot be called on symbols trains all the same"
)
NO_OPTIMIZER = _declare(_MODEL, "optimizer", CALL, "a model is built without its optimizer")
NO_METRICS = _declare(_MODEL, "_compile_metrics", CALL, "a model is built without its metrics")
MEASURED_LOSS = _declare(_MODEL, "_compile_loss", CALL, "curvature of a loss that was asked for")
LOSS_PARTS = _declare(_LOSSES, "_flat_losses", CALL, "each loss is measured by itself")
REGULARIZATION_LOSSES = _declare(
    _MODEL, "_get_regularization_losses", CALL, "a measured loss leaves out regularizers"
)
OWN_LOSSES = _declare(_LAYER, "_get_own_losses", CALL, "a measured loss leaves out add_loss")
START = _declare(
    "tensorflow.python.eager.context.Context", "ensure_initialized", CALL,
    "the line that starts TensorFlow is noted, for an error message",
)  # fmt: skip

# During one fit.
END_OF_FIT = _declare(
    _OPTIMIZER, "finalize_variable_values", FIT, "the last round of a fit ends with it"
)
AGREEMENT = _declare(
    _OPTIMIZER, "finalize_variable_values", FIT,
    "replicas are compared at the end of a fit with a rule or a method of the user's",
)  # fmt: skip
ADVERSARIAL_STEP = _declare(_MODEL, "train_step", FIT, "Adversarial moves samples before a step")
TRAIN_FUNCTION = _declare(
    _MODEL, "train_function", FIT, "Adversarial and Recompute change the steps of one fit"
)
BAR_OF_BATCH = _declare(
    "keras.callbacks.ProgbarLogger", "on_train_batch_end", OBJECT,
    "the bar shows some numbers of Telemetry only",
)  # fmt: skip
BAR_OF_EPOCH = _declare(
    "keras.callbacks.ProgbarLogger", "on_epoch_end", OBJECT,
    "the bar shows some numbers of Telemetry only",
)  # fmt: skip
EPOCH_BATCHES = _declare(
    _EPOCHS, "_enumerate_iterator", OBJECT, "shapes are read without reading a batch"
)
EPOCH_ITERATOR = _declare(
    _EPOCHS, "_get_iterator", OBJECT, "a batch that was read for its shapes is trained on"
)

# As long as an object lives.
OPTIMIZER_BUILD = _declare(
    _OPTIMIZER, "build", "it is built", "an optimizer gets the state of its gradients' sums"
)
ADD_VARIABLE = _declare(
    _OPTIMIZER, "add_variable", "it is built", "sharded state: only parts of slots are made"
)
ASSIGN_SLOT = _declare(
    "keras.Variable", "assign", OBJECT, "shards, slices: a replica assigns the part that it holds"
)
RECORDED_STEP = _declare(
    _MODEL, "train_step", OBJECT, "AdaHessian records eager steps, to differentiate gradients"
)
SET_MODEL = _declare(
    "keras.callbacks.CallbackList", "set_model", STRATEGY,
    "on several workers only the first one writes backups, checkpoints and logs",
)  # fmt: skip
BAR_PARAMS = _declare(
    "keras.callbacks.ProgbarLogger", "set_params", STRATEGY,
    "workers other than the first show no bars by default",
)  # fmt: skip
PREDICT_ON_BATCH = _declare(
    _MODEL, "predict_on_batch", STRATEGY, "workers of one device each predict a part of the batch"
)
RESTORE = _declare(
    "tensorflow.python.checkpoint.restore.CheckpointPosition", "restore", STRATEGY,
    "what a replica makes in a step is restored on all replicas",
)  # fmt: skip
SAVE_MODEL = _declare(
    "keras.src.saving.saving_lib", "save_model", STRATEGY, "workers may write to one path"
)
SAVE_WEIGHTS = _declare(
    "keras.src.saving.saving_lib", "save_weights_only", STRATEGY, "workers may write to one path"
)
ROOM_FOR_FILES = _declare(
    "keras.src.saving.saving_lib", "is_memory_sufficient", STRATEGY,
    "a model may be larger than the memory of a worker, which is not all memory of its host",
)  # fmt: skip
SAVE_HDF5 = _declare(
    "keras.src.legacy.saving.legacy_h5_format", "save_model_to_hdf5", STRATEGY,
    "workers may write to one path",
)  # fmt: skip

# The named files replace these by themselves: they are no attributes that can have several hooks.
_declare(
    "keras.callbacks", "__class__", OBJECT,
    "checkpoints and logs of workers other than the first write nothing (bridge/callbacks.py)",
)  # fmt: skip
_declare(
    "tensorflow.python.framework.ops.gradient_registry", "_registry", "the graph is gone",
    "custom gradients are freed with their graph (bridge/gradients.py)",
)  # fmt: skip
_declare(
    "tensorflow.python.eager.context.Context", "function_call_options", CALL,
    "sums of several terms keep their order (bridge/grappler.py)",
)  # fmt: skip
_declare(
    "tf.Operation", "_gradient_function", CALL,
    "the mean within a variance counts for second derivatives (bridge/gradients.py)",
)  # fmt: skip
