"""`kubectl gpushare explain` of a pod without a node: why it waits, and the smallest changes that would let it start now.

The cluster is read once with the person's own rights (cluster_reading.py), and decided on by kubectl/decisions/changes.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from msgspec import Raw
from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.core.cli.command_line import Form
from gpushare_agent.core.cli.render_text import counted, plain, print_as
from gpushare_agent.core.kit.near_names import AMONG_OTHERS, nearest
from gpushare_agent.core.kube.client import KubeApi
from gpushare_agent.core.kube.objects import whole_number
from gpushare_agent.core.kube.pods import PodJson, mistyped_annotations, read_pod_json, scheduler_message
from gpushare_agent.core.kube.scheduling import DEFAULT_SCHEDULER, PodNeeds, pod_needs
from gpushare_agent.core.model.errors import AgentError, Unavailable
from gpushare_agent.core.model.names import MIB, PodUid
from gpushare_agent.core.placement.gpu_account import describe_request
from gpushare_agent.core.settings.settings import Settings
from gpushare_agent.extender.decisions.pod_plan import signature_of
from gpushare_agent.kubectl.cluster_reading import ReadCluster, read_cluster_view
from gpushare_agent.kubectl.decisions.changes import Change, Waiting, gpus_text, waiting
from gpushare_agent.kubectl.decisions.cluster_view import ClusterView, PodView

SCHEMA = 2
_MOST_ASKED = 10
_MOST_REASONS = 3
_MOST_BLOCKS = 1_000_000
"""The most memory blocks that a pod may mean: 1 Mi of bytes is more."""


async def explain_waiting(api: KubeApi, settings: Settings, raw: Raw, *, form: Form) -> int:
    """Raises AgentError: the pod asks for no share, or the cluster cannot be read."""
    pod = read_pod_json(raw)
    needs = pod_needs(pod.spec)
    name = f"{pod.meta.namespace}/{pod.meta.name}"
    try:
        read = await read_cluster_view(api, settings)
    except AgentError as error:
        # A user who may only read one namespace still sees what the scheduler wrote, and which right is missing.
        raise Unavailable(
            f"pod {name} is on no node yet. {_why_on_no_node(pod, needs, settings)} What would let it start now is "
            f"worked out from all nodes and pods, and: {error}"
        ) from error
    known = read.view.pods.get(PodUid(pod.meta.uid or ""))
    if known is None or _is_mistyped(pod, settings):
        raise Unavailable(
            f"pod {name} is on no node yet. {_why_on_no_node(pod, needs, settings)} Its Events: "
            f"kubectl describe pod -n {pod.meta.namespace} {pod.meta.name}"
        )
    if known.pod.node_name:
        raise Unavailable(f"pod {name} went to node {known.pod.node_name} just now: ask again")
    found = waiting(read.view, known.pod)
    # From the pod as it is: the cluster's view keeps only what placement reads.
    mistyped = mistyped_annotations(pod.meta.annotations)
    reasons = _reasons(read, known)
    unchecked = _unchecked(read, known, found)
    document: dict[str, object] = {
        "schema": SCHEMA,
        "pod": pod.meta.name,
        "decisions": [],
        "waiting": {
            "namespace": known.pod.namespace,
            "scheduler": known.message,
            "ignored": mistyped,
            "nodes": found.nodes,
            "reasons": reasons,
            "fitting": {"nodes": found.fitting, "gpus": found.gpus},
            "changes": [_change_document(change, read) for change in found.changes],
            "other_reasons": found.others,
            "not_checked": unchecked,
        },
    }
    print_as(form, document, lambda _: _lines(read.view, known, found, reasons, unchecked, mistyped))
    return 0


def _is_mistyped(pod: PodJson, settings: Settings) -> bool:
    """Bytes for blocks, or a name close to one of the agents': no change of the size would help."""
    names = settings.resources
    own = [names.vcore, names.vmemory]
    for one in (*(pod.spec.init_containers or ()), *(pod.spec.containers or ())):
        for name, count in one.limits.items():
            if name == names.vmemory and whole_number(count, name) > _MOST_BLOCKS:
                return True
            if name not in own and nearest(name, own, AMONG_OTHERS):
                return True
    return False


