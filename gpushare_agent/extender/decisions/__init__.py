"""The extender's decisions: where a pod fits, what a namespace may use, and the ledger of the cluster. No clock, no I/O.

`ledger.py` has the one class here with state, ClusterLedger; extender/cluster_state.py owns it.
"""
