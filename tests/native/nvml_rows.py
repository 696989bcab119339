"""Asks NVML for the samples of utilisation ten times a second, with the newest time stamp seen, as the agent does: one line
of JSON for each row, [when it was sampled, PID, percent, when it was asked for] in seconds of CLOCK_REALTIME.

    python nvml_rows.py SECONDS

Under virtual_time.c it takes part in that clock.
"""

from __future__ import annotations

import json
import sys
import time

import pynvml


def main() -> None:
    pynvml.nvmlInit()
    gpu, newest, until = pynvml.nvmlDeviceGetHandleByIndex(0), 0, time.monotonic() + float(sys.argv[1])
    while time.monotonic() < until:
        time.sleep(0.1)
        try:
            rows = pynvml.nvmlDeviceGetProcessUtilization(gpu, newest)
        except pynvml.NVMLError_NotFound:
            continue
        asked = time.time()
        for row in sorted(rows, key=lambda row: row.timeStamp):
            newest = max(newest, row.timeStamp)
            print(json.dumps([row.timeStamp / 1e6, row.pid, row.smUtil, asked]), flush=True)  # noqa: T201 - its output


if __name__ == "__main__":
    main()
