# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding against decoding one token a step."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxkv
from jaxkv.generation import DraftModel, PromptLookup, Sampling, generate
from jaxkv.generation.lookup import looked_up
from jaxkv.generation.sampling import draw_of
from jaxkv.generation.verify import verified
from tests.generation.models import PROMPTS, check_cache, model, scores

NEW = 20
STOP = 2
full = pytest.mark.full
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    # The window is smaller than the text; one token more than the spare ones can be taken back.
    "ring": dict(layout=jaxkv.Ring(window=6, pinned=1, spare=3)),
    "paged": dict(layout=jaxkv.Paged(16)),
    "int8": dict(codec=jaxkv.Int8()),
}


def drafter(name: str) -> Any:
    """Makes a way of drafting that is right now and then."""
    return PromptLookup(3, draft=4) if name == "lookup" else DraftModel(model(noise=0.1), draft=4)


def cache(name: str = "contiguous", rows: int = 3, capacity: int = 32) -> jaxkv.ModelCache:
    return model().init_cache(rows, capacity, **LAYOUTS[name])


@functools.cache
def plain(name: str = "contiguous") -> jaxkv.Generation:
    return generate(model(), PROMPTS, max_new_tokens=NEW, stop_tokens=STOP, cache=cache(name))


def texts(made: jaxkv.Generation) -> list[list[int]]:
    return [prompt + row for prompt, row in zip(PROMPTS, made.rows(), strict=True)]


def test_no_choice_of_the_plain_text_is_near_a_tie() -> None:
    for prompt, text in zip(PROMPTS, texts(plain()), strict=True):
        best = np.sort(scores(model(), text)[len(prompt) - 1 : -1])
        assert np.min(best[:, -1] - best[:, -2]) > 1e-2
    assert plain().why() == ["length", "length", "stop token"]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("contiguous", "lookup"),
        ("ring", "lookup"),
        ("paged", "lookup"),
        pytest.param("int8", "lookup", marks=full),
        *(pytest.param(name, "model", marks=full) for name in LAYOUTS),
    ],
)
def test_spc_03_the_text_is_that_of_plain_decoding(name: str, how: str) -> None:
    want = plain("contiguous" if name == "paged" else name)
    given = dict(stop_tokens=STOP, cache=cache(name), decoding=drafter(how))
    made = generate(model(), PROMPTS, max_new_tokens=NEW, **given)
    assert made.rows() == want.rows() and made.why() == want.why()
    assert made.pending.tolist() == want.pending.tolist()
    # What was turned down is gone, and only that.
    assert made.cache.lengths.tolist() == want.cache.lengths.tolist()
    assert not np.any(made.cache.overflowed) and not np.any(made.cache.refused)
    accepted, drafted = made.accepted.tolist(), made.drafted.tolist()
    assert all(0 < a < d for a, d in zip(accepted, drafted, strict=True))
    assert len(set(accepted)) > 1  # rows go on at different speeds
    if name == "contiguous":
        check_cache(model(), made, texts(made))


@pytest.mark.parametrize("pages", [29, pytest.param(24, marks=full)])
def test_a_stop_token_in_a_draft_ends_the_row_and_drafts_take_no_room_for_good(pages: int) -> None:
    stop = plain().rows()[0][5]
    want = [row[: row.index(stop) + 1] for row in plain().rows()]
    assert [len(row) for row in want] == [6, 2, 7]
    # Rows end with 8 + 5, 3 + 1 and 6 + 6 tokens in the cache: 29 pages. But the first drafts ask
    # for 8 + 8, 3 + 8 and 6 + 8, so the last row finds no page and has to wait.
    pool = model().init_cache(3, 32, layout=jaxkv.Paged(1, pages=pages))
    # The model drafts for itself, so all is accepted: one drawn token, then a step of 1 + 7.
    given = dict(stop_tokens=stop, cache=pool, decoding=DraftModel(model(), draft=7))
    made = generate(model(), PROMPTS, max_new_tokens=NEW, **given)
    for row, text in zip(made.rows(), want, strict=True):
        assert row == text[: len(row)]
    if pages == 29:
        assert made.rows() == want and made.why() == ["stop token"] * 3
        assert made.drafted.tolist()[:2] == [7, 7] and made.accepted.tolist()[:2] == [5, 1]
    else:
        assert made.why()[2] == "full" and len(made.rows()[2]) == 2
    check_cache(model(), made, texts(made))


