"""The user's own functions, by name."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from lanewise.errors import UserError


def named(name: str, setting: str) -> Callable[..., Any]:
    """The function 'module:function'; the module may be in the current folder. Raises UserError if there is none."""
    module, sign, function = name.partition(":")
    if not sign or not module or not function:
        raise UserError(f"{setting}: {name!r} names no function: write module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), function, None)
    except ImportError as error:
        raise UserError(f"{setting}: module {module!r} cannot be imported ({error}): write module:function") from None
    if not callable(found):
        raise UserError(f"{setting}: module {module!r} has no function {function!r}")
    return found
