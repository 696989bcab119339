"""`explain POD`: why a pod's containers got their GPUs, or why they were refused. One without a node: explain_waiting.py.

The agent has its last decisions in memory, none from before its start; the answer states that.
Exit codes: 0 with a decision, 1 without.

Shown are the request, what was chosen or why not, every GPU's verdict, what to do. Decisions are read as
docs/reference/api.md has them (the fields of model/decision_records.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime

from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.core.cli.command_line import KUBECTL, Invocation
from gpushare_agent.core.cli.render_text import CORES_COLUMN, bar, counted, gib, grid, health_style, plain, print_as
from gpushare_agent.core.kube.pods import MAX_MESSAGE_CHARS, read_pod_json
from gpushare_agent.core.model.decision_records import CLAIMS_RESOURCE, Outcome
from gpushare_agent.core.model.errors import AgentError, NotFound, RefusalReason, Rejected
from gpushare_agent.core.model.names import CORES_PER_GPU
from gpushare_agent.core.node_report.documents import Candidate, DecisionDocument
from gpushare_agent.core.settings.settings import SettingsError
from gpushare_agent.kubectl.agent_client import AgentClient, node_of, open_agent, read_decisions, read_node, read_pod
from gpushare_agent.kubectl.cluster_nodes import open_cluster
from gpushare_agent.kubectl.explain_waiting import SCHEMA, explain_waiting

_POLICIES = {
    "share": "a share of one GPU, by placement.share_policy",
    "fragment": "one whole GPU, in the branch of the topology that is most used already",
    "link": "several whole GPUs with the cheapest links between them",
    "hint": "the GPU that the pod's annotation names (the scheduler extender's choice), which had enough free",
    "must-include": "the GPU of the devices that the kubelet names",
    "replicas": "replicas of GPUs with room, by nvidia.replica_policy",
    "memory": "a GPU with enough free memory (GPUShare's resource)",
    "scheduler": "kube-scheduler placed the claim; the node's ResourceSlice has the order of its GPUs (dra.order)",
}
_BAR = 8
_WIDTH_WITH_BARS = 90
_RETRIED = "Nothing: the pod's controller replaces it and the next try may succeed. If it goes on, read the agent's log"
ADVICE: dict[str, str] = {
    RefusalReason.INVALID_REQUEST: "Correct the pod's manifest, as the refusal states",
    RefusalReason.NO_HEALTHY_GPU: "Find out why the GPUs are out of service (`gpushare-agent top`), or use another node",
    RefusalReason.NOT_ENOUGH_CORES: "Ask for fewer cores, use another node, or wait for pods to end",
    RefusalReason.NOT_ENOUGH_MEMORY: "Ask for less memory, use another node, or wait for pods to end",
    RefusalReason.FRAGMENTED: "The node has enough in all, but on no single GPU: ask for less, or wait until pods here end",
    RefusalReason.SHARING_DISABLED: "Ask for whole GPUs (a multiple of 100 cores), or use a node that shares its GPUs",
    RefusalReason.UNKNOWN_DEVICE: "Restart the kubelet if it recurs: it named a device that this node does not offer",
    RefusalReason.DEVICE_IN_USE: _RETRIED,
    RefusalReason.WRONG_GPUS: "Delete the pod so that it is admitted afresh; restart the kubelet if it recurs",
    RefusalReason.POD_UNKNOWN: _RETRIED,
    RefusalReason.POD_AMBIGUOUS: _RETRIED,
    RefusalReason.NOT_READY: _RETRIED,
    RefusalReason.QUOTA_EXCEEDED: "Wait until pods of the namespace end, ask for less, or have the quota raised",
    RefusalReason.WRONG_POOL: "Use a node of a pool that the namespace's quota names, or have the pool added to it",
}

TOO_LARGE: dict[str, str] = {
    RefusalReason.NOT_ENOUGH_CORES: "Ask for fewer cores, or use a node with more GPUs",
    RefusalReason.NOT_ENOUGH_MEMORY: "Ask for less memory, or use a node with larger GPUs",
}
"""Where the end of pods would not help."""

CLAIM_ADVICE: dict[str, str] = {
    RefusalReason.INVALID_REQUEST: "Correct the claim, its template or its class, as the refusal states",
    RefusalReason.NOT_READY: "Nothing: the pod waits and the kubelet tries again. If it goes on, read the agent's log",
}


def decision_parts(decision: DecisionDocument, width: int, ended_by: str = "") -> list[RenderableType]:
    """Everything about one decision; in few columns without bars, because otherwise the verdicts are broken. `ended_by` is
    the container of the same pod whose refusal made the pod fail."""
    lines = [_title(decision, ended_by), *_facts(decision)]
    candidates = decision["candidates"]
    bar_width = _BAR if width >= _WIDTH_WITH_BARS else 0
    return [*lines, _candidates_table(candidates, bar_width)] if candidates else [*lines]


def _title(decision: DecisionDocument, ended_by: str) -> Text:
    is_allocated = decision["outcome"] == Outcome.ALLOCATED.value
    at = datetime.fromtimestamp(decision["at"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    names = ", ".join(map(plain, decision["labels"]))
    what = f"was refused: {plain(decision['reason'])}"
    if is_allocated:
        what = f"{'had' if ended_by else 'got'} GPU{'s' * (len(decision['gpus']) > 1)} {names}"
        what += f" until container {plain(ended_by)} was refused" if ended_by else ""
    name = f"{plain(decision['namespace'])}/{plain(decision['pod'])}, container {plain(decision['container'])}"
    # A call whose container could not be identified is recorded without one.
    if not decision["pod"]:
        name = "a pod that could not be identified"
    return Text.assemble((name, "bold"), " ", (what, "green" if is_allocated else "red"), (f"  ({at})", "dim"))


def _facts(decision: DecisionDocument) -> list[Text]:
    facts = [("request", _request(decision)), ("policy", _policy(decision)), ("why", plain(decision["explanation"]))]
    if decision["outcome"] == Outcome.REFUSED.value:
        facts.append(("do", _advice(decision)))
    facts += [("ignored", plain(decision["ignored"])), ("limits", plain(decision.get("not_limited", "")))]
    return [Text.assemble((f"  {name:<8}", "dim"), text) for name, text in facts if text]


def _request(decision: DecisionDocument) -> str:
    request = decision["asked"]
    if request is None:
        return f"{plain(decision['resource'])}; refused before its request was known"
    parts = [f"{request['cores']} GPU cores"] if request["cores"] else []
    parts += [f"{gib(request['memory_bytes'])} GiB"] if request["memory_bytes"] else []
    # Units of NVIDIA's resources are neither cores nor memory.
    parts = parts or [plain(decision["resource"])]
    parts += [f"its annotation names GPU {', '.join(map(str, request['hint']))}"] if request["hint"] else []
    parts += [f"the kubelet requires {', '.join(map(plain, request['must_gpus']))}"] if request["must_gpus"] else []
    return ", ".join(parts)


def _policy(decision: DecisionDocument) -> str:
    policy = decision["policy"]
    return f"{plain(policy)}: {_POLICIES[policy]}" if policy in _POLICIES else plain(policy)


def _advice(decision: DecisionDocument) -> str:
    known, reason = ADVICE, decision["reason"]
    # A claim is tried again by the kubelet, where a pod that is refused at admission has failed.
    if decision["resource"] == CLAIMS_RESOURCE:
        known = ADVICE | CLAIM_ADVICE
    elif _is_too_large(decision):
        known = ADVICE | TOO_LARGE
    return f"{known[reason]}." if reason in known else ""


def _is_too_large(decision: DecisionDocument) -> bool:
    """Whether the node's GPUs are too few or too small, however much of them is free."""
    asked, gpus = decision["asked"], decision["candidates"]
    if asked is None or not gpus:
        return False
    wanted = max(1, asked["cores"] // CORES_PER_GPU)
    largest = sorted((gpu["total_memory_bytes"] for gpu in gpus), reverse=True)[:wanted]
    return wanted > len(gpus) or asked["memory_bytes"] > sum(largest)


def _candidates_table(candidates: Sequence[Candidate], bar_width: int) -> RenderableType:
    columns = ("  ", "GPU", "HEALTH", CORES_COLUMN, "MEMORY", "VERDICT")
    rows: list[Sequence[str | Text]] = []
    for gpu in candidates:
        health = _health_word(gpu)
        free, total = gpu["free_memory_bytes"], gpu["total_memory_bytes"]
        rows.append(
            (
                "  *" if gpu["is_chosen"] else "",
                plain(gpu["label"]),
                Text(health, style=health_style(health)),
                _free(1 - gpu["free_cores"] / CORES_PER_GPU, f"{gpu['free_cores']} free", bar_width),
                _free(1 - free / total if total else None, f"{gib(free)} of {gib(total)} GiB free", bar_width),
                Text(plain(gpu["verdict"]), style="green" if gpu["is_chosen"] else ""),
            )
        )
    return grid(columns, rows, right=("GPU",))


def _free(used: float | None, text: str, bar_width: int) -> Text:
    return bar(used, bar_width).append(f" {text}", "") if bar_width else Text(text)


def _health_word(gpu: Candidate) -> str:
    """A decision has why a GPU was out of service only in the verdict."""
    if gpu["is_healthy"]:
        return "Healthy"
    return "Cordoned" if gpu["verdict"].startswith("cordoned") else "Unhealthy"


_SEARCHED_FOR_UNATTRIBUTED = 200
_ASKED_FOR_S = 10.0


async def run(call: Invocation) -> int:
    """Raises SettingsError for what names no pod, AgentError, NotFound where nothing was decided about the pod."""
    options, settings, node = call.options, call.settings(), node_of(call)
    is_remote = call.program == KUBECTL
    named, slash, pod = options.pod.rpartition("/")
    if named in ("pod", "pods", "po"):  # kubectl's TYPE/NAME
        named = slash = ""
    if not pod or "/" in named or (slash and (not named or options.namespace not in ("", named))):
        raise SettingsError([f"{options.pod!r}: name one pod, as POD or NAMESPACE/POD, and no other namespace by -n"])
    # The agent searches its decisions by name alone; through the API server the pod is fetched first, which needs a
    # namespace: kubectl's own default.
    is_in_default = (is_remote or node) and not options.all_namespaces
    namespace = (named if slash else options.namespace) or ("default" if is_in_default else "")
    if is_remote and not node:
        async with open_cluster(settings) as api:
            raw = await read_pod(api, namespace, pod)
            node = read_pod_json(raw).spec.node_name or ""
            if not node:
                return await explain_waiting(api, settings, raw, form=options.output)
    async with open_agent(call, settings, node) as agent:
        decisions = await read_decisions(agent, pod=pod, namespace=namespace)
        chosen = newest_of_containers(decisions, options.container)
        if not chosen:
            place = "" if decisions else await _place_of(call, pod, namespace, node)
            if place is None:
                return 0
            raise NotFound(await _nothing_known(call, agent, pod, namespace, decisions, place))
        with suppress(AgentError):  # what was decided is shown also where the node cannot be read
            containers = (await read_node(agent))["containers"]
            limits = {(one["pod_uid"], one["container"]): one["not_limited"] for one in containers}
            for decision in chosen:
                if why := limits.get((decision["pod_uid"], decision["container"])):
                    decision["not_limited"] = why

    # The kubelet tries a claim again, and a start, whose refusal has no request; of a pod whose container is refused at its
    # admission nothing starts.
    refused = [one for one in newest_of_containers(decisions, "") if one["outcome"] == Outcome.REFUSED.value]
    at_admission = [one for one in refused if one["asked"] and one["resource"] != CLAIMS_RESOURCE]
    ended_by = {one["namespace"]: one["container"] for one in at_admission}

    def tables(width: int) -> Sequence[RenderableType]:
        parts = [decision_parts(one, width, ended_by.get(one["namespace"], "")) for one in chosen]
        return [part for of_one in parts for part in (*of_one, Text(""))]

    print_as(options.output, {"schema": SCHEMA, "pod": pod, "decisions": chosen}, tables)
    return 0


def newest_of_containers(decisions: Sequence[DecisionDocument], container: str) -> list[DecisionDocument]:
    """The newest decision of each container, in the order in which they were decided. `decisions` begins with the newest.

    A pod created again under the same name is another pod: only the newest one's count, in each namespace.
    """
    pods: dict[str, str] = {}
    newest: dict[tuple[str, str], DecisionDocument] = {}
    for decision in decisions:
        # The first is the newest: its UID is that of the pod which exists now.
        pod = pods.setdefault(decision["namespace"], decision["pod_uid"])
        if decision["pod_uid"] == pod and (not container or decision["container"] == container):
            newest.setdefault((decision["namespace"], decision["container"]), decision)
    return sorted(newest.values(), key=lambda decision: (decision["namespace"], decision["number"]))


async def _nothing_known(
    call: Invocation,
    agent: AgentClient,
    pod: str,
    namespace: str,
    decisions: Sequence[DecisionDocument],
    place: str,
) -> str:
    name, container = f"{namespace}/{pod}" if namespace else pod, call.options.container
    # The pod is known, but not the container that was named.
    if decisions:
        known = ", ".join(sorted({plain(decision["container"]) for decision in decisions}))
        return f"{agent.name} has decided nothing about container {container} of pod {name}, but about: {known}"
    # The refusal of this very pod may be among those that could not be identified.
    latest = await read_decisions(agent, limit=_SEARCHED_FOR_UNATTRIBUTED)
    unattributed = [decision for decision in latest if not decision["pod"]]
    seen = (
        f" It has refused {counted(len(unattributed), 'call')} for a pod that it could not identify, the last one so: "
        f"{plain(unattributed[0]['explanation']).rstrip('.')}."
        if unattributed
        else ""
    )
    in_namespace = f" -n {namespace}" if namespace else ""
    begin = f"{agent.name} has decided nothing about pod {name}"
    if place:
        return f"{begin}: {place}{seen}"
    return (
        f"{begin}. It may be on another node, wait for one (`kubectl gpushare explain` says for what), be unknown to the "
        "cluster, or request no share of a GPU, or the decision was before the agent started or too long ago."
        f"{seen} See its Events: kubectl describe pod{in_namespace} {pod}"
    )


async def _place_of(call: Invocation, pod: str, namespace: str, asked: str) -> str | None:
    """Where the API server has the pod, a sentence; empty where it cannot be asked, as on a host without a kubeconfig. None:
    it is on no node, and why is printed, as `kubectl gpushare` does. `asked` is the node asked, empty for this host."""
    settings = call.settings()
    try:
        async with asyncio.timeout(_ASKED_FOR_S), open_cluster(settings) as api:
            raw = await read_pod(api, namespace, pod)
            found = read_pod_json(raw)
    except NotFound as error:
        return f"{error}."
    except (AgentError, TimeoutError):
        return ""
    if not (node := found.spec.node_name):
        try:
            async with open_cluster(settings) as api:
                await explain_waiting(api, settings, raw, form=call.options.output)
            return None
        except AgentError as error:
            if isinstance(error.__cause__, Rejected):  # an agent's own account may not list nodes
                return f"{error}. With your own rights: `kubectl gpushare explain -n {found.meta.namespace} {pod}`."
            return f"{error}."
    if said := ": ".join(filter(None, (found.status.reason, found.status.message))):
        return f"it is on node {node}, and its status says: {plain(said[:MAX_MESSAGE_CHARS]).rstrip('.')}."
    return (
        ("" if node == asked else f"it is on node {node}. If that is this one, ")
        + "its claims are being prepared, it requests no share of a GPU, or the decision was before the agent started or too"
        f" long ago. What it has: {call.program} inspect -d; Events: kubectl describe pod -n {found.meta.namespace} {pod}."
    )
