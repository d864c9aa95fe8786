# SPDX-License-Identifier: Apache-2.0
"""Tools to test attention variants with; pytest and Orbax are loaded by the modules that need them.

`jaxkv.testing.conformance.AttentionConformance` is the suite that a variant's tests subclass.
"""
