"""A decision for people: the request, what was chosen or why not, every GPU's verdict, what to do. Pure.

Reads decisions as docs/reference/api.md has them (the fields of model/decision_records.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.cli.agent_documents import CandidateDocument, DecisionDocument
from gpushare_agent.cli.render_text import CORES_COLUMN, bar, gib, grid, health_style, plain
from gpushare_agent.model.decision_records import CLAIMS_RESOURCE, Outcome
from gpushare_agent.model.errors import RefusalReason
from gpushare_agent.model.names import CORES_PER_GPU

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
ADVICE = {
    RefusalReason.INVALID_REQUEST: "Correct the limits in the pod's manifest, as the refusal states",
    RefusalReason.NO_HEALTHY_GPU: "Find out why the GPUs are out of service (`gpushare-agent top`), or use another node",
    RefusalReason.NOT_ENOUGH_CORES: "Ask for fewer cores, use another node, or wait for pods to end if this one has so many",
    RefusalReason.NOT_ENOUGH_MEMORY: "Ask for less memory, use another node, or wait for pods to end if a GPU has so much",
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

CLAIM_ADVICE = {
    RefusalReason.INVALID_REQUEST: "Correct the claim, its template or its class, as the refusal states",
    RefusalReason.NOT_READY: "Nothing: the pod waits and the kubelet tries again. If it goes on, read the agent's log",
}


def decision_parts(decision: DecisionDocument, width: int) -> list[RenderableType]:
    """Everything about one decision; in few columns without bars, for else the verdicts are broken."""
    lines = [_title(decision), *_facts(decision)]
    candidates = decision["candidates"]
    bar_width = _BAR if width >= _WIDTH_WITH_BARS else 0
    return [*lines, _candidates_table(candidates, bar_width)] if candidates else [*lines]


def _title(decision: DecisionDocument) -> Text:
    is_allocated = decision["outcome"] == Outcome.ALLOCATED.value
    at = datetime.fromtimestamp(decision["at"], UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    names = ", ".join(plain(label) for label in decision.get("labels", decision["gpus"]))
    what = f"got GPU {names}" if is_allocated else f"was refused: {plain(decision['reason'])}"
    if is_allocated and len(decision["gpus"]) > 1:
        what = f"got GPUs {names}"
    name = f"{plain(decision['namespace'])}/{plain(decision['pod'])}, container {plain(decision['container'])}"
    if not decision["pod"]:
        name = "a pod that could not be identified"
    return Text.assemble((name, "bold"), " ", (what, "green" if is_allocated else "red"), (f"  ({at})", "dim"))


def _facts(decision: DecisionDocument) -> list[Text]:
    facts = [("request", _request(decision)), ("policy", _policy(decision)), ("why", plain(decision["explanation"]))]
    if decision["outcome"] == Outcome.REFUSED.value:
        facts.append(("do", _advice(decision["resource"], decision["reason"])))
    return [Text.assemble((f"  {name:<8}", "dim"), text) for name, text in facts if text]


def _request(decision: DecisionDocument) -> str:
    request = decision["asked"]
    if request is None:
        return f"{plain(decision['resource'])}; refused before its request was known"
    parts = [f"{request['cores']} GPU cores"] if request["cores"] else []
    parts += [f"{gib(request['memory_bytes'])} GiB"] if request["memory_bytes"] else []
    parts = parts or [plain(decision["resource"])]
    parts += [f"its annotation names GPU {_gpus(request['hint'])}"] if request["hint"] else []
    parts += [f"the kubelet requires {', '.join(map(plain, request['must_gpus']))}"] if request["must_gpus"] else []
    return ", ".join(parts)


def _policy(decision: DecisionDocument) -> str:
    policy = decision["policy"]
    return f"{plain(policy)}: {_POLICIES[policy]}" if policy in _POLICIES else plain(policy)


def _advice(resource: str, reason: str) -> str:
    known = {
        item.value: text for item, text in (ADVICE | (CLAIM_ADVICE if resource == CLAIMS_RESOURCE else {})).items()
    }
    return f"{known[reason]}." if reason in known else ""


def _gpus(indexes: Sequence[int]) -> str:
    return ", ".join(map(str, indexes))


def _candidates_table(candidates: Sequence[CandidateDocument], bar_width: int) -> RenderableType:
    columns = ("  ", "GPU", "HEALTH", CORES_COLUMN, "MEMORY", "VERDICT")
    rows: list[Sequence[str | Text]] = []
    for gpu in candidates:
        health = _health_word(gpu)
        free, total = gpu["free_memory_bytes"], gpu["total_memory_bytes"]
        rows.append(
            (
                "  *" if gpu["is_chosen"] else "",
                plain(gpu.get("label", gpu["index"])),
                Text(health, style=health_style(health)),
                _free(1 - gpu["free_cores"] / CORES_PER_GPU, f"{gpu['free_cores']} free", bar_width),
                _free(1 - free / total if total else None, f"{gib(free)} of {gib(total)} GiB free", bar_width),
                Text(plain(gpu["verdict"]), style="green" if gpu["is_chosen"] else ""),
            )
        )
    return grid(columns, rows, right=("GPU",))


def _free(used: float | None, text: str, bar_width: int) -> Text:
    return bar(used, bar_width).append(f" {text}", "") if bar_width else Text(text)


def _health_word(gpu: CandidateDocument) -> str:
    """A decision has why a GPU was out of service only in the verdict."""
    if gpu["is_healthy"]:
        return "Healthy"
    return "Cordoned" if gpu["verdict"].startswith("cordoned") else "Unhealthy"