@full
def test_a_second_model_is_kept_in_step() -> None:
    # One that drafts for itself is always right, unless its cache lacks a token.
    given = dict(stop_tokens=STOP, cache=cache(), decoding=DraftModel(model(), draft=4))
    made = generate(model(), PROMPTS, max_new_tokens=NEW, **given)
    assert made.rows() == plain().rows()
    # 19 tokens after the first: 3 steps of 5 and one of 4, of which all but one are drafts.
    assert made.accepted.tolist()[:2] == made.drafted.tolist()[:2] == [15, 15]


def test_streaming_continuing_and_a_full_cache() -> None:
    pieces: list[list[list[int]]] = []
    given = dict(stop_tokens=STOP, decoding=drafter("lookup"), max_new_tokens=NEW)
    streamed = dict(on_tokens=pieces.append, stream_every=3)
    made = generate(model(), PROMPTS, cache=cache(), **given, **streamed)
    assert made.rows() == plain().rows()
    assert [[t for piece in pieces for t in piece[b]] for b in range(3)] == made.rows()
    # A call ends once a row has 3 tokens more: that is 1 to 3 steps of at most 5.
    assert all(3 <= max(map(len, piece)) <= 7 for piece in pieces[1:-1]) and len(pieces) > 3
    follow = [[t, 9, 9, 9, 9, 4, 7][: 1 + 2 * b] for b, t in enumerate(made.pending.tolist())]
    rest = generate(model(), follow, cache=made.cache, **given)
    for text, more, row in zip(texts(made), follow, rest.rows(), strict=True):
        whole = text + more[1:] + row
        best = scores(model(), whole).argmax(axis=-1)[-1 - len(row) : -1]
        assert row == best.tolist()
    assert rest.why() == ["full", "full", "stop token"]
    assert rest.cache.lengths.tolist()[:2] == [32, 32]
    assert not np.any(rest.cache.overflowed)


def test_what_does_not_go_together_is_named() -> None:
    run = functools.partial(generate, model(), PROMPTS, max_new_tokens=4)
    with pytest.raises(ValueError, match="draft=5: this cache can take back 4 tokens"):
        run(decoding=PromptLookup(draft=5), cache=cache("ring"))
    for given in (dict(codec=jaxkv.Kivi(group=4)), dict(layout=jaxkv.Evicting(16, jaxkv.H2O()))):
        with pytest.raises(ValueError, match="this cache can take back [04] tokens"):
            run(decoding=PromptLookup(draft=5), cache=model().init_cache(3, 32, **given))
    with pytest.raises(ValueError, match="draft model of 7 tokens for a model of 11"):
        run(decoding=DraftModel(model(vocab=7)))
    with pytest.raises(ValueError, match="a draft by None: want a Decoder"):
        run(decoding=DraftModel(None))  # pyright: ignore
    with pytest.raises(ValueError, match="decoding='beams': want a Decoding"):
        run(decoding="beams")
    for wrong in (dict(draft=0), dict(ngram=0)):
        with pytest.raises(ValueError, match="want an int of at least 1"):
            PromptLookup(**wrong)


def _by_hand(text: list[int], ngram: int, draft: int) -> list[int]:
    """Looks for the longest run of last tokens, from the end of the text backwards."""
    for n in range(min(ngram, len(text) - 1), 0, -1):
        for end in range(len(text) - 1, n - 1, -1):
            if text[end - n : end] == text[-n:]:
                copied = list(text)
                for number in range(draft):
                    copied.append(copied[end + number])
                return copied[len(text) :]
    return []


def test_looked_up_as_by_hand() -> None:
    random = np.random.default_rng(0)
    lengths = np.concatenate([np.arange(1, 13), random.integers(1, 13, 200)])
    rows = random.integers(0, 3, (lengths.size, 12))
    given = jnp.asarray(rows, jnp.int32), jnp.asarray(lengths, jnp.int32)
    found, copied = map(np.asarray, jax.jit(looked_up, static_argnums=(2, 3))(*given, 3, 5))
    for row, n, has, copy in zip(rows, lengths, found, copied, strict=True):
        want = _by_hand(row[:n].tolist(), 3, 5)
        assert bool(has) == bool(want) and (not has or copy.tolist() == want)


