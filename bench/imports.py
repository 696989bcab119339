"""What the agent's imports alone keep in memory, by package: the modules of an agent that runs, imported again in a process
that does nothing else.

`python -m bench.imports names FILE ARGUMENTS…` is that agent, with its command's arguments, and writes the names of its
modules when it ends; `python -m bench.imports` reads such names from its standard input and prints the MiB by package.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import subprocess
import sys
from collections import defaultdict
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what is imported here is not measured
    from bench.results import Row

_LEAST_MIB = 0.5
_PYTHON, _STANDARD, _REST = "Python itself", "its standard library", f"each below {_LEAST_MIB:g} MiB, together"
_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


async def import_rows(runs: int) -> list[Row]:
    """A package has what its own modules and extension modules take; what they import counts as its own package's."""
    from bench.node import open_node
    from bench.results import row

    async with open_node() as node:
        names = node.state / "modules.json"
        command = [sys.executable, "-m", "bench.imports", "names", str(names)]
        node.agent.become([*command, *node.agent.arguments])
        node.fill()
        await node.start_agent()
        await node.agent.stop()
        modules = names.read_text()
    found = [_measured(modules) for _ in range(runs)]
    of_package = {name: [one.get(name, 0.0) for one in found] for name in {name for one in found for name in one}}
    small = [name for name, values in of_package.items() if max(values) < _LEAST_MIB]
    of_package[_REST] = [sum(one.get(name, 0.0) for name in small) for one in found]
    rows = [row(name, values, unit="MiB") for name, values in of_package.items() if name not in small]
    rows.sort(key=lambda one: (one.name != _PYTHON, one.name == _REST, -one.median))
    return [row("resident memory of the imports alone", [sum(one.values()) for one in found], unit="MiB"), *rows]


def _measured(modules: str) -> dict[str, float]:
    ended = subprocess.run(
        [sys.executable, "-m", "bench.imports"], input=modules, capture_output=True, text=True, check=True
    )
    found: dict[str, float] = json.loads(ended.stdout)
    return found


def _run_agent(path: Path, arguments: list[str]) -> int:
    atexit.register(lambda: path.write_text(json.dumps(list(sys.modules))))
    sys.argv[:] = ["gpushare-agent", *arguments]
    from gpushare_agent.__main__ import main

    return main()


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_MIB


class _Shares:
    """Charges each growth of the process to the package whose module runs."""

    def __init__(self) -> None:
        self._seen_mib = _bare_mib()
        self.mib = defaultdict[str, float](float, {_PYTHON: self._seen_mib})
        self._running = [_STANDARD]

    def charge(self) -> None:
        now = _resident_mib()
        self.mib[self._running[-1]] += now - self._seen_mib
        self._seen_mib = now

    def wrap(self, loader: Any) -> Any:
        """The loader's `exec_module` for all modules of its kind."""
        run = loader.exec_module

        def exec_module(self_: Any, module: ModuleType) -> None:
            self.charge()
            top = module.__name__.partition(".")[0]
            self._running.append(_STANDARD if top in sys.stdlib_module_names else top)
            try:
                run(self_, module)
            finally:
                self.charge()
                self._running.pop()

        return exec_module


def _import_all(modules: list[str]) -> dict[str, float]:
    from importlib.machinery import ExtensionFileLoader, SourceFileLoader

    gc.disable()  # as the agent, while it imports
    shares = _Shares()
    for loader in (SourceFileLoader, ExtensionFileLoader):
        loader.exec_module = shares.wrap(loader)  # type: ignore[method-assign]  # for this process
    from gpushare_agent.__main__ import import_libraries

    import_libraries(is_agent=True)  # before all that imports them: the agent has them without some modules
    from gpushare_agent.core.kube.configuration import load_library

    for name in modules:
        # Of kubernetes-asyncio the agent has a few modules, put in place by hand.
        if name.partition(".")[0] == "kubernetes_asyncio":
            load_library()
            continue
        # Some names are no modules of their own, such as typing.io.
        with suppress(ImportError):
            import_module(name)
    shares.charge()
    return dict(shares.mib)


def _bare_mib() -> float:
    program = "print(open('/proc/self/statm').read().split()[1])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # noqa: S603
    return int(ended.stdout) * _PAGE_MIB


if __name__ == "__main__":
    if sys.argv[1:2] == ["names"]:
        sys.exit(_run_agent(Path(sys.argv[2]), sys.argv[3:]))
    print(json.dumps(_import_all(json.loads(sys.stdin.read()))))  # noqa: T201 - its output
