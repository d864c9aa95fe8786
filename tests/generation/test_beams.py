# SPDX-License-Identifier: Apache-2.0
"""Beam search against a search of everything, and against one written in plain Python."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxkv
from jaxkv.generation import Beams, Sampling, generate
from tests.generation.models import PROMPTS, check_cache, model, scores

full = pytest.mark.full
Scored = tuple[float, list[int]]


def everything(decoder: Any, prompt: list[int], limit: int, stop: int, penalty: float) -> Scored:
    """Scores every text of up to `limit` tokens that ends with a stop token or at the limit."""
    best: Scored = (-np.inf, [])
    for length in range(1, limit + 1):
        for start in itertools.product(range(decoder.vocab), repeat=length - 1):
            if stop in start:
                continue
            each = scores(decoder, prompt + list(start)).astype(np.float64)
            before = sum(each[len(prompt) - 1 + i, t] for i, t in enumerate(start))
            for token in range(decoder.vocab) if length == limit else (stop,):
                score = (before + each[-1, token]) / length**penalty
                best = max(best, (score, [*start, token]))
    return best


def by_hand(
    decoder: Any, prompt: list[int], how: Beams, limit: int, stop: int, **context: Any
) -> list[Scored]:
    """Searches as `Beams` says, with sorted lists and no cache; never ends early."""
    beams: list[Scored] = [(0.0, [])]
    done: list[Scored] = []
    for length in range(1, limit + 1):
        found: list[Scored] = []
        for score, text in beams:
            each = scores(decoder, prompt + text, **context)[-1].astype(np.float64)
            found += [(score + each[t], [*text, t]) for t in range(decoder.vocab)]
        found.sort(reverse=True)
        done += [
            (s / length**how.length_penalty, t) for s, t in found[: how.beams] if t[-1] == stop
        ]
        beams = [(s, t) for s, t in found if t[-1] != stop][: how.beams]
    done += [(s / limit**how.length_penalty, t) for s, t in beams]
    return sorted(done, reverse=True)[: how.returns]


def check(made: jaxkv.Generation, want: list[list[Scored]]) -> None:
    """Compares a search's hypotheses, of which the best are the result."""
    found = made.hypotheses
    assert found is not None
    for row, best in enumerate(want):
        for place, (score, text) in enumerate(best):
            assert found.tokens[row, place, : found.counts[row, place]].tolist() == text
            np.testing.assert_allclose(found.scores[row, place], score, rtol=0, atol=1e-4)
    assert made.rows() == [best[0][1] for best in want]


@pytest.mark.parametrize("penalty", [1.5, pytest.param(0.0, marks=full)])
def test_enough_beams_find_the_best_of_all_texts(penalty: float) -> None:
    small, prompts, stop, limit = model(seed=3, vocab=5), [[1, 2], [3, 3, 0]], 4, 4
    # There are 4 * 4 * 4 * 5 texts of 4 tokens and at most 4 * 4 * 5 shorter ones at a time.
    given = dict(stop_tokens=stop, decoding=Beams(80, length_penalty=penalty))
    made = generate(small, prompts, max_new_tokens=limit, **given)
    check(made, [[everything(small, p, limit, stop, penalty)] for p in prompts])


LAYOUTS: dict[str, Any] = {
    "contiguous": jaxkv.Contiguous(),
    # Too small to be rolled back to the prompt, and large enough for the text.
    "ring": jaxkv.Ring(window=24),
    "paged": jaxkv.Paged(4, pages=60),
}


@pytest.mark.parametrize(
    "layout", ["paged", *(pytest.param(name, marks=full) for name in ("contiguous", "ring"))]
)
def test_the_search_is_that_by_hand_and_can_be_continued(layout: str) -> None:
    how, limit, stop = Beams(3, length_penalty=0.7, returns=2), 12, 10
    want = [by_hand(model(), p, how, limit, stop) for p in PROMPTS]
    cache = model().init_cache(3, 32, layout=LAYOUTS[layout])
    given = dict(stop_tokens=stop, decoding=how, cache=cache)
    made = generate(model(), PROMPTS, max_new_tokens=limit, **given)
    check(made, want)
    assert {len(text) for best in want for _, text in best} != {limit}  # some were stopped
    check_cache(model(), made, [p + best[0][1] for p, best in zip(PROMPTS, want, strict=True)])


@full
def test_one_beam_is_greedy() -> None:
    greedy = generate(model(), PROMPTS, max_new_tokens=12)
    made = generate(model(), PROMPTS, max_new_tokens=12, decoding=Beams(1))
    assert made.rows() == greedy.rows() and made.why() == greedy.why()


@full
def test_a_full_cache_and_an_empty_pool_end_rows() -> None:
    how = Beams(3)
    made = generate(
        model(), PROMPTS, max_new_tokens=12, decoding=how, cache=model().init_cache(3, 12)
    )
    # Row b may store 12 - len(prompt) new tokens; the last one need not be stored.
    assert made.why() == ["full"] * 3
    for prompt, row in zip(PROMPTS, made.rows(), strict=True):
        assert [row] == [text for _, text in by_hand(model(), prompt, how, 13 - len(prompt), 99)]
    pool = model().init_cache(3, 32, layout=jaxkv.Paged(4, pages=12))
    short = generate(model(), PROMPTS, max_new_tokens=12, decoding=how, cache=pool)
    assert "full" in short.why() and min(map(len, short.rows())) > 0
    check_cache(model(), short, [p + row for p, row in zip(PROMPTS, short.rows(), strict=True)])


@functools.cache
def reader() -> jaxkv.Decoder:
    """Makes a model with a layer of cross-attention."""
    kinds = [
        functools.partial(jaxkv.GroupedQueryAttention, num_heads=2, rotary=jaxkv.Rotary()),
        functools.partial(jaxkv.CrossAttention, num_heads=2, context_features=6),
    ]
    made = jaxkv.Decoder(11, 16, 2, kinds, tied=False, rngs=nnx.Rngs(5))
    assert made.head is not None
    made.head.kernel[...] = 4 * made.head.kernel[...]
    return made


def test_spc_07_beams_read_the_context_of_their_row() -> None:
    how, limit, stop = Beams(3), 6, 10
    contexts = jax.random.normal(jax.random.key(2), (2, 5, 6))
    lengths = jnp.array([5, 3], jnp.int32)
    given = dict(context=contexts, context_lengths=lengths)
    made = generate(
        reader(), PROMPTS[:2], max_new_tokens=limit, stop_tokens=stop, decoding=how, **given
    )
    want = []
    for row, prompt in enumerate(PROMPTS[:2]):
        one = dict(context=contexts[row : row + 1], context_lengths=lengths[row : row + 1])
        want.append(by_hand(reader(), prompt, how, limit, stop, **one))
    check(made, want)
    alone = by_hand(reader(), PROMPTS[0], how, limit, stop, **one)
    assert want[0][0][1] != alone[0][1]  # so the context matters


def test_what_beams_cannot_do_is_named() -> None:
    run = functools.partial(generate, model(), PROMPTS, max_new_tokens=4, decoding=Beams())
    with pytest.raises(ValueError, match="beams are searched, not drawn"):
        run(sampling=Sampling(0.5))
    with pytest.raises(ValueError, match="on_tokens: no token of Beams"):
        run(on_tokens=print)
    with pytest.raises(ValueError, match="returns=3 of 2 beams"):
        Beams(2, returns=3)
    with pytest.raises(ValueError, match="beams=0: want an int"):
        Beams(0)