def _why_on_no_node(pod: PodJson, needs: PodNeeds, settings: Settings) -> str:
    """The request next to what agents offer: the scheduler refuses a misspelt resource, and bytes for blocks, without a word
    of the cause."""
    names = settings.resources
    containers = (*(pod.spec.init_containers or ()), *(pod.spec.containers or ()))
    asked = sorted({f"{name}: {count}" for one in containers for name, count in one.limits.items() if "/" in name})
    asked += [f"claim {one.name}" for one in pod.spec.claims]
    said, mistyped = _said(scheduler_message(pod), needs), mistyped_annotations(pod.meta.annotations)
    ignored = f"The pod's {plain(mistyped)} " if mistyped else ""
    return (
        f"The scheduler: {said.removesuffix('.')}. {ignored}The pod asks for "
        f"{plain(', '.join(asked[:_MOST_ASKED])) or 'no device'}; agents offer {names.vcore}, in hundredths of a "
        f"GPU, and {names.vmemory}, in blocks of {names.memory_block_mib} MiB"
        f"{', and in ResourceSlices what claims may ask for' if pod.spec.claims else ''}."
    )


def _said(message: str, needs: PodNeeds) -> str:
    """The scheduler's words; where there are none, the scheduler that has to place the pod."""
    if message or needs.scheduler == DEFAULT_SCHEDULER:
        return plain(message or "nothing so far")
    return f"nothing so far; the pod's schedulerName is {plain(needs.scheduler)}: that scheduler alone may place it"


def _reasons(read: ReadCluster, known: PodView) -> dict[str, int]:
    """The extender's reasons, each with the number of nodes."""
    found = read.state.filter(known.pod, None)
    return dict(Counter([*found.failed.values(), *found.unresolvable.values()]).most_common())


def _unchecked(read: ReadCluster, known: PodView, found: Waiting) -> list[str]:
    scheduler = known.needs.scheduler
    return [
        *known.needs.unchecked,
        *([f"whether the scheduler {scheduler} runs"] if scheduler != DEFAULT_SCHEDULER else []),
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


def _lines(
    view: ClusterView,
    known: PodView,
    found: Waiting,
    reasons: Mapping[str, int],
    unchecked: Sequence[str],
    mistyped: str,
) -> list[RenderableType]:
    pod, names = known.pod, view.policy.names
    asked = "; ".join(describe_request(request, names) for _, request in signature_of(pod, names)[:_MOST_ASKED])
    lines = [
        Text.assemble((f"{pod.namespace}/{pod.name}", "bold"), " ", ("waits for a node", "yellow")),
        _line("request", asked),
        _line("scheduler", _said(known.message, known.needs)),
    ]
    if mistyped:
        lines.append(_line("ignored", mistyped))
    if found.fitting:
        [node] = [one for one in view.nodes if one.name == found.fitting[0]]
        first, more = gpus_text(node, found.gpus), len(found.fitting) - 1
        others = f" and {counted(more, 'more node')}" if more else ""
        text = f"now on {first}{others}: the scheduler has not tried again yet, or has another reason"
        return [*lines, _line("fits", text), *_unchecked_line(unchecked)]
    shown = [f"{counted(count, 'node')}: {text}" for text, count in list(reasons.items())[:_MOST_REASONS]]
    more_reasons = len(reasons) - len(shown)
    lines.append(_line("GPUs", "; ".join(shown) or "no node offers shares of GPUs"))
    if more_reasons:
        lines.append(_line("", f"and {counted(more_reasons, 'more reason')}: -o json"))
    if found.others:
        free = [f"{text} ({counted(count, 'node')})" for text, count in list(found.others.items())[:_MOST_REASONS]]
        lines.append(_line("also", f"nodes with room on their GPUs are refused: {'; '.join(free)}"))
    if not found.changes:
        lines.append(_line("to start", "no single change was found that would let it start now"))
    else:
        lines.append(Text("  to start now, one of:", style="dim"))
        lines += [Text.assemble("    - ", (plain(change.text), "")) for change in found.changes]
    return [*lines, *_unchecked_line(unchecked)]


def _unchecked_line(unchecked: Sequence[str]) -> list[Text]:
    return [_line("unchecked", "; ".join(unchecked))] if unchecked else []


def _line(name: str, text: str) -> Text:
    return Text.assemble((f"  {name:<10}", "dim"), plain(text))
