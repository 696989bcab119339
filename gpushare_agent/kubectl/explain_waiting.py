"""`kubectl gpushare explain` of a pod without a node: why it waits, and the smallest changes that would let it start now.

The cluster is read once with the person's own rights (cluster_reading.py), and decided on by kubectl/decisions/changes.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from msgspec import Raw
from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.core.cli.command_line import Form
from gpushare_agent.core.cli.render_text import counted, plain, print_as
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.kube.pods import PodJson, mistyped_annotations, read_pod_json, scheduler_message
from gpushare_agent.core.kube.scheduling import DEFAULT_SCHEDULER, PodNeeds, pod_needs
from gpushare_agent.core.kube.session import KubeLists
from gpushare_agent.core.model.errors import AgentError, Unavailable
from gpushare_agent.core.model.names import MIB, NVIDIA_MIG_PREFIX, PodUid
from gpushare_agent.core.placement.gpu_account import describe_request
from gpushare_agent.core.placement.mistakes import Offer, mistakes
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.extender.cluster_state import MAX_ASKING
from gpushare_agent.extender.decisions.pod_plan import signature_of
from gpushare_agent.kubectl.cluster_nodes import cluster_names
from gpushare_agent.kubectl.cluster_reading import ReadCluster, read_claims, read_cluster_view
from gpushare_agent.kubectl.decisions.changes import Change, Waiting, gpus_text, waiting
from gpushare_agent.kubectl.decisions.instances import (
    ClaimCluster,
    WaitsFor,
    Wanted,
    attributes_of_instances,
    instead_of,
    waits_for,
    wanted_of,
)

SCHEMA = 2
_MOST_ASKED = 10
_MOST_REASONS = 3


async def explain_waiting(api: KubeApi, settings: Settings, raw: Raw, *, form: Form) -> int:
    """Raises AgentError: the pod asks for no share, or the cluster cannot be read."""
    pod = read_pod_json(raw)
    name = f"{pod.meta.namespace}/{pod.meta.name}"
    waits = f"pod {name} is on no node yet. {_why_on_no_node(pod, settings)}"
    try:
        read = await read_cluster_view(api, settings)
        found = await waiting_document(api, read, pod)
    except AgentError as error:
        # A user who may only read one namespace still sees what the scheduler wrote, and which right is missing.
        worked_out = "What would let it start now is worked out from all nodes and pods, and"
        raise Unavailable(f"{waits} {worked_out}: {error}") from error
    known = read.view.pods.get(PodUid(pod.meta.uid or ""))
    if known is not None and known.pod.node_name:
        raise Unavailable(f"pod {name} went to node {known.pod.node_name} just now: ask again")
    if found is None:
        raise Unavailable(f"{waits} Its Events: kubectl describe pod -n {pod.meta.namespace} {pod.meta.name}")
    document: dict[str, object] = {"schema": SCHEMA, "pod": pod.meta.name, "decisions": [], "waiting": found}
    print_as(form, document, lambda _: _lines(pod, found))
    return 0


async def waiting_document(api: KubeLists, read: ReadCluster, pod: PodJson) -> dict[str, Any] | None:
    """Why the pod waits, and the changes that would let it start now, for `explain` and for the page of all nodes; None
    where it asks for no share and no MIG instance. docs/reference/cli.md has the fields. Raises AgentError."""
    return _shares_document(read, pod) or await _instances_document(api, read, pod)


def _shares_document(read: ReadCluster, pod: PodJson) -> dict[str, Any] | None:
    view, names, offer = read.view, read.view.policy.names, read.state.offer
    mistake = mistakes(pod, names, offer)
    known = view.pods.get(PodUid(pod.meta.uid or ""))
    if known is None and not mistake:
        return None
    asked, reasons, fits = asked_by(pod), {}, ""
    found = Waiting(nodes=len(view.nodes), fitting=(), gpus=(), changes=(), others={}, tried=len(view.nodes))
    # Of a request that is right on no node of whatever size, nothing but itself can be changed.
    if known is not None and not mistakes(pod, names, Offer(offer.resources)):
        signature = signature_of(known.pod, names)
        if len(signature) <= MAX_ASKING:
            found = waiting(view, known.pod)
        asked = "; ".join(describe_request(request, names) for _, request in signature[:_MOST_ASKED])
        refused = read.state.filter(known.pod, None)
        reasons = dict(Counter([*refused.failed.values(), *refused.unresolvable.values()]).most_common())
        # Where all are Unhealthy, that alone says nothing: they may be for claims.
        sick = Counter(
            why
            for node in view.nodes
            if not any(gpu.is_healthy for gpu in node.ledger.node.gpus)
            for why in {gpu.unhealthy_reason for gpu in node.ledger.node.gpus} - {""}
        )
        reasons |= dict(sick.most_common(_MOST_REASONS))
    if found.fitting:
        [node] = [one for one in view.nodes if one.name == found.fitting[0]]
        others = f" and {counted(more, 'more node')}" if (more := len(found.fitting) - 1) else ""
        fits = f"now on {gpus_text(node, found.gpus)}{others}"
    said = scheduler_message(pod)
    if mistake:  # The extender gives it as the reason of each node; the sandbox's scheduler ends with it.
        said = re.sub(rf"(?<=\d ){re.escape(mistake)}", "for the mistake below", said).removesuffix(mistake).rstrip()
    return _document(pod, read) | {
        "request": asked,
        "scheduler": said,
        "mistake": mistake,
        # From the pod as it is: the cluster's view keeps only what placement reads.
        "ignored": mistyped_annotations(pod.meta.annotations),
        "reasons": reasons,
        "fitting": {"nodes": found.fitting, "gpus": found.gpus},
        "fits": fits,
        "changes": [_change_document(change, read) for change in found.changes],
        "other_reasons": found.others,
        "not_checked": _unchecked(read, pod_needs(pod.spec), found),
    }


def _document(pod: PodJson, read: ReadCluster) -> dict[str, Any]:
    """What is the same whatever is found, and nothing found."""
    return {
        "namespace": pod.meta.namespace,
        "request": asked_by(pod),
        "scheduler": scheduler_message(pod),
        "mistake": "",
        "ignored": "",
        "nodes": len(read.view.nodes),
        "reasons": {},
        "fitting": {"nodes": [], "gpus": []},
        "fits": "",
        "changes": [],
        "other_reasons": {},
        "not_checked": [],
    }


def _asked_by_name(pod: PodJson) -> dict[str, int]:
    return {name: count for name, count in pod_needs(pod.spec).requests.items() if "/" in name}


def may_want_instances(pod: PodJson) -> bool:
    """Whether it asks for a claim, whatever that is, or for the resource of a MIG profile."""
    has_claims = bool(pod.spec.claims or pod.status.claims)
    return has_claims or any(name.startswith(NVIDIA_MIG_PREFIX) for name in _asked_by_name(pod))


def wanted_instances(pod: PodJson, cluster: ClaimCluster) -> tuple[Sequence[Wanted], str]:
    """The MIG instances that the pod asks for by claims and classes, and the first resource of a device plugin for them."""
    claims = [one.resource_claim_name for one in (*pod.spec.claims, *pod.status.claims) if one.resource_claim_name]
    resources = _asked_by_name(pod)
    named = next((name for name in sorted(resources) if name.startswith(NVIDIA_MIG_PREFIX)), "")
    return wanted_of(cluster, pod.meta.namespace or "", claims, resources), named


async def _instances_document(api: KubeLists, read: ReadCluster, pod: PodJson) -> dict[str, Any] | None:
    """Of a pod that asks for MIG instances by claims or by their resources; None where it does not."""
    if not pod.spec.claims and not pod.status.claims and not _asked_by_name(pod):
        return None
    cluster = await read_claims(api)
    wanted, named = wanted_instances(pod, cluster)
    if not wanted and not named:
        return None
    found = waits_for(wanted, cluster) if wanted else _of_plugins(named, read, cluster)
    # Expressions (CEL) are not evaluated here.
    if "CEL" in scheduler_message(pod) and (has := attributes_of_instances(cluster)):
        why = (
            f"a selector names an attribute that a device of its class does not have; those of MIG instances are {has}"
        )
        found = WaitsFor(reasons={why: len(read.view.nodes)})
    return _document(pod, read) | {
        "reasons": found.reasons,
        "fits": found.fits,
        "changes": found.changes,
        "not_checked": ["what else the claim, its class and the pod ask of the device and the node"],
    }


def _of_plugins(resource: str, read: ReadCluster, cluster: ClaimCluster) -> WaitsFor:
    """Of a resource that no DeviceClass has."""
    reasons = Counter(
        gpu.unhealthy_reason
        for node in read.view.nodes
        for gpu in node.ledger.node.gpus
        if "MIG mode" in gpu.unhealthy_reason
    )
    why = f"every {resource} of the device plugins is taken"
    if resource not in read.state.offer.resources:
        why = (
            f"no node offers {resource}: a device plugin does by nvidia.mig_strategy mixed where there are such instances, "
            f"claims do where a DeviceClass has this extendedResourceName{instead_of(resource, cluster)}"
        )
    return WaitsFor(reasons={why: len(read.view.nodes), **reasons})


def asked_by(pod: PodJson) -> str:
    """What its containers ask for next to CPU and memory, as it is written."""
    containers = (*(pod.spec.init_containers or ()), *(pod.spec.containers or ()))
    asked = sorted({f"{name}: {count}" for one in containers for name, count in one.limits.items() if "/" in name})
    return ", ".join([*asked, *(f"claim {one.name}" for one in pod.spec.claims)][:_MOST_ASKED])


def first_reason(message: str, mistake: str) -> str:
    """Of a pod that waits, in short: its mistake, else the first of the reasons that kube-scheduler counts."""
    said = message.partition(" nodes are available: ")[2] or message
    return mistake or re.split(r"(?<=\S), (?=\d+ )|\. ", said, maxsplit=1)[0]


def _why_on_no_node(pod: PodJson, settings: Settings) -> str:
    """The request next to what agents offer: the scheduler refuses without a word of the cause."""
    names, mistyped = settings.resources, mistyped_annotations(pod.meta.annotations)
    notes = [mistakes(pod, cluster_names(settings)), f"The pod's {mistyped}" if mistyped else ""]
    said = _said(scheduler_message(pod), pod_needs(pod.spec)).removesuffix(".")
    return (
        f"The scheduler: {said}. {''.join(f'{plain(note)} ' for note in notes if note)}The pod asks for "
        f"{plain(asked_by(pod)) or 'no device'}; agents offer {names.vcore}, in hundredths of a "
        f"GPU, and {names.vmemory}, in blocks of {names.memory_block_mib} MiB"
        f"{', and in ResourceSlices what claims may ask for' if pod.spec.claims else ''}."
    )


def _said(message: str, needs: PodNeeds) -> str:
    """The scheduler's words; where there are none, the scheduler that has to place the pod."""
    if message or needs.scheduler == DEFAULT_SCHEDULER:
        return plain(message or "nothing so far")
    return f"nothing so far; the pod's schedulerName is {plain(needs.scheduler)}: that scheduler alone may place it"


