# SPDX-License-Identifier: Apache-2.0
"""Attention for GPUs, without one: who serves what, our kernel as plain operations, and lowering.

What cuDNN computes is stood in for by its documented meaning, so that what we ask of it, and what
we make of its answers, is held to float64.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.nn import functions as nn_functions
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxkv.ops import api, cudnn
from jaxkv.ops import triton as ops_triton
from jaxkv.ops.api import attention, explain
from jaxkv.ops.blockwise import Blockwise
from jaxkv.ops.triton import Triton
from tests.ops import suite
from tests.support import dense

PLAIN = Triton(rows=16, slots=16, interpret=True)
BF16 = jnp.bfloat16


def on_gpu() -> Any:
    device = AbstractDevice("NVIDIA H100 80GB HBM3", None, "gpu")
    mesh = AbstractMesh((1,), ("data",), (AxisType.Auto,), abstract_device=device)
    return jax.sharding.use_abstract_mesh(mesh)


def shapes(T: int = 256, N: int = 4, K: int = 2, H: int = 64, S: int = 0, V: int = 0) -> dict:
    array = functools.partial(jax.ShapeDtypeStruct, dtype=BF16)
    S = S or T
    return {
        "query": array((2, T, N, H)),
        "key": array((2, S, K, H)),
        "value": array((2, S, K, V or H)),
    }


def wide(dtype: Any) -> dict:
    return {n: jax.ShapeDtypeStruct(x.shape, dtype) for n, x in shapes().items()}


def given(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def on_device(given: dict) -> dict:
    return {n: jnp.asarray(x) if isinstance(x, np.ndarray) else x for n, x in given.items()}


def answers(arrays: dict, **options: Any) -> dict[str, str]:
    """Lists who serves a call of which only shapes are known."""
    traced = {n: x for n, x in options.items() if isinstance(x, jax.ShapeDtypeStruct)}
    static = {n: x for n, x in options.items() if n not in traced}
    said: dict[str, str] = {}

    def look(arrays: dict, traced: dict) -> None:
        said.update(explain(**arrays, **static, **traced))

    jax.eval_shape(look, arrays, traced)
    return said


# The call, and what each of the two lacks for it; `None`: nothing.
CALLS = {
    "plain": (shapes(), {}, None, None),
    "causal": (shapes(), {"causal": True}, None, None),
    "window": (shapes(), {"causal": True, "window": 32}, None, None),
    "left window": (shapes(), {"window": (32, 0)}, None, None),
    "key lengths": (
        shapes(),
        {"causal": True, "key_lengths": given(2, dtype=jnp.int32)},
        None,
        None,
    ),
    "sinks": (shapes(), {"causal": True, "sink_logits": given(4)}, None, None),
    "last query": (shapes(T=2, S=256), {"causal": True, "offset": 255}, None, None),
    "mask": (shapes(), {"mask": given(256, 256, dtype=jnp.bool_)}, None, "has no mask"),
    "bias": (shapes(), {"bias": given(256, 256)}, "has no bias", "has no bias"),
    "ALiBi": (shapes(), {"alibi_slopes": given(4)}, "has no ALiBi slopes", "has no ALiBi slopes"),
    "dropout": (
        shapes(),
        {"dropout_rate": 0.5, "dropout_key": given(2, dtype=jnp.uint32)},
        *("has no dropout", "has no dropout"),
    ),
    "soft-cap": (shapes(), {"soft_cap": 30.0}, "has no soft-cap", None),
    "segments": (
        shapes(),
        {"query_segments": given(2, 256, dtype=jnp.int32)},
        *("has no segments", None),
    ),
    "query lengths": (
        shapes(),
        {"query_lengths": given(2, dtype=jnp.int32)},
        *("has no segments", None),
    ),
    "float32": (
        wide(jnp.float32),
        {"causal": True},
        *("computes in bfloat16 and float16, not in float32", None),
    ),
    "float8": (
        wide(jnp.float8_e4m3fn),
        {"causal": True},
        "computes in bfloat16 and float16, not in float8_e4m3fn",
        "does not compute in float8_e4m3fn",
    ),
    "values": (
        shapes(H=192, V=128),
        {"causal": True},
        "takes values as wide as keys, and here keys are 192 wide and values 128",
        None,
    ),
    "wide heads": (
        shapes(H=288),
        {"causal": True},
        "*multiple of 8, but got 288",
        "takes heads up to 256 wide, and here are 288",
    ),
    "traced offset": (
        shapes(),
        {"causal": True, "offset": given(2, dtype=jnp.int32)},
        *("takes no orders or offsets that are known only when it runs", None),
    ),
    "places of keys": (
        shapes(),
        {"key_order": given(2, 256, dtype=jnp.int32)},
        *("takes no orders or offsets that are known only when it runs", None),
    ),
    "offset": (
        shapes(T=64, S=256),
        {"causal": True, "offset": 100},
        "starts queries and keys together and wants as many of both; here are 64 and 256, "
        "offset 100",
        None,
    ),
    "look ahead": (
        shapes(),
        {"window": (8, 8)},
        *("has no window that looks ahead, as (8, 8) does", None),
    ),
    "pinned": (
        shapes(),
        {"causal": True, "window": 8, "pinned": 2},
        *("has no pinned tokens", None),
    ),
    "window and lengths": (
        shapes(),
        {"causal": True, "window": 8, "key_lengths": given(2, dtype=jnp.int32)},
        "does not say what a query gives whose window lies behind the row's last key",
        None,
    ),
    "no keys": (
        {
            **shapes(),
            "key": given(2, 0, 2, 64, dtype=BF16),
            "value": given(2, 0, 2, 64, dtype=BF16),
        },
        {},
        *("takes no empty arrays", None),
    ),
}


@pytest.fixture
def with_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets JAX believe that cuDNN is there."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 92800)
    cudnn._refused.cache_clear()
    yield
    cudnn._refused.cache_clear()


@pytest.mark.parametrize(("arrays", "options", "vendor", "ours"), CALLS.values(), ids=CALLS)
def test_what_each_lacks(
    with_library: None, arrays: dict, options: dict, vendor: str | None, ours: str | None
) -> None:
    with on_gpu():
        said = answers(arrays, **options)
    for name, lacks in (("cudnn", vendor), ("triton", ours)):
        if lacks is None:
            assert said[name].startswith("serves"), said[name]
        elif lacks.startswith("*"):
            assert said[name].endswith(lacks[1:] + ".")
        else:
            assert said[name] == lacks


def test_neither_serves_elsewhere() -> None:
    said = answers(shapes(), causal=True)
    assert said["cudnn"] == said["triton"] == "runs on GPUs only"


def test_without_the_library_ours_serves() -> None:
    cudnn._refused.cache_clear()
    with on_gpu():
        assert answers(shapes())["cudnn"] == "is not to be had here: cuDNN is not detected."
        operands = api.prepare(**{n: jnp.zeros(x.shape, BF16) for n, x in shapes().items()})
        assert api.choose(operands, None).name == "triton"


def test_without_pallas_on_triton_others_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with on_gpu():
        assert answers(shapes())["triton"] == "needs Pallas on Triton, which this JAX has not"


def test_few_queries_go_elsewhere(with_library: None) -> None:
    with on_gpu():
        said = answers(shapes(T=1, S=256))
    assert said["triton"] == "serves, but has tiles that 1 queries leave empty"


def test_tiles_are_powers_of_two() -> None:
    for size in (8, 24):
        with pytest.raises(ValueError, match=f"slots={size}: want a power of two, at least 16"):
            Triton(slots=size)


# Sizes that overhang their tiles, each feature once.
KERNEL_CASES: dict[str, tuple[dict, dict]] = {
    "causal": (
        {"T": 35, "S": 35, "H": 8, "V": 24, "sinks": True},
        {"causal": True, "soft_cap": 2.0},
    ),
    "window": (
        {"T": 20, "S": 40, "K": 4, "H": 16, "V": 16},
        {"window": (7, 3), "pinned": 2, "offset": np.array([13, -9])},
    ),
    "documents": (
        {"T": 36, "S": 36, "K": 1, "H": 16, "V": 16, "dtype": BF16},
        {"causal": True, "query_segments": np.repeat([[1, 2, 0], [1, 1, 2]], 12, axis=1)},
    ),
    "lengths": (
        {"T": 16, "S": 32, "H": 16, "V": 16, "dtype": np.float16},
        {"key_lengths": np.array([0, 23])},
    ),
    "full": ({"T": 16, "S": 32, "H": 16, "V": 16}, {}),
}


def kernel_case(sizes: dict) -> dict[str, np.ndarray]:
    sinks = sizes.get("sinks")
    arrays = suite.operands(**{n: x for n, x in sizes.items() if n != "sinks"})
    return arrays | ({"sink_logits": suite.normal("sinks", 4)} if sinks else {})


@pytest.mark.parametrize(("sizes", "options"), KERNEL_CASES.values(), ids=KERNEL_CASES)
def test_the_kernel_computes_attention(sizes: dict, options: dict) -> None:
    suite.check(PLAIN, kernel_case(sizes), jit=True, **options)


def test_nothing_comes_from_where_nothing_is() -> None:
    arrays = suite.operands(T=16, S=16, H=16, V=16)
    segments = np.repeat([[0, 1], [2, 0]], 8, axis=1)
    options = {"query_segments": segments}
    want = suite.outputs(PLAIN, arrays, jit=True, **options)
    hole = (segments == 0)[..., None, None]
    holed = {n: np.where(hole, np.float32(np.nan), x) for n, x in arrays.items()}
    got = suite.outputs(PLAIN, holed, jit=True, **options)
    np.testing.assert_array_equal(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])


@pytest.mark.parametrize(
    ("T", "S", "options"),
    [
        (70, 90, {"causal": True, "window": 20, "offset": 11}),
        (64, 64, {"query_segments": np.repeat([[1, 2, 3, 0], [4, 4, 4, 5]], 16, axis=1)}),
        (33, 65, {"causal": True, "offset": 20, "key_lengths": np.array([0, 34])}),
    ],
    ids=["window", "documents", "lengths"],
)
def test_tiles_with_nothing_to_see_are_skipped(T: int, S: int, options: dict) -> None:
    arrays = suite.operands(T=T, S=S, N=1, K=1, H=16, V=16)
    o = api.prepare(**on_device(arrays | options))
    call = PLAIN.call(o, ops_triton.FORWARD)
    seen = dense.visible((2, 1, T, S), options)[:, 0]
    for by_query in (True, False):
        first, end = jax.jit(functools.partial(ops_triton._spans, call, by_query=by_query))(o)
        flat = seen if by_query else seen.swapaxes(1, 2)
        for b in range(2):
            for i in range(first.shape[1]):
                keys = np.flatnonzero(flat[b, 16 * i : 16 * i + 16].any(axis=0))
                want = (keys[0] // 16, keys[-1] // 16 + 1) if keys.size else None
                got = (int(first[b, i]), int(end[b, i]))
                assert got == want or (want is None and got[0] == got[1])


def meaning(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: None,
    mask: jax.Array | None,
    q_lengths: jax.Array | None,
    k_lengths: jax.Array | None,
    *,
    scale: float,
    mask_type: Any,
    sliding_window_length: int | None,
    return_residual: bool,
) -> Any:
    """Computes what JAX's docstring says that cuDNN computes.

    A query that sees nothing gets NaN, or a mix of everything where a mask hides it all.
    """
    (B, T, N, _), (S, K) = query.shape, key.shape[1:3]
    q, k = jnp.arange(T)[:, None], jnp.arange(S)[None]
    seen = jnp.ones((B, 1, T, S), bool)
    if "CAUSAL" in mask_type.name:
        seen &= (k <= q)[None, None]
    if sliding_window_length is not None:
        seen &= (k > q - sliding_window_length)[None, None]
    if "PADDING" in mask_type.name:
        assert q_lengths.shape == k_lengths.shape == (B,)
        seen &= (k[None] < k_lengths[:, None, None])[:, None]
    kept = jnp.ones((), bool) if mask is None else mask
    assert kept.shape[2:] in ((), (T, S))
    key, value = (jnp.repeat(x, N // K, axis=2).astype(jnp.float32) for x in (key, value))
    scores = jnp.einsum("btnh,bsnh->bnts", query.astype(jnp.float32), key) * scale
    scores = jnp.where(seen, jnp.where(kept, scores, -1e6), -jnp.inf)
    out = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), value).astype(query.dtype)
    lse = jax.lax.stop_gradient(jax.nn.logsumexp(scores, axis=-1))
    return (out, lse) if return_residual else out


@pytest.fixture
def stood_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets the meaning of cuDNN compute, where JAX would call it."""
    monkeypatch.setattr(fused_attention_stablehlo, "dot_product_attention", meaning)
    monkeypatch.setattr(nn_functions, "cudnn_dot_product_attention", meaning)
    monkeypatch.setattr(cudnn, "target_platform", lambda: "gpu")
    monkeypatch.setattr(cudnn, "Triton", lambda: PLAIN)
    monkeypatch.setattr(cudnn, "Blockwise", lambda: Blockwise(rows=64, slots=16))
    cudnn._refused.cache_clear()
    yield
    cudnn._refused.cache_clear()


