# SPDX-License-Identifier: Apache-2.0
"""Serving: what a host keeps in mind while requests come and go in the rows of one cache."""

from jaxkv.serving.prefixes import Match as Match
from jaxkv.serving.prefixes import PrefixIndex as PrefixIndex
from jaxkv.serving.prefixes import adopt as adopt
