"""The probe of `gpushare-agent check` that asks the API server: own node, kubelet version, permissions."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from msgspec import Raw

from gpushare_agent.agent.kubelet.pod_resources import OLDEST, parsed_version
from gpushare_agent.agent.mig.own_node import managed_by_another
from gpushare_agent.core.claims.claim import DRIVER
from gpushare_agent.core.kit.json_schema import NULL
from gpushare_agent.core.kube.objects import NodeJson, read_node_json
from gpushare_agent.core.model.errors import AgentError, Conflict, NotFound, Rejected
from gpushare_agent.core.model.finding import Finding, error, ok, warning
from gpushare_agent.core.model.names import GPUSHARE_COUNT_RESOURCE, RESIZE_STATUS_ANNOTATION
from gpushare_agent.core.settings.settings import Settings

if TYPE_CHECKING:
    from gpushare_agent.core.kube.client import KubeApi

API_CURE = "check the network, the service account or kubeconfig (--kubeconfig), and that the API server is up"
_ROLE_REMEDY = "apply manifests/base/rbac.yaml, or give this account the right"
_POLICY_REMEDY = (
    "manifests/extender's policy wants a service account with gpushare-agent in its name and the right to use"
    " annotations.gpushare-agent: apply manifests/base and manifests/extender of one version; in other policies except it"
)

OTHER_PODS_REMEDY = (
    "taint the nodes with GPUs, such as with tencent.com/vcuda-core:NoSchedule, or set facts.taint_above: 0.5"
    " (docs/how-to/install.md)"
)
_MOST_CPU_OF_OTHERS = 0.1
"""The part of a node's CPUs that a cluster's own pods may have."""
_NODES_OWN = {"DaemonSet", "Node"}
"""Owners of pods that taints keep nowhere away; Node is that of static pods."""
_PASSING_TAINTS = (
    "node.kubernetes.io/", "node.cloudprovider.kubernetes.io/", "karpenter.sh/", "ToBeDeletedByClusterAutoscaler",
    "startup-taint.cluster-autoscaler.kubernetes.io/", "readiness.k8s.io/",
)  # fmt: skip
"""Keys of taints that a node has for a while: its condition's, its start's, its removal's."""

NEEDED_RIGHTS = (
    ("get", "nodes"),
    ("list", "pods"),
    ("watch", "pods"),
    ("get", "pods"),
    ("patch", "pods"),
    ("create", "events"),
)
CLEANUP_RIGHT = ("delete", "pods")
"""Only for removing rejected pods (allocation.cleanup_rejected_pods)."""
STATIC_PODS_RIGHT = ("get", "nodes/pods")
"""Only for static pods (kubelet.api_address)."""
RUNTIME_CLASSES_RIGHT = ("get", "runtimeclasses.node.k8s.io")
"""Only for pods that name a RuntimeClass (runtime.sandboxed_handlers)."""
FACTS_RIGHT = ("patch", "nodes")
"""Only for the labels and the annotation about the GPUs (facts.is_written)."""


async def check_api(settings: Settings) -> list[Finding]:
    """Own node, kubelet version, pods of the node, and every right that the agent uses. Raises AgentError."""
    from gpushare_agent.core.kube.client import open_kube_api
    from gpushare_agent.core.kube.session import KubeTimeouts

    # Each well below the probe's limit, so that the finding says which request had no answer.
    timeouts = KubeTimeouts(connect_s=3.0, request_s=4.0, list_s=5.0)
    async with open_kube_api(kubeconfig=settings.kubeconfig, timeouts=timeouts) as api:
        findings = await _check_node_object(api, settings)
        findings += [*await _check_rights(api, settings), *await _check_slices(api, settings)]
        return [*findings, *await _check_static_pods(api, settings)]


async def _check_node_object(api: KubeApi, settings: Settings) -> list[Finding]:
    try:
        # The Node first: with a wrong node name all that follows says nothing.
        raw_node = await api.get_node(settings.node_name)
    except NotFound:
        detail = f"there is no node {settings.node_name}"
        return [error("api server", detail, "set --node-name (or NODE_NAME from spec.nodeName) to this node's name")]
    node = read_node_json(raw_node)
    managed = managed_by_another(node.meta.labels) if settings.mig.on_demand else ""
    why, _, remedy = managed.partition(": ")
    findings = [ok("api server", f"answers, node {settings.node_name} found"), _kubelet_version(node)]
    return [*findings, *([error("mig", why, remedy)] if why else ()), await _check_other_pods(api, settings, raw_node)]


