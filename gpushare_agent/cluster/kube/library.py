"""Loads the few modules of kubernetes-asyncio that are used here, without the 900 generated ones that are not.

The library's packages import every API class and model in their `__init__`: 33 MiB of memory and a third of a second
of one core (docs/reference/measurements.md), for an agent that works on raw JSON. So the packages are put in place without
running their `__init__`, and the modules that are needed are imported from them.

State owned: the library's entries in sys.modules. A library that the process has imported already is used as it is;
who wants all of it beside the agent's client imports it first. Where the layout is not the one known, it is imported
whole. Not for use on the event loop: importing takes a while.
"""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Any

import structlog
from msgspec import Struct

log = structlog.get_logger(__name__)

_LIBRARY = "kubernetes_asyncio"
_HOLLOW = (_LIBRARY, f"{_LIBRARY}.client", f"{_LIBRARY}.client.models")
"""Packages whose `__init__` is passed over, parents first."""
_OFFERED = {"Configuration": f"{_LIBRARY}.client.configuration", "ApiClient": f"{_LIBRARY}.client.api_client"}
"""What the library's own modules import from its client package, in the order in which they need each other."""

_lock = threading.Lock()


class KubeLibrary(Struct, frozen=True, kw_only=True):
    """The modules `client`, `config` and `config.kube_config`. Of `client` only Configuration and ApiClient are there."""

    client: Any
    config: Any
    kube_config: Any


def load_library() -> KubeLibrary:
    """The library, imported at the first call. Raises ImportError where it is not installed."""
    with _lock:
        if _LIBRARY not in sys.modules:
            _load_lean()
        return KubeLibrary(
            client=import_module(f"{_LIBRARY}.client"),
            config=import_module(f"{_LIBRARY}.config"),
            kube_config=import_module(f"{_LIBRARY}.config.kube_config"),
        )


def _load_lean() -> None:
    try:
        for name in _HOLLOW:
            _put_package(name)
        for name, module in _OFFERED.items():
            setattr(sys.modules[f"{_LIBRARY}.client"], name, getattr(import_module(module), name))
        import_module(f"{_LIBRARY}.config.kube_config")
    except (ImportError, AttributeError) as e:
        for name in [name for name in sys.modules if name.partition(".")[0] == _LIBRARY]:
            del sys.modules[name]
        log.info("kubernetes_library_loaded_whole", reason=str(e))


def _put_package(name: str) -> None:
    """Makes the package importable from, with nothing in it."""
    spec = find_spec(name)
    if spec is None:
        raise ImportError(f"no package {name}")
    package = sys.modules[name] = module_from_spec(spec)
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, package)