def _far_off(counts: np.ndarray, chances: np.ndarray) -> float:
    """Says by how many standard deviations Pearson's statistic is above its mean.

    Source: for n draws it has about the mean k - 1 and the variance 2 (k - 1), k outcomes of
    which each is expected at least 5 times; rarer ones are taken together.
    """
    want = counts.sum() * chances
    rare = want < 5
    counts = np.append(counts[~rare], counts[rare].sum())
    want = np.append(want[~rare], want[rare].sum())
    kept = want > 0
    assert counts[~kept].sum() == 0  # nothing that cannot be drawn
    counts, want = counts[kept], want[kept]
    free = counts.size - 1
    return (np.sum((counts - want) ** 2 / want) - free) / np.sqrt(2 * free)


@pytest.mark.parametrize("drawn", [True, False])
def test_verified_drafts_are_distributed_as_the_target(drawn: bool) -> None:
    rows, p = 20_000, np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25] * 4])
    q = np.array([[0.1, 0.6, 0.1, 0.2], [0.4, 0.3, 0.2, 0.1]])
    keys = jax.random.split(jax.random.key(5), (3, rows))
    draws = jax.vmap(lambda key: jax.random.categorical(key, jnp.log(jnp.asarray(q, jnp.float32))))
    drafts = draws(keys[0]).astype(jnp.int32) if drawn else jnp.full((rows, 2), 1, jnp.int32)
    target = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (rows, *p.shape))
    chances = jnp.broadcast_to(jnp.asarray(q, jnp.float32), (rows, *q.shape)) if drawn else None
    count = jnp.full((rows,), 2, jnp.int32)
    check = jax.jit(functools.partial(verified, sampling=draw_of(Sampling(1.0))))
    new, agreed = map(np.asarray, check(target, drafts, count, chances, keys[1]))
    assert _far_off(np.bincount(new[:, 0], minlength=4), p[0]) < 5
    second = new[agreed >= 1, 1]
    assert second.size > 4000 and _far_off(np.bincount(second, minlength=4), p[1]) < 5
    third = new[agreed == 2, 2]
    assert third.size > 1000 and _far_off(np.bincount(third, minlength=4), p[2]) < 5
    # A draft stands as often as both distributions overlap (the paper's Theorem 3.5).
    share = np.minimum(p[0], q[0]).sum() if drawn else p[0, 1]
    assert abs(np.mean(agreed >= 1) - share) < 5 * np.sqrt(share * (1 - share) / rows)


@pytest.mark.parametrize("how", [pytest.param("lookup", marks=full), "model"])
def test_drawn_text_is_distributed_as_without_speculation(how: str) -> None:
    vocab, rows, prompt = 5, 3000, [1, 2, 3, 1, 2]
    target = model(seed=3, vocab=vocab)
    sampling = Sampling(4.0, top_k=4, min_p=0.02)
    decoding = PromptLookup(2, 2) if how == "lookup" else DraftModel(model(7, vocab), 2)
    prompts = np.tile(np.array(prompt, np.int32), (rows, 1))
    draw = functools.partial(
        generate, target, max_new_tokens=3, sampling=sampling, decoding=decoding, seed=7
    )
    made = draw(prompts)
    assert 0 < int(made.accepted.sum()) < int(made.drafted.sum())
    prompts[2:] = 4
    assert draw(prompts).rows()[:2] == made.rows()[:2]  # a row draws alone
    place = np.asarray(made.tokens) @ vocab ** np.arange(2, -1, -1)
    counts = np.bincount(place, minlength=vocab**3)
    chances = np.ones(())
    for length in range(3):
        each = [
            _chances(scores(target, prompt + list(text))[-1], sampling)
            for text in itertools.product(range(vocab), repeat=length)
        ]
        chances = (chances.reshape(-1, 1) * np.stack(each)).reshape(-1)
    assert _far_off(counts, chances) < 5


def _chances(logits: np.ndarray, how: Sampling) -> np.ndarray:
    """Filters in float64: the k best, then those of a share of the best one."""
    values = logits.astype(np.float64) / how.temperature
    values[values < np.sort(values)[-(how.top_k or values.size)]] = -np.inf
    values[values < values.max() + np.log(how.min_p)] = -np.inf
    chances = np.exp(values - values.max())
    return chances / chances.sum()
