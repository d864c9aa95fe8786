# SPDX-License-Identifier: Apache-2.0
"""Attention on arrays: the reference, the fast paths, merging, and the choice."""

from jaxkv.ops.api import attention as attention
from jaxkv.ops.api import explain as explain
from jaxkv.ops.blockwise import Blockwise as Blockwise
from jaxkv.ops.merge import add_sink as add_sink
from jaxkv.ops.merge import merge as merge
