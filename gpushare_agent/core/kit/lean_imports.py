"""Imports a library without modules that it imports for what this program does not use. No state."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from types import ModuleType
from typing import Any


def import_lean(
    library: str, stand_ins: Mapping[str, ModuleType | None], load: Callable[[], object] | None = None
) -> Exception | None:
    """Imports `library`, by `load` if given, unless somebody has. Meanwhile `stand_ins` are in the place of those modules
    that nobody has imported; None makes the import of one fail.

    Returns why the library cannot do with them; then nothing of it stays, and the next import finds it whole. Raises
    OSError, as where no file can be opened.
    """
    if library in sys.modules:
        return None
    put = {name: one for name, one in stand_ins.items() if name not in sys.modules}
    sys.modules.update(put)  # type: ignore[arg-type]  # None is Python's own way to say "not to be had"
    try:
        load() if load is not None else import_module(library)
    except Exception as error:  # whatever a stand-in is used for
        for name in [name for name in sys.modules if name.partition(".")[0] == library]:
            del sys.modules[name]
        if isinstance(error, OSError):
            raise
        return error
    finally:
        for name, one in put.items():
            if sys.modules.get(name) is one:
                sys.modules.pop(name, None)
    return None


class Hollow(ModuleType):
    """Stands for a module whose classes and functions are only named, as the bases of classes that nobody uses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__version__":
            raise AttributeError(name)
        return type(name, (_Anything,), {})


class _Anything:
    """May be called and iterated, and does nothing."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __iter__(self) -> Iterator[Any]:
        return iter(())
