"""Writes over a container's `usage` again and again, as its programs may. Under virtual_time.c it takes part in that clock.

    python liar.py FILE WHAT PERIOD_S FOR_S

WHAT is a seed: random bytes over the whole file. Or `hides`: a full bucket on GPU 0, and nothing launched or paid.
"""

from __future__ import annotations

import os
import random
import struct
import sys
import time

from gpushare_agent.agent.isolation.gpushare.format import usage_head_bytes

TOKENS, LAUNCHED, LAUNCHED_LONG = (usage_head_bytes(0) + offset for offset in (24, 48, 192))
BUCKET_NS = 50_000_000


def hide(file: int) -> None:
    os.pwrite(file, struct.pack("q", BUCKET_NS), TOKENS)
    os.pwrite(file, bytes(16), LAUNCHED)
    os.pwrite(file, bytes(24), LAUNCHED_LONG)


def main() -> None:
    path, what, period_s, for_s = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
    file, began = os.open(path, os.O_RDWR), time.monotonic()
    size, numbers = os.fstat(file).st_size, random.Random(None if what == "hides" else int(what))
    while time.monotonic() - began < for_s:
        time.sleep(period_s)
        if what == "hides":
            hide(file)
        else:
            os.pwrite(file, numbers.randbytes(size), 0)


if __name__ == "__main__":
    main()
