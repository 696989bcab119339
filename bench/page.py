"""The dashboard's poll: bytes and processor time of an answer, with everything changing between two."""

from __future__ import annotations

import time

from bench.results import Row, row
from bench.sample_node import SampleNode
from gpushare_agent.agent.observability.node_snapshot import node_document
from gpushare_agent.core.kit.http_answers import encode, packed

GPUS = 16
CONTAINERS = 200
POLLS = 60
TARGET_KB = 40.0
TARGET_CPU_MS = 50.0


def poll_rows() -> list[Row]:
    """The whole document, encoded and packed as it is sent; the processor time is for any number of readers."""
    node = SampleNode(gpus=GPUS, containers=CONTAINERS)
    sizes: list[float] = []
    costs: list[float] = []
    for _ in range(POLLS):
        node.step()
        snapshot = node.snapshot()
        before = time.process_time()
        answer = packed(encode(node_document(snapshot)))
        costs.append((time.process_time() - before) * 1000)
        sizes.append(len(answer) / 1000)
    what = f"{GPUS} GPUs, {CONTAINERS} containers, all changing"
    return [
        row(f"poll of the page: {what}", sizes, unit="KB", target_median=TARGET_KB, target_p99=TARGET_KB),
        row(f"poll of the page, CPU: {what}", costs, target_median=TARGET_CPU_MS),
    ]