VENDOR_CASES: dict[str, dict] = {
    "window": {"causal": True, "window": 5, "scale": 0.3},
    "left window": {"window": (5, 0), "sinks": True},
    "wide window": {"causal": True, "window": 40, "offset": 15},
    "lengths": {"causal": True, "key_lengths": np.array([0, 11])},
    "mask": {"mask": np.arange(16)[None, None, None] < np.array([0, 9])[:, None, None, None]},
}


@pytest.mark.parametrize("options", VENDOR_CASES.values(), ids=VENDOR_CASES)
def test_cudnn_is_asked_the_right_thing(stood_in: None, options: dict) -> None:
    arrays = suite.operands(T=16, S=16, N=2, K=1, H=16, V=16, dtype=BF16)
    if "sinks" in options:
        arrays["sink_logits"] = suite.normal("sinks", 2)
    options = {n: x for n, x in options.items() if n != "sinks"}
    for b, length in enumerate(options.get("key_lengths", ())):
        arrays["key"][b, length:] = arrays["value"][b, length:] = np.nan
    bars = suite.bars_for(arrays)

    @jax.jit
    def program(arrays: dict, bars: Any) -> Any:
        call = functools.partial(attention, **on_device(options), implementation="cudnn")
        both, pull = jax.vjp(lambda a: call(**a, return_lse=True), arrays)
        out, pull_out = jax.vjp(lambda a: call(**a), arrays)
        return both, pull(bars)[0], out, pull_out(bars[0])[0]

    (out, lse), grads, alone, grads_alone = jax.device_get(program(on_device(arrays), bars))
    suite.compare(arrays, (out, lse, grads), dense.attention(arrays, options, bars))
    # Where nobody wants the log-sum-exp, JAX's own function and gradient serve.
    np.testing.assert_array_equal(alone, out)
    want = dense.attention(arrays, options, (bars[0], np.zeros_like(bars[1])))
    suite.compare(arrays, (out, lse, grads_alone), want)


