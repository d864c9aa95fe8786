# SPDX-License-Identifier: Apache-2.0
"""Kernels for GPUs, in Pallas on Triton."""
