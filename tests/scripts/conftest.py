# SPDX-License-Identifier: Apache-2.0
"""Lets tests import what lies beside the scripts, as the scripts themselves do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
