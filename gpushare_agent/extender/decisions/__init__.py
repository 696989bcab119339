"""The extender's decisions: where a pod fits, what a namespace may use, which claims replace limits, and the ledger.

No clock, no I/O. `ledger.py` alone has state, ClusterLedger and its NodeLedgers; extender/cluster_state.py owns it.
"""
