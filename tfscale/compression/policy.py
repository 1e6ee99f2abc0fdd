"""Which gradient is sent on which wire."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tfscale import wires

# Few numbers with much say. The last word of a path tells them, for the shape alone
# does not: an attention's bias and a layer norm's gamma may have two dimensions.
DEFAULT_SENSITIVE = r"(?i)(^|[/_])(bias|gamma|beta|scale)(:\d+)?$"


class WirePolicy:
    """The wire on which each gradient is sent.

    The wire of the first rule that matches. Without one, the lossless ``"fp32"`` for tensors
    that are small, have fewer than two dimensions, or are sensitive, and for float64 and
    integers; ``wire`` for all others.

    Args:
        wire: the name of the wire of all other gradients.
        rules: wires by regular expressions, which are searched in a variable's path, such
            as ``"dense_1/kernel"``. The first that matches counts.
        small: tensors with fewer elements than this are small.
        sensitive: a regular expression; if it is found in a variable's path, the variable
            is sensitive.

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
        if not isinstance(small, int) or small < 0:
            raise ValueError(f"small is a number of elements, 0 or more; got {small!r}")
        self.wire = wires.checked(wire)
        self.small = small
        self._rules = [(_compiled(p), wires.checked(w)) for p, w in (rules or {}).items()]
        self._sensitive = _compiled(sensitive)

    @classmethod
    def of(cls, wire: str | Mapping[str, str] | WirePolicy) -> WirePolicy:
        """Make a policy from what a user passes as ``wire``.

        Args:
            wire: a wire's name; a policy; or a mapping of rules, in which the key ``"*"``
                (no regular expression) gives the wire of all that no rule matches. Without
                that key it is ``"fp32"``.

        Example:
            >>> WirePolicy.of({"embedding": "bf16", "*": "int8"})
            WirePolicy('int8', rules={'embedding': 'bf16'})
        """
        if isinstance(wire, WirePolicy):
            return wire
        if isinstance(wire, str):
            return cls(wire)
        if isinstance(wire, Mapping):
            rules = dict(wire)
            return cls(rules.pop("*", wires.LOSSLESS), rules)
        raise TypeError(
            f"a wire is a name, a mapping from regular expressions to names, or a WirePolicy; "
            f"got {wire!r}"
        )

    def wire_of(self, path: str, shape: Sequence[int], dtype: str) -> str:
        """The wire of one variable's gradient.

        Args:
            path: the variable's path.
            shape: its shape.
            dtype: its type's name, such as ``"float32"``.
        """
        for pattern, wire in self._rules:
            if pattern.search(path):
                _check_carries(wire, dtype, f"the rule {pattern.pattern!r} for {path}")
                return wire
        return wires.LOSSLESS if self._keeps_exact(path, shape, dtype) else self.wire

    @property
    def wires(self) -> list[str]:
        """All that it may choose, each once."""
        return list(dict.fromkeys([self.wire, *(wire for _, wire in self._rules)]))

    def idle(self, paths: Sequence[str]) -> list[str]:
        """The rules that match none of these paths."""
        patterns = [pattern for pattern, _ in self._rules]
        return [p.pattern for p in patterns if not any(p.search(path) for path in paths)]

    def _keeps_exact(self, path: str, shape: Sequence[int], dtype: str) -> bool:
        return (
            dtype not in wires.FLOATS
            or dtype == "float64"  # who chose it wants its digits
            or len(shape) < 2
            or math.prod(shape) < self.small
            or self._sensitive.search(path) is not None
        )

    def describe(self) -> dict[str, Any]:
        """All settings of the policy, in types that JSON knows."""
        return {
            "wire": self.wire,
            "rules": [[pattern.pattern, wire] for pattern, wire in self._rules],
            "small": self.small,
            "sensitive": self._sensitive.pattern,
        }

    def fingerprint(self) -> str:
        """A short string, the same on every host; workers whose strings differ disagree."""
        text = json.dumps(self.describe(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WirePolicy):
            return NotImplemented
        return self.describe() == other.describe()

    def __hash__(self) -> int:
        return hash(self.fingerprint())

    def __repr__(self) -> str:
        usual = WirePolicy(self.wire).describe()
        own = {key: value for key, value in self.describe().items() if value != usual[key]}
        if self._rules:
            own["rules"] = dict(own["rules"])
        said = [repr(self.wire), *(f"{key}={value!r}" for key, value in own.items())]
        return f"WirePolicy({', '.join(said)})"


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as error:
        raise ValueError(
            f"{pattern!r} is not a regular expression: {error}. It is searched in a variable's "
            "path, such as 'dense_1/kernel'; for all kernels say 'kernel$', not '*kernel'."
        ) from error


def _check_carries(wire: str, dtype: str, who: str) -> None:
    if wire != wires.LOSSLESS and dtype not in wires.FLOATS:
        raise TypeError(
            f"{who} says {wire!r}, which carries {', '.join(wires.FLOATS)}, and not {dtype}. "
            f"Put a rule with {wires.LOSSLESS!r}, which carries every type, before it."
        )
