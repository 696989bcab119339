"""Measures the node agent against its targets: `python -m bench` prints a table (docs/reference/measurements.md explains
it).

The agent runs as its own process, the real `gpushare-agent run` with simulated GPUs. What stands in for the kubelet is
lean on purpose (bench/http2.py, bench/kubelet.py): its time is part of every interval that is measured at the socket.
"""
