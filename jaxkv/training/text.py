# SPDX-License-Identifier: Apache-2.0
"""Text as bytes: the tokenizer, and where text is read from."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable
from os import PathLike
from pathlib import Path

import numpy as np


class ByteTokenizer:
    """Takes each byte of UTF-8 text for a token.

    >>> tokenizer = ByteTokenizer()
    >>> tokenizer.encode("né").tolist(), tokenizer.decode([110, 195, 169])
    ([110, 195, 169], 'né')
    """

    vocab = 256

    def encode(self, text: str | bytes) -> np.ndarray:
        """Turns text into int32 `[T]`."""
        data = text.encode("utf-8") if isinstance(text, str) else text
        return np.frombuffer(data, np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """Turns tokens into text; bytes that are no UTF-8 become U+FFFD.

        Raises:
          ValueError: If a token is no byte.
        """
        tokens = [int(token) for token in tokens]
        wrong = [token for token in tokens if not 0 <= token < self.vocab]
        if wrong:
            raise ValueError(f"token {wrong[0]} is no byte: want 0 to 255.")
        return bytes(tokens).decode("utf-8", errors="replace")


def read_text(path: str | PathLike[str] | None = None) -> tuple[str, bytes]:
    """Reads a text file, or the three plays that come with the package.

    Args:
      path: Of the file; `None` for the plays.

    Returns:
      The file's name and its bytes.

    Raises:
      ValueError: If there is no such file, or it is empty.
    """
    if path is None:
        shipped = importlib.resources.files("jaxkv").joinpath("data", "shakespeare.txt")
        return shipped.name, shipped.read_bytes()
    file = Path(path)
    if not file.is_file():
        what = "is a folder, not a file" if file.is_dir() else "does not exist"
        raise ValueError(f"text file {file} {what}.")
    data = file.read_bytes()
    if not data:
        raise ValueError(f"text file {file} is empty (0 bytes): it must hold some text.")
    return str(file), data
