# SPDX-License-Identifier: Apache-2.0
"""Settling a step's plan after attention: who is kept goes by what each token got."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkv.cache.codecs import Planes
from jaxkv.cache.index import Index, Layout, Plan, index_axes
from jaxkv.cache.reading import Reading
from jaxkv.cache.weighing import last_observers, weigh_new, weigh_stored
from jaxkv.core.sharding import axis_size, local, spec_for


class Attended(NamedTuple):
    """What a call attended with.

    Attributes:
      query: `[B, T, N, H]`.
      key: `[B, T, K, H]`, the call's own.
      lse: float32 `[B, T, N]`, over all that each query saw.
      slopes: `[N]`, ALiBi's, or `None`.
    """

    query: jax.Array
    key: jax.Array
    lse: jax.Array
    slopes: jax.Array | None


def settle(
    layout: Layout,
    how: Reading,
    call: Attended,
    planes: Planes,
    index: Index,
    plan: Plan,
    weights: Any,
    axes: tuple[str | None, Any],
) -> Plan:
    """Weighs every token and lets the layout choose which stay.

    Args:
      layout: Which chooses.
      how: The choices of the read.
      call: What was attended with.
      planes: The records, before the step is written.
      index: Before the step.
      plan: As it was made before attention.
      weights: Arrays of the read's view.
      axes: Logical axes: of heads, and of the planes.

    Returns:
      The plan, with its jobs and its index afterwards settled. On a mesh each device chooses
      for its own rows and heads.
    """
    call = jax.tree.map(lax.stop_gradient, call)
    heads, plane_axes = axes
    kept = how.spec.kv_heads if layout.per_head else 1
    (B, T, N), n = call.query.shape[:3], layout.observed(call.query.shape[1])
    split = spec_for(("batch", None, heads), (B, T, N))[2] is not None
    parts = axis_size(heads) if heads is not None and split else 1
    by_head = ("batch", heads, None)
    placed = index_axes(layout, heads)
    if n and B:
        tokens = ("batch", None, heads)
        view_axes = how.view.weight_axes if how.view is not None else ()
        call_axes = Attended(tokens, tokens, tokens, (heads,))  # type: ignore[arg-type]
        in_axes = (call_axes, plane_axes, placed, ("batch",), view_axes)
        stored = jax.tree.map(lax.stop_gradient, planes)

        def weigh(
            call: Attended, planes: Planes, index: Index, place: tuple, weights: Any
        ) -> tuple[jax.Array, ...]:
            found = _weigh(how, n, call, planes, index, place, weights)
            # Of one KV head each device has the share that its own query heads gave: as many
            # rows as there are devices, one on each, which are added below.
            rows = parts * call.query.shape[2] // N
            return tuple(
                jnp.broadcast_to(x, (x.shape[0], max(rows, x.shape[1]), x.shape[2])) for x in found
            )

        old, new = local(weigh, in_axes, (by_head, by_head))(
            call, stored, index, (plan.start, plan.count), weights
        )
    else:
        old, new = (jnp.zeros((B, kept, size), jnp.float32) for size in (how.slots, T))
    if old.shape[1] != kept:  # the heads decide together
        old, new = (jnp.sum(x, axis=1, keepdims=True) for x in (old, new))

    def chosen(index: Index, plan: Plan, old: jax.Array, new: jax.Array) -> tuple[Any, Index]:
        settled = layout.settled(index, how.slots, plan, old, new)
        return settled.jobs, settled.after

    jobs, after = local(
        chosen,
        (placed, ("batch",), by_head, by_head),
        (layout.job_axes(heads), placed),
    )(index, plan, old, new)
    return Plan(plan.start, plan.count, plan.order, jobs, after)


def _weigh(
    how: Reading,
    n: int,
    call: Attended,
    planes: Planes,
    index: Index,
    place: tuple[jax.Array, jax.Array],
    weights: Any,
) -> tuple[jax.Array, jax.Array]:
    """Sums what each stored and each new token got of the last `n` queries."""
    start, count = place
    seen_by = last_observers(n, call.query, call.lse, place)
    old = weigh_stored(how, seen_by, planes, index, weights, call.slopes)
    token = jnp.arange(call.key.shape[1], dtype=jnp.int32)[None]
    order = jnp.where(token < count[:, None], start[:, None] + token, -1)
    return old, weigh_new(how, seen_by, call.key, order, call.slopes)
