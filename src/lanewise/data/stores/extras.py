"""Libraries only some users need: imported when used, and if missing, named with the command that brings them."""

import importlib
from types import ModuleType

from lanewise.errors import UserError


def needs(module: str, extra: str, url: str) -> ModuleType:
    """The module of an optional extra. Raises UserError naming the extra."""
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise UserError(f"{url}: {e}; install it with: pip install 'lanewise[{extra}]'") from None
