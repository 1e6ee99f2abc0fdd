"""Policies: the wire, or the method, of each gradient."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tfscale.collectives import wires
from tfscale.compression.adaptive import Adaptive
from tfscale.compression.gradient import Gradient
from tfscale.compression.method import Method, Wire, checked_method
from tfscale.support import arguments

# Few numbers with much influence. The last word of a path identifies them. The shape alone does
# not: an attention's bias and a layer norm's gamma may have two dimensions.
DEFAULT_SENSITIVE = r"(?i)(^|[/_])(bias|gamma|beta|scale)(:\d+)?$"


_OTHERS = "*"  # not a regular expression: stands for all gradients that no rule matches
_SMALL = 1024  # elements
ADAPTIVE = "adaptive"  # a method's name, as wires have names


class MethodPolicy:
    """The choice of a method for each gradient.

    The first rule that matches decides. Without a matching rule, the method is ``Wire("fp32")``,
    which is exact, for tensors that are small, have fewer than two dimensions, or are sensitive,
    and for float64 and integers. All others use ``method``. A method may leave a gradient that it
    does not suit to another method: ``PowerSGD`` leaves vectors to a wire.

    Args:
        method: method of all other gradients; a string is the name of a wire.
        rules: methods by regular expressions, which are searched in a variable's path, such as
            ``"dense_1/kernel"``. The first match counts.
        small: tensors with fewer elements than this are small.
        sensitive: a regular expression; a variable is sensitive if its path contains a match.

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
        small: int = _SMALL,
        sensitive: str = DEFAULT_SENSITIVE,
    ) -> None:
        rules = _parsed({} if rules is None else rules, "rules", _method)
        self._fill(_method(method, "method"), rules, small, sensitive)

    def _fill(
        self, method: Method, rules: Mapping[str, Method], small: int, sensitive: str
    ) -> None:
        self.method = method  # for gradients that no rule matches and that need not be exact
        self.small = arguments.whole(small, "small", 0, what="a number of elements")
        self._rules = [(arguments.pattern(each, "rules"), rules[each]) for each in rules]
        self._sensitive = arguments.pattern(sensitive, "sensitive")

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
            return cls._of_rules(_parsed(method, "method", _method))  # type: ignore[no-any-return]
        return cls(method)

    @classmethod
    def _of_rules(cls, rules: dict[str, Any]) -> Any:
        policy = cls()
        policy._fill(rules.pop(_OTHERS, Wire()), rules, policy.small, DEFAULT_SENSITIVE)
        return policy

    def method_of(self, gradient: Gradient) -> Method:
        """Return the method of one variable's gradient."""
        for pattern, method in self._rules:
            if pattern.search(gradient.path):
                suited = method.suited(gradient)
                if suited.lossless or gradient.dtype in wires.FLOATS:
                    return suited
                raise TypeError(
                    f"the rule {pattern.pattern!r} sends {gradient.path} as {str(suited)!r}, but "
                    f"this variable is {gradient.dtype}, and {str(suited)!r} carries only "
                    f"{', '.join(wires.FLOATS)}. Put a rule with {wires.LOSSLESS!r}, which carries "
                    "every type, before this rule."
                )
        return Wire() if self._keeps_exact(gradient) else self.method.suited(gradient)

    def keeping(self, paths: Sequence[str]) -> MethodPolicy:
        """Return the same choices, but that variables of these paths stay exact."""
        policy = MethodPolicy()
        method, rules, small, sensitive = self._settings
        kept = {f"^{re.escape(path)}$": Wire() for path in paths}
        policy._fill(method, {**kept, **dict(rules)}, small, sensitive)
        return policy

    def _keeps_exact(self, gradient: Gradient) -> bool:
        return (
            gradient.dtype not in wires.FLOATS
            or gradient.dtype == "float64"  # its user wants all digits
            or len(gradient.shape) < 2
            or gradient.elements < self.small
            or self._sensitive.search(gradient.path) is not None
        )

    @property
    def methods(self) -> list[Method]:
        """All methods that the policy may choose or leave gradients to, each once."""
        every = [Wire(), self.method, *(method for _, method in self._rules)]
        return list(dict.fromkeys(one for each in every for one in (each, *each.others)))

    def idle(self, paths: Sequence[str]) -> list[str]:
        """Return the rules that match none of these paths."""
        patterns = [pattern for pattern, _ in self._rules]
        return [p.pattern for p in patterns if not any(p.search(path) for path in paths)]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, MethodPolicy) and self._settings == other._settings

    def __hash__(self) -> int:
        return hash(self._settings)

    @property
    def _settings(self) -> tuple[Any, ...]:
        rules = tuple((pattern.pattern, method) for pattern, method in self._rules)
        return (self.method, rules, self.small, self._sensitive.pattern)

    def __repr__(self) -> str:
        method, rules, small, sensitive = self._settings
        said = {
            "rules": {pattern: self._word(one) for pattern, one in rules},
            "small": small,
            "sensitive": sensitive,
        }
        usual = {"rules": {}, "small": _SMALL, "sensitive": DEFAULT_SENSITIVE}
        words = [f"{key}={value!r}" for key, value in said.items() if value != usual[key]]
        return f"{type(self).__name__}({', '.join([repr(self._word(method)), *words])})"

    def _word(self, method: Method) -> Any:
        return method