def _kubelet_version(node: NodeJson) -> Finding:
    text = node.status.info.kubelet_version
    if (found := parsed_version(text)) is None:
        return warning(
            "kubelet version", f"the node has none ({text!r})", "make sure that the kubelet is 1.30 or newer"
        )
    if found >= OLDEST:
        return ok("kubelet version", text)
    detail = f"{text} is older than 1.30: asking its PodResources during an admission can crash it"
    return error("kubelet version", detail, "update the kubelet")


async def _check_other_pods(api: KubeApi, settings: Settings, raw_node: Raw) -> Finding:
    """Whether something keeps pods without GPUs from the CPUs that free GPUs need, and else what such pods have now."""
    from gpushare_agent.core.kube.client import UNFINISHED, pods
    from gpushare_agent.core.kube.pods import read_pod_json
    from gpushare_agent.core.kube.scheduling import CPU, node_offer, pod_needs

    what, offer = "pods without GPUs", node_offer(raw_node)
    if keeping := [taint for taint in offer.taints if not taint.key.startswith(_PASSING_TAINTS)]:
        return ok(what, f"the taint {keeping[0]} keeps them away")
    if settings.facts.is_written and settings.facts.taint_above < 1:
        if any(name.startswith("karpenter.sh/") for name in offer.labels):
            # From its source: it asks for a toleration of every taint, whatever the effect.
            detail = "Karpenter made this node, and takes the taint of facts.taint_above for one that forbids it"
            return warning(what, detail, "set it to 1, and taints in the NodePool (docs/how-to/scale-nodes.md)")
        return ok(
            what, f"they go elsewhere while much is free here: facts.taint_above is {settings.facts.taint_above:g}"
        )
    try:
        running = pods(fields=f"spec.nodeName={settings.node_name},{UNFINISHED}")
        found, _ = await api.list_all(running, read_pod_json)
    except AgentError as failure:
        return ok(what, f"not known, and nothing keeps them away: {failure}")
    needs = [pod_needs(pod.spec) for pod in found if not _NODES_OWN & {one.kind for one in pod.meta.owners}]
    # A device plugin's resources have a domain; claims are named among what is not checked.
    others = [
        one for one in needs if not any("/" in name for name in one.requests) and "resourceClaims" not in one.unchecked
    ]
    has, used = offer.allocatable.get(CPU, 0), sum(one.requests.get(CPU, 0) for one in others)
    detail = f"nothing keeps them away, and they have {used / 1000:g} of {has / 1000:g} CPUs now"
    if used > has * _MOST_CPU_OF_OTHERS:
        return warning(what, f"{detail}; GPUs without CPUs are of use to nobody", OTHER_PODS_REMEDY)
    return ok(what, f"{detail}; whether more come is not known")


async def _check_static_pods(api: KubeApi, settings: Settings) -> list[Finding]:
    """The right, then the list itself, which also shows whether the kubelet's certificate is verified."""
    from gpushare_agent.agent.kubelet.static_pods import StaticPods

    kubelet = settings.kubelet
    if not kubelet.api_address:
        return []
    if not await api.can_i(*STATIC_PODS_RIGHT):
        detail = "not allowed: get nodes/pods; static pods that ask for a share will be refused"
        return [warning("static pods", detail, "add manifests/components/static-pods")]
    reader = StaticPods(
        address=kubelet.api_address, port=kubelet.api_port, ca_file=kubelet.api_ca, node_name=settings.node_name
    )
    try:
        # Its own limit, less than the probe's, so that the finding names the kubelet's port.
        found = await reader.read(timeout_s=4.0)
    except AgentError as failure:
        return [
            warning(
                "static pods", f"{failure}; those that ask for a share will be refused", "docs/how-to/static-pods.md"
            )
        ]
    return [ok("static pods", f"the kubelet at {kubelet.api_address} lists {len(found)}")]


