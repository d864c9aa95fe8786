# SPDX-License-Identifier: Apache-2.0
"""Beam search: the most likely text, of several that are kept for each row."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxkv.cache.model_cache import ModelCache
from jaxkv.core.sharding import constrain
from jaxkv.core.trees import check_sizes, static
from jaxkv.generation.decoding import (
    Carry,
    Decoding,
    Generation,
    Given,
    How,
    Hypotheses,
    StopReason,
    fed,
    is_stop,
    running,
)
from jaxkv.models.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Search:
    """What a search keeps beside its live beams, which are the rows of the loop.

    Attributes:
      scores: float32 `[B, beams]`, log-probabilities of the live beams, falling; -inf is no beam.
      done: Hypotheses that ended with a stop token, `[B, returns]`; a score of -inf is none.
      prompts: int32 `[B]`, tokens that the cache held after the prompts.
      start: The cache after the prompts, where rolling back would not bring it back.
    """

    scores: jax.Array
    done: Hypotheses
    prompts: jax.Array
    start: ModelCache | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Beams(Decoding):
    """Searches for the text of the best score, log-probability / tokens ** length_penalty.

    Each step continues every beam by every token. Of the best continuations those with a stop
    token become hypotheses, and `beams` others go on. A row ends when no beam can come to score
    more than the hypotheses that are there. Its beams share the prompt's pages on `Paged` (give
    it `pages` for what they add), and a context is read by all of them and never moved.

    Args:
      beams: Texts that are kept for each row.
      length_penalty: 0 scores the log-probability, 1 the mean of a token; more favours long text.
      returns: Hypotheses to give back for each row, at most `beams`.

    Raises:
      ValueError: If a number is out of range; from `generate`, with a temperature or `on_tokens`.

    The cache that comes back holds each row's best hypothesis, read once more behind the prompt.
    """

    beams: int = static(default=4)
    length_penalty: float = static(default=1.0)
    returns: int = static(default=1)

    def __post_init__(self) -> None:
        check_sizes(beams=self.beams, returns=self.returns)
        if self.returns > self.beams:
            raise ValueError(f"returns={self.returns} of {self.beams} beams: want no more.")
        if not math.isfinite(self.length_penalty):
            raise ValueError(f"length_penalty={self.length_penalty}: want a finite number.")

    @property
    def streams(self) -> bool:
        """No token is final before the end."""
        return False

    def prepare(self, model: Decoder, how: How, given: Given, cache: ModelCache) -> None:
        """Checks that nothing is to be drawn."""
        del model, given, cache
        if how.sampling.temperature is not None:
            raise ValueError(
                f"temperature={float(how.sampling.temperature):g}: beams are searched, not drawn; "
                "want temperature 0."
            )

    def begin(
        self, how: How, given: Given, prepared: Any, logits: jax.Array, cache: ModelCache, keys: Any
    ) -> Carry:
        """Makes `beams` rows of each and gives them its best first tokens."""
        del given, prepared
        B, K = logits.shape[0], self.beams
        lost, prompts = cache.overflowed, cache.lengths
        start = cache if cache.rollback_limit < how.limit else None
        first = jnp.where(jnp.arange(K) == 0, 0.0, -jnp.inf)[None]
        search = Search(jnp.broadcast_to(first, (B, K)), self._none(how, B), prompts, start)
        rows = jnp.repeat(jnp.arange(B, dtype=jnp.int32), K)
        wide = cache.fork(rows)

        def zeros() -> jax.Array:
            return jnp.zeros((B * K,), jnp.int32)

        carry = Carry(
            cache=wide,
            tokens=jnp.zeros((B * K, how.limit), jnp.int32),
            counts=zeros(),
            reasons=jnp.where(lost[rows], StopReason.FULL, StopReason.RUNNING).astype(jnp.int32),
            pending=zeros(),
            keys=keys,
            drafted=zeros(),
            accepted=zeros(),
            own=search,
        )
        logits = jnp.repeat(logits, K, axis=0)
        # Beams of one row still hold the same, so none has to move.
        carry, _ = self._selected(how, carry, logits, self._any(running(carry)))
        return self._ended(how, carry, self._any(wide.refused & ~cache.refused[rows]))

    def step(self, model: Decoder, how: How, carry: Carry) -> Carry:
        """Feeds each live beam's last token, chooses the beams that go on, and moves their rows."""
        active, held = running(carry), carry.cache
        x, cache, stored = fed(model, held, carry.pending[:, None], active.astype(jnp.int32))
        short = self._any(active & (stored == 0))
        logits = constrain(model.logits(x)[:, 0], ("batch", None))
        carry, parents = self._selected(how, carry, logits, self._any(active) & ~short)
        # All beams of a row read one context.
        cache = cache.reorder(parents, contexts=False)
        lost = self._any(cache.refused & ~held.refused)
        return self._ended(how, dataclasses.replace(carry, cache=cache), short | lost)

    def finish(self, model: Decoder, how: How, carry: Carry) -> Generation:
        """Ranks the hypotheses, and reads each row's best one behind its prompt."""
        graph, state = nnx.split(model)
        return _finish(graph, how, self, nnx.as_pure(state), carry)

    def ranked(self, how: How, carry: Carry) -> Hypotheses:
        """Gives each row's best hypotheses; beams that were cut off count with what they have."""
        search, K = carry.own, self.beams
        rows = search.scores.shape[0]
        counts = carry.counts.reshape(rows, K)
        reasons = carry.reasons.reshape(rows, K)
        cut = (reasons != StopReason.STOP_TOKEN) & (counts > 0)
        scores = jnp.where(cut, search.scores / self._length(counts), -jnp.inf)
        live = Hypotheses(carry.tokens.reshape(rows, K, -1), counts, scores, reasons)
        best = _best(search.done, live, self.returns)
        # A row whose prompt did not fit has none, and is full.
        none = jnp.isneginf(best.scores)
        reasons = jnp.where(none, reasons[:, :1], best.reasons)
        tokens = jnp.where(none[..., None], 0, best.tokens)
        return Hypotheses(tokens, jnp.where(none, 0, best.counts), best.scores, reasons)

    def prompted(self, carry: Carry) -> ModelCache:
        """Gives back the cache of B rows as it was after the prompts."""
        search = carry.own
        if search.start is not None:
            return search.start
        # Where pages ran out some beams are empty, but never all of a row.
        lengths = carry.cache.lengths.reshape(-1, self.beams)
        whole = jnp.argmax(lengths, axis=1).astype(jnp.int32)
        cache = carry.cache.fork(_first(lengths, self.beams) + whole)
        return cache.rollback(cache.lengths - search.prompts)

    def _selected(
        self, how: How, carry: Carry, logits: jax.Array, going: jax.Array
    ) -> tuple[Carry, jax.Array]:
        """Chooses hypotheses and beams of the rows `going bool[B]`; says each one's parent row."""
        search, K, V = carry.own, self.beams, logits.shape[-1]
        B = search.scores.shape[0]
        scores = jax.nn.log_softmax(logits.astype(jnp.float32), axis=-1).reshape(B, K, V)
        scores = (search.scores[..., None] + scores).reshape(B, K * V)
        # A beam has one continuation for each stop token: enough others are among these.
        number = min(K * (1 + how.stop_tokens.size), K * V)
        scores, place = lax.top_k(scores, number)
        beam, token = place // V, place % V
        stops = is_stop(how, token)
        counts = carry.counts.reshape(B, K)[:, :1] + 1
        tokens = _taken(carry.tokens.reshape(B, K, -1), beam)
        at = jnp.arange(how.limit, dtype=jnp.int32)[None, None]
        tokens = jnp.where(at == counts[..., None] - 1, token[..., None], tokens)
        ends = stops & (jnp.arange(number) < K)[None]
        ended = Hypotheses(
            tokens,
            jnp.broadcast_to(counts, stops.shape),
            jnp.where(ends, scores / self._length(counts), -jnp.inf),
            jnp.full(stops.shape, StopReason.STOP_TOKEN, jnp.int32),
        )
        done = _best(search.done, ended, self.returns)
        live, chosen = lax.top_k(jnp.where(stops, -jnp.inf, scores), min(K, number))
        live = jnp.pad(live, ((0, 0), (0, K - live.shape[1])), constant_values=-jnp.inf)
        chosen = jnp.pad(chosen, ((0, 0), (0, K - chosen.shape[1])))
        parents = _first(search.scores, K)[:, None] + jnp.take_along_axis(beam, chosen, axis=1)
        own = dataclasses.replace(search, scores=live, done=done)
        pending = jnp.take_along_axis(token, chosen, axis=1).reshape(-1)
        after = dataclasses.replace(
            carry,
            tokens=_taken(tokens, chosen).reshape(B * K, -1),
            counts=carry.counts + 1,
            pending=pending,
            own=own,
        )
        return self._where(going, after, carry), jnp.where(
            jnp.repeat(going, K), parents.reshape(-1), jnp.arange(B * K, dtype=jnp.int32)
        )

    def _where(self, going: jax.Array, after: Carry, before: Carry) -> Carry:
        """Takes what a selection changes in the rows `going`."""

        def pick(new: jax.Array, old: jax.Array) -> jax.Array:
            rows = going if new.shape[0] == going.shape[0] else jnp.repeat(going, self.beams)
            return jnp.where(rows.reshape(-1, *(1,) * (new.ndim - 1)), new, old)

        def parts(carry: Carry) -> Any:
            own = (carry.own.scores, carry.own.done)
            return carry.tokens, carry.counts, carry.pending, own

        tokens, counts, pending, (scores, done) = jax.tree.map(pick, parts(after), parts(before))
        own = dataclasses.replace(before.own, scores=scores, done=done)
        return dataclasses.replace(before, tokens=tokens, counts=counts, pending=pending, own=own)

    def _ended(self, how: How, carry: Carry, short: jax.Array) -> Carry:
        """Decides which rows go on; `short bool[B]` has no room for the next token of a beam."""
        search, K = carry.own, self.beams
        counts = carry.counts.reshape(-1, K)[:, 0]
        full = jnp.any((carry.cache.lengths >= carry.cache.capacity).reshape(-1, K), axis=1)
        # Log-probabilities only fall, so of all lengths one of these two promises most.
        best = search.scores[:, 0]
        reachable = jnp.maximum(best / self._length(counts + 1), best / self._length(how.limit))
        beaten = search.done.scores[:, -1] >= reachable
        reasons = jnp.where(beaten, StopReason.STOP_TOKEN, StopReason.RUNNING)
        reasons = jnp.where(full | short, StopReason.FULL, reasons)
        reasons = jnp.where(counts >= how.limit, StopReason.LENGTH, reasons)
        reasons = jnp.repeat(reasons, K).astype(jnp.int32)
        return dataclasses.replace(carry, reasons=jnp.where(running(carry), reasons, carry.reasons))

    def _length(self, counts: Any) -> jax.Array:
        return jnp.asarray(counts, jnp.float32) ** self.length_penalty

    def _any(self, rows: jax.Array) -> jax.Array:
        """Says of each row whether it is so of any of its beams."""
        return jnp.any(rows.reshape(-1, self.beams), axis=1)

    def _none(self, how: How, rows: int) -> Hypotheses:
        shape = (rows, self.returns)
        return Hypotheses(
            jnp.zeros((*shape, how.limit), jnp.int32),
            jnp.zeros(shape, jnp.int32),
            jnp.full(shape, -jnp.inf, jnp.float32),
            jnp.full(shape, StopReason.RUNNING, jnp.int32),
        )


