"""Counts of transformers: Megatron-LM (Narayanan et al., 2021; Korthikanti et al., 2022)."""

from __future__ import annotations

import dataclasses

from tfscale.support import arguments


@dataclasses.dataclass(frozen=True)
class Transformer:
    """A GPT-like model.

    Args:
        layers: number of blocks.
        hidden: width of the model.
        heads: number of attention heads.
        sequence: number of tokens of a sample.
        vocabulary: number of words.

    Example:
        >>> gpt3 = Transformer(layers=96, hidden=12288, heads=96, sequence=2048, vocabulary=51200)
        >>> print(f"{gpt3.parameters / 1e9:.1f} billion")
        174.6 billion
    """

    layers: int
    hidden: int
    heads: int
    sequence: int
    vocabulary: int

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            arguments.whole(getattr(self, field.name), field.name, 1)

    @property
    def parameters(self) -> float:
        """Number of parameters: 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h))."""
        l, h, s, v = self.layers, self.hidden, self.sequence, self.vocabulary  # noqa: E741
        return 12 * l * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * l * h))

    def flops(self, batch: int) -> float:
        """Return the operations of a step: 96 B s l h^2 (1 + s / (6 h) + V / (16 l h)).

        They are those of a forward pass, a backward pass of twice as many, and a second forward
        pass, since the paper recomputes activations.
        """
        l, h, s, v = self.layers, self.hidden, self.sequence, self.vocabulary  # noqa: E741
        return 96 * batch * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))

    def activation_bytes(
        self, batch: int, tensor: int = 1, sequence_parallel: bool = True
    ) -> float:
        """Return the bytes that one block keeps for its backward pass, in 16 bits.

        Args:
            batch: number of samples.
            tensor: number of ranks that split the block.
            sequence_parallel: whether these ranks also split what lies between its products:
                ``s b h (34 + 5 a s / h) / t``; else 10 of the 34 remain on each rank.
        """
        arguments.whole(tensor, "tensor", 1)
        size = self.sequence * batch * self.hidden
        attention = 5 * self.heads * self.sequence / self.hidden
        whole = 0 if sequence_parallel else 10
        return size * (whole + (34 - whole + attention) / tensor)
