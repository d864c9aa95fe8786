# SPDX-License-Identifier: Apache-2.0
"""Which devices a program is meant for, on a machine that may have none of them."""

import jax
import jax.export
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxkv.attention.placement import default_lanes
from jaxkv.core.platform import by_platform, target_platform

DEVICES = {
    "tpu": AbstractDevice("TPU v5 lite", 1, "tpu"),
    "gpu": AbstractDevice("NVIDIA H200", 132, "cuda"),
    "cpu": AbstractDevice("cpu", None, "cpu"),
}


@pytest.mark.parametrize("platform", DEVICES)
def test_the_mesh_in_use_names_the_devices(platform):
    device = DEVICES[platform]
    mesh = AbstractMesh((2,), ("data",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh), jax.default_device("cpu"):
        assert target_platform() == platform
        assert default_lanes() == (128 if platform == "tpu" else 1)


def test_without_a_mesh_the_default_device_decides():
    with jax.default_device("cpu"):
        assert target_platform() == "cpu"
    with jax.default_device(jax.devices()[0]):
        assert target_platform() == jax.devices()[0].platform
    assert target_platform() == jax.default_backend()


def test_a_choice_follows_the_platform_that_a_program_is_compiled_for():
    seen = []

    def times(factor, x):
        seen.append(factor)
        return x * factor

    def run(x):
        return by_platform(times, 3.0, 5.0, x)

    x = jnp.float32(2.0)
    assert jax.jit(run)(jax.device_put(x, jax.devices("cpu")[0])) == 6.0
    for platform, factor, other in (("cpu", "3.0", "5.0"), ("tpu", "5.0", "3.0")):
        text = jax.export.export(jax.jit(run), platforms=[platform])(x).mlir_module()
        assert f"dense<{factor}" in text and f"dense<{other}" not in text
    seen.clear()
    assert by_platform(times, 7.0, 7.0, x) == 14.0
    assert seen == [7.0], "what is chosen alike is traced once"