async def _check_annotations(api: KubeApi, settings: Settings) -> list[Finding]:
    """Whether admission policies let this account write a pod's annotations, tried on the own pod or another of the node."""
    from gpushare_agent.core.kube.client import pods_of_node
    from gpushare_agent.core.kube.objects import object_meta, pod_uid

    try:
        found, _ = await api.list_all(pods_of_node(settings.node_name), lambda raw: (object_meta(raw, "pod"), raw))
        if not found:
            return []
        meta, raw_pod = next((one for one in found if one[0].name == socket.gethostname()), found[0])
        annotations = {RESIZE_STATUS_ANNOTATION: "tried by check"}
        await api.patch_pod_annotations(
            meta.namespace or "", meta.name or "", pod_uid(raw_pod), annotations, is_tried=True
        )
    except (NotFound, Conflict):  # it has ended meanwhile
        return []
    except Rejected as failure:
        return [error("pod annotations", str(failure), _POLICY_REMEDY)]
    return [ok("pod annotations", "may be written")]


async def _check_slices(api: KubeApi, settings: Settings) -> list[Finding]:
    """Whether an admission policy refuses this account the slices of another node, tried with one."""
    from gpushare_agent.core.kube.claims import Pool, ResourceSlice, SliceMeta, SliceSpec

    if not settings.has_claims:
        return []
    other = "another-node-for-check"
    spec = SliceSpec(driver=DRIVER, node_name=other, pool=Pool(other, 1, 1), devices=())
    try:
        made = ResourceSlice(metadata=SliceMeta(name=other, owner_references=NULL), spec=spec)
        await api.create_slice(made, is_tried=True)
    except Rejected as failure:
        if "ValidatingAdmissionPolicy" in str(failure):
            return [ok("ResourceSlices", "a policy keeps this account to those of its own node")]
        return [warning("ResourceSlices", str(failure), "add manifests/components/dra")]
    except (NotFound, Conflict):
        return []
    detail = "no admission policy keeps this account to those of its own node"
    remedy = "apply manifests/components/dra, whose policy knows accounts with gpushare-agent in their name"
    return [warning("ResourceSlices", detail, remedy)]


async def _check_rights(api: KubeApi, settings: Settings) -> list[Finding]:
    missing = [f"{verb} {resource}" for verb, resource in NEEDED_RIGHTS if not await api.can_i(verb, resource)]
    allowed = ", ".join(f"{verb} {resource}" for verb, resource in NEEDED_RIGHTS)
    cleanup, may_clean_up = settings.allocation.cleanup_rejected_pods, await api.can_i(*CLEANUP_RIGHT)
    if cleanup and may_clean_up:
        allowed += ", delete pods (rejected ones that have a controller)"
    # A right that nothing uses should be taken back.
    elif may_clean_up:
        allowed += "; delete pods too, which is not needed: allocation.cleanup_rejected_pods is false"
    findings = [
        error("permissions", f"not allowed: {', '.join(missing)}", _ROLE_REMEDY)
        if missing
        else ok("permissions", allowed)
    ]
    if not missing:
        findings += await _check_annotations(api, settings)
    if cleanup and not may_clean_up:
        detail = "not allowed: delete pods; rejected pods of controllers will pile up"
        findings.append(
            warning("permissions", detail, f"{_ROLE_REMEDY}; or set --allocation.cleanup-rejected-pods=false")
        )
    if settings.facts.is_written and not await api.can_i(*FACTS_RIGHT):
        detail = (
            "not allowed: patch nodes; labels and the scheduler extender's list of GPUs will be missing on the node"
        )
        findings.append(warning("permissions", detail, f"{_ROLE_REMEDY}; or set --facts.is-written=false"))
    if settings.runtime.sandboxed_handlers and not await api.can_i(*RUNTIME_CLASSES_RIGHT):
        detail = "not allowed: get runtimeclasses; a sandboxed pod is known by the name of its RuntimeClass alone"
        findings.append(warning("permissions", detail, f"{_ROLE_REMEDY}; or set --runtime.sandboxed-handlers="))
    if settings.gpushare.enabled and not await api.can_i("patch", "nodes/status"):
        detail = f"not allowed: patch nodes/status; the capacity will lack {GPUSHARE_COUNT_RESOURCE}"
        findings.append(warning("permissions", detail, "add manifests/components/gpushare"))
    return findings
