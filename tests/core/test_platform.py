# SPDX-License-Identifier: Apache-2.0
"""Which devices a program is meant for, on a machine that may have none of them."""

import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from jaxkv.attention.placement import default_lanes
from jaxkv.core.platform import target_platform

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
