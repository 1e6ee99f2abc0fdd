"""Every gradient travels once, early, and with its like."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from tfscale.compression import Gradient, MethodPolicy
from tfscale.compression.gradient import ELEMENT_BYTES
from tfscale.exchange.buckets import Bucket, pack

POLICY = MethodPolicy("int8", rules={"embed": "bf16"}, small=20)


def gradient(path: str, *shape: int, dtype: str = "float32") -> Gradient:
    return Gradient(path, shape, dtype)


GRADIENTS = st.lists(
    st.builds(
        Gradient,
        st.sampled_from(["a/kernel", "b/kernel", "b/bias", "embed/rows"]),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
        st.sampled_from(["float32", "float16", "float64"]),
    ),
    max_size=40,
)
BYTES = st.integers(1, 2000)


def size(bucket: Bucket, gradients: list[Gradient]) -> int:
    items = {"float32": 4, "float16": 2, "float64": 8}
    return sum(math.prod(gradients[m].shape) * items[gradients[m].dtype] for m in bucket.members)


def completed(packed: tuple[Bucket, ...], gradients: list[Gradient]) -> list[Bucket]:
    """The buckets as a backward pass completes them, gradient after gradient."""
    missing = {bucket: set(bucket.members) for bucket in packed}
    order = []
    for position in reversed(range(len(gradients))):
        for bucket, members in missing.items():
            if position in members:
                members.remove(position)
                if not members:
                    order.append(bucket)
    return order


@given(GRADIENTS, BYTES, BYTES)
def test_every_gradient_is_in_one_bucket(gradients, bucket_bytes, first_bytes) -> None:
    packed = pack(gradients, POLICY, bucket_bytes, first_bytes)
    members = [member for bucket in packed for member in bucket.members]
    assert sorted(members) == list(range(len(gradients)))
    assert all(bucket.members for bucket in packed)


@given(GRADIENTS, BYTES, BYTES)
def test_a_bucket_has_one_wire_and_one_type(gradients, bucket_bytes, first_bytes) -> None:
    for bucket in pack(gradients, POLICY, bucket_bytes, first_bytes):
        for one in (gradients[member] for member in bucket.members):
            assert one.dtype == bucket.dtype
            assert POLICY.method_of(one) == bucket.method


@given(GRADIENTS, BYTES, BYTES)
def test_buckets_are_as_full_as_they_may_be(gradients, bucket_bytes, first_bytes) -> None:
    """None exceeds its limit unless alone, and none is closed while the next one fits."""
    packed = pack(gradients, POLICY, bucket_bytes, first_bytes)
    for kind in {(bucket.method, bucket.dtype) for bucket in packed}:
        alike = [bucket for bucket in packed if (bucket.method, bucket.dtype) == kind]
        limits = [min(first_bytes, bucket_bytes)] + [bucket_bytes] * (len(alike) - 1)
        for bucket, limit in zip(alike, limits, strict=True):
            assert size(bucket, gradients) <= limit or len(bucket.members) == 1
        for bucket, following, limit in zip(alike, alike[1:], limits):
            next_one = Bucket("", *kind, following.members[:1])
            assert size(bucket, gradients) + size(next_one, gradients) > limit


@given(GRADIENTS, BYTES, BYTES)
def test_the_last_layer_goes_first(gradients, bucket_bytes, first_bytes) -> None:
    packed = pack(gradients, POLICY, bucket_bytes, first_bytes)
    assert completed(packed, gradients) == list(packed)
    for kind in {(bucket.method, bucket.dtype) for bucket in packed}:
        alike = [bucket for bucket in packed if (bucket.method, bucket.dtype) == kind]
        members = [member for bucket in alike for member in bucket.members]
        assert members == sorted(members, reverse=True)


@given(GRADIENTS, BYTES, BYTES)
def test_names_are_unique_and_no_accident(gradients, bucket_bytes, first_bytes) -> None:
    packed = pack(gradients, POLICY, bucket_bytes, first_bytes)
    assert len({bucket.name for bucket in packed}) == len(packed)
    assert packed == pack(list(gradients), POLICY, bucket_bytes, first_bytes)


def test_names_say_what_is_inside() -> None:
    gradients = [
        gradient("model/conv/kernel", 5, 5),
        gradient("model/conv/bias", 5),
        gradient("model/block/dense/kernel", 5, 5),
        gradient("model/block/dense/bias", 5),
    ]
    packed = pack(gradients, POLICY, bucket_bytes=1000)
    assert [(bucket.name, str(bucket.method)) for bucket in packed] == [
        ("gradients 0: dense/bias..conv/bias", "fp32"),
        ("gradients 1: dense/kernel..conv/kernel", "int8"),
    ]
    (alone,) = pack(gradients[:1], POLICY, bucket_bytes=1000)
    assert alone.name == "gradients 0: conv/kernel"


def test_a_bucket_waits_for_its_last_gradient_not_for_its_neighbours() -> None:
    """The kernels' bucket is closed by the first kernel, long after it is complete."""
    gradients = [
        gradient("first/kernel", 10, 10),
        gradient("first/bias", 5),
        gradient("last/kernel", 10, 10),
    ]
    packed = pack(gradients, POLICY, bucket_bytes=400)
    assert [bucket.members for bucket in packed] == [(2,), (1,), (0,)]


def test_nothing_needs_no_bucket() -> None:
    assert pack([], POLICY, bucket_bytes=1000) == ()


@pytest.mark.parametrize("sizes", [(0, 5), (5, -1)])
def test_bad_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="_bytes must be a number of bytes, 1 or more; got"):
        pack([], POLICY, *sizes)


def test_other_types_are_refused() -> None:
    with pytest.raises(TypeError, match=r"gradient of dense/kernel has type complex64.*float32"):
        pack([gradient("dense/kernel", 5, dtype="complex64")], POLICY, 1000)


def test_types_are_those_of_the_collectives() -> None:
    from tfscale.ops import DTYPES

    assert {dtype.name: dtype.size for dtype in DTYPES} == ELEMENT_BYTES
