"""`python -m gpushare_agent`, and the console scripts."""

import gc
import os
import sys

if sys.version_info < (3, 11):  # noqa: UP036 - in a checkout any `python3 -m gpushare_agent` comes here
    older = sys.version.split()[0]
    sys.exit(f"gpushare-agent needs Python 3.11 or newer, this is {older}: run it with a newer one")


def main(module: str = "gpushare_agent.commands", function: str = "main") -> int:
    """Runs a command line and returns the exit code.

    Imports make hundreds of thousands of objects and no garbage: without collections in between they take a tenth less
    time (measured), and the start until registration is short of time. CommandLine.main turns collection on again.
    """
    from gpushare_agent.core.cli import interrupts

    interrupts.end_at_once()
    is_agent = sys.argv[1:2] == ["run"] and module == "gpushare_agent.commands"
    if is_agent:
        interrupts.hold_hangup()
    from importlib import import_module

    gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")  # else pydantic searches every installed package for one
    try:
        import_libraries(is_agent=is_agent)
        return int(getattr(import_module(module), function)())
    except BaseException as error:
        if not interrupts.is_behind(error):
            raise
        return interrupts.INTERRUPTED
    finally:
        interrupts.end_at_once()


def run_as_gpushare() -> int:
    """`gpushare-device-plugin-v2`: GPUShare's DaemonSet calls its device plugin so (core/settings/sources.py)."""
    sys.argv.insert(1, "run")
    os.environ["GPUSHARE_PROGRAM"] = "gpushare-device-plugin-v2"
    return main()


def run_plugin() -> int:
    """`kubectl-gpushare`."""
    return main("gpushare_agent.kubectl.plugin")


def complete_plugin() -> int:
    """`kubectl_complete-gpushare`."""
    return main("gpushare_agent.kubectl.plugin", "complete")


def import_libraries(*, is_agent: bool) -> None:
    """Those of which the agent needs less than they import (docs/reference/measurements.md).

    | library | without | which it imports for |
    |---|---|---|
    | structlog | rich: 50 ms and 5 MiB | coloured tracebacks. Commands that want rich import it as ever |
    | pydantic_settings | importlib.metadata: 8 ms with email | pydantic's plugins, which are switched off above |
    | | the others: 6 ms | sources of its own, which core/settings/sources.py replaces |
    | betterproto2 | its version, which takes importlib.metadata too | its check of the compiler's: pyproject.toml has it |
    | prometheus_client | http.server and others: 8 ms | servers and clients of its own |
    """
    from gpushare_agent.core.kit.lean_imports import Hollow, import_lean

    import_lean("structlog", {"rich": None})
    for library, unused in _UNUSED.items() if is_agent else ():
        import_lean(library, {name: Hollow(name) for name in unused.split()})


_UNUSED = {
    "pydantic_settings": "importlib.metadata importlib.resources.abc dotenv pydantic_settings.sources.providers.cli",
    "betterproto2": "betterproto2._version",
    "prometheus_client": "http.server socketserver urllib.request wsgiref.simple_server",
}


if __name__ == "__main__":
    sys.exit(main())
