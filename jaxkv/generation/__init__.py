# SPDX-License-Identifier: Apache-2.0
"""Generating tokens from a model and its cache."""

from jaxkv.generation.loop import Generation as Generation
from jaxkv.generation.loop import StopReason as StopReason
from jaxkv.generation.loop import generate as generate
from jaxkv.generation.sampling import Sampling as Sampling
from jaxkv.generation.sampling import sample as sample
