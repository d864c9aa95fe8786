# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: several drafted tokens are checked in one step of the model."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkv.cache.model_cache import ModelCache
from jaxkv.core.sharding import constrain
from jaxkv.generation.decoding import (
    Carry,
    Decoding,
    Given,
    How,
    advanced,
    fed,
    running,
    started,
    step_keys,
    until_stop,
)
from jaxkv.generation.verify import verified
from jaxkv.models.decoder import Decoder


class Drafts(NamedTuple):
    """What a drafter proposes.

    Attributes:
      tokens: int32 `[B, draft]`.
      count: int32 `[B]`, how many of them are proposed.
      probabilities: float32 `[B, draft, vocab]`, which they were drawn from; `None` if they were
        not drawn.
      memory: The drafter's own pytree.
    """

    tokens: jax.Array
    count: jax.Array
    probabilities: jax.Array | None
    memory: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Speculating:
    """What speculation keeps between steps.

    Attributes:
      tight: bool, drafts took the room of another row's token: the next step has none.
      memory: The drafter's own pytree.
    """

    tight: jax.Array
    memory: Any


class Speculation(Decoding):
    """Checks drafted tokens: a drafter says what it remembers, proposes, and learns.

    Each step feeds the last token and the drafted ones, keeps those that the model itself would
    have taken, and rolls the cache back behind them, in each row as far as its own drafts went.

    Attributes:
      draft: The most tokens drafted a step.
    """

    draft: int

    def remember(self, how: How, given: Given, prepared: Any, first: Carry) -> Any:
        """Makes the drafter's memory of the prompts and of each row's first token."""
        raise NotImplementedError

    def propose(self, how: How, carry: Carry, room: jax.Array) -> Drafts:
        """Drafts up to `room int32[B]` tokens after each running row's last one."""
        raise NotImplementedError

    def learn(self, before: Carry, drafts: Drafts, new: jax.Array, count: jax.Array) -> Any:
        """Gives the memory after `count int32[B]` of the tokens `new [B, draft + 1]` were taken."""
        raise NotImplementedError

    def prepare(self, model: Decoder, how: How, given: Given, cache: ModelCache) -> Any:
        """Checks that what is drafted in vain can be taken back."""
        del model, how, given
        if cache.rollback_limit < self.draft:
            raise ValueError(
                f"draft={self.draft}: this cache can take back {cache.rollback_limit} tokens for "
                f"certain. Draft no more than that, or give its layout room to spare: {cache}."
            )

    def begin(
        self, how: How, given: Given, prepared: Any, logits: jax.Array, cache: ModelCache, keys: Any
    ) -> Carry:
        """Draws each row's first token, and begins the drafter's memory."""
        first = started(how, logits, cache, keys)
        memory = self.remember(how, given, prepared, first)
        return dataclasses.replace(first, own=Speculating(jnp.zeros((), jnp.bool_), memory))

    def step(self, model: Decoder, how: How, carry: Carry) -> Carry:
        """Checks one draft in each running row."""
        active, held = running(carry), carry.cache
        # Nothing is drafted that would not fit, or that the row has no use for.
        room = jnp.minimum(held.capacity - held.lengths, how.limit - carry.counts) - 1
        room = jnp.where(active & ~carry.own.tight, jnp.clip(room, 0, self.draft), 0)
        drafts = self.propose(how, carry, room)
        count = jnp.minimum(drafts.count, room)
        chunk = jnp.concatenate([carry.pending[:, None], drafts.tokens], axis=1)
        x, cache, stored = fed(model, held, chunk, jnp.where(active, count + 1, 0))
        logits = constrain(model.logits(x), ("batch", None, None))
        given = (drafts.tokens, count, drafts.probabilities)
        new, agreed = verified(logits, *given, step_keys(carry), how.sampling)
        taken = jnp.where(active, jnp.minimum(agreed + 1, stored), 0)
        taken = until_stop(how, new, taken)
        cache = cache.rollback(stored - taken)
        short, drafted = active & (stored == 0), jnp.any(count > 0)
        carry = dataclasses.replace(
            carry,
            cache=cache,
            drafted=carry.drafted + count,
            accepted=carry.accepted + jnp.minimum(agreed, taken),
            own=Speculating(jnp.any(short) & drafted, self.learn(carry, drafts, new, taken)),
        )
        # Without drafts the room is not there, and a row that cannot go back must not go on.
        ended = (short & ~drafted) | (cache.refused & ~held.refused)
        return advanced(how, carry, new, taken, ended)
