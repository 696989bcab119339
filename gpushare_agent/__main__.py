"""`python -m gpushare_agent` and the console script `gpushare-agent`."""

from __future__ import annotations

import gc
import sys


def main() -> int:
    """Runs the command line and returns the exit code.

    Imports make hundreds of thousands of objects and no garbage: without collections in between they take a tenth less
    time (measured), and the start until registration is short of time. cli.py turns collection on again.
    """
    gc.disable()
    from gpushare_agent.cli import main as run_command_line

    return run_command_line()


if __name__ == "__main__":
    sys.exit(main())
