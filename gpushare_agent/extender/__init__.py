"""The scheduler extender: filter, prioritize, preempt and bind for kube-scheduler, and quotas of namespaces.

`cluster_state.py` answers and reserves: where GPUs are reserved is `ClusterState.reserve`, decided by decisions/pod_plan.py
and recorded in decisions/ledger.py. `bind.py` carries a reservation out: annotations, then the bind.
State owned: `ClusterState` (the ledger of nodes and reservations), `QuotaState`, `Waiters`, `Preemption`, `Binder` (binds
under way), `PodsFeed`, `NodesFeed` and `QuotaFeed` (the informers' handlers), `LeaderElection` and `Leadership`.
Called by commands.py, by simulation without I/O, and by kubectl/, which advises. Open
`verbs.py` first for a request, `app.py` for the composition.

Others import: app, cluster_feed, cluster_state, debug, decisions.ledger, decisions.pod_plan, decisions.quota,
metrics, objects, values.
"""
