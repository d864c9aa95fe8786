# SPDX-License-Identifier: Apache-2.0
"""Products with weights: values and gradients in every form, and no weight copied or widened."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxkv.core.products import FEW_ROWS, part_count, project, unembed

# Contracted shape, produced shape: in parts, of a prime number of channels, over two axes.
SHAPES = {"parts": ((256,), (96,)), "prime": ((131,), (40,)), "heads": ((6, 64), (3, 16))}


def drawn(leading, inputs, outputs, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((*leading, *inputs))
    kernel = rng.standard_normal((*inputs, *outputs)) / np.sqrt(np.prod(inputs))
    return jnp.asarray(x, dtype), jnp.asarray(kernel, dtype)


def expected(x, kernel, inputs):
    """Multiplies in float64."""
    leading = x.shape[: x.ndim - inputs]
    wide, weights = np.asarray(x, np.float64), np.asarray(kernel, np.float64)
    channels = int(np.prod(kernel.shape[:inputs]))
    out = wide.reshape(-1, channels) @ weights.reshape(channels, -1)
    return out.reshape(*leading, *kernel.shape[inputs:])


def assert_rounded(got, want):
    """Sums are float32, so a result is one rounding to 8 bits of mantissa away (and float32's)."""
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("leading", [(1, 1), (1, 2), (3, 1), (2, 4), (1, FEW_ROWS), (3, 6), (5,)])
@pytest.mark.parametrize("shape", SHAPES)
def test_projects_any_number_of_rows(shape, leading):
    inputs, outputs = SHAPES[shape]
    x, kernel = drawn(leading, inputs, outputs)
    got = project(x, kernel, len(inputs), (None,) * len(outputs))
    assert got.shape == (*leading, *outputs)
    assert got.dtype == jnp.bfloat16
    assert_rounded(got, expected(x, kernel, len(inputs)))


@pytest.mark.parametrize("leading", [(1, 1), (3, 1), (2, 4), (3, 6)])
def test_scores_every_row_of_a_table(leading):
    x, kernel = drawn(leading, (256,), (40,))
    got = unembed(x, kernel.T)
    assert got.dtype == jnp.bfloat16
    assert_rounded(got, expected(x, kernel, 1))


@pytest.mark.parametrize("rows", [1, 3, FEW_ROWS])
def test_gradients_are_those_of_the_plain_product(rows):
    x, kernel = drawn((rows, 1), (256,), (48,))
    aim = jnp.asarray(np.random.default_rng(1).standard_normal((rows, 1, 48)), jnp.bfloat16)

    def loss(x, kernel):
        return jnp.sum((project(x, kernel, 1, (None,)) * aim).astype(jnp.float32))

    d_x, d_kernel = jax.grad(loss, argnums=(0, 1))(x, kernel)
    wide = [np.asarray(a, np.float64) for a in (x[:, 0], kernel, aim[:, 0])]
    assert_rounded(d_x[:, 0], wide[2] @ wide[1].T)
    assert_rounded(d_kernel, wide[0].T @ wide[2])


def test_models_stacked_by_vmap_keep_their_own_kernels():
    x, kernel = drawn((4, 2, 1), (256,), (48,))
    kernels = jnp.stack([kernel, 2 * kernel, 4 * kernel, 8 * kernel])
    got = jax.vmap(lambda x, k: project(x, k, 1, (None,)))(x, kernels)
    for n in range(4):
        assert_rounded(got[n], 2**n * expected(x[n], kernel, 1))


@pytest.mark.parametrize("rows", [1, 2, 8, FEW_ROWS])
@pytest.mark.parametrize("fn", ["project", "unembed"])
def test_no_weight_is_copied_or_widened_on_a_cpu(fn, rows):
    x, kernel = drawn((rows, 1), (512,), (768,))
    if fn == "project":
        compiled = jax.jit(lambda x, k: project(x, k, 1, (None,))).lower(x, kernel).compile()
    else:
        compiled = jax.jit(unembed).lower(x, kernel.T.copy()).compile()
    # The rows of partial sums are the largest thing: 8 parts of at least 4 rows, in float32.
    most = 3 * part_count(512) * max(rows, 4) * 768 * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= most
    assert not re.search(r"f32\[(8,64,768|512,768|768,512)\]", compiled.as_text())


def test_a_symbolic_number_of_rows_is_exported():
    (B,) = export.symbolic_shape("B")
    x, kernel = drawn((3, 1), (256,), (48,))
    like = jax.ShapeDtypeStruct((B, 1, 256), x.dtype)
    exported = export.export(jax.jit(lambda x, k: project(x, k, 1, (None,))))(like, kernel)
    assert_rounded(exported.call(x, kernel), expected(x, kernel, 1))


def test_a_call_outside_of_jit_finds_what_the_last_one_compiled(caplog):
    x, kernel = drawn((2, 1), (192,), (36,))
    project(x, kernel, 1, (None,))
    with jax.log_compiles():
        project(x + 1, kernel, 1, (None,))
    assert not [r for r in caplog.records if "project" in r.getMessage()]


@pytest.mark.parametrize(("channels", "parts"), [(1, 1), (63, 1), (128, 2), (576, 9), (577, 1)])
def test_parts_divide_the_channels(channels, parts):
    assert part_count(channels) == parts
