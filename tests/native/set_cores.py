"""Writes other cores into a container's gpushare.config, as the agent does at a resize. Under virtual_time.c it takes part
in that clock.

    python set_cores.py FILE AFTER_S HUNDREDTHS
"""

from __future__ import annotations

import mmap
import sys
import time
from pathlib import Path

from gpushare_agent.agent.isolation.gpushare.format import CONFIG_BYTES, GpuLimits, write_limits


def main() -> None:
    path, after_s, cores = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    with path.open("r+b") as file:
        config = memoryview(mmap.mmap(file.fileno(), CONFIG_BYTES))
    time.sleep(after_s)
    write_limits(config, 0, GpuLimits(uuid="", cores=cores))


if __name__ == "__main__":
    main()
