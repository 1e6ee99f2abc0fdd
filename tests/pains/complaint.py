"""Public complaints: a thread's number and title, and its program in small."""

from __future__ import annotations

from dataclasses import dataclass

from tests.gallery.parts import Program

REPOSITORIES = {
    "keras": "keras-team/keras",
    "tf": "tensorflow/tensorflow",
    "tf-keras": "keras-team/tf-keras",
}


@dataclass(frozen=True)
class Complaint(Program):
    """A program of which somebody said in public that it does not train on several devices.

    Args:
        title: title of the thread, word for word.
        layout: workers x devices of each: "2x1" where the thread is about several workers.
        tolerance: largest difference of weights and reported numbers from those of one device.
        refusal: words of the error that ``ScaleStrategy`` raises, where it does not train this.
    """

    title: str = ""
    layout: str = "1x2"
    tolerance: float = 1e-6
    refusal: str = ""

    def may(self, name: str) -> float:
        return self.tolerance if self.equal else super().may(name)


def link(number: str) -> str:
    """The address of a thread, of which "keras#20585" is the number."""
    repository, _, issue = number.partition("#")
    return f"https://github.com/{REPOSITORIES[repository]}/issues/{issue}"
