"""Models named by path: ``env.value_net``, ``transforms[0]``, ``heads['left']``."""

from __future__ import annotations

import re
from typing import Any

from weightsync.errors import ModelError

_PART = re.compile(r"""\.?(?P<name>[^.\[\]]+)|\[(?:(?P<at>-?\d+)|'(?P<a>[^']*)'|"(?P<b>[^"]*)"|(?P<c>[^\]]+))\]""")


def resolve(root: Any, path: str) -> Any:
    """The object at a path, from ``root`` on. Nothing is evaluated.

    Raises:
        ModelError: naming the part that does not exist, and the names that do.
    """
    here, done, at = root, "", 0
    while at < len(path):
        part = _PART.match(path, at)
        if part is None or (at == 0 and path[0] == "."):
            raise ModelError(f"{path!r} is not a path: {path[at:]!r} cannot be read")
        at = part.end()
        try:
            if (name := part["name"]) is not None:
                here = getattr(here, name)
            elif part["at"] is not None:
                here = here[int(part["at"])]
            else:
                here = here[next(part[key] for key in "abc" if part[key] is not None)]
        except (AttributeError, LookupError, TypeError) as error:
            raise ModelError(
                f"{path!r} does not exist: there is no {part[0].lstrip('.')!r} in "
                f"{done or 'the root'}, a {type(here).__name__} with {_names(here)}"
            ) from error
        done = path[:at]
    return here


def _names(value: Any) -> str:
    """Some of the names that exist in a value."""
    if hasattr(value, "keys"):
        names = [repr(key) for key in value.keys()]
    elif isinstance(value, (list, tuple)):
        names = [f"{len(value)} items"]
    else:
        names = [name for name in dir(value) if not name.startswith("_")]
        own = getattr(value, "__dict__", {})
        names = [name for name in own if not name.startswith("_")] or names
    some = ", ".join(names[:8])
    return f"{some} and {len(names) - 8} more" if len(names) > 8 else some or "nothing"
