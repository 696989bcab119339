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
    if sys.argv[1:2] == ["run"] and module == "gpushare_agent.commands":
        interrupts.hold_hangup()
    from importlib import import_module

    gc.disable()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "true")  # else pydantic searches every installed package for one
    try:
        _import_structlog()
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


def _import_structlog() -> None:
    """Without rich, which it would import for coloured tracebacks: 50 ms and 5 MiB (docs/reference/measurements.md) for
    nothing that the agent prints. Commands that want rich import it as ever."""
    if "rich" in sys.modules:
        return
    sys.modules["rich"] = None  # type: ignore[assignment]  # Python's own way to say "not to be had"
    try:
        import structlog  # noqa: F401 - imported for what it remembers of rich
    finally:
        del sys.modules["rich"]


if __name__ == "__main__":
    sys.exit(main())
