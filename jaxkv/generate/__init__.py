# SPDX-License-Identifier: Apache-2.0
"""Generating tokens from a model and its cache."""

from jaxkv.generate.loop import Generation as Generation
from jaxkv.generate.loop import StopReason as StopReason
from jaxkv.generate.loop import generate as generate
from jaxkv.generate.sampling import Sampling as Sampling
from jaxkv.generate.sampling import sample as sample
