# SPDX-License-Identifier: Apache-2.0
"""The planner: from a model's config to bytes, per token, per device and per chip."""

from jaxkv.memory.chips import CHIPS, Chip, find_chip
from jaxkv.memory.counting import Storage
from jaxkv.memory.planner import Plan, plan
from jaxkv.memory.policy import SlotPolicy

__all__ = ["plan", "Plan", "Storage", "SlotPolicy", "Chip", "CHIPS", "find_chip"]
