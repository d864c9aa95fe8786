# SPDX-License-Identifier: Apache-2.0
"""Drafting with a second, smaller model."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxkv.cache.model_cache import ModelCache
from jaxkv.core.sharding import constrain
from jaxkv.core.trees import check_sizes, static
from jaxkv.generation.decoding import Carry, Given, How, fed, running, step_keys
from jaxkv.generation.prompts import bucket, check_context
from jaxkv.generation.sampling import sample
from jaxkv.generation.speculation import Drafts, Speculation
from jaxkv.generation.verify import distribution
from jaxkv.models.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Drafter:
    """The second model's cache, and what it lacks of each row's text.

    Attributes:
      cache: Holds all of the row's tokens but the last `behind`.
      before: int32 `[B]`, the token before the row's last one.
      behind: int32 `[B]`, 1 or 2.
    """

    cache: ModelCache
    before: jax.Array
    behind: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DraftModel(Speculation):
    """Speculates with a smaller model that knows the same tokens.

    Greedy text is the same as without, and draws have the same distribution: sampling's filters
    are applied to both models first.

    Args:
      model: The second model. It has a cache of its own, that begins with the prompts of the call.
      draft: Tokens drafted a step, as far as they fit.

    Raises:
      ValueError: From `generate`, if its vocabulary is another one.

    Source: Leviathan et al. 2023, "Fast Inference from Transformers via Speculative Decoding"
    (arXiv:2211.17192).
    """

    model: Decoder
    draft: int = static(default=4)

    def __post_init__(self) -> None:
        check_sizes(draft=self.draft)

    def prepare(self, model: Decoder, how: How, given: Given, cache: ModelCache) -> ModelCache:
        """Checks the second model and allocates its cache."""
        super().prepare(model, how, given, cache)
        if not isinstance(self.model, Decoder):
            raise ValueError(f"a draft by {self.model!r}: want a Decoder.")
        if self.model.vocab != model.vocab:
            raise ValueError(
                f"a draft model of {self.model.vocab} tokens for a model of {model.vocab}: want "
                "the same vocabulary."
            )
        longest = int(np.max(np.asarray(given.lengths))) + how.limit
        rows, width = given.lengths.shape[0], None
        if _reads_context(self.model) and given.context is not None:
            width = given.context.shape[1]
        own = self.model.init_cache(rows, bucket(longest, self.model), context_capacity=width)
        if width is not None:
            check_context(own, given.context, given.context_lengths)
        return own

    def remember(self, how: How, given: Given, prepared: ModelCache, first: Carry) -> Drafter:
        """Reads the prompts."""
        del how
        context: dict[str, Any] = {}
        if _reads_context(self.model):
            context = dict(context=given.context, context_lengths=given.context_lengths)
        _, cache, _ = fed(self.model, prepared, given.tokens, given.lengths, **context)
        return Drafter(cache, first.pending, jnp.ones_like(given.lengths))

    def propose(self, how: How, carry: Carry, room: jax.Array) -> Drafts:
        """Catches up with the row's text, then draws one token after the other."""
        own: Drafter = carry.own.memory
        first = jnp.where(own.behind == 2, own.before, carry.pending)
        chunk = jnp.stack([first, carry.pending], axis=1)
        count = jnp.where(running(carry), own.behind, 0)
        x, cache, _ = fed(self.model, own.cache, chunk, count)
        x = jnp.take_along_axis(x, (own.behind - 1)[:, None, None], axis=1)
        keys = step_keys(carry)
        first, chances = self._drawn(how, x, keys, jnp.int32(0))

        def further(loop: tuple[ModelCache, jax.Array], number: jax.Array) -> Any:
            cache, token = loop
            active = (number < room).astype(jnp.int32)
            x, cache, _ = fed(self.model, cache, token[:, None], active)
            token, chances = self._drawn(how, x, keys, number)
            return (cache, token), (token, chances)

        numbers = jnp.arange(1, self.draft, dtype=jnp.int32)
        (cache, _), (tokens, more) = lax.scan(further, (cache, first), numbers)
        tokens = jnp.concatenate([first[None], tokens]).swapaxes(0, 1)
        if chances is not None:
            chances = jnp.concatenate([chances[None], more]).swapaxes(0, 1)
        return Drafts(tokens, room, chances, dataclasses.replace(own, cache=cache))

    def _drawn(
        self, how: How, x: jax.Array, keys: jax.Array, number: jax.Array
    ) -> tuple[jax.Array, jax.Array | None]:
        """Draws draft `number` of hidden states `[B, 1, D]`; greedy drafts have no chances."""
        logits = constrain(self.model.logits(x)[:, 0], ("batch", None))
        # The first two are what the drafts are checked with.
        keys = jax.vmap(jax.random.fold_in, (0, None))(keys, number + 2)
        token = sample(logits, keys, how.sampling)
        return token, None if how.sampling.greedy else distribution(logits, how.sampling)

    def learn(self, before: Carry, drafts: Drafts, new: jax.Array, count: jax.Array) -> Drafter:
        """Takes back what the row does not have."""
        old: Drafter = before.own.memory
        own: Drafter = drafts.memory
        # All tokens of the row but the last, up to which the drafts are right.
        text = old.cache.lengths + old.behind + count - 1
        kept = jnp.minimum(own.cache.lengths, text)
        cache = own.cache.rollback(own.cache.lengths - kept)
        joined = jnp.concatenate([own.before[:, None], before.pending[:, None], new], axis=1)
        # `count` of the new tokens are the row's: the one before the last is at place `count`.
        token = jnp.take_along_axis(joined, count[:, None], axis=1)[:, 0]
        return Drafter(cache, token, text + 1 - kept)


def _reads_context(model: Decoder) -> bool:
    return any(block.attention.reads_context for block in model.blocks)
