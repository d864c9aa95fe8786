# SPDX-License-Identifier: Apache-2.0
"""The same outputs and gradients on no mesh and on Auto, Explicit and mixed meshes."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxkv.core.sharding import Rules, use_rules
from jaxkv.ops.api import attention
from tests.ops.suite import QUICK, normal, operands
from tests.support import dense
from tests.support.tolerances import assert_close

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
B, T, S, N = 8, 3, 5, 8
# KV heads by mesh: one, fewer than the tensor axis, as many, more.
KV_HEADS = {(8, 1): (2,), (2, 4): (1, 2, 4), (1, 8): (8,)}


def mesh_of(shape, *kinds):
    return jax.make_mesh(shape, ("data", "tensor"), axis_types=kinds)


def arrays_of(K):
    by_head = {"sink_logits": normal("sink", N), "alibi_slopes": normal("slope", N)}
    return operands(B, T, S, N, K, 4, 3) | {"bias": normal("bias", B, 1, T, S)} | by_head


OPTIONS = {
    "causal": True,
    "offset": np.arange(B) - 1,
    "query_lengths": np.array([3, 2, 0, 3, 3, 1, 3, 3]),
    "soft_cap": 4.0,
    "mask": normal("mask", 1, N, T, S) > -1,
}


@functools.partial(jax.jit, compiler_options=QUICK)
def attended(arrays):
    """Computes out, lse and the gradients of a loss of both."""

    def loss(arrays):
        out, lse = attention(**arrays, **OPTIONS, return_lse=True)
        some = jnp.where(jnp.isfinite(lse), lse, 0.0)
        return jnp.sum(jnp.square(out)) + jnp.sum(some), (out, lse)

    grads, (out, lse) = jax.grad(loss, has_aux=True)(arrays)
    return {"out": out, "lse": lse} | grads


@functools.cache
def truth(K):
    """Computes the same in float64."""
    out = dense.attention(arrays_of(K), OPTIONS).out
    bars = (2 * out, np.ones(out.shape[:3]))
    result = dense.attention(arrays_of(K), OPTIONS, bars)
    return {"out": result.out, "lse": result.lse} | result.grads


def on(mesh, program, *arguments):
    """Runs on a mesh, or on none."""
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        return jax.device_get(program(*arguments))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(("shape", "K"), [(s, K) for s in KV_HEADS for K in KV_HEADS[s]], ids=str)
def test_outputs_and_gradients_match_float64_on_every_mesh(shape, K, kind):
    got = on(mesh_of(shape, kind, kind), attended, arrays_of(K))
    for name, want in truth(K).items():
        assert_close(got[name], want, terms=B * T * N, what=name)
        assert want.any(), name


@functools.partial(jax.jit, compiler_options=QUICK)
def dropped(arrays, key):
    return attention(**arrays, dropout_rate=0.4, dropout_key=key)


@functools.cache
def dropped_alone(seed):
    return on(None, dropped, operands(B, T, S, N, 4, 4, 3), jax.random.key(seed))


@pytest.mark.parametrize(
    ("shape", "kind"),
    [((8, 1), AUTO), ((2, 4), AUTO), ((2, 4), EXPLICIT), ((1, 8), EXPLICIT)],
    ids=str,
)
def test_a_mesh_drops_the_same_weights(shape, kind):
    arrays = operands(B, T, S, N, 4, 4, 3)
    got = on(mesh_of(shape, kind, kind), dropped, arrays, jax.random.key(7))
    assert_close(got, dropped_alone(7))
    assert np.abs(got - dropped_alone(8)).max() > 0.1  # other masks would show


PLAIN = {"causal": True, "offset": 2}


def plain_arrays(K):
    return operands(B, T, S, N, K, 4, 4) | {"sink_logits": normal("sink", N)}


@functools.cache
def plain_truth(K):
    return dense.attention(plain_arrays(K), PLAIN).out


def check_on(mesh, run=attention, placed=None, rules=None, K=4):
    """Holds a forward pass on a mesh against float64; `placed` gives the arrays' axes."""
    with jax.set_mesh(mesh), use_rules(rules or Rules()):
        arrays = plain_arrays(K)
        if placed is not None:
            for name in ("query", "key", "value"):
                arrays[name] = jax.device_put(arrays[name], PartitionSpec(*placed))
        # A new function object, so that jit does not find a trace made under other rules.
        program = jax.jit(lambda a: run(**a, **PLAIN), compiler_options=QUICK)
        out = program(arrays)
    assert_close(jax.device_get(out), plain_truth(K))
    return out


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
@pytest.mark.parametrize(("K", "heads"), [(4, 2), (2, 8)])
def test_each_device_computes_its_own_rows_and_heads(K, heads, kind):
    out = check_on(mesh_of((2, 4), kind, kind), K=K)
    assert {shard.data.shape for shard in out.addressable_shards} == {(4, T, heads, 4)}


@pytest.mark.parametrize(
    "placed", [("data", None, "tensor"), ("tensor", None, None, "data")], ids=["right", "wrong"]
)
def test_arrays_may_lie_anywhere_on_an_explicit_mesh(placed):
    check_on(mesh_of((2, 4), EXPLICIT, EXPLICIT), placed=placed)


def test_an_explicit_mesh_of_one_device():
    check_on(mesh_of((1, 1), EXPLICIT, EXPLICIT), placed=("data", None, "tensor"))


@pytest.mark.parametrize("kinds", [(AUTO, EXPLICIT), (EXPLICIT, AUTO)], ids=["ae", "ea"])
def test_auto_and_explicit_axes_may_be_mixed(kinds):
    check_on(mesh_of((2, 4), *kinds))


@pytest.mark.parametrize("names", [{"data"}, {"data", "tensor"}], ids=["rows", "all"])
def test_inside_a_callers_shard_map(names):
    def run(query, key, value, **options):
        rows = PartitionSpec("data")
        mapped = jax.shard_map(
            lambda *x: attention(*x, **options),
            in_specs=(rows, rows, rows),
            out_specs=rows,
            axis_names=names,
            check_vma=False,
        )
        return mapped(query, key, value)

    check_on(mesh_of((2, 4), AUTO, AUTO), run)


ODD_RULES = {
    "heads": (("heads", "tensor"),),
    "unlike": (("heads", "data"), ("kv_heads", "tensor")),
    "rows-too": (("batch", "tensor"), ("heads", "tensor"), ("kv_heads", "tensor")),
    "nothing": (),
}


@pytest.mark.parametrize(("name", "K"), [*((name, 4) for name in ODD_RULES), ("rows-too", 1)])
def test_rules_that_split_oddly_cost_speed_and_not_results(name, K):
    check_on(mesh_of((2, 4), AUTO, AUTO), rules=Rules(ODD_RULES[name]), K=K)


def test_rows_that_the_mesh_does_not_divide():
    mesh = mesh_of((2, 4), EXPLICIT, EXPLICIT)
    arrays = operands(3, T, S, 6, 1, 4, 3) | {"sink_logits": normal("sink", 6)}
    with jax.set_mesh(mesh):
        out = jax.jit(lambda a: attention(**a, **PLAIN), compiler_options=QUICK)(arrays)
    assert_close(jax.device_get(out), dense.attention(arrays, PLAIN).out)
