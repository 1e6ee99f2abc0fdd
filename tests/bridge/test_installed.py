"""A Keras without a private name that tfscale relies on is refused when a strategy is made."""

import keras
import pytest

from tfscale import ScaleStrategy
from tfscale.bridge import installed


@pytest.fixture(autouse=True)
def looked_up_anew():
    installed.check.cache_clear()
    yield
    installed.check.cache_clear()


def test_this_keras_has_all_names():
    installed.check()
    assert all(installed._names().values())


@pytest.mark.parametrize(
    "owner, name",
    [
        (keras.Model, "_maybe_symbolic_build"),
        (keras.optimizers.Optimizer, "_clip_gradients"),
        (keras.layers.BatchNormalization, "_moments"),
    ],
)
def test_a_name_that_is_gone_is_said(monkeypatch, owner, name):
    definer = next(each for each in owner.__mro__ if name in vars(each))
    monkeypatch.delattr(definer, name)
    with pytest.raises(ImportError, match=f"no {owner.__name__}.{name}. .*pip install"):
        ScaleStrategy(devices=["CPU:0"])


def test_a_variable_of_fit_that_is_gone_is_said(monkeypatch):
    def fit(self, x=None, callbacks=None, epochs=1):
        """Stand in for the ``fit`` of another Keras."""

    monkeypatch.setattr(keras.Model, "fit", fit)
    with pytest.raises(ImportError, match="no variable 'epoch_iterator' in Model.fit.*pip install"):
        ScaleStrategy(devices=["CPU:0"])


def test_an_attribute_that_compile_no_longer_sets_is_said(monkeypatch):
    def compile(self, optimizer="rmsprop", loss=None):
        """Stand in for the ``compile`` of another Keras."""
        self._losses_of_compile = loss

    for one in keras.Model.__mro__:
        if "compile" in vars(one):
            monkeypatch.setattr(one, "compile", compile)
    with pytest.raises(ImportError, match="no Model._compile_loss and no Model._compile_metrics"):
        ScaleStrategy(devices=["CPU:0"])


def test_a_step_of_tf_keras_is_refused():
    """Keras is ``tf.keras`` where TF_USE_LEGACY_KERAS is set.

    ``make test-ray`` tries a real one.
    """

    def run_step():
        raise AssertionError("it ran")

    run_step.__module__ = "tf_keras.src.engine.training"
    with pytest.raises(ValueError, match="TF_USE_LEGACY_KERAS is set.*`import keras`"):
        ScaleStrategy(devices=["CPU:0", "CPU:1"]).run(run_step)
