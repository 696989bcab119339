"""The JSON between kube-scheduler and its extender, read with bounds and written with the exact names.

Format: k8s.io/kube-scheduler/extender/v1 (its Go types have no JSON tags: fields are written as they are named there, and
read in any case, as Go does). Any client may reach the port: whatever does not fit the format raises Corrupt.
The pod's annotations are not read. No state.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpushare_agent.cluster.kube.pods import mapping_or_empty
from gpushare_agent.extender.cluster_state import Filtered
from gpushare_agent.extender.pods import lean_pod
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames

MAX_NAME_CHARS = 253
MAX_NODES = 20_000
"""In a request; Kubernetes goes to 5,000."""
FREE_VALUES = 10_000
BYTES_OF_A_VALUE = 16
"""Of a longer request, on average and at least: real ones have 20 and more. What is made of small ones only, such as empty
objects, takes 35 times its size in memory, and is refused before it is decoded."""
MAX_FIELDS = 64
"""Of a request's top level, whose names are folded one by one."""
MAX_CONTAINERS = 256
"""Of a pod. Far more than a node runs; each takes 60 µs to read."""
MAX_VIOLATIONS = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesArgs:
    """ExtenderArgs. `names` are the nodes in the order given; `raw_nodes` has their objects by name where the scheduler
    sent whole nodes (nodeCacheCapable false), else None."""

    pod: Pod
    names: Sequence[str]
    raw_nodes: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BindArgs:
    """ExtenderBindingArgs."""

    namespace: str
    pod: str
    uid: PodUid
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PreemptArgs:
    """ExtenderPreemptionArgs: by node the UIDs of its victims, and how many disruption budgets that violates."""

    pod: Pod
    victims: Mapping[str, Sequence[PodUid]]
    violations: Mapping[str, int]


def parse_nodes_args(content: bytes | bytearray, names: ResourceNames) -> NodesArgs:
    raw = _top(content, "ExtenderArgs")
    pod = _pod(raw, "ExtenderArgs", names)
    raw_names, raw_nodes = raw.get("nodenames"), raw.get("nodes")
    if raw_names is not None:
        return NodesArgs(pod=pod, names=_names(raw_names))
    if raw_nodes is None:
        raise Corrupt("ExtenderArgs: neither Nodes nor NodeNames is there")
    raw_items = raw_nodes.get("items") if isinstance(raw_nodes, dict) else _no("ExtenderArgs.Nodes", "an object")
    items = _few(_list(raw_items, "ExtenderArgs.Nodes.items"), "ExtenderArgs.Nodes.items")
    by_name = {_node_name(item, number): item for number, item in enumerate(items)}
    return NodesArgs(pod=pod, names=list(by_name), raw_nodes=by_name)


def parse_bind_args(content: bytes | bytearray) -> BindArgs:
    raw = _top(content, "ExtenderBindingArgs")
    return BindArgs(
        namespace=_name(raw.get("podnamespace"), "ExtenderBindingArgs.PodNamespace"),
        pod=_name(raw.get("podname"), "ExtenderBindingArgs.PodName"),
        uid=PodUid(_name(raw.get("poduid"), "ExtenderBindingArgs.PodUID")),
        node=_name(raw.get("node"), "ExtenderBindingArgs.Node"),
    )


def parse_preempt_args(content: bytes | bytearray, names: ResourceNames) -> PreemptArgs:
    what = "ExtenderPreemptionArgs"
    raw = _top(content, what)
    pod = _pod(raw, what, names)
    victims: dict[str, Sequence[PodUid]] = {}
    violations: dict[str, int] = {}
    for field in ("NodeNameToVictims", "NodeNameToMetaVictims"):
        by_node = raw.get(field.lower())
        if by_node is None:
            continue
        if not isinstance(by_node, dict):
            _no(f"{what}.{field}", "an object")
        for node, raw_victims in _few(by_node, f"{what}.{field}").items():
            where = f"{what}.{field}[{node[:MAX_NAME_CHARS]}]"
            found = _folded(raw_victims if raw_victims is not None else {}, where)
            pods = _list(found.get("pods"), f"{where}.Pods")
            victims[node] = [_victim(item, f"{where}.Pods[{number}]") for number, item in enumerate(pods)]
            violations[node] = _violations(found.get("numpdbviolations", 0), f"{where}.NumPDBViolations")
    return PreemptArgs(pod=pod, victims=victims, violations=violations)


