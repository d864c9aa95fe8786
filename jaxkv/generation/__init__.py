# SPDX-License-Identifier: Apache-2.0
"""Generating tokens from a model and its cache."""

from jaxkv.generation.beams import Beams as Beams
from jaxkv.generation.decoding import Decoding as Decoding
from jaxkv.generation.decoding import Generation as Generation
from jaxkv.generation.decoding import Hypotheses as Hypotheses
from jaxkv.generation.decoding import StopReason as StopReason
from jaxkv.generation.draft import DraftModel as DraftModel
from jaxkv.generation.lookup import PromptLookup as PromptLookup
from jaxkv.generation.loop import generate as generate
from jaxkv.generation.sampling import Sampling as Sampling
from jaxkv.generation.sampling import sample as sample
