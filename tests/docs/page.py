"""Runs the Python blocks of a page, as a reader does who types them in: ``page.py PAGE``.

One interpreter, one namespace, in the order of the page. Where a block of text follows, the
block before it must print just that.
"""

import contextlib
import io
import re
import sys
from pathlib import Path

BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", re.DOTALL | re.MULTILINE)


def run(page: Path) -> str:
    """Return a message about the first block that prints something else; empty if there is none."""
    text = page.read_text()
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(page), "exec")  # errors name the page's line
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, namespace)
        if block[2] and printed.getvalue() != block[2]:
            return f"the block in line {line} printed\n{printed.getvalue()}instead of\n{block[2]}"
    return ""


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])) or None)
