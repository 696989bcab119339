"""The extender's decisions: where a pod fits, what a namespace may use, which claims replace limits, and the ledger.

No clock, no I/O. `ledger.py` and `quota.py` alone have state: the NodeLedgers, which extender/cluster_state.py owns, and
QuotaState, which it tells what counts.
"""
