"""Every gradient travels on the wire that its user would expect."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, strategies as st

from tfscale.collectives.wires import FLOATS, WIRES
from tfscale.compression import Gradient, WirePolicy

LARGE = (512, 512)

# Paths and shapes as Keras 3 makes them.
EXACT = {
    "dense/bias": (4096,),
    "multi_head_attention/query/bias": (64, 64),
    "gru/gru_cell/bias": (2, 3072),
    "layer_normalization/gamma": (64, 64),
    "layer_normalization/beta": (64, 64),
    "rms_normalization/scale": (4096,),
    "Block/Pre_Bias": LARGE,
    "dense/bias:0": LARGE,
    "dense/kernel": (4, 3),
    "temperature": (),
    "my_layer/vector": (4096,),
}
ROUNDED = {
    "dense/kernel": LARGE,
    "embedding/embeddings": LARGE,
    "conv2d/kernel": (3, 3, 64, 64),
    "spectral_normalization/dense/kernel": LARGE,
    "bias_free_block/kernel": LARGE,
    "scale/kernel": LARGE,
    "rescaled": LARGE,
}


def wire_of(policy: WirePolicy, path: str, shape: tuple[int, ...], dtype: str) -> str:
    (wire,) = policy.method_of(Gradient(path, shape, dtype)).wires
    return wire


class TestDefaults:
    @pytest.mark.parametrize("path", EXACT)
    def test_small_and_sensitive_ones_stay_exact(self, path: str) -> None:
        assert wire_of(WirePolicy("int8"), path, EXACT[path], "float32") == "fp32"

    @pytest.mark.parametrize("path", ROUNDED)
    def test_all_others_take_the_wire(self, path: str) -> None:
        assert wire_of(WirePolicy("int8"), path, ROUNDED[path], "float32") == "int8"

    @pytest.mark.parametrize("wire", WIRES)
    def test_every_wire_may_be_chosen(self, wire: str) -> None:
        assert wire_of(WirePolicy(wire), "dense/kernel", LARGE, "float32") == wire

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_halves_take_the_wire(self, dtype: str) -> None:
        assert wire_of(WirePolicy("int8"), "dense/kernel", LARGE, dtype) == "int8"

    @pytest.mark.parametrize("dtype", ["float64", "int32", "int64", "bool"])
    def test_other_types_stay_exact(self, dtype: str) -> None:
        assert wire_of(WirePolicy("int8"), "dense/kernel", LARGE, dtype) == "fp32"

    def test_small_means_fewer_elements(self) -> None:
        policy = WirePolicy("int8", small=12)
        assert wire_of(policy, "kernel", (3, 4), "float32") == "int8"
        assert wire_of(policy, "kernel", (11, 1), "float32") == "fp32"

    def test_sensitive_may_be_something_else(self) -> None:
        policy = WirePolicy("int8", sensitive="^head/")
        assert wire_of(policy, "head/kernel", LARGE, "float32") == "fp32"
        assert wire_of(policy, "dense/bias", LARGE, "float32") == "int8"

    def test_a_policy_says_fp32_if_nothing_is_said(self) -> None:
        assert wire_of(WirePolicy(), "dense/kernel", LARGE, "float32") == "fp32"


class TestRules:
    def test_the_first_that_matches_counts(self) -> None:
        policy = WirePolicy("int4", rules={"head/": "bf16", "kernel$": "int8"})
        assert wire_of(policy, "head/kernel", LARGE, "float32") == "bf16"
        assert wire_of(policy, "dense/kernel", LARGE, "float32") == "int8"
        assert wire_of(policy, "embedding/embeddings", LARGE, "float32") == "int4"

    @pytest.mark.parametrize("path", EXACT)
    def test_they_count_more_than_defaults(self, path: str) -> None:
        policy = WirePolicy("fp32", rules={"": "int8"})
        assert wire_of(policy, path, EXACT[path], "float32") == "int8"

    @pytest.mark.parametrize("dtype", FLOATS)
    def test_they_may_round_every_float(self, dtype: str) -> None:
        assert wire_of(WirePolicy(rules={"": "int8"}), "dense/kernel", LARGE, dtype) == "int8"

    def test_one_that_cannot_be_kept_is_refused(self) -> None:
        policy = WirePolicy(rules={"^count": "fp32", "": "int8"})
        assert wire_of(policy, "counter", LARGE, "int64") == "fp32"
        with pytest.raises(TypeError, match=r"rule '' sends steps as 'int8'.*int64.*'fp32'"):
            wire_of(policy, "steps", LARGE, "int64")

    @given(st.permutations(["a", "b", "c"]))
    def test_their_order_is_a_part_of_the_policy(self, order: list[str]) -> None:
        rules = {"a": "int8", "b": "fp8", "c": "bf16"}
        policy = WirePolicy(rules={pattern: rules[pattern] for pattern in order})
        assert wire_of(policy, "abc", LARGE, "float32") == rules[order[0]]
        assert (policy == WirePolicy(rules=rules)) == (order == ["a", "b", "c"])


class TestWhatAUserMaySay:
    def test_a_name(self) -> None:
        assert WirePolicy.of("int8") == WirePolicy("int8")

    def test_rules_with_a_wire_for_the_rest(self) -> None:
        said = {"embedding": "bf16", "*": "int8"}
        assert WirePolicy.of(said) == WirePolicy("int8", rules={"embedding": "bf16"})
        assert "*" in said

    def test_rules_alone(self) -> None:
        assert WirePolicy.of({"kernel": "int8"}) == WirePolicy("fp32", rules={"kernel": "int8"})

    def test_a_policy(self) -> None:
        policy = WirePolicy("int8", small=7)
        assert WirePolicy.of(policy) is policy

    @pytest.mark.parametrize("wrong", [None, 8, ["int8"]])
    def test_nothing_else(self, wrong: object) -> None:
        with pytest.raises(ValueError, match="wire is 'fp32'.* or a mapping .* got "):
            WirePolicy.of(wrong)


class TestRefusals:
    def test_unknown_wires(self) -> None:
        message = "is 'fp32', 'bf16', .*got 'int7'. Did you mean 'int8'"
        for make in (
            lambda: WirePolicy("int7"),
            lambda: WirePolicy(rules={"kernel": "int7"}),
            lambda: WirePolicy.of({"*": "int7"}),
        ):
            with pytest.raises(ValueError, match=message):
                make()

    def test_no_near_match_is_made_up(self) -> None:
        with pytest.raises(ValueError, match="wire is 'fp32'.*; got 'zzz'$"):
            WirePolicy("zzz")

    @pytest.mark.parametrize("pattern", ["*kernel", "(", None])
    def test_bad_patterns(self, pattern: str | None) -> None:
        with pytest.raises(ValueError, match="is a regular expression .*'kernel\\$', not"):
            WirePolicy(rules={pattern: "int8"})
        with pytest.raises(ValueError, match="is a regular expression"):
            WirePolicy(sensitive=pattern)

    @pytest.mark.parametrize("small", [-1, 0.5, "many"])
    def test_bad_sizes(self, small: object) -> None:
        with pytest.raises(ValueError, match=f"0 or more; got {small!r}"):
            WirePolicy(small=small)


POLICIES = [
    WirePolicy(),
    WirePolicy("int8"),
    WirePolicy("int8", small=7),
    WirePolicy("int8", sensitive="head"),
    WirePolicy("int8", rules={"kernel": "bf16"}),
    WirePolicy("int8", rules={"kernel": "fp8"}),
    WirePolicy("int8", rules={"kernel": "bf16", "head": "fp8"}),
    WirePolicy("int8", rules={"head": "fp8", "kernel": "bf16"}),
]


class TestComparison:
    @pytest.mark.parametrize("policy", POLICIES, ids=repr)
    def test_only_equal_ones_are_equal(self, policy: WirePolicy) -> None:
        for other in POLICIES:
            assert (policy == other) == (policy is other)

    @pytest.mark.parametrize("policy", POLICIES, ids=repr)
    def test_printed_and_pickled_they_stay_the_same(self, policy: WirePolicy) -> None:
        for copy in (eval(repr(policy)), pickle.loads(pickle.dumps(policy))):
            assert copy == policy
            assert hash(copy) == hash(policy)
            assert repr(copy) == repr(policy)

    def test_a_policy_is_not_a_name(self) -> None:
        assert WirePolicy("int8") != "int8"

    def test_print_says_only_what_is_unusual(self) -> None:
        assert repr(POLICIES[1]) == "WirePolicy('int8')"
        assert repr(POLICIES[2]) == "WirePolicy('int8', small=7)"


def test_rules_that_match_nothing_are_told():
    policy = WirePolicy("int8", rules={"^head/": "bf16", "kernal": "fp16", "kernel": "int4"})
    assert policy.idle(["head/kernel", "tail/kernel"]) == ["kernal"]
    assert policy.idle([]) == ["^head/", "kernal", "kernel"]
    assert WirePolicy("int8").idle(["a"]) == []
