"""A callback that trains on adversarial samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfscale.bridge.callbacks import steps_of_epoch
from tfscale.bridge.installed import refuse_keras_2
from tfscale.callbacks import progress
from tfscale.callbacks.one_fit import OneFit
from tfscale.support import arguments
from tfscale.training.adversarial import PGD, losses
from tfscale.training.adversarial.attacks import checked_attack
from tfscale.training.adversarial.inputs import checked_names
from tfscale.training.adversarial.step import AdversarialStep

Amount = float | Callable[[int], float]


class Adversarial(keras.callbacks.Callback):
    r"""A callback that trains on samples moved slightly towards a higher loss.

    Before each step of ``fit``, an attack moves a share of the batch's samples, using the model's
    current weights. The step itself is the model's own, so metrics are those of the moved samples.
    Such training flattens the loss around its minima, which matters most for large batches [1].

    - **What moves.** The attack uses the gradients of the compiled loss by the inputs, with sample
      weights and masks. A sample of weight 0, and a masked step, stay as they are. Inputs that are
      not floating-point numbers raise an error that names them; ``inputs`` chooses among several.
    - **What does not change.** The attack calls the model as in evaluation: no dropout, and batch
      normalization uses its moving statistics. It changes no variable: no statistics, seeds,
      metrics.
    - **Which samples.** Each sample of a batch moves with probability ``share``, drawn from its own
      values and the step's number. So any number of replicas move the same samples.
    - **Replicas** train as one device does, except for numbers whose gradient is so small that
      rounding decides its sign.
    - **Cost.** Each step of the attack costs a forward and a backward pass by the inputs of the
      whole batch, whatever the share. It costs nothing while the share is 0.
    - **Resuming.** ``share`` and ``strength`` depend on the optimizer's step alone, so a training
      that resumes from a checkpoint has the right ones. With ``steps_per_execution``, all steps of
      an execution use the values of its first step.

    Args:
        attack: ``FGSM`` or ``PGD`` of ``tfscale.adversarial``.
        share: share of the samples that move, from 0 to 1: a number, a schedule of
            ``tfscale.schedules``, or a function from the step to a number.
        strength: factor of the attack's epsilon; also a number, a schedule or a function.
        inputs: names of the inputs to move: keys of a dict, or places in a list, such as ``"0"``.

    Example:
        >>> attack = tfscale.adversarial.FGSM(0.05, low=0.0, high=1.0)
        >>> fading = tfscale.schedules.Polynomial(0.2, end=10, unit="epochs")
        >>> adversarial = tfscale.callbacks.Adversarial(attack, share=fading)
        >>> history = model.fit(x, y, epochs=2, verbose=0, callbacks=[adversarial])

    Reference:
        [1] Yao, Gholami, Arfeen, Liaw, Gonzalez, Keutzer, Mahoney, Large batch size training of
        neural networks with adversarial training and second-order information,
        https://arxiv.org/abs/1810.01021.
    """

    def __init__(
        self,
        attack: PGD,
        *,
        share: Amount = 1.0,
        strength: Amount = 1.0,
        inputs: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        refuse_keras_2("Adversarial changes the steps of Keras 3")
        self.attack = checked_attack(attack)
        self._inputs = checked_names(inputs)
        self._amounts = {"share": share, "strength": strength}
        for name, amount in self._amounts.items():
            if not callable(amount):
                self._amounts[name] = _checked(name, amount)
        self._amount_at: dict[str, Callable[[int], float]] = {}
        self._variables: dict[str, Any] = {}
        self._values: dict[str, float] = {}
        self._fit: OneFit | None = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Replace the model's step for this ``fit``."""
        model = self.model
        losses.check(model)
        steps = steps_of_epoch(self)
        self._amount_at = {n: _by_step(n, amount, steps) for n, amount in self._amounts.items()}
        with model.distribute_strategy.scope():
            self._variables = {
                name: tf.Variable(0.0, trainable=False, name=f"adversarial_{name}")
                for name in self._amounts
            }
        self._values = dict.fromkeys(self._amounts, 0.0)
        step = AdversarialStep(self.attack, self._inputs, **self._variables)
        self._fit = OneFit(model, type(self).__name__, step=step)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Set the share and the strength of an execution."""
        step = progress.steps(self.model)
        for name, amount_at in self._amount_at.items():
            value = _checked(name, float(amount_at(step)))
            if value != self._values[name]:
                self._variables[name].assign(value)
                self._values[name] = value

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Log the share and the epsilon."""
        if logs is not None:
            logs["adversarial_share"] = self._values["share"]
            logs["adversarial_epsilon"] = self._values["strength"] * self.attack.epsilon

    def on_train_end(self, logs: Any = None) -> None:
        """Restore the model's own step."""
        if self._fit is not None:
            self._fit.end()
        self._fit = None


def _by_step(name: str, amount: Amount, steps: int | None) -> Callable[[int], float]:
    """Return a function from the step to the amount."""
    if not callable(amount):
        return functools.partial(_always, amount)
    amount_at: Callable[[int], float] = progress.in_steps(amount, steps, f"Adversarial({name}=...)")
    if isinstance(amount_at, keras.optimizers.schedules.LearningRateSchedule):
        traced = tf.function(amount_at, [tf.TensorSpec([], tf.int64)])
        return lambda step: float(traced(step))
    return amount_at


def _always(amount: float, step: int) -> float:
    return amount


def _checked(name: str, value: float) -> float:
    most = 1 if name == "share" else arguments.LARGEST_REAL
    return arguments.real(
        value, name, 0, most, what="a number or a function from a step to a number"
    )
