"""Quantizers: bounds, idempotence, scales by channel and by group."""

import numpy as np
import pytest

from tfscale.analysis.quantize.numbers import quantized

W = np.random.default_rng(0).standard_normal((3, 3, 4, 6)).astype("float32")


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("places", [{}, {"axis": -1}, {"axis": 3, "group": 4}])
def test_a_number_moves_by_half_a_step_at_most(bits, places):
    found = quantized(W, bits, **places)
    assert found.dtype == W.dtype and found.shape == W.shape
    assert np.abs(found - W).max() <= np.abs(W).max() / (2 ** (bits - 1) - 1) / 2 * (1 + 1e-5)
    np.testing.assert_allclose(quantized(found, bits, **places), found, rtol=1e-6)


def test_each_channel_has_its_own_scale():
    whole = quantized(W, 3, axis=-1)
    for channel in range(6):
        np.testing.assert_array_equal(whole[..., channel], quantized(W[..., channel], 3))


def test_channels_of_a_group_share_a_scale():
    whole = quantized(W, 3, axis=-1, group=4)
    np.testing.assert_array_equal(whole[..., :4], quantized(W[..., :4], 3))
    np.testing.assert_array_equal(whole[..., 4:], quantized(W[..., 4:], 3))


def test_zeros_stay_zeros():
    assert not quantized(np.zeros((4, 2), "float32"), 2, axis=-1).any()
