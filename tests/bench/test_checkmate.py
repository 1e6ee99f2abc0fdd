"""``tfscale bench checkmate``: Checkmate's figures, in the model of its paper."""

from __future__ import annotations

import re

import pytest

from tfscale.tools.bench.checkmate import main


def test_vgg19_reaches_the_published_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """The search takes a few seconds, and the goal is a minute."""
    assert main(["--nets", "VGG19", "--seconds", "60", "--solver", "search"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert re.search(r"VGG19: batch 289, Checkmate's 289. No batch above 289.0\d fits", said), said
