# SPDX-License-Identifier: Apache-2.0
"""What the tests measure against: float64 attention from its definition, and the tolerances."""
