"""Matrices over the variables of a model, summed over its data, on all replicas and hosts."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import hashlib
import math
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfscale.analysis.curvature import progress, surface
from tfscale.analysis.curvature.derivatives import REMEDY, UNKNOWN, again, dense, first_sentence
from tfscale.analysis.curvature.objective import Draw, Objective, OwnLoss, Parts, has_own_loss
from tfscale.analysis.curvature.operator import Operator
from tfscale.analysis.curvature.samples import AT_ONCE
from tfscale.analysis.curvature.surface import Landscape, Sharpness
from tfscale.analysis.curvature.variables import checked_variables, chosen, places
from tfscale.bridge.data import Batches
from tfscale.bridge.fit import as_measurement
from tfscale.bridge.hooks import MEASURED_LOSS
from tfscale.bridge.installed import KERAS_2
from tfscale.bridge.losses import as_compiled, compiled_loss
from tfscale.bridge.objects import layers_of, native
from tfscale.exchange.scaling import scaling
from tfscale.support import arguments
from tfscale.support.sizes import number_of_bytes


class NotFiniteError(ValueError):
    """The loss, or a derivative of it, is infinite or NaN."""


@dataclasses.dataclass(frozen=True)
class _Seen:
    """The loss of a pass over the data, and the model's state during that pass."""

    loss: float
    state: bytes


# A function of a batch, its index, its shares in the loss, and further arguments. It returns the
# batch's contribution to the loss, and lists of one tensor for each variable.
Compute = Callable[..., tuple[Parts, list[list[tf.Tensor]]]]

# Products would underflow in half precision. This factor is a power of 2, so scaling is exact.
_SIZE_OF_HALVES = 2.0**10
# The losses of two passes may differ by this share, because of rounding.
_SAME = 1e-3


