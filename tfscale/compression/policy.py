"""Policies: the wire, or the method, of each gradient."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from tfscale.collectives import wires
from tfscale.compression.adaptive import Adaptive
from tfscale.compression.gradient import Gradient
from tfscale.compression.method import Method, Wire, checked_method
from tfscale.support import arguments

# Few numbers with much influence. The last word of a path identifies them. The shape alone does
# not: an attention's bias and a layer norm's gamma may have two dimensions.
DEFAULT_SENSITIVE = r"(?i)(^|[/_])(bias|gamma|beta|scale)(:\d+)?$"


_OTHERS = "*"  # not a regular expression: stands for all gradients that no rule matches
ADAPTIVE = "adaptive"  # a method's name, as wires have names

Choice = TypeVar("Choice")


class _Rules(Generic[Choice]):
    """A choice for each gradient: by rules on paths, or else by the gradient's properties.

    Args:
        usual: choice without a rule, for gradients that need not be exact.
        exact: choice without a rule, for gradients that must be exact.
        rules, small, sensitive: see ``WirePolicy``.
    """

    def __init__(
        self,
        usual: Choice,
        exact: Choice,
        rules: Mapping[str, Choice],
        small: int,
        sensitive: str,
    ) -> None:
        self.small = arguments.whole(small, "small", 0, what="a number of elements")
        self._usual, self._exact = usual, exact
        self._rules = [(arguments.pattern(each, "rules"), rules[each]) for each in rules]
        self._sensitive = arguments.pattern(sensitive, "sensitive")

    def _chosen(self, path: str, shape: Sequence[int], dtype: str) -> tuple[Choice, str]:
        """Return the choice for a gradient, and the rule that made it."""
        for pattern, choice in self._rules:
            if pattern.search(path):
                return choice, f"the rule {pattern.pattern!r} for {path}"
        return (self._exact if self._keeps_exact(path, shape, dtype) else self._usual), ""

    @property
    def _choices(self) -> list[Choice]:
        return list(dict.fromkeys([self._usual, *(choice for _, choice in self._rules)]))

    def idle(self, paths: Sequence[str]) -> list[str]:
        """Return the rules that match none of these paths."""
        patterns = [pattern for pattern, _ in self._rules]
        return [p.pattern for p in patterns if not any(p.search(path) for path in paths)]

    def _keeps_exact(self, path: str, shape: Sequence[int], dtype: str) -> bool:
        return (
            dtype not in wires.FLOATS
            or dtype == "float64"  # its user wants all digits
            or len(shape) < 2
            or math.prod(shape) < self.small
            or self._sensitive.search(path) is not None
        )

    def describe(self) -> dict[str, Any]:
        """Return all settings of the policy, in types that JSON knows."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """Return a short string, equal on every host; workers whose strings differ disagree."""
        text = json.dumps(self.describe(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, type(self)):
            return NotImplemented
        return self.describe() == other.describe()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        usual = type(self)(self._usual).describe()  # type: ignore[call-arg]
        own = {key: value for key, value in self.describe().items() if value != usual[key]}
        if self._rules:
            own["rules"] = {pattern.pattern: choice for pattern, choice in self._rules}
        said = [repr(self._usual), *(f"{key}={value!r}" for key, value in own.items())]
        return f"{type(self).__name__}({', '.join(said)})"


class WirePolicy(_Rules[str]):
    """The choice of a wire for each gradient.

    The first rule that matches decides. Without a matching rule, the wire is the lossless
    ``"fp32"`` for tensors that are small, have fewer than two dimensions, or are sensitive, and for
    float64 and integers. All others use ``wire``.

    Args:
        wire: name of the wire of all other gradients.
        rules: wires by regular expressions, which are searched in a variable's path, such as
            ``"dense_1/kernel"``. The first match counts.
        small: tensors with fewer elements than this are small.
        sensitive: a regular expression; a variable is sensitive if its path contains a match.

    Example:
        >>> policy = WirePolicy("int8", rules={"^head/": "bf16"})
        >>> policy.wire_of("dense/kernel", (512, 512), "float32")
        'int8'
        >>> policy.wire_of("dense/bias", (4096,), "float32")
        'fp32'
        >>> policy.wire_of("head/bias", (10,), "float32")
        'bf16'
    """

    def __init__(
        self,
        wire: str = wires.LOSSLESS,
        rules: Mapping[str, str] | None = None,
        small: int = 1024,
        sensitive: str = DEFAULT_SENSITIVE,
    ) -> None:
        named = _checked_rules({} if rules is None else rules, "rules", wires.checked)
        super().__init__(wires.checked(wire), wires.LOSSLESS, named, small, sensitive)

    @classmethod
    def of(cls, wire: str | Mapping[str, str] | WirePolicy) -> WirePolicy:
        """Make a policy from what a user passes as ``wire``.

        Args:
            wire: a wire's name; a policy; or a mapping of rules, in which the key ``"*"`` (not a
                regular expression) gives the wire of all gradients that no rule matches. Without
                that key, they use ``"fp32"``.

        Example:
            >>> WirePolicy.of({"embedding": "bf16", "*": "int8"})
            WirePolicy('int8', rules={'embedding': 'bf16'})
        """
        if isinstance(wire, WirePolicy):
            return wire
        if isinstance(wire, Mapping):
            rules = _checked_rules(wire, "wire", wires.checked)
            return cls(rules.pop(_OTHERS, wires.LOSSLESS), rules)
        other = "a mapping from regular expressions to these, or a WirePolicy"
        return cls(arguments.choice(wire, "wire", wires.WIRES, other))

    def wire_of(self, path: str, shape: Sequence[int], dtype: str) -> str:
        """Return the wire of one variable's gradient.

        Args:
            path: path of the variable.
            shape: shape of the variable.
            dtype: name of its type, such as ``"float32"``.
        """
        wire, who = self._chosen(path, shape, dtype)
        _check_carries(wire == wires.LOSSLESS, wire, dtype, who)
        return wire

    @property
    def wire(self) -> str:
        """The wire of gradients that no rule matches and that need not be exact."""
        return self._usual

    @property
    def wires(self) -> list[str]:
        """All wires that the policy may choose, each once."""
        return self._choices

    def describe(self) -> dict[str, Any]:
        """Return all settings of the policy, in types that JSON knows."""
        return {
            "wire": self.wire,
            "rules": [[pattern.pattern, wire] for pattern, wire in self._rules],
            "small": self.small,
            "sensitive": self._sensitive.pattern,
        }

    def methods(self, error_feedback: bool | None = None) -> MethodPolicy:
        """Return this policy as a policy of methods."""

        def method(wire: str) -> Wire:
            return Wire(wire, error_feedback)

        rules = {pattern.pattern: method(wire) for pattern, wire in self._rules}
        return MethodPolicy(method(self.wire), rules, self.small, self._sensitive.pattern)


class MethodPolicy(_Rules[Method]):
    """The choice of a method for each gradient.

    The first rule that matches decides. Without a matching rule, the method is ``Wire("fp32")``,
    which is exact, for tensors that are small, have fewer than two dimensions, or are sensitive,
    and for float64 and integers. All others use ``method``. A method may leave a gradient that it
    does not suit to another method: ``PowerSGD`` leaves vectors to a wire.

    Args:
        method: method of all other gradients; a string is the name of a wire.
        rules, small, sensitive: as for ``WirePolicy``, with methods instead of wires.

    Example:
        >>> from tfscale.compression import Gradient, PowerSGD
        >>> policy = MethodPolicy(PowerSGD(rank=4), rules={"embedding": "int8"})
        >>> print(policy.method_of(Gradient("dense/kernel", (512, 512), "float32")))
        PowerSGD(4) + feedback
        >>> print(policy.method_of(Gradient("dense/bias", (512,), "float32")))
        fp32
    """

    def __init__(
        self,
        method: Method | str = wires.LOSSLESS,
        rules: Mapping[str, Method | str] | None = None,
        small: int = 1024,
        sensitive: str = DEFAULT_SENSITIVE,
    ) -> None:
        named = _checked_rules({} if rules is None else rules, "rules", _method)
        super().__init__(_method(method, "method"), Wire(), named, small, sensitive)

    @classmethod
    def of(cls, method: Method | str | Mapping[str, Method | str] | MethodPolicy) -> MethodPolicy:
        """Make a policy from what a user passes as ``method``.

        Args:
            method: a method; a wire's name; a policy; or a mapping of rules, as for
                ``WirePolicy.of``.
        """
        if isinstance(method, MethodPolicy):
            return method
        if isinstance(method, Mapping):
            rules = _checked_rules(method, "method", _method)
            return cls(rules.pop(_OTHERS, wires.LOSSLESS), rules)
        return cls(method)

    def method_of(self, gradient: Gradient) -> Method:
        """Return the method of one variable's gradient."""
        method, who = self._chosen(gradient.path, gradient.shape, gradient.dtype)
        suited = method.suited(gradient)
        _check_carries(suited.lossless, str(suited), gradient.dtype, who)
        return suited

    @property
    def method(self) -> Method:
        """The method of gradients that no rule matches and that need not be exact."""
        return self._usual

    @property
    def methods(self) -> list[Method]:
        """All methods that the policy may choose or leave gradients to, each once."""
        every = [self._exact, *self._choices]
        return list(dict.fromkeys(one for each in every for one in (each, *each.others)))

    def describe(self) -> dict[str, Any]:
        """Return all settings of the policy, in types that JSON knows."""
        return {
            "method": repr(self.method),
            "rules": [[pattern.pattern, repr(method)] for pattern, method in self._rules],
            "small": self.small,
            "sensitive": self._sensitive.pattern,
        }


def _method(given: Method | str, name: str) -> Method:
    if isinstance(given, str) and given == ADAPTIVE:
        return Adaptive()
    return checked_method(given, name, ADAPTIVE)


def _checked_rules(
    rules: Mapping[str, Any], name: str, check: Callable[[Any, str], Any]
) -> dict[str, Any]:
    expected = "a mapping from regular expressions to choices, such as {'embedding': 'bf16'}"
    found = arguments.mapping(rules, name, expected)
    for pattern in found:
        if pattern != _OTHERS:
            arguments.pattern(pattern, f"a key of {name}")
    return {pattern: check(each, f"{name}[{pattern!r}]") for pattern, each in found.items()}


def _check_carries(lossless: bool, name: str, dtype: str, who: str) -> None:
    if not lossless and dtype not in wires.FLOATS:
        raise TypeError(
            f"{who} says {name!r}, which carries {', '.join(wires.FLOATS)}, and not {dtype}. "
            f"Put a rule with {wires.LOSSLESS!r}, which carries every type, before it."
        )
