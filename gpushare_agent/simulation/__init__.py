"""Replays a workload on a simulated cluster, with the decisions that the extender and the agent take (docs/simulate.md).

Simulated are time, pods, nodes and the scheduler's queue; which GPU a pod gets, and whether it gets one, is decided by
the code that decides it in a cluster. Nothing here waits, reads a clock or keeps anything after a replay.
"""