class OfModel(Operator):
    """A symmetric matrix over variables of a model: the base class of ``Hessian`` and others."""

    draws = False  # whether targets are drawn, so that products see another loss

    def __init__(
        self,
        model: keras.Model,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        *,
        batch_size: int | None = None,
        steps: int | None = None,
        variables: str | Iterable[Any] | None = None,
        loss: Any = None,
        regularizers: bool = True,
        add_loss: bool = True,
        training: bool = False,
        jit_compile: bool = False,
        memory: float | str = "2GB",
        progress: bool | None = None,
    ) -> None:
        who = f"curvature.{type(self).__name__}"
        arguments.data(x, "x")
        arguments.optional(arguments.data, y, "y")
        arguments.optional(arguments.data, sample_weight, "sample_weight")
        size = number_of_bytes(memory, "memory")
        arguments.optional(arguments.whole, batch_size, "batch_size", 1, what="a number of rows")
        arguments.optional(arguments.whole, steps, "steps", 1, what="a number of batches")
        checked_variables(variables)
        flags = {
            "regularizers": regularizers, "add_loss": add_loss, "training": training,
            "jit_compile": jit_compile,
        }  # fmt: skip
        for name, value in flags.items():
            arguments.flag(value, name)
        arguments.optional(arguments.flag, progress, "progress")
        if KERAS_2:
            raise ValueError(f"{who} needs Keras 3, and this is Keras {keras.__version__}")
        arguments.instance(model, "model", keras.Model, "a keras.Model that is compiled")
        refuse_other_strategies(model, who)
        self._given = {
            "steps": steps, "batch_size": batch_size, "loss": loss, "regularizers": regularizers,
            "add_loss": add_loss, "training": training, "jit_compile": jit_compile,
            "memory": memory, "progress": progress,
        }  # fmt: skip
        self.data = (x, y, sample_weight)
        self.model = model
        self._compiled, own = _loss(who, model, loss)
        self._batches = Batches(model, self.data, batch_size, steps, who)
        with self._as_compiled():
            compares = own is None and compiled_loss(model) is not None
            if compares and not self._batches.have_targets and not has_own_loss(model):
                raise ValueError(
                    f"{who}: the loss of {model.name!r} compares outputs with targets, and the "
                    "data have none: give y, or a dataset of pairs (x, y)"
                )
            self._batches.build(model)
        self.variables = chosen(model, variables, who)
        counted = {"regularizers": regularizers, "add_loss": add_loss}
        penalties = frozenset(name for name, counts in counted.items() if counts)
        self._objective = Objective(model, self.variables, training, penalties, own)
        self._jit = jit_compile
        self._shows = progress
        self._advance: Callable[[float], None] = lambda _: None
        self._functions: dict[Any, Any] = {}
        self._together = 1  # vectors for which products were traced
        computes = {layer.compute_dtype for layer in [model, *layers_of(model)]}
        self._size = _SIZE_OF_HALVES if "float16" in computes else 1.0
        double = all(tf.as_dtype(v.dtype) == tf.float64 for v in self.variables)
        dtype = np.float64 if double else np.float32
        super().__init__(places(self.variables), dtype, size)

    # ------------------------------------------------------------- what there is

    @functools.cached_property
    def _shares(self) -> np.ndarray:
        """Share of each batch in each part of the loss; counted in one pass."""
        rows = [
            numbers for numbers, _ in self._each_batch(self._only_loss, None, lambda _: (None,))
        ]
        if not rows:
            raise ValueError(f"curvature.{type(self).__name__} got no data: there is no batch")
        divisors, terms = np.split(self.summed_over_hosts(np.array(rows)), 2, axis=1)
        self._refuse_nan(terms.sum(1))
        total = divisors.sum(0)
        if not total[-1]:
            raise ValueError(f"curvature.{type(self).__name__} got no data: batches have no rows")
        shares: np.ndarray = np.divide(divisors, total, out=np.ones_like(divisors), where=total > 0)
        self._seen = _Seen(float((shares * terms).sum()), self._state())
        return shares

    def _state(self) -> bytes:
        """Return a hash of the model's variables."""
        found = hashlib.sha256()
        for variable in self.model.variables:
            found.update(tf.convert_to_tensor(native(variable)).numpy().tobytes())
        return found.digest()

    def _refuse_nan(self, losses: np.ndarray) -> None:
        (bad,) = np.nonzero(~np.isfinite(losses))
        if len(bad):
            raise NotFiniteError(
                f"the loss of {self.model.name!r} is {losses[bad[0]]} in batch {bad[0]} (from 0) "
                f"of {len(losses)}, and {len(bad)} batches are not finite. Curvature needs finite "
                "losses: look for NaN in the data and in the variables"
            )

    @property
    def loss(self) -> float:
        """The loss on all data; costs a pass over them."""
        return self._sum_of_terms(self._only_loss, None)

    @property
    def gradient(self) -> np.ndarray:
        """The gradient of the loss on all data as a flat vector; costs a pass over them."""
        return self._sum(self._gradient, None).reshape(-1)

    def loss_at(self, moved: np.ndarray) -> float:
        """Return the loss at the variables plus a vector."""
        return self._sum_of_terms(self._only_loss, self._tensors(moved))

    def gradient_at(self, moved: np.ndarray) -> np.ndarray:
        """Return the gradient at the variables plus a vector."""
        return self._sum(self._gradient, self._tensors(moved)).reshape(-1)

    def products(self, vectors: np.ndarray) -> np.ndarray:
        """Return the products with the rows of ``vectors``, as rows in float64."""
        vectors = np.asarray(vectors)
        found = [
            self._few_products(vectors[i : i + AT_ONCE]) for i in range(0, len(vectors), AT_ONCE)
        ]
        return np.concatenate(found)

    def _few_products(self, vectors: np.ndarray) -> np.ndarray:
        """Multiply one vector alone, or pad to the traced number, since each new number is traced
        anew.
        """
        asked = len(vectors)
        return self._sum(self._products, None, self._padded(vectors), asked=asked)[:asked]

    def _padded(self, vectors: np.ndarray) -> list[list[tf.Tensor]]:
        asked = len(vectors)
        self._together = max(self._together, asked)
        tensors = [self._tensors(v) for v in vectors]
        if asked > 1:
            tensors += [[tf.zeros_like(v) for v in tensors[0]]] * (self._together - asked)
        return tensors

    @property
    def batches(self) -> int:
        """Number of batches; costs a pass over the data at first."""
        return len(self._shares)

    def products_of_batches(
        self, vectors: Callable[[int], np.ndarray]
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield for each batch its number, vectors, and their products with the batch's part of the
        matrix, as far as this host computes them: parts of all batches and hosts sum to the matrix.

        Args:
            vectors: function that returns the vectors, as rows, for a batch's number.
        """
        shares, terms = self._shares, []
        asked: list[np.ndarray] = []

        def arguments(number: int) -> Sequence[Any]:
            asked.append(vectors(number))
            return None, self._padded(asked[-1])

        for numbers, found in self._each_batch(self._products, shares, arguments):
            terms.append(numbers[len(numbers) // 2 :].sum())
            products = np.zeros((len(asked[0]), self.size), self.dtype)
            for replica in found:
                self._add(products, replica)
            products /= self._size
            self._refuse_overflow(products)
            yield len(terms) - 1, asked.pop(), products
            self._advance(len(products) / len(shares))
        self._check_count(len(terms))
        self._check_losses(self.summed_over_hosts(np.array(terms)) / self._size)

    @property
    def name(self) -> str:
        """The operator's name in messages."""
        return f"the {type(self).__name__} of {self.model.name!r}"

    def __matmul__(self, v: Any) -> Any:
        """Multiply by a flat vector, a matrix's columns, or a list of one array per variable."""
        if isinstance(v, (list, tuple)):
            return self.unflat(super().__matmul__(self.flat(v)))
        return super().__matmul__(v)

    def flat(self, arrays: Sequence[Any]) -> np.ndarray:
        """Return an array for each variable as one vector."""
        shapes = [tuple(np.shape(a)) for a in arrays]
        if shapes != [tuple(v.shape) for v in self.variables]:
            raise ValueError(
                f"{self.name} takes an array for each of its variables, of the shapes "
                f"{[tuple(v.shape) for v in self.variables]}; got {shapes}"
            )
        return np.concatenate([np.ravel(np.asarray(a)) for a in arrays])

    def unflat(self, vector: np.ndarray) -> list[np.ndarray]:
        """Return a vector as an array for each variable."""
        parts = zip(self.parts.values(), self.variables, strict=True)
        return [np.reshape(vector[part], v.shape) for part, v in parts]

    def sharpness(self, rho: float = 0.05, epsilon: float = 1e-3, **options: Any) -> Sharpness:
        """Measure how fast the loss rises nearby; see ``tfscale.analysis.curvature.surface``."""
        return surface.sharpness(self, rho, epsilon, **options)

    def landscape(self, along: Any = 1, **options: Any) -> Landscape:
        """Compute the loss along eigenvectors; see ``tfscale.analysis.curvature.surface``."""
        return surface.landscape(self, along, **options)

    def block(self, variables: str | Iterable[Any]) -> OfModel:
        """Return the diagonal block of some of the variables.

        Args:
            variables: regular expressions, searched in their paths, or variables.
        """
        x, y, sample_weight = self.data
        some = chosen(self.model, variables, f"curvature.{type(self).__name__}.block")
        some = [v for v in some if any(v is mine for mine in self.variables)]
        return type(self)(self.model, x, y, sample_weight, variables=some, **self._given)

    def layers(self) -> dict[str, OfModel]:
        """Return the diagonal block of each layer, by the layer's name."""
        named: dict[str, list[Any]] = {}
        for path, v in zip(self.parts, self.variables, strict=True):
            named.setdefault(self.layer_of(path), []).append(v)
        return {name: self.block(several) for name, several in named.items()}

    @contextlib.contextmanager
    def telling(self, what: str, steps: int, of: str = "products") -> Iterator[None]:
        """Show the progress in a bar while the block runs."""
        with progress.bar(f"{what}, {of}", steps, self._shows) as self._advance:
            try:
                yield
            finally:
                self._advance = lambda _: None

    # ---------------------------------------------------------------- of a batch

    @abc.abstractmethod
    def _products_of(self, parts: Parts, values: Any, vectors: Any) -> list[list[Any]]:
        """Return the batch's contribution to the products with vectors; None stands for zeros."""

    def _draw(self, data: Any) -> Draw | None:
        """Return a function that draws targets, or None for the true targets."""
        return None

    def _only_loss(self, data: Any, number: Any, scales: Any, moved: Any) -> Any:
        return self._objective.on_batch(self._objective.values(moved), data, number, scales), []

    def _gradient(self, data: Any, number: Any, scales: Any, moved: Any) -> Any:
        values = self._objective.values(moved)
        parts = self._objective.on_batch(values, data, number, scales)
        return parts, [self.gradients(parts.loss, values)]

    def _products(self, data: Any, number: Any, scales: Any, moved: Any, vectors: Any) -> Any:
        values = self._objective.values(moved)
        parts = self._objective.on_batch(values, data, number, scales, self._draw(data))
        return parts, self._products_of(parts, values, vectors)

    def gradients(self, loss: tf.Tensor, values: Sequence[Any]) -> list[tf.Tensor]:
        """Return the gradients of a loss that depends on all variables."""
        gradients = tf.gradients(loss, list(values))
        idle = [path for path, g in zip(self.parts, gradients, strict=True) if g is None]
        if idle:
            raise ValueError(
                f"the loss of {self.model.name!r} does not depend on {', '.join(idle[:5])}"
                f"{', ...' if len(idle) > 5 else ''}: leave them out by variables=..., or look "
                "whether a layer reads its variables in an unusual way"
            )
        return [dense(g, v) for g, v in zip(gradients, values, strict=True)]

    def forward(self, ys: Sequence[Any], xs: Sequence[Any], vector: Sequence[Any]) -> list[Any]:
        """Return the product of the Jacobian of ``ys`` by ``xs`` with a vector.

        The transposed Jacobian's product with any numbers is linear in these numbers. Its
        derivative by the numbers, times the vector, is the result.
        """
        if all(g is None for g in tf.gradients(list(ys), list(xs))):
            return [tf.zeros_like(y) for y in ys]
        any_numbers = [tf.ones_like(y) for y in ys]
        given = zip(tf.gradients(list(ys), list(xs), any_numbers), xs, vector, strict=True)
        known = [(dense(g, x), v) for g, x, v in given if g is not None]
        backwards, weights = zip(*known, strict=True)
        found = self.again(backwards, any_numbers, weights)
        return [tf.zeros_like(y) if f is None else f for f, y in zip(found, ys, strict=True)]

    def again(
        self, ys: Sequence[Any], xs: Sequence[Any], weights: Sequence[Any],
        constants: Sequence[Any] = (),
    ) -> list[Any]:  # fmt: skip
        """Differentiate gradients; raise an error that names the layer if TensorFlow cannot."""
        try:
            return again(ys, xs, weights, constants)
        except UNKNOWN as error:
            raise NotImplementedError(
                f"curvature.{type(self).__name__} needs second derivatives, and TensorFlow cannot "
                f"differentiate a gradient of {self.model.name!r}: {first_sentence(error)}. "
                f"{REMEDY}, or leave those variables out by variables=..."
            ) from error

    # ------------------------------------------------------------- over all data

    def _sum(self, compute: Compute, *arguments: Any, asked: int = 1) -> np.ndarray:
        """Sum over all data the batches' results for each variable; rows are in float64.

        Args:
            compute: the function of a batch.
            arguments: its further arguments.
            asked: number of rows that count as progress.
        """
        count = len(arguments[1]) if len(arguments) > 1 else 1
        shares, batches = self._shares, 0
        # one array, because copies would take long
        total = np.zeros(count * self.size + len(shares))
        sums, terms = np.split(total, [count * self.size])
        for numbers, found in self._each_batch(compute, shares, lambda _: arguments):
            terms[batches] = numbers[len(numbers) // 2 :].sum()
            batches += 1
            for replica in found:
                self._add(sums.reshape(count, -1), replica)
            self._advance(asked / len(shares))
        self._check_count(batches)
        total = self.summed_over_hosts(total)
        total /= self._size
        products, losses = np.split(total, [sums.size])
        if arguments[0] is None:
            self._check_losses(losses)
        else:
            self._refuse_nan(losses)
        self._refuse_overflow(products)
        return products.reshape(count, -1)

    def _add(self, rows: np.ndarray, found: Sequence[Sequence[np.ndarray]]) -> None:
        """Add a replica's results, an array for each variable, to vectors."""
        for row, each in zip(rows, found, strict=False):  # results of padding have no row
            for part, one in zip(self.parts.values(), each, strict=True):
                row[part] += one

    def _check_count(self, batches: int) -> None:
        if batches != len(self._shares):
            there = len(self._shares)
            raise ValueError(_OTHER_DATA % f"there were {there} batches, now {batches}")

    def _check_losses(self, losses: np.ndarray) -> None:
        """Refuse losses of batches that are not finite, or that other data have."""
        self._refuse_nan(losses)
        if not self.draws:
            self._refuse_other_data(float(losses.sum()))

    def _sum_of_terms(self, compute: Compute, *arguments: Any) -> float:
        total, shares = 0.0, self._shares
        for numbers, _ in self._each_batch(compute, shares, lambda _: arguments):
            total += numbers[len(numbers) // 2 :].sum()
            self._advance(1 / len(shares))
        return float(self.summed_over_hosts(np.array([total]))[0] / self._size)

    def _each_batch(
        self,
        compute: Compute,
        shares: np.ndarray | None,
        arguments: Callable[[int], Sequence[Any]],
    ) -> Iterator[tuple[np.ndarray, list[Any]]]:
        """Yield for each batch its divisors and terms, and the results of each local replica."""
        strategy = self.model.distribute_strategy
        with self._as_compiled():  # the model's own loss may not be built yet, or have other parts
            width = self._objective.losses + 1
        for number, batch in enumerate(self._batches):
            if shares is not None and number >= len(shares):
                raise ValueError(_OTHER_DATA % f"there is a new batch {number}")
            scales = np.ones(width) if shares is None else self._size * shares[number]
            numbers, found = self._function(compute)(
                batch, tf.constant(number, tf.int32), tf.constant(scales), *arguments(number)
            )
            replicas = [one.numpy() for one in strategy.experimental_local_results(numbers)]
            self._replicas = len(replicas)
            yield sum(replicas), list(zip(*(self._by_replica(each) for each in found)))

    def _by_replica(self, found: list[Any]) -> list[list[Any]]:
        local = self.model.distribute_strategy.experimental_local_results
        each = [[np.asarray(one) for one in local(value)] for value in found]  # no copies
        return [list(of_one) for of_one in zip(*each, strict=True)]

    def _function(self, compute: Any) -> Any:
        if compute.__name__ not in self._functions:
            self._functions[compute.__name__] = tf.function(
                functools.partial(self._on_replicas, compute),
                autograph=False, jit_compile=self._jit or None, reduce_retracing=not self._jit,
            )  # fmt: skip
        return self._functions[compute.__name__]

    def _on_replicas(self, compute: Compute, batch: Any, *arguments: Any) -> Any:
        @tf.autograph.experimental.do_not_convert
        def step(_: Any, data: Any) -> Any:
            parts, found = compute(data, *arguments)
            numbers = tf.stack([*parts.divisors, *parts.terms])
            return numbers, [
                [_known(g, v) for g, v in zip(each, self.variables, strict=True)] for each in found
            ]

        as_measurement(step, self._objective.training)
        strategy = self.model.distribute_strategy
        with self._as_compiled():
            return strategy.run(types.MethodType(step, self.model), args=(batch,))

    def _as_compiled(self) -> contextlib.AbstractContextManager[None]:
        """Give the model the requested loss while the block runs."""
        if self._compiled is None:
            return contextlib.nullcontext()
        return MEASURED_LOSS.showing(self.model, self._compiled)

    def _tensors(self, vector: np.ndarray) -> list[tf.Tensor]:
        return [
            tf.constant(vector[part].reshape(v.shape), v.dtype)
            for part, v in zip(self.parts.values(), self.variables, strict=True)
        ]

    def summed_over_hosts(self, numbers: np.ndarray) -> np.ndarray:
        """Sum over all hosts, with the same bits on each."""
        strategy = self.model.distribute_strategy
        if int(strategy.num_replicas_in_sync) == self._replicas:
            return numbers
        others = [np.zeros_like(numbers)] * (self._replicas - 1)
        mine = iter([numbers, *others])
        given = strategy.experimental_distribute_values_from_function(
            lambda _: tf.constant(next(mine))
        )
        return np.array(strategy.experimental_local_results(self._totals(given))[0])

    @functools.cached_property
    def _totals(self) -> Any:
        """A traced function that sums over replicas; cached, since each new function is traced
        anew.
        """
        run = self.model.distribute_strategy.run
        return tf.function(lambda given: run(_total, args=(given,)), autograph=False)

    def _refuse_other_data(self, loss: float) -> None:
        """Raise if the data changed between two passes, while the model's state did not."""
        before = self._seen
        if abs(loss - before.loss) <= _SAME * max(abs(before.loss), 1e-6):
            return
        self._seen = _Seen(loss, self._state())
        if self._seen.state == before.state:
            raise ValueError(_OTHER_DATA % f"the loss was {before.loss:.6g} and is {loss:.6g} now")

    def _refuse_overflow(self, total: np.ndarray) -> None:
        if np.all(np.isfinite(total)):
            return
        rows = total.reshape(-1, self.size)
        bad = [path for path, part in self.parts.items() if not np.isfinite(rows[:, part]).all()]
        raise NotFiniteError(
            f"the loss of {self.model.name!r} is finite, but its derivatives with respect to "
            f"{bad[0]} are not. Look for an overflow, or for a root or a logarithm of zero"
        )


_OTHER_DATA = (
    "the data differ from pass to pass, so the matrix is undefined: %s. Pass data that do not "
    "change: no random augmentation, no sampling, and dataset.cache() if they come from a stream"
)


@tf.autograph.experimental.do_not_convert
def _total(value: Any) -> Any:
    return tf.distribute.get_replica_context().all_reduce("SUM", value)


def _known(found: Any, variable: Any) -> tf.Tensor:
    """Return a flat gradient, with zeros where there is none.

    A strategy would treat a scalar as a log value and add up the replicas' values.
    """
    if found is None:
        return tf.zeros([math.prod(variable.shape)], variable.dtype)
    found = tf.reshape(dense(found, variable), [-1])
    return tf.cast(found, tf.float32) if found.dtype.size < 4 else found


def refuse_other_strategies(model: Any, who: str) -> None:
    """Raise under TensorFlow's own strategies: they do not know each replica's part of a batch."""
    strategy = model.distribute_strategy
    replicas = int(strategy.num_replicas_in_sync)
    if replicas > 1 and scaling(strategy) is None:
        raise ValueError(
            f"{who} works on several replicas under a tfscale.ScaleStrategy, and {model.name!r} "
            f"was made in the scope of a {type(strategy).__name__} with {replicas}, which weights "
            "replicas equally, whatever rows they hold. Make the model in the scope of a "
            "ScaleStrategy; or measure a copy of it on one device, which "
            "keras.models.clone_model and set_weights make outside of the scope, compiled anew"
        )


def _loss(who: str, model: Any, loss: Any) -> tuple[Any, OwnLoss | None]:
    """Return the replacement for the compiled loss, and the user's own loss, if any."""
    expected = (
        "a loss of Keras or its name, or a function of the model and a batch that returns the "
        "losses of its rows, or their mean"
    )
    if isinstance(loss, (str, keras.losses.Loss)):
        try:
            return as_compiled(loss), None
        except ValueError:
            raise arguments.wrong(loss, "loss", expected) from None
    arguments.optional(arguments.function, loss, "loss", expected)
    if not getattr(model, "compiled", False):
        raise ValueError(
            f"{who} needs a loss, and {model.name!r} is not compiled: call model.compile(loss=...) "
            "first" + (", which may be any loss: yours is used" if loss else "")
        )
    return None, loss