class WirePolicy(MethodPolicy):
    """The choice of a wire for each gradient: a ``MethodPolicy`` whose methods are all wires.

    Args:
        wire: name of the wire of all gradients that no rule matches and that need not be exact.
        rules: names of wires, by regular expressions.
        small, sensitive: as for ``MethodPolicy``.

    Example:
        >>> policy = WirePolicy("int8", rules={"^head/": "bf16"})
        >>> print(policy.method_of(Gradient("dense/kernel", (512, 512), "float32")))
        int8
        >>> print(policy.method_of(Gradient("dense/bias", (4096,), "float32")))
        fp32
        >>> print(policy.method_of(Gradient("head/bias", (10,), "float32")))
        bf16
    """

    def __init__(
        self,
        wire: str = wires.LOSSLESS,
        rules: Mapping[str, str] | None = None,
        small: int = _SMALL,
        sensitive: str = DEFAULT_SENSITIVE,
    ) -> None:
        named = _parsed({} if rules is None else rules, "rules", _wire)
        self._fill(_wire(wire, "wire"), named, small, sensitive)

    @classmethod
    def of(cls, wire: str | Mapping[str, str] | WirePolicy) -> WirePolicy:  # type: ignore[override]
        """Make a policy from what a user passes as ``wire``.

        Args:
            wire: a wire's name; a policy; or a mapping of rules, in which the key ``"*"`` (not a
                regular expression) gives the wire of all gradients that no rule matches. Without
                that key, they use ``"fp32"``.

        Example:
            >>> WirePolicy.of({"embedding": "bf16", "*": "int8"})
            WirePolicy('int8', rules={'embedding': 'bf16'})
        """
        return wire_policy_of(wire, "wire", cls)

    def with_feedback(self, feedback: bool | None) -> MethodPolicy:
        """Return the same choices, with or without error feedback; None for each wire's default."""
        policy = MethodPolicy()
        method, rules, small, sensitive = self._settings
        changed = {key: dataclasses.replace(one, feedback=feedback) for key, one in rules}
        policy._fill(dataclasses.replace(method, feedback=feedback), changed, small, sensitive)
        return policy

    def _word(self, method: Method) -> str:
        return method.wires[0]


def wire_policy_of(
    wire: Any, name: str = "wire", kind: type[WirePolicy] = WirePolicy
) -> WirePolicy:
    """Return the policy that an argument asks for, which messages call by its own name."""
    if isinstance(wire, WirePolicy):
        return wire
    if isinstance(wire, Mapping):
        return kind._of_rules(_parsed(wire, name, _wire))  # type: ignore[no-any-return]
    other = "a mapping from regular expressions to these, or a WirePolicy"
    return kind(arguments.choice(wire, name, wires.WIRES, other))


def policy_of(wire: Any, method: Any, error_feedback: bool | None) -> MethodPolicy:
    """Return the policy that a user's arguments of these names ask for.

    Raises:
        ValueError: an argument is wrong, or ``method`` is given together with another argument.
    """
    if method is None:
        return WirePolicy.of(wires.LOSSLESS if wire is None else wire).with_feedback(error_feedback)
    for name, other in {"wire": wire, "error_feedback": error_feedback}.items():
        if other is not None:
            raise ValueError(
                f"method={method!r} excludes {name}, got {name}={other!r}: both say how gradients "
                'are summed. Leave one of them out. method={"head": "bf16", "*": Wire("int8", '
                "feedback=True)} says all that wire and error_feedback can"
            )
    return MethodPolicy.of(method)


def _method(given: Method | str, name: str) -> Method:
    if isinstance(given, str) and given == ADAPTIVE:
        return Adaptive()
    return checked_method(given, name, ADAPTIVE)


def _wire(given: Any, name: str) -> Wire:
    return Wire(wires.checked(given, name))


def _parsed(
    rules: Mapping[str, Any], name: str, parse: Callable[[Any, str], Method]
) -> dict[str, Method]:
    expected = "a mapping from regular expressions to choices, such as {'embedding': 'bf16'}"
    found = arguments.mapping(rules, name, expected)
    for pattern in found:
        if pattern != _OTHERS:
            arguments.pattern(pattern, f"a key of {name}")
    return {pattern: parse(each, f"{name}[{pattern!r}]") for pattern, each in found.items()}
