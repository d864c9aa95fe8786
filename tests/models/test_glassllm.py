# SPDX-License-Identifier: Apache-2.0
"""Two trained models give the logits, tokens and gradients of the NumPy code they came with."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkv.attention import GroupedQueryAttention
from jaxkv.core.rotary import Rotary
from jaxkv.generation import generate
from jaxkv.models.decoder import Decoder
from tests.support import glass

TEXTS = {
    "en": [
        "The king said to his men that the night was long and the road was dark, and they went",
        "She looked out of the window and",
    ],
    "pt": [
        "O rei disse aos seus homens que a noite era longa e o caminho escuro, e eles foram",
        "Ela olhou pela janela e",
    ],
}
TOKENS, PREFILL, NEW = 24, 10, 32

# Theirs is float64 on the same weights, so only our float32 rounds. Errors of a sum are as good as
# independent and grow like the square root of its terms: 341 at most, 18 units of the largest
# value. Measured: 9 for logits, 33 for gradients, which pass twice as many sums; 4 times that is
# allowed. Halves rotated instead of pairs, or gradients that stop at the cache, are off by
# thousands of times as much.
UNITS = 128
TOLERANCE = UNITS * 2.0**-24

Loss = Callable[[Decoder, jax.Array, jax.Array], jax.Array]


def prompts(language: str) -> np.ndarray:
    """Cuts two rows of `TOKENS` + 1 tokens out of the model's own language."""
    tokens = [t for text in TEXTS[language] * 4 for t in glass.tokenizer(language).encode(text)]
    return np.array(tokens[: 2 * (TOKENS + 1)], np.int32).reshape(2, TOKENS + 1)


def assert_close(got: jax.Array | np.ndarray, want: np.ndarray, what: str = "") -> None:
    assert want.dtype == np.float64 and got.dtype == np.float32
    gap = np.abs(np.asarray(got, np.float64) - want).max()
    assert gap <= TOLERANCE * np.abs(want).max(), what


@jax.jit
def whole(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    return decoder(tokens)[0]


@jax.jit
def cached(decoder: Decoder, tokens: jax.Array) -> jax.Array:
    """Scores a prefill and then the rest token by token, in one program."""
    cache = decoder.init_cache(tokens.shape[0], tokens.shape[1])
    first, cache = decoder(tokens[:, :PREFILL], cache=cache)
    rest = jnp.swapaxes(tokens[:, PREFILL:], 0, 1)[..., None]

    def step(cache, token):
        logits, cache = decoder(token, cache=cache)
        return cache, logits[:, 0]

    _, steps = jax.lax.scan(step, cache, rest)
    return jnp.concatenate([first, jnp.swapaxes(steps, 0, 1)], axis=1)


def cross_entropy(score: Callable[[Decoder, jax.Array], jax.Array]) -> Loss:
    """Makes the mean loss of the next tokens out of a way to score them."""

    def loss(decoder: Decoder, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        log_probabilities = jax.nn.log_softmax(score(decoder, tokens))
        taken = jnp.take_along_axis(log_probabilities, targets[..., None], axis=-1)
        return -jnp.mean(taken)

    return loss


@pytest.mark.parametrize("language", glass.LANGUAGES)
def test_logits_match(language: str) -> None:
    tokens = prompts(language)[:, :-1]
    want = glass.theirs(language)(tokens).data
    assert_close(whole(glass.ours(language), jnp.asarray(tokens)), want)


@pytest.mark.parametrize("language", glass.LANGUAGES)
def test_cached_logits_match_their_cached_logits(language: str) -> None:
    tokens, model = prompts(language)[:, :-1], glass.theirs(language)
    cache = model.new_cache()
    parts = [model(tokens[:, :PREFILL], cache=cache).data]
    for t in range(PREFILL, TOKENS):
        parts.append(model(tokens[:, t : t + 1], cache=cache, start=t).data)
    assert_close(cached(glass.ours(language), jnp.asarray(tokens)), np.concatenate(parts, 1))


@pytest.mark.parametrize("language", glass.LANGUAGES)
def test_greedy_tokens_match(language: str) -> None:
    """Our rows are decoded together though their prompts differ in length, theirs one by one."""
    encoded = [glass.tokenizer(language).encode(text) for text in TEXTS[language]]
    assert len({len(prompt) for prompt in encoded}) == 2
    want = []
    for prompt in encoded:
        steps = list(glass.theirs(language).generate(prompt, NEW, greedy=True))
        want.append([step.token for step in steps])
        top = np.sort(np.log([step.probs for step in steps]), axis=-1)[:, -2:]
        # Logits are about 20: the two likeliest tokens lie apart by more than rounding can move.
        assert np.diff(top).min() > 20 * TOLERANCE
    got = generate(glass.ours(language), encoded, max_new_tokens=NEW)
    assert got.rows() == want


@pytest.mark.parametrize(
    ("language", "score"),
    [("en", whole), ("pt", whole), pytest.param("en", cached, marks=pytest.mark.full)],
    ids=["en-whole", "pt-whole", "en-cached"],
)
def test_gradients_match(language: str, score: Callable[[Decoder, jax.Array], jax.Array]) -> None:
    """Of a loss over all tokens; the cached way sends them through 14 writes to the cache."""
    rows, model = prompts(language), glass.theirs(language)
    for tensor in model.parameters():
        tensor.grad = None
    loss = model.loss(rows[:, :-1], rows[:, 1:])
    loss.backward()
    value, grads = jax.jit(jax.value_and_grad(cross_entropy(score)))(
        glass.ours(language), jnp.asarray(rows[:, :-1]), jnp.asarray(rows[:, 1:])
    )
    assert float(value) == pytest.approx(float(loss.data), rel=TOLERANCE)
    got = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(grads))}
    theirs = model.named_parameters()
    for weight in glass.weights(language):
        want = weight.convert(theirs[weight.source].grad)
        assert_close(got.pop(weight.target).get_value(), want, weight.target)
    assert not got


def test_the_other_rotation_is_far_off() -> None:
    """The tolerance can tell: halves instead of pairs, on weights that are otherwise right."""
    tokens = prompts("en")[:, :-1]
    config = glass.theirs("en").cfg
    graph, state = nnx.split(glass.ours("en"))
    twisted = nnx.merge(graph, state)
    for block in twisted.blocks:
        assert isinstance(block.attention, GroupedQueryAttention)
        block.attention.rotary = Rotary(config.rope_base, layout="half")
    want = glass.theirs("en")(tokens).data
    gap = np.abs(np.asarray(whole(twisted, jnp.asarray(tokens))) - want).max()
    assert gap > 1000 * TOLERANCE * np.abs(want).max()