def test_the_gradient_is_cudnns_own_where_it_can_be(
    stood_in: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("not needed for this gradient")

    monkeypatch.setattr(cudnn, "_with_lse_gradient", never)

    def grad(i: int) -> None:
        def loss(arrays: dict) -> jax.Array:
            both = attention(**arrays, implementation="cudnn", return_lse=True)
            return both[i].astype(jnp.float32).sum()

        jax.eval_shape(jax.grad(loss), shapes())

    grad(0)
    with pytest.raises(AssertionError, match="not needed"):
        grad(1)


# JAX means to take its Triton out one day; `Triton` refuses then.
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("name", ["triton", "blockwise", "einsum"])
def test_programs_lower_for_cuda(name: str) -> None:
    def loss(arrays: dict) -> jax.Array:
        out, lse = attention(
            **arrays, causal=True, window=100, implementation=name, return_lse=True
        )
        return out.astype(jnp.float32).sum() + lse.sum()

    with on_gpu():
        traced = jax.jit(jax.value_and_grad(loss)).trace(shapes())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = [k for k in ("flash_forward", "flash_backward_queries") if k in text]
    assert len(kernels) == (2 if name == "triton" else 0)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")
@pytest.mark.parametrize("lse", [False, True])
def test_calls_of_cudnn_lower_for_cuda(with_library: None, lse: bool) -> None:
    """The gradient is cuDNN's too, but for one that asks for the log-sum-exp's."""

    def loss(arrays: dict) -> jax.Array:
        found = attention(**arrays, causal=True, window=100, implementation="cudnn", return_lse=lse)
        return jnp.stack([x.astype(jnp.float32).sum() for x in jax.tree.leaves(found)]).sum()

    with on_gpu():
        traced = jax.jit(jax.value_and_grad(loss)).trace(shapes())
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"__cudnn\$\w+", text)) == {
        "__cudnn$fmhaSoftmax",
        *(() if lse else ("__cudnn$fmhaSoftmaxBackward",)),
    }
    assert ("flash_backward_queries" in text) == lse
