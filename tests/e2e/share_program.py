"""Programs in a container that compare their limits with its share, again and again: `share_program.py CORES MIB`.

Each runs tests/native/gpu_program on the fake driver, which lie beside this file: it asks for the memory's size, takes what
it can get, and launches for a second. After each, one line of JSON says how many there were and what was wrong, the first
few times: `{"gpus": "GPU-…", "checks": 7, "wrong": []}`. Without a share nothing is run. Until SIGTERM.

tests/e2e/test_endurance.py has it in pods of the agent's image.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STATE = "/tmp/gpu"
CONTEXT_MIB, BLOCK_MIB, MOST_BLOCKS = 300, 64, 1000
KERNELS_PER_S = 1000
"""Of the fake driver, one after the other."""
SAVED_S, TOLERANCE = 0.15, 1.3
"""What an idle share may have saved of the GPU's time, and how much more than its part it may get in a second."""
MOST_SHOWN = 5
PAUSE_S = 2


def run_program(gpu: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {
        "LD_LIBRARY_PATH": str(HERE),
        "FAKE_GPU_STATE": STATE,
        "FAKE_GPU_GPUS": "1",
        "FAKE_GPU_DEVICES": "all",
        "FAKE_GPU_UUID_PREFIX": gpu,
    }
    actions = ["info", f"alloc:alloc:{BLOCK_MIB}:{MOST_BLOCKS}", "launch:kernel:1"]
    program = [str(HERE / "gpu_program"), "dlsym", "12080", *actions]
    return subprocess.run(program, env=env, capture_output=True, text=True, timeout=120, check=False)


def wrong(done: subprocess.CompletedProcess[str], cores: int, memory_mib: int) -> Iterator[str]:
    """What such a program had that its share does not have."""
    if done.returncode:
        yield f"ended with {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"
        return
    steps: dict[str, dict[str, Any]] = {step["action"]: step for step in map(json.loads, done.stdout.splitlines())}
    if (total_mib := steps["info"]["total_mib"]) != memory_mib:
        yield f"memory is {total_mib} MiB, not {memory_mib}"
    if (blocks := steps["alloc"]["blocks"]) != (memory_mib - CONTEXT_MIB) // BLOCK_MIB:
        yield f"took {blocks} blocks of {BLOCK_MIB} MiB of {memory_mib} MiB, {CONTEXT_MIB} of which the context has"
    launched = steps["launch"]
    used_s = launched["kernels"] / KERNELS_PER_S
    if not 0 < used_s <= (launched["seconds"] * cores / 100) * TOLERANCE + SAVED_S:
        yield f"kept the GPU busy for {used_s} s of {launched['seconds']}, with {cores} cores"


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # PID 1 of its container has no default for it
    said: dict[str, Any] = {"gpus": os.environ["NVIDIA_VISIBLE_DEVICES"], "checks": 0, "wrong": []}
    while True:
        sys.stdout.write(json.dumps(said) + "\n")
        sys.stdout.flush()
        time.sleep(PAUSE_S)
        if len(sys.argv) > 1:
            found = wrong(run_program(said["gpus"]), int(sys.argv[1]), int(sys.argv[2]))
            said |= {"checks": said["checks"] + 1, "wrong": [*said["wrong"], *found][:MOST_SHOWN]}


if __name__ == "__main__":
    main()
