# SPDX-License-Identifier: Apache-2.0
"""Training and validation rows, each a function of the seed and its number."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Sequence
from os import PathLike

import numpy as np

from jaxkv.training.batch import Batch
from jaxkv.training.text import ByteTokenizer, read_text


class Data(abc.ABC):
    """Rows for training, in a new order every epoch, and rows for validation.

    The training row with number n depends on the seed and on n alone, so a run that knows how many
    rows it has drawn (its cursor) goes on exactly where it stopped.
    """

    vocab: int

    @abc.abstractmethod
    def count(self, split: str, length: int) -> int:
        """Counts the rows of `length + 1` tokens in a split ("train" or "validation").

        Raises:
          ValueError: If there are none, with the sizes that are there and those that are needed.
        """

    @abc.abstractmethod
    def read(self, split: str, length: int, rows: np.ndarray, shift: int) -> Batch:
        """Reads rows by number; `shift` moves where rows begin, where that makes sense."""

    def train_batch(self, cursor: int, *, batch: int, length: int, seed: int) -> Batch:
        """Draws the training rows `cursor` to `cursor + batch - 1`.

        Args:
          cursor: Rows that were drawn before.
          batch: B.
          length: T, tokens that are read; rows have one more.
          seed: Of the order.

        Returns:
          NumPy arrays `[B, T + 1]`.
        """
        rows = self.count("train", length)
        numbers = np.arange(cursor, cursor + batch)
        parts = []
        for epoch in np.unique(numbers // rows):
            order, shift = _epoch(seed, int(epoch), rows)
            inside = numbers[numbers // rows == epoch] % rows
            parts.append(self.read("train", length, order[inside], shift))
        return _joined(parts)

    def validation_batches(self, batches: int, *, batch: int, length: int) -> list[Batch]:
        """Takes rows spread evenly over the validation part, always the same ones.

        Args:
          batches: How many at most.
          batch: B.
          length: T.

        Returns:
          Batches `[B, T + 1]` of different rows; what is missing in the last one is masked.
        """
        rows = self.count("validation", length)
        number = min(rows, batches * batch)
        chosen = np.arange(number) * rows // number
        out = []
        for start in range(0, number, batch):
            taken = chosen[start : start + batch]
            filled = np.concatenate([taken, np.full(batch - len(taken), taken[-1])])
            read = self.read("validation", length, filled, 0)
            real = np.arange(batch)[:, None] < len(taken)
            mask = np.broadcast_to(real, read.tokens.shape)
            mask = mask if read.mask is None else mask & read.mask
            out.append(Batch(read.tokens, read.segment_ids, np.array(mask)))
        return out


class TextData(Data):
    """Cuts one long text into rows that follow each other.

    Args:
      text: The text.
      validation: Share of it, from the end, that is kept for validation.
      name: For messages.

    Raises:
      ValueError: If the share does not fit.

    >>> data = TextData("abcdefghij" * 4, validation=0.25)
    >>> batch = data.train_batch(0, batch=2, length=4, seed=1)
    >>> [ByteTokenizer().decode(row) for row in batch.tokens]
    ['cdefg', 'abcde']
    """

    vocab = ByteTokenizer.vocab

    def __init__(
        self, text: str | bytes, *, validation: float = 0.1, name: str = "the text"
    ) -> None:
        tokens = np.frombuffer(text.encode("utf-8") if isinstance(text, str) else text, np.uint8)
        self.name, self.share = name, check_share(validation)
        border = len(tokens) - int(len(tokens) * validation)
        self.parts = {"train": tokens[:border], "validation": tokens[border:]}

    @classmethod
    def read_file(
        cls, path: str | PathLike[str] | None = None, *, validation: float = 0.1
    ) -> TextData:
        """Reads a text file, or the plays that come with the package.

        Raises:
          ValueError: As `read_text`.
        """
        name, text = read_text(path)
        return cls(text, validation=validation, name=name)

    def count(self, split: str, length: int) -> int:
        train, held = (len(self.parts[part]) for part in ("train", "validation"))
        if min(train, held) <= length:
            need = math.ceil((length + 1) / min(self.share, 1 - self.share))
            raise ValueError(
                f"{self.name} is too short: {train + held:,} bytes, {train:,} to train and "
                f"{held:,} to validate; length={length} needs {length + 1:,} in each, so about "
                f"{need:,} bytes."
            )
        # One row is given up for the shift that moves the cuts in every epoch.
        return max(1, (len(self.parts[split]) - length) // length)

    def read(self, split: str, length: int, rows: np.ndarray, shift: int) -> Batch:
        tokens = self.parts[split]
        spare = len(tokens) - 1 - self.count(split, length) * length
        starts = rows * length + shift % (min(spare, length - 1) + 1)
        index = starts[:, None] + np.arange(length + 1)[None, :]
        return Batch(tokens[index].astype(np.int32))


def check_share(validation: float) -> float:
    """Checks the share that is kept for validation."""
    if not 0 < validation < 1:
        raise ValueError(f"validation={validation}: want a share between 0 and 1.")
    return validation


@functools.lru_cache(maxsize=4)
def _epoch(seed: int, epoch: int, rows: int) -> tuple[np.ndarray, int]:
    """Draws the order of an epoch's rows and how far its cuts are moved.

    Raw bits and a stable sort, since NumPy keeps only those the same in every version.
    """
    bits = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(rows + 1)
    shift = int(bits[-1] >> np.uint64(33)) if epoch else 0
    return np.argsort(bits[:-1], kind="stable"), shift


def _joined(parts: Sequence[Batch]) -> Batch:
    def join(name: str) -> np.ndarray | None:
        arrays = [getattr(part, name) for part in parts]
        return None if arrays[0] is None else np.concatenate(arrays)

    return Batch(join("tokens"), join("segment_ids"), join("mask"))
