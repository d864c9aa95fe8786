# SPDX-License-Identifier: Apache-2.0
"""Kernels in Pallas, on plain arrays; `jaxkv.ops` decides when one serves."""
