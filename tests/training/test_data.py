# SPDX-License-Identifier: Apache-2.0
"""Rows: where they come from, in which order, and what is refused."""

from pathlib import Path

import numpy as np
import pytest

from jaxkv.training import ByteTokenizer, TextData, read_text

# Byte i is i, so a row tells where it was cut.
RAMP = TextData(bytes(range(200)), validation=0.1)


def train_rows(cursor: int, batch: int, seed: int = 3, length: int = 7) -> np.ndarray:
    return RAMP.train_batch(cursor, batch=batch, length=length, seed=seed).tokens


def test_tokens_are_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé").tolist() == [97, 0xC3, 0xA9]
    assert tokenizer.decode(np.array([97, 0xC3, 0xA9])) == "aé"
    assert tokenizer.decode([0xC3, 97]) == "�a"
    with pytest.raises(ValueError, match="token 256 is no byte"):
        tokenizer.decode([1, 256])


def test_rows_depend_on_seed_and_number_alone() -> None:
    whole = train_rows(0, 60)
    np.testing.assert_array_equal(whole, train_rows(0, 60))
    np.testing.assert_array_equal(whole[17:48], train_rows(17, 31))
    assert not np.array_equal(whole, train_rows(0, 60, seed=4))


def test_each_epoch_shows_each_row_once_in_its_own_order_and_cut() -> None:
    count = RAMP.count("train", 7)
    assert count == (180 - 7) // 7
    epochs = [train_rows(count * epoch, count) for epoch in range(3)]
    cuts, orders = set(), set()
    for rows in epochs:
        np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(8))
        starts = rows[:, 0]
        assert rows.max() < 180, "a validation byte was trained on"
        assert len(set(starts)) == count
        assert len(set(starts % 7)) == 1
        cuts.add(int(starts[0] % 7))
        orders.add(tuple((starts // 7).tolist()))
    assert len(cuts) > 1
    assert len(orders) == 3


def test_shortest_text_that_fits_is_read() -> None:
    data = TextData(bytes(range(20)), validation=0.5)
    rows = data.train_batch(0, batch=3, length=9, seed=0).tokens
    np.testing.assert_array_equal(rows, np.tile(np.arange(10), (3, 1)))
    with pytest.raises(ValueError, match="20 bytes, 10 to train and 10 to validate; length=10"):
        data.count("train", 10)


def test_validation_rows_are_spread_and_never_repeat() -> None:
    data = TextData(bytes(range(200)), validation=0.5)
    one, two = data.validation_batches(2, batch=4, length=9)
    rows = np.concatenate([one.tokens, two.tokens])
    np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(10))
    assert rows.min() >= 100
    assert len(set(rows[:, 0])) == 8
    assert rows[-1, 0] - rows[0, 0] > 60
    assert one.mask.all() and two.mask.all()


def test_validation_masks_what_is_missing() -> None:
    data = TextData(bytes(range(200)), validation=0.2)
    batches = data.validation_batches(9, batch=2, length=9)
    real = np.concatenate([batch.tokens[batch.mask[:, 0]] for batch in batches])
    assert len(batches) == 2
    assert len(real) == len(set(real[:, 0])) == data.count("validation", 9) == 3


def test_shipped_text_is_the_default() -> None:
    name, text = read_text()
    assert (name, len(text)) == ("shakespeare.txt", 335_210)
    assert TextData.read_file().count("train", 256) > 1000


def test_unusable_files_are_named(tmp_path: Path) -> None:
    empty = tmp_path / "empty.txt"
    empty.touch()
    for path, words in (
        (tmp_path / "none.txt", r"text file .*none\.txt does not exist\.$"),
        (tmp_path, r"is a folder, not a file\.$"),
        (empty, r"empty\.txt is empty \(0 bytes\)"),
    ):
        with pytest.raises(ValueError, match=words):
            TextData.read_file(path)


def test_short_text_says_what_it_needs(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 900)
    data = TextData.read_file(path)
    words = (
        r"short\.txt is too short: 900 bytes, 810 to train and 90 to validate; length=256 needs "
        r"257 in each, so about 2,570 bytes\.$"
    )
    with pytest.raises(ValueError, match=words):
        data.train_batch(0, batch=1, length=256, seed=0)
    path.write_text("x" * 2570)
    assert TextData.read_file(path).count("validation", 256) == 1


def test_share_is_checked() -> None:
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"validation={share}"):
            TextData("abc", validation=share)