@functools.partial(jax.jit, static_argnums=(0, 2))
def _finish(graph: Any, how: How, decoding: Beams, state: Any, carry: Carry) -> Generation:
    found = decoding.ranked(how, carry)
    tokens, counts = found.tokens[:, 0], found.counts[:, 0]
    cache = decoding.prompted(carry)
    if how.limit > 1:
        stored = jnp.maximum(counts - 1, 0)
        _, cache = nnx.merge(graph, state).hidden(tokens[:, :-1], cache=cache, lengths=stored)
    last = jnp.take_along_axis(tokens, jnp.maximum(counts - 1, 0)[:, None], axis=1)[:, 0]
    none = jnp.zeros_like(counts)
    return Generation(tokens, counts, found.reasons[:, 0], last, cache, none, none, found)


def _best(some: Hypotheses, more: Hypotheses, number: int) -> Hypotheses:
    """Takes the best of both; of equal ones those that were there."""
    both = jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), some, more)
    _, chosen = lax.top_k(both.scores, number)
    return jax.tree.map(lambda x: _taken(x, chosen), both)


def _taken(x: jax.Array, chosen: jax.Array) -> jax.Array:
    """Takes entries `chosen int32[B, n]` of the second axis of `[B, m, ...]`."""
    return jnp.take_along_axis(x, chosen.reshape(*chosen.shape, *(1,) * (x.ndim - 2)), axis=1)


def _first(x: jax.Array, beams: int) -> jax.Array:
    """Numbers each row's first beam: int32 `[B]`."""
    return jnp.arange(x.shape[0], dtype=jnp.int32) * beams
