"""``tfscale bench experts``, on small layers."""

import numpy as np
import pytest
import tensorflow as tf

from tfscale.bridge.installed import KERAS_2
from tfscale.tools.bench import experts

pytestmark = pytest.mark.skipif(KERAS_2, reason="Experts needs Keras 3")


def test_it_measures_every_part(capsys):
    words = ["--tokens", "16", "--features", "4", "--units", "8", "--rounds", "1"]
    assert experts.main(words) == 0
    printed = capsys.readouterr().out
    for name in ("chosen experts", "all experts", "all experts, by XLA"):
        assert printed.count(f"{name} ") >= len(experts.PARTS)


def test_contestants_compute_the_same():
    layer, x = experts._layer(8, 2, 50, 6, 12)
    np.testing.assert_allclose(layer(x), experts.all_experts(layer, x), atol=1e-5)
    assert tf.reduce_max(tf.abs(layer(x))) > 0.1
