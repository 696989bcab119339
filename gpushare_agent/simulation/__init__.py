"""Replays a workload on a simulated cluster, with the decisions of the extender and the agent (docs/how-to/simulate.md).

Time, pods, nodes and the scheduler's queue are simulated; whether a pod fits, and which GPUs it gets, is decided by the
code that decides it in a cluster (extender/cluster_state.py; of claims, the sandbox's allocator). Nothing here waits or
reads a clock, and no state outlives a replay: `Replay` owns the events and the waiting pods, `Scheduler` the ledger and
the candidates, `Meter` the measurements.
Called by cli/simulate.py. Open `replay.py` first.

Others import: results, schedulers, traces, workload.
"""
