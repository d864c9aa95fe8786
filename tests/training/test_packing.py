# SPDX-License-Identifier: Apache-2.0
"""Packing keeps every document, apart, and every token is learned once."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkv.training import Batch, PackedData, Program, TrainConfig, parameters
from jaxkv.training.loss import wanted_targets
from jaxkv.training.packing import Document, pack
from jaxkv.training.step import summed_gradient
from tests.training.tiny import decoder

RNG = np.random.default_rng(0)
LENGTHS = (5, 2, 9, 1, 0, 30, 3, 8, 4)


def documents(lengths: tuple[int, ...]) -> list[Document]:
    tokens = [RNG.integers(1, 256, length).astype(np.int32) for length in lengths]
    return [Document(t, np.ones(len(t), bool)) for t in tokens]


def pairs(row: np.ndarray) -> list[tuple[int, int]]:
    return [(int(a), int(b)) for a, b in itertools.pairwise(row)]


def test_every_pair_of_neighbours_is_learned_once() -> None:
    made = documents(LENGTHS)
    packed = pack(made, 8)
    wanted = np.asarray(wanted_targets(packed))
    learned = [
        (int(a), int(b))
        for inputs, targets, keep in zip(packed.inputs, packed.targets, wanted, strict=True)
        for a, b, k in zip(inputs, targets, keep, strict=True)
        if k
    ]
    assert sorted(learned) == sorted(pair for document in made for pair in pairs(document.tokens))


def test_rows_are_filled_in_order_and_padded_with_zeros() -> None:
    packed = pack(documents(LENGTHS), 9)
    assert packed.segment_ids.tolist()[:3] == [
        [1] * 5 + [2] * 2 + [0] * 3,
        [1] * 9 + [0],
        [1] * 10,
    ]
    assert not packed.tokens[packed.segment_ids == 0].any()


def test_masks_choose_what_is_learned() -> None:
    texts = [b"question?answer"] * 4
    mask = np.arange(15) >= 9
    data = PackedData(texts, masks=[mask] * 4, validation=0.25)
    batch = data.train_batch(0, batch=1, length=40, seed=0)
    wanted = np.asarray(wanted_targets(batch))
    assert bytes(batch.targets[wanted].astype(np.uint8)) == b"answer" * (wanted.sum() // 6)
    assert wanted.sum() in (6, 12)


def test_separator_ends_each_document(tmp_path) -> None:
    path = tmp_path / "plays.txt"
    path.write_text("one\n\ntwo\n\nthree\n\nfour")
    data = PackedData.read_file(path, validation=0.25)
    texts = [bytes(d.tokens.astype(np.uint8)) for d in data.parts["train"]]
    assert texts == [b"one\n\n", b"two\n\n", b"three\n\n"]
    assert PackedData.read_file().count("train", 256) > 1000


def test_bad_documents_are_named() -> None:
    with pytest.raises(ValueError, match="2 masks for 1 documents"):
        PackedData(["ab"], masks=[np.ones(2), np.ones(2)])
    with pytest.raises(ValueError, match=r"tokens \(2,\) and mask \(3,\)"):
        PackedData(["ab"], masks=[np.ones(3)])
    with pytest.raises(ValueError, match="1 documents leave 0 for the validation part"):
        PackedData(["abc"]).count("train", 8)


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_pak_01_packed_decoder_gives_and_learns_what_it_does_alone(positions: str) -> None:
    model = decoder(max_positions=16) if positions == "learned" else decoder()
    first, second = documents((7, 7))
    packed = pack([first, second], 14)
    assert packed.segment_ids.tolist() == [[1] * 7 + [2] * 7 + [0]]

    program, params = Program.of(model, TrainConfig(steps=1)), parameters(model)

    @jax.jit
    def learn(batch: Batch) -> tuple[jax.Array, ...]:
        logits, _ = program.model(params)(batch.inputs, segment_ids=batch.input_segments)
        total, count, grads = summed_gradient(program, params, batch.in_parts(1), jax.random.key(0))
        return logits[0], total, count, jax.tree.leaves(grads)

    both = learn(jax.tree.map(jnp.asarray, packed))
    alone = [learn(Batch(jnp.asarray(document.tokens)[None])) for document in (first, second)]
    np.testing.assert_allclose(both[0][:6], alone[0][0], atol=1e-5)
    np.testing.assert_allclose(both[0][7:13], alone[1][0], atol=1e-5)
    assert both[2] == alone[0][2] + alone[1][2] == 12
    for packed_sum, one, two in zip(
        *(jax.tree.leaves((run[1], run[3])) for run in (both, *alone)), strict=True
    ):
        np.testing.assert_allclose(packed_sum, one + two, rtol=1e-5, atol=1e-5)
