"""One table of what the Kubernetes version changes in the sandbox, and the kubelet's times.

The embedded kubelet and the API server ask a `KubeletBehaviour` and never a version number. A version behaves as
measured on a real kubelet of it (docs/reference/sandbox.md, "What the embedded kubelet does"). No state.
"""

from __future__ import annotations

from msgspec import Struct

from gpushare_agent.core.model.errors import StartupError


class KubeletBehaviour(Struct, frozen=True, kw_only=True):
    version: str
    release: str
    """Reported by the API server's /version and in the Node object."""
    has_pod_resources_get: bool = True
    """The feature gate KubeletPodResourcesGet is on."""
    lists_ended_pods: bool = False
    """PodResources List names rejected and ended pods until their object is deleted."""
    removes_plugin_files: bool = False
    """At its start it removes files and links in the plugin directory, except sockets, directories and the checkpoint."""


_BEHAVIOURS = (
    KubeletBehaviour(
        version="1.31",
        release="v1.31.14",
        has_pod_resources_get=False,
        lists_ended_pods=True,
        removes_plugin_files=True,
    ),
    KubeletBehaviour(version="1.34", release="v1.34.9"),
    KubeletBehaviour(version="1.36", release="v1.36.2"),
)
KUBERNETES_VERSIONS = tuple(behaviour.version for behaviour in _BEHAVIOURS)


def behaviour_of(version: str) -> KubeletBehaviour:
    """Raises StartupError for a version with unknown behaviour."""
    for behaviour in _BEHAVIOURS:
        if behaviour.version == version:
            return behaviour
    raise StartupError(f"Kubernetes {version} cannot be embedded: known are {', '.join(KUBERNETES_VERSIONS)}")


class KubeletTimes(Struct, frozen=True, kw_only=True):
    """The measured times of a real kubelet; tests use shorter ones."""

    admission_delay_s: float = 1.0
    """From the sockets' creation to the first admission: PodResources lists nothing before."""
    status_interval_s: float = 10.0
    """Between updates of the Node object's capacity."""
    first_status_s: float = 0.25
    container_start_s: float = 0.05
    start_retry_s: float = 10.0
    """After a failed PreStartContainer."""
    registry_poll_s: float = 1.0
    """The watcher of the plugin registry reconciles so often."""
    slice_wipe_s: float = 1.0
    """From the start to the deletion of the node's ResourceSlices."""
    driver_away_s: float = 30.0
    """From the end of a DRA driver's registration to the deletion of its ResourceSlices."""
    prepare_retry_s: tuple[float, float] = (60.0, 90.0)
    """After a failed NodePrepareResources, unless the pod's object changes."""
    unprepare_retry_s: float = 10.0
    claims_reconcile_s: float = 60.0
    """Between searches for prepared claims that have lost their pods."""
