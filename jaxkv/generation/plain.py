# SPDX-License-Identifier: Apache-2.0
"""Decoding one token a step."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jaxkv.generation.decoding import Carry, Decoding, How, drawn, fed, running
from jaxkv.models.decoder import Decoder


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plain(Decoding):
    """Feeds each row's last token and draws the next one."""

    def step(self, model: Decoder, how: How, carry: Carry) -> Carry:
        """Decodes one token in each running row."""
        active = running(carry)
        tokens = carry.pending[:, None]
        x, cache, stored = fed(model, carry.cache, tokens, active.astype(jnp.int32))
        carry = dataclasses.replace(carry, cache=cache)
        # A token that found no room stays pending, and the row ends with it.
        return drawn(how, carry, model.logits(x)[:, 0], stored > 0, active & (stored == 0))
