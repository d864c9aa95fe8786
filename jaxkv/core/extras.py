# SPDX-License-Identifier: Apache-2.0
"""Optional dependencies: imported where they are used, named when they are missing."""

import importlib
from types import ModuleType


def require(module: str, *, extra: str) -> ModuleType:
    """Imports an optional dependency, or says how to install it.

    Args:
      module: Dotted name, such as `"orbax.checkpoint"`.
      extra: The extra of this package that brings it, such as `"train"`.

    Returns:
      The imported module.

    Raises:
      ImportError: If it is not installed. A fault inside an installed one is passed on as it is.

    >>> require("math", extra="cli").sqrt(4.0)
    2.0
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ImportError(
            f'{module} is not installed; it comes with: pip install "jaxkv[{extra}]"',
            name=module,
        ) from error
