"""Names that the interface gives to a flag and to a method at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weightsync.errors import SettingError


class FlagAndMethod:
    """A method whose name is a flag of its instance, too.

    Assigning a bool sets the flag and leaves the method; calling calls the method; a condition
    reads the flag.
    """

    def __init__(self, method: Callable[..., Any], default: bool = False) -> None:
        self._method = method
        self._default = default
        self._key = f"{method.__name__} is set"
        self.__doc__ = method.__doc__

    @staticmethod
    def keep(cls: type) -> None:
        """Makes what a subclass puts under such a name, a method or a flag, both again."""
        for name, own in list(cls.__dict__.items()):
            above = next((b.__dict__[name] for b in cls.__mro__[1:] if name in b.__dict__), None)
            if isinstance(above, FlagAndMethod) and not isinstance(own, FlagAndMethod):
                is_flag = isinstance(own, bool)
                method, default = (above._method, own) if is_flag else (own, above._default)
                setattr(cls, name, FlagAndMethod(method, default))

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self._method
        return _Bound(self._method, instance, instance.__dict__.get(self._key, self._default))

    def __set__(self, instance: Any, value: Any) -> None:
        if not isinstance(value, (bool, _Bound)):
            raise SettingError(f"{self._method.__name__}: expected true or false, got {value!r}")
        instance.__dict__[self._key] = bool(value)


class _Bound:
    """One instance's method, and its flag."""

    def __init__(self, method: Callable[..., Any], instance: Any, flag: bool) -> None:
        self._method, self._instance, self._flag = method, instance, flag

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._method(self._instance, *arguments, **named)

    def __bool__(self) -> bool:
        return self._flag

    def __eq__(self, other: object) -> bool:
        return self._flag == bool(other) if isinstance(other, (bool, _Bound)) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._flag)
