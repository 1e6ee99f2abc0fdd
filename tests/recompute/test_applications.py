"""Nets as people train them give the same bits: a few here, all in the full tests."""

import pytest

from tests.recompute.applications import BIASES, IN_ORDER, NETS, compare, in_a_process


@pytest.mark.parametrize("net", ["VGG16", pytest.param("MobileNetV3Small", marks=pytest.mark.full)])
def test_same_bits(net):
    assert [different for _, _, different in compare(net, None, ("sqrt",)).values()] == [[]]


@pytest.mark.full
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("onednn", ["on", "off"])
@pytest.mark.parametrize("biases", set(BIASES) - {"as it is"})
@pytest.mark.parametrize("net", NETS)
def test_all_nets(net, biases, onednn):
    for way, (_, segments, different) in in_a_process(net, biases, onednn):
        assert segments, way
        assert different in ([], [IN_ORDER]), (way, different)
