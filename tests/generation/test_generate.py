# SPDX-License-Identifier: Apache-2.0
"""The decode loop against token-by-token scoring without a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv.generation import PromptLookup, Sampling, generate
from jaxkv.generation import loop as generate_loop
from jaxkv.generation.timing import measure_decoding

VOCAB = 61
NEW = 8
PROMPTS = [[1, 2, 3], [5, 6, 7, 8, 9], [4]]


@functools.cache
def model(variant: type = jaxkv.GroupedQueryAttention, layers: int = 1) -> jaxkv.Decoder:
    factory = functools.partial(variant, num_heads=4, rotary=jaxkv.Rotary())
    return jaxkv.Decoder(VOCAB, 32, layers, factory, rngs=nnx.Rngs(3))


def score(decoder: jaxkv.Decoder, tokens: list[int]) -> np.ndarray:
    """Scores the next token without a cache, in one padded shape."""
    row = np.zeros((1, 24), np.int32)
    row[0, : len(tokens)] = tokens
    return np.asarray(_forward(decoder, jnp.asarray(row)))[0, len(tokens) - 1]


@jax.jit
def _forward(decoder: jaxkv.Decoder, row: jax.Array) -> jax.Array:
    return decoder(row)[0]


@pytest.mark.parametrize("variant", [jaxkv.GroupedQueryAttention, jaxkv.MultiHeadLatentAttention])
def test_greedy_tokens_equal_scoring_without_a_cache(variant: type) -> None:
    decoder = model(variant, layers=2)
    made = generate(decoder, PROMPTS, max_new_tokens=NEW)
    for prompt, got in zip(PROMPTS, made.rows(), strict=True):
        tokens = list(prompt)
        for token in got:
            logits = score(decoder, tokens)
            # The chosen token is the best one, up to the rounding of a tie.
            assert logits[token] >= logits.max() - 1e-5
            tokens.append(token)
    assert made.why() == ["length"] * 3
    assert made.counts.tolist() == [NEW] * 3
    # The cache holds all tokens but the last one, which is pending.
    assert made.cache.lengths.tolist() == [len(p) + NEW - 1 for p in PROMPTS]
    assert made.pending.tolist() == [row[-1] for row in made.rows()]


def test_a_row_alone_equals_the_row_in_a_batch() -> None:
    together = generate(model(), PROMPTS, max_new_tokens=NEW).rows()
    for prompt, row in zip(PROMPTS, together, strict=True):
        alone = np.zeros((1, 5), np.int32)
        alone[0, : len(prompt)] = prompt
        given = dict(lengths=np.array([len(prompt)]), cache=model().init_cache(1, 32))
        assert generate(model(), alone, max_new_tokens=NEW, **given).rows() == [row]


def test_array_prompts_with_lengths_equal_lists() -> None:
    rows = np.array([[1, 2, 3, 0, 0], [5, 6, 7, 8, 9]], np.int32)
    got = generate(model(), rows, lengths=jnp.array([3, 5]), max_new_tokens=NEW)
    assert got.rows() == generate(model(), PROMPTS, max_new_tokens=NEW).rows()[:2]


def test_stop_tokens_end_a_row_and_say_so() -> None:
    plain = generate(model(), PROMPTS, max_new_tokens=NEW).rows()
    stop = plain[1][2]
    made = generate(model(), PROMPTS, max_new_tokens=NEW, stop_tokens=[stop])
    for row, got, why in zip(plain, made.rows(), made.why(), strict=True):
        if stop in row:
            assert got == row[: row.index(stop) + 1] and why == "stop token"
        else:
            assert got == row and why == "length"
    assert made.why()[1] == "stop token"


def test_a_full_cache_ends_a_row_and_says_so() -> None:
    plain = generate(model(), PROMPTS, max_new_tokens=NEW).rows()
    made = generate(model(), PROMPTS, max_new_tokens=NEW, cache=model().init_cache(3, 8))
    # Row b may store 8 - len(prompt) new tokens; the last one drawn need not be stored.
    assert made.why() == ["full", "full", "length"]
    assert made.rows() == [
        row[: min(NEW, 8 - len(p) + 1)] for p, row in zip(PROMPTS, plain, strict=True)
    ]
    assert not np.any(made.cache.overflowed)


def test_streaming_gives_the_same_tokens_in_pieces() -> None:
    pieces: list[list[list[int]]] = []
    made = generate(model(), PROMPTS, max_new_tokens=NEW, on_tokens=pieces.append, stream_every=3)
    joined = [[t for piece in pieces for t in piece[b]] for b in range(3)]
    assert joined == made.rows() == generate(model(), PROMPTS, max_new_tokens=NEW).rows()
    # One piece for the prefill, then ceil(7 / 3).
    assert len(pieces) == 1 + 3


def test_one_seed_fixes_all_draws_and_rows_draw_alone() -> None:
    how = Sampling(1.0)
    make = functools.partial(generate, model(), max_new_tokens=NEW, sampling=how)
    first, again, other = make(PROMPTS, seed=1), make(PROMPTS, seed=1), make(PROMPTS, seed=2)
    assert first.rows() == again.rows() != other.rows()
    # Row 0 draws the same whoever else is in the batch, and equal rows draw apart.
    same = make([PROMPTS[0]] * 3, seed=1).rows()
    assert same[0] == first.rows()[0]
    assert same[0] != same[1]


def test_continuing_equals_going_on() -> None:
    cache = model().init_cache(3, 32)
    first = generate(model(), PROMPTS, max_new_tokens=NEW, cache=cache)
    rest = generate(
        model(), np.asarray(first.pending)[:, None], max_new_tokens=NEW, cache=first.cache
    )
    for prompt, a, b in zip(PROMPTS, first.rows(), rest.rows(), strict=True):
        assert int(score(model(), prompt + a + b[:-1]).argmax()) == b[-1]


def test_decode_compiles_once_for_all_lengths() -> None:
    decoder = model()
    before = generate_loop._decode._cache_size()
    for prompt in ([1], [1, 2, 3, 4], [9]):
        generate(decoder, [prompt], max_new_tokens=NEW, cache=decoder.init_cache(1, 32))
    assert generate_loop._decode._cache_size() - before <= 1


@pytest.mark.parametrize("decoding", [None, PromptLookup(draft=2)], ids=str)
def test_other_numbers_need_no_other_program(decoding: Any) -> None:
    def sizes() -> list[int]:
        programs = (generate_loop._prefill, generate_loop._begin, generate_loop._decode)
        return [program._cache_size() for program in programs]

    def drawn(**numbers: Any) -> list[list[int]]:
        stop = numbers.pop("stop", 1)
        return generate(
            model(),
            PROMPTS,
            max_new_tokens=6,
            sampling=Sampling(**{"temperature": 0.8, "top_p": 0.9, "min_p": 0.01, **numbers}),
            stop_tokens=stop,
            decoding=decoding,
        ).rows()

    first, before = drawn(), sizes()
    others = [drawn(temperature=5.0), drawn(top_p=0.2), drawn(min_p=0.6), drawn(stop=first[0][1])]
    assert sizes() == before
    assert all(rows != first for rows in others)
    assert drawn() == first


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (dict(prompts=[[1], []], max_new_tokens=2), r"\[1, 0\]"),
        (dict(prompts=[[1, 99]], max_new_tokens=2), "99.*0 to 60"),
        (dict(prompts=[[1]], max_new_tokens=0), "max_new_tokens=0"),
        (dict(prompts=[[1]], max_new_tokens=2, stream_every=0), "stream_every=0"),
        (dict(prompts=[[1]], max_new_tokens=2, stop_tokens=[61]), r"\[61\]"),
        (dict(prompts=[1, 2], max_new_tokens=2), "list of token lists"),
        (dict(prompts="abc", max_new_tokens=2), "list of token lists"),
        (dict(prompts=np.zeros((2, 2)), max_new_tokens=2), "float64"),
        (dict(prompts=[[1]], max_new_tokens=2, lengths=jnp.array([1])), "lengths"),
    ],
)
def test_bad_calls_are_named(call: dict, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        generate(model(), **call)


def test_cac_04_the_capacity_changes_neither_text_nor_logits() -> None:
    """The prompt and then each best token: calls of one width, which tell how much is real."""
    found = []
    for capacity in (20, 40):
        cache, given, text, scores = model().init_cache(1, capacity), PROMPTS[1], [], []
        for _ in range(10):
            tokens = np.zeros((1, 5), np.int32)
            tokens[0, : len(given)] = given
            logits, cache = _step(model(), tokens, cache, np.array([len(given)], np.int32))
            scores.append(logits[0, len(given) - 1])
            given = [int(scores[-1].argmax())]
            text += given
        found.append((text, np.stack(scores)))
    (text, logits), (wide_text, wide_logits) = found
    assert text == wide_text == generate(model(), PROMPTS, max_new_tokens=10).rows()[1]
    np.testing.assert_allclose(logits, wide_logits, rtol=0, atol=1e-6)


@jax.jit
def _step(decoder: jaxkv.Decoder, tokens: Any, cache: jaxkv.ModelCache, lengths: Any = None) -> Any:
    return decoder(tokens, cache=cache, lengths=lengths)


def test_prompts_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match=r"\[9\].*\[0\] of 8"):
        generate(model(), [[1] * 9], max_new_tokens=1, cache=model().init_cache(1, 8))
    with pytest.raises(ValueError, match="1 prompts for a cache of 2 rows"):
        generate(model(), [[1]], max_new_tokens=1, cache=model().init_cache(2, 8))


def test_learned_positions_are_used_to_the_last() -> None:
    factory = functools.partial(jaxkv.GroupedQueryAttention, num_heads=2)
    learned = jaxkv.Decoder(VOCAB, 16, 1, factory, max_positions=20, rngs=nnx.Rngs(0))
    made = generate(learned, [[1] * 5], max_new_tokens=15)
    assert made.why() == ["length"]
    # Each token is the best one by a call without a cache, whose positions are its own.
    text = [1] * 5 + made.rows()[0]
    logits = np.asarray(_forward(learned, jnp.asarray([text])))[0]
    for place, token in enumerate(text[5:], 4):
        assert logits[place, token] >= logits[place].max() - 1e-5
    cache = learned.init_cache(1, 20)
    assert generate(learned, [[1] * 17], max_new_tokens=3, cache=cache).why() == ["length"]
    with pytest.raises(ValueError, match="capacity 21 is more than the 20 learned positions"):
        generate(learned, [[1] * 5], max_new_tokens=16)
    with pytest.raises(ValueError, match="positions of -1 to 0: want 0 to 19"):
        learned(jnp.ones((1, 2), jnp.int32), positions=jnp.array([[-1, 0]]))


def test_flags_of_earlier_calls_do_not_end_a_row() -> None:
    cache = model().init_cache(1, 4)
    _, full = _step(model(), jnp.ones((1, 6), jnp.int32), cache)
    assert full.overflowed.tolist() == [True]
    made = generate(model(), [[1]], max_new_tokens=2, cache=full.rollback(3))
    assert made.why() == ["length"] and made.counts.tolist() == [2]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (dict(prompts=[[1.5, 2.7]]), "want whole numbers"),
        (dict(prompts=["12"]), "list of token lists"),
        (dict(prompts=np.array([[2**32 + 5]])), "tokens 4294967301 to 4294967301: want 0 to 60"),
        (dict(prompts=np.ones((2, 3), int), lengths=np.array([-1, 3])), r"\[-1, 3\]: want 0 to 3"),
        (dict(stop_tokens=[3.5]), r"stop_tokens \[3.5\]: want tokens"),
        (dict(stop_tokens=[99]), r"stop_tokens \[99\]: want tokens"),
        (dict(max_new_tokens=2.0), "max_new_tokens=2.0: want an int"),
        (dict(sampling=0.8), "sampling=0.8: want a Sampling"),
        (dict(context_lengths=np.array([1])), "no layer of this model is a CrossAttention"),
    ],
)
def test_what_generate_cannot_use_is_named(given: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        generate(model(), **{"prompts": [[1]], "max_new_tokens": 2, **given})


def test_numbers_of_numpy_do() -> None:
    for stop in (np.int64(3), jnp.array([3]), 3, [3]):
        made = generate(model(), [[1]], max_new_tokens=np.int32(2), stop_tokens=stop)
        assert made.counts.tolist()[0] >= 1


def test_timing_helpers_measure_something_real() -> None:
    tokens = np.arange(20, dtype=np.int32)
    measured = measure_decoding(model(), tokens, batches=(1, 2), steps=10, repeats=1)
    assert 0 <= measured.gap < 1e-5
    assert set(measured.rates) == {1, 2} and min(measured.rates.values()) > 0
    with pytest.raises(ValueError, match="20 tokens in loops of 6 steps"):
        measure_decoding(model(), tokens, steps=6)
