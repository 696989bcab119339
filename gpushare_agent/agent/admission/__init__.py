"""Finds the container of an admission call and what it gets: identify, plan, commit, answer; releases what ended.

State owned: `AllocationCache` (the device IDs of every container), `PendingAdmissions` and `RefusedPods` (kept
between the kubelet's calls), `GarbageCollection` (deleted pods whose processes run, containers missing), `DecisionLog`,
`DeviceTables`, `ShareResizing` (what is in resize.json of state_directory). Called by the device plugins
(kubelet/device_plugin.py), by the pod store's changes, and by its own periodic loops. Open admission.py first. What happens
when the pod is unknown: identification.py asks the kubelet (when a List may be sent: kubelet/pod_resources.py) and the
API server, and refuses in doubt. decisions/ is pure.

Others import: allocation_cache, claim_pods, decisions.container_edits, decisions.former_devices, decisions.ledger,
decisions.recovery, outcomes, part.
"""
