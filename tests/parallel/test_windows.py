"""Windows and halos: each output's inputs are there, and nothing else travels."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, strategies as st

from tfscale.parallel.windows import (
    Moves,
    Repeated,
    Transposed,
    Window,
    fits,
    others_padding,
    padding_of,
    slices,
)

sizes, kernels, strides = st.integers(1, 20), st.integers(1, 5), st.integers(1, 4)
paddings = st.sampled_from(["valid", "same"])


@given(sizes, kernels, strides, st.integers(1, 3), paddings)
def test_a_window_is_that_of_tensorflow(size, kernel, stride, dilation, padding):
    if stride > 1:
        dilation = 1  # TensorFlow has one of both
    window = Window.of(size, kernel, stride, dilation, padding)
    if window.outputs == 0:
        return
    x = np.random.default_rng(0).standard_normal((1, size, 1))
    weights = np.arange(1.0, kernel + 1)[:, None, None]
    expected = tf.nn.convolution(x, weights, stride, padding.upper(), dilations=dilation)
    before, after = others_padding(window)
    padded = np.pad(x, [(0, 0), (before, after), (0, 0)])
    found = tf.nn.convolution(padded, weights, stride, "VALID", dilations=dilation)
    np.testing.assert_allclose(found, expected)
    assert window.real_places(range(window.outputs)) == [
        sum(0 <= i < size for i in window.inputs(range(o, o + 1))[::dilation])
        for o in range(window.outputs)
    ]


@given(sizes, kernels, strides, paddings, st.integers(1, 4), st.integers(0, 3))
def test_slices_of_a_transposed_convolution_are_those_of_the_whole(
    size, kernel, stride, padding, ranks, rank
):
    reach = Transposed(size, kernel, stride, padding)
    if rank >= ranks or not fits([size, reach.outputs], ranks):
        return
    x = np.random.default_rng(0).standard_normal((1, size, 1))
    weights = np.arange(1.0, kernel + 1)[:, None, None]

    def transposed(x, outputs, padding):
        return tf.nn.conv_transpose(x, weights, (1, outputs, 1), stride, padding.upper()).numpy()

    expected = transposed(x, reach.outputs, padding)
    own = slices(reach.outputs, ranks)[rank]
    needed = reach.inputs(own)
    longest = (len(needed) - 1) * stride + max(kernel, stride)
    found = transposed(x[:, needed.start : needed.stop], longest, "valid")
    first = reach.cut_off(own)
    np.testing.assert_allclose(
        found[:, first : first + len(own)], expected[:, own.start : own.stop]
    )


@given(sizes, kernels, strides, st.integers(1, 3), paddings, st.integers(1, 5))
def test_ranks_get_what_they_need_once(size, kernel, stride, dilation, padding, ranks):
    for reach in (Window.of(size, kernel, stride, dilation, padding), Repeated(size, kernel)):
        if not fits([reach.size, reach.outputs], ranks):
            continue
        moves = Moves.of(reach, ranks)
        for rank, outputs in enumerate(slices(reach.outputs, ranks)):
            needed = reach.inputs(outputs)
            came = moves.received(rank)
            came[rank] = moves.kept(rank)
            before, after = padding_of(needed, size)
            every = [-1] * before + [i for each in came for i in each] + [-1] * after
            assert every == [i if 0 <= i < size else -1 for i in needed]
            assert [moves.sent(other)[rank] for other in range(ranks)] == moves.received(rank)


@pytest.mark.parametrize(("stride", "travel"), [(1, 2 * 3), (2, 3)])
def test_a_halo_is_as_small_as_can_be(stride, travel):
    """A kernel of 3 needs one index of each neighbour; with a stride of 2, of one neighbour."""
    assert Moves.of(Window.of(16, 3, stride, 1, "same"), 4).number == travel
