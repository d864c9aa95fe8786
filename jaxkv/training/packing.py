# SPDX-License-Identifier: Apache-2.0
"""Several documents in one row, told apart by their segment numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from os import PathLike

import jax
import numpy as np

from jaxkv.training.batch import Batch
from jaxkv.training.data import Data, check_share
from jaxkv.training.text import ByteTokenizer, read_text


@dataclasses.dataclass(frozen=True)
class Document:
    """Holds the tokens of a document, int32 `[n]`, and which of them to learn, bool `[n]`."""

    tokens: np.ndarray
    learned: np.ndarray

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or self.learned.shape != self.tokens.shape:
            raise ValueError(
                f"document with tokens {self.tokens.shape} and mask {self.learned.shape}: want [n]."
            )

    def cut(self, length: int) -> list[Document]:
        """Cuts what is longer than `length + 1` tokens; pieces share one token, to learn it once.

        What has no token to predict gives no piece.
        """
        starts = range(0, len(self.tokens) - 1, length)
        ends = [start + length + 1 for start in starts]
        return [
            Document(self.tokens[a:b], self.learned[a:b]) for a, b in zip(starts, ends, strict=True)
        ]


def pack(documents: Sequence[Document], length: int) -> Batch:
    """Packs documents into rows, in their order.

    Args:
      documents: At least one of two or more tokens.
      length: T; rows have T + 1 tokens, and only a document longer than that is cut.

    Returns:
      All rows, NumPy arrays `[R, T + 1]`. Segments count from 1 in each row; 0 is padding.

    >>> abc, de = (ByteTokenizer().encode(text) for text in ("abc", "de"))
    >>> packed = pack([Document(d, np.ones(len(d), bool)) for d in (abc, de, abc)], 5)
    >>> packed.segment_ids.tolist()
    [[1, 1, 1, 2, 2, 0], [1, 1, 1, 0, 0, 0]]
    """
    rows: list[list[Document]] = []
    room = 0
    for piece in (piece for document in documents for piece in document.cut(length)):
        if len(piece.tokens) > room:
            rows.append([])
            room = length + 1
        rows[-1].append(piece)
        room -= len(piece.tokens)
    shape = (len(rows), length + 1)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    mask = np.zeros(shape, bool)
    for r, row in enumerate(rows):
        start = 0
        for number, piece in enumerate(row, start=1):
            place = slice(start, start + len(piece.tokens))
            tokens[r, place], segments[r, place] = piece.tokens, number
            mask[r, place] = piece.learned
            start = place.stop
    return Batch(tokens, segments, mask)


class PackedData(Data):
    """Packs documents into rows; no document sees or predicts another.

    Args:
      documents: Token arrays `[n]`, or texts, which are taken as bytes.
      masks: For each document bool `[n]`, which tokens to learn to predict; default all.
      validation: Share of the documents, from the end, that is kept for validation.
      vocab: Number of tokens.
      name: For messages.

    Raises:
      ValueError: If a mask does not fit its document, or the share does not fit.
    """

    def __init__(
        self,
        documents: Sequence[str | bytes | np.ndarray],
        *,
        masks: Sequence[np.ndarray] | None = None,
        validation: float = 0.1,
        vocab: int = ByteTokenizer.vocab,
        name: str = "the documents",
    ) -> None:
        self.vocab, self.name = vocab, name
        arrays = [_tokens(document) for document in documents]
        if masks is None:
            masks = [np.ones(len(array), bool) for array in arrays]
        if len(masks) != len(arrays):
            raise ValueError(f"{len(masks)} masks for {len(arrays)} documents: want one for each.")
        made = [
            Document(array, np.asarray(mask, bool))
            for array, mask in zip(arrays, masks, strict=True)
        ]
        border = len(made) - int(len(made) * check_share(validation))
        self.parts = {"train": made[:border], "validation": made[border:]}
        self._packed: dict[tuple[str, int], Batch] = {}

    @classmethod
    def read_file(
        cls,
        path: str | PathLike[str] | None = None,
        *,
        separator: str = "\n\n",
        validation: float = 0.1,
    ) -> PackedData:
        """Reads a text file (or the plays that come with the package) and splits it.

        Args:
          path: Of the file.
          separator: Stands between documents and ends each; default an empty line.
          validation: As above.

        Raises:
          ValueError: As `read_text`.
        """
        name, text = read_text(path)
        end = separator.encode("utf-8")
        documents = [document + end for document in text.split(end) if document]
        return cls(documents, validation=validation, name=name)

    def count(self, split: str, length: int) -> int:
        for part, documents in self.parts.items():
            if not any(len(document.tokens) > 1 for document in documents):
                total = sum(len(documents) for documents in self.parts.values())
                raise ValueError(
                    f"{self.name}: {total} documents leave {len(documents)} for the {part} part; "
                    f"want at least one of two or more tokens in each."
                )
        return len(self._rows(split, length).tokens)

    def read(self, split: str, length: int, rows: np.ndarray, shift: int) -> Batch:
        return jax.tree.map(lambda x: x[rows], self._rows(split, length))

    def _rows(self, split: str, length: int) -> Batch:
        key = (split, length)
        if key not in self._packed:
            self._packed[key] = pack(self.parts[split], length)
        return self._packed[key]


def _tokens(document: str | bytes | np.ndarray) -> np.ndarray:
    if isinstance(document, str | bytes):
        return ByteTokenizer().encode(document)
    return np.asarray(document, np.int32)
