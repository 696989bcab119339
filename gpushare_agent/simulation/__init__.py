"""Replays a workload on a simulated cluster, with the decisions of the extender and the agent (docs/how-to/simulate.md).

Time, pods, nodes and the scheduler's queue are simulated. The code of a real cluster decides whether a pod fits and which
GPUs it gets (extender/cluster_state.py; for claims core/placement/first_fit.py). Nothing here waits or
reads a clock, and no state outlives a replay: `Replay` owns the events and the waiting pods, `Scheduler` the ledger and
the candidates, `Meter` the measurements.
Called by simulation/command.py. Open `replay.py` first.

Others import: nothing.
"""
