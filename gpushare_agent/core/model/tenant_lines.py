"""The log lines that a tenant can cause: those that name a pod or a claim, and the events below, which name none."""

from __future__ import annotations

TENANT_FIELDS = ("pod_uid", "claim_uid", "pod", "claim", "about")
"""The first that a line has is its subject. The namespace, where it is known, is next to it or in it (`NAMESPACE/NAME`)."""
TENANT_EVENTS = frozenset(
    {
        "allocate",
        "claim_template_created",
        "container_ids_unknown",
        "debug_request_failed",
        "device_plugin_call_failed",
        "gpu_event",
        "gpu_event_ignored",
        "gpu_event_of_no_gpu",
        "gpu_event_of_unknown_gpu",
        "kubelet_checkpoint_unreadable",
        "object_unreadable",
        "path_replaced",
        "pod_not_identified",
        "pre_start_container",
        "pre_start_refused",
        "preferred_allocation_failed",
        "preferred_allocation_timed_out",
        "private_cache_not_prepared",
        "reconcile_failed",
        "rpc_failed",
        "vdevice_directory_not_ours",
        "vdevice_not_prepared",
        "vdevice_poll_failed",
    }
)