def filter_result(answer: Filtered, args: NodesArgs | None) -> bytes:
    """ExtenderFilterResult in the form in which `args` asked: whole nodes, or names."""
    names: Sequence[str] | None = None
    nodes: dict[str, Any] | None = None
    if args is not None and not answer.error:
        if args.raw_nodes is None:
            names = list(answer.fitting)
        else:
            nodes = {"metadata": {}, "items": [args.raw_nodes[name] for name in answer.fitting]}
    return _encoded(
        {
            "Nodes": nodes,
            "NodeNames": names,
            "FailedNodes": dict(sorted(answer.failed.items())),
            "FailedAndUnresolvableNodes": dict(sorted(answer.unresolvable.items())),
            "Error": answer.error,
        }
    )


def host_priorities(scores: Sequence[tuple[str, int]]) -> bytes:
    """HostPriorityList, scores from 0 to 10."""
    return _encoded([{"Host": name, "Score": score} for name, score in scores])


def binding_result(error: str) -> bytes:
    """ExtenderBindingResult; no error means bound."""
    return _encoded({"Error": error})


def preemption_result(victims: Mapping[str, Sequence[PodUid]], violations: Mapping[str, int]) -> bytes:
    """ExtenderPreemptionResult, which always names victims by UID."""
    return _encoded(
        {
            "NodeNameToMetaVictims": {
                node: {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": violations.get(node, 0)}
                for node, uids in sorted(victims.items())
            }
        }
    )


def _top(content: bytes | bytearray, what: str) -> dict[str, Any]:
    values = sum(map(content.count, (b",", b"{", b"[")))  # at least so many, and those in texts
    if values > FREE_VALUES + len(content) // BYTES_OF_A_VALUE:
        raise Corrupt(f"{what}: {values} values in {len(content)} bytes are no scheduler's request")
    try:
        raw = json.loads(content)
    except (ValueError, RecursionError) as e:
        raise Corrupt(f"{what}: the request is no JSON ({e})") from e
    if isinstance(raw, dict) and len(raw) > MAX_FIELDS:
        raise Corrupt(f"{what}: {len(raw)} fields are no scheduler's request")
    return _folded(raw, what)


def _folded(raw: Any, what: str) -> dict[str, Any]:
    """An object with its fields in small letters."""
    return (
        {str(name).lower(): value for name, value in raw.items()} if isinstance(raw, dict) else _no(what, "an object")
    )


def _pod(raw: Mapping[str, Any], what: str, names: ResourceNames) -> Pod:
    raw_pod = raw.get("pod")
    if not isinstance(raw_pod, dict):
        raise Corrupt(f"{what}.Pod: is not an object")
    raw_spec = mapping_or_empty(raw_pod.get("spec"))
    raw_lists = (raw_spec.get(name) for name in ("containers", "initContainers"))
    count = sum(len(raw_list) for raw_list in raw_lists if isinstance(raw_list, list))
    if count > MAX_CONTAINERS:
        raise Corrupt(f"{what}.Pod: {count} containers, more than {MAX_CONTAINERS}")
    return lean_pod(raw_pod, names)


def _names(raw_names: Any) -> list[str]:
    names: list[str] = _few(_list(raw_names, "ExtenderArgs.NodeNames"), "ExtenderArgs.NodeNames")
    if not all(type(name) is str and len(name) <= MAX_NAME_CHARS for name in names):
        _no("ExtenderArgs.NodeNames", "a list of names")
    return names


def _node_name(item: Any, number: int) -> str:
    name = mapping_or_empty(mapping_or_empty(item).get("metadata")).get("name")
    return _name(name, f"ExtenderArgs.Nodes.items[{number}].metadata.name")


def _victim(item: Any, where: str) -> PodUid:
    """A MetaPod has its UID at the top, a whole pod in its metadata."""
    found = _folded(item, where)
    metadata = found.get("metadata")
    uid = metadata.get("uid") if isinstance(metadata, dict) else found.get("uid")
    return PodUid(_name(uid, f"{where}.UID"))


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_NAME_CHARS:
        _no(where, f"a text of 1 to {MAX_NAME_CHARS} characters")
    return str(value)


def _violations(value: Any, where: str) -> int:
    """An int64 of Go's; a bool is none, though Python takes it for one."""
    if type(value) is not int or not 0 <= value <= MAX_VIOLATIONS:
        _no(where, "a whole number of 0 and more")
    return int(value)


def _few(values: Any, where: str) -> Any:
    return values if len(values) <= MAX_NODES else _no(where, f"of at most {MAX_NODES} nodes")


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else _no(where, "a list")


def _no(where: str, wanted: str) -> Any:
    raise Corrupt(f"{where}: is not {wanted}")


def _encoded(raw: Any) -> bytes:
    return json.dumps(raw, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
