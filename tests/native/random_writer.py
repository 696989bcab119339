"""Writes random bytes over a file again and again, as a container may over its `usage`. Under virtual_time.c it takes part
in that clock.

    python random_writer.py FILE SEED PERIOD_S FOR_S
"""

from __future__ import annotations

import os
import random
import sys
import time


def main() -> None:
    path, seed, period_s, for_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4])
    numbers, file = random.Random(seed), os.open(path, os.O_RDWR)
    size, began = os.fstat(file).st_size, time.monotonic()
    while time.monotonic() - began < for_s:
        time.sleep(period_s)
        os.pwrite(file, numbers.randbytes(size), 0)


if __name__ == "__main__":
    main()