def _unchecked(read: ReadCluster, needs: PodNeeds, found: Waiting) -> list[str]:
    return [
        *needs.unchecked,
        *([f"whether the scheduler {needs.scheduler} runs"] if needs.scheduler != DEFAULT_SCHEDULER else []),
        *([f"the quota ({read.quota_problem})"] if read.quota_problem else []),
        *([f"{found.nodes - found.tried} of {found.nodes} nodes"] if found.tried < found.nodes else []),
    ]


def _change_document(change: Change, read: ReadCluster) -> dict[str, object]:
    names, request = read.view.policy.names, change.request
    document: dict[str, object] = {
        "kind": change.kind.name.lower().replace("_", "-"),
        "text": change.text,
        "node": change.node,
        "gpus": change.gpus,
    }
    if request is not None:
        memory_mib = request.blocks * names.memory_block_mib + request.units * names.gpu_mem_unit_mib
        document |= {"container": change.container, "cores": request.cores, "memory_bytes": memory_mib * MIB}
    if change.ending:
        pods = [read.view.pods[uid].pod for uid in change.ending]
        document["pods"] = [{"namespace": pod.namespace, "pod": pod.name} for pod in pods]
    return document


_TO_START = "to start now, one of:"


def lines_of(found: dict[str, Any], needs: PodNeeds) -> list[tuple[str, list[str]]]:
    """A waiting pod's document for people, in the terminal and on the page of all nodes: names, each with its texts."""
    lines = [("request", found["request"]), ("scheduler", _said(found["scheduler"], needs))]
    lines += [(name, found[name]) for name in ("mistake", "ignored") if found[name]]
    reasons, others, changes = found["reasons"], found["other_reasons"], []
    if found["fits"]:
        lines.append(("fits", f"{found['fits']}: the scheduler has not tried again yet, or has another reason"))
    else:
        shown = [f"{counted(count, 'node')}: {text}" for text, count in list(reasons.items())[:_MOST_REASONS]]
        if shown or not found["nodes"]:
            lines.append(("GPUs", "; ".join(shown) or "no node offers shares of GPUs"))
        if more_reasons := len(reasons) - len(shown):
            lines.append(("", f"and {counted(more_reasons, 'more reason')}: -o json"))
        if others:
            free = [f"{text} ({counted(count, 'node')})" for text, count in list(others.items())[:_MOST_REASONS]]
            lines.append(("also", f"nodes with room on their GPUs are refused: {'; '.join(free)}"))
        changes = [change["text"] for change in found["changes"]]
        if not changes and not found["mistake"]:
            lines.append(("to start", "no single change was found that would let it start now"))
    return [
        *((name, [text]) for name, text in lines),
        *([(_TO_START, changes)] if changes else []),
        *([("unchecked", ["; ".join(found["not_checked"])])] if found["not_checked"] else []),
    ]


def _lines(pod: PodJson, found: dict[str, Any]) -> list[RenderableType]:
    name = f"{pod.meta.namespace}/{pod.meta.name}"
    lines: list[RenderableType] = [Text.assemble((name, "bold"), " ", ("waits for a node", "yellow"))]
    for name, texts in lines_of(found, pod_needs(pod.spec)):
        if name == _TO_START:
            lines.append(Text(f"  {name}", style="dim"))
            lines += [Text.assemble("    - ", (plain(text), "")) for text in texts]
        else:
            lines += [Text.assemble((f"  {name:<10}", "dim"), plain(text)) for text in texts]
    return lines
