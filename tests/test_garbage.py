"""The garbage collector rests in a block, and is afterwards as it was before."""

import gc

import pytest

from tfscale.support.garbage import without_collection


def test_it_goes_on_after_an_error():
    with pytest.raises(KeyError), without_collection():
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()


def test_it_stays_off_where_a_program_has_turned_it_off():
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_it_rests_to_the_end_of_the_outer_block():
    with without_collection():
        with without_collection():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
