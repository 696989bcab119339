"""The dashboard's stream: bytes and processor time a second, with everything changing each second."""

from __future__ import annotations

import time

from bench.results import Row, row
from bench.sample_node import SampleNode
from gpushare_agent.observability.http.live_patch import patch, rounded
from gpushare_agent.observability.http.live_stream import encode_event
from gpushare_agent.observability.node_snapshot import node_document

GPUS = 16
CONTAINERS = 200
SECONDS = 60
TARGET_KB_PER_S = 20.0
TARGET_CPU_MS_PER_S = 50.0


def stream_rows() -> list[Row]:
    """One patch a second for a minute, encoded as it is sent; the processor time is for any number of readers."""
    node = SampleNode(gpus=GPUS, containers=CONTAINERS)
    reported = rounded(node_document(node.snapshot()))
    sizes: list[float] = []
    costs: list[float] = []
    for _ in range(SECONDS):
        node.step()
        snapshot = node.snapshot()
        before = time.process_time()
        new = rounded(node_document(snapshot))
        event = encode_event("patch", patch(reported, new))
        costs.append((time.process_time() - before) * 1000)
        sizes.append(len(event) / 1000)
        reported = new
    what = f"{GPUS} GPUs, {CONTAINERS} containers, all changing"
    return [
        row(f"stream per second: {what}", sizes, unit="KB", target_median=TARGET_KB_PER_S, target_p99=TARGET_KB_PER_S),
        row(f"stream, CPU per second: {what}", costs, target_median=TARGET_CPU_MS_PER_S),
    ]
