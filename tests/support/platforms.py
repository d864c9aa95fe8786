# SPDX-License-Identifier: Apache-2.0
"""Platforms to trace for where no device of theirs is there."""

from jax.sharding import AbstractDevice, AbstractMesh

TPU = AbstractMesh((1,), ("data",), abstract_device=AbstractDevice("TPU v5 lite", 1, "tpu"))
