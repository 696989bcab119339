"""The JSON between kube-scheduler and its extender, read with bounds and written with the exact names.

Format: k8s.io/kube-scheduler/extender/v1 (its Go types have no JSON tags: fields are written as they are named there, and
read in any case, as Go does). Any client may reach the port: whatever does not fit the format raises Corrupt.
The pod's annotations are not read. No state.

A request is decoded in steps (json_reader.py), between which the event loop may run other tasks (`verbs.in_steps`): field by
field, and nodes and victims one by one.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from gpushare_agent.cluster.kube.pods import mapping_or_empty
from gpushare_agent.extender.cluster_state import Filtered
from gpushare_agent.extender.json_reader import JsonReader
from gpushare_agent.extender.pods import lean_pod
from gpushare_agent.model.errors import Corrupt
from gpushare_agent.model.names import PodUid
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames

MAX_NAME_CHARS = 253
MAX_NODES = 20_000
"""In a request; Kubernetes goes to 5,000."""
BIND_BYTES = 16 * 1024
"""Of a bind's request: four names."""
MAX_CONTAINERS = 256
"""Of a pod. Far more than a node runs; each takes 60 µs to read."""
MAX_VIOLATIONS = (1 << 63) - 1


class NodesArgs(Struct, frozen=True, kw_only=True):
    """ExtenderArgs. `names` are the nodes in the order given; `raw_nodes` has their JSON by name where the scheduler sent
    whole nodes (nodeCacheCapable false), else None."""

    pod: Pod
    names: Sequence[str]
    raw_nodes: Mapping[str, str] | None = None


class BindArgs(Struct, frozen=True, kw_only=True):
    """ExtenderBindingArgs."""

    namespace: str
    pod: str
    uid: PodUid
    node: str


class PreemptArgs(Struct, frozen=True, kw_only=True):
    """ExtenderPreemptionArgs: by node the UIDs of its victims, and how many disruption budgets that violates."""

    pod: Pod
    victims: Mapping[str, Sequence[PodUid]]
    violations: Mapping[str, int]


def parse_nodes_args(content: bytes, names: ResourceNames) -> Generator[None, None, NodesArgs]:
    """In steps. Raises Corrupt."""
    reader, raw = JsonReader(content, "ExtenderArgs"), dict[str, Any]()
    for field in reader.fields():
        if field == "nodes" and reader.next_char() == "{":
            raw[field] = yield from _read_nodes(reader)
        else:
            raw[field] = reader.part()
            yield
    reader.end()
    pod = _pod(raw, "ExtenderArgs", names)
    if raw.get("nodenames") is not None:
        return NodesArgs(pod=pod, names=_names(raw["nodenames"]))
    if raw.get("nodes") is None:
        raise Corrupt("ExtenderArgs: neither Nodes nor NodeNames is there")
    by_name: dict[str, str] = raw["nodes"] if isinstance(raw["nodes"], dict) else _no("ExtenderArgs.Nodes", "an object")
    return NodesArgs(pod=pod, names=list(by_name), raw_nodes=by_name)


def _read_nodes(reader: JsonReader) -> Generator[None, None, dict[str, str]]:
    """The JSON of each node of a NodeList by the node's name."""
    by_name: dict[str, str] = {}
    for field in reader.fields():
        if field != "items":
            reader.part()
            continue
        if reader.next_char() != "[":
            _null(reader, "ExtenderArgs.Nodes.items", "a list")
            continue
        for number in reader.elements():
            node, text = reader.part_and_text()
            by_name[_node_name(node, number)] = text
            if len(by_name) > MAX_NODES:
                _no("ExtenderArgs.Nodes.items", f"of at most {MAX_NODES} nodes")
            if reader.is_step():
                yield
    return by_name


def parse_bind_args(content: bytes) -> BindArgs:
    """Raises Corrupt."""
    what = "ExtenderBindingArgs"
    if len(content) > BIND_BYTES:
        raise Corrupt(f"{what}: {len(content)} bytes are no scheduler's request")
    reader = JsonReader(content, what)
    raw = {field: reader.part() for field in reader.fields()}
    reader.end()
    return BindArgs(
        namespace=_name(raw.get("podnamespace"), f"{what}.PodNamespace"),
        pod=_name(raw.get("podname"), f"{what}.PodName"),
        uid=PodUid(_name(raw.get("poduid"), f"{what}.PodUID")),
        node=_name(raw.get("node"), f"{what}.Node"),
    )


def parse_preempt_args(content: bytes, names: ResourceNames) -> Generator[None, None, PreemptArgs]:
    """In steps. Raises Corrupt."""
    what = "ExtenderPreemptionArgs"
    reader, raw = JsonReader(content, what), dict[str, Any]()
    by_node = dict[str, tuple[list[PodUid], int]]()
    for field in reader.fields():
        if field in _VICTIMS and reader.next_char() == "{":
            yield from _read_victims(reader, f"{what}.{_VICTIMS[field]}", by_node)
        elif field in _VICTIMS:
            _null(reader, f"{what}.{_VICTIMS[field]}", "an object")
        else:
            raw[field] = reader.part()
            yield
    reader.end()
    return PreemptArgs(
        pod=_pod(raw, what, names),
        victims={node: uids for node, (uids, _) in by_node.items()},
        violations={node: number for node, (_, number) in by_node.items()},
    )


def _read_victims(
    reader: JsonReader, what: str, by_node: dict[str, tuple[list[PodUid], int]]
) -> Generator[None, None, None]:
    """Victims, or MetaVictims, of each node."""
    for node in reader.entries():
        where = f"{what}[{node[:MAX_NAME_CHARS]}]"
        uids, number = list[PodUid](), 0
        if reader.next_char() != "{":
            _null(reader, where, "an object")
        else:
            for field in reader.fields():
                if field == "pods" and reader.next_char() == "[":
                    for position in reader.elements():
                        uids.append(_victim(reader.part(), f"{where}.Pods[{position}]"))
                        if reader.is_step():
                            yield
                    continue
                value = reader.part()
                if field == "pods":
                    _list(value, f"{where}.Pods")
                elif field == "numpdbviolations":
                    number = _violations(value, f"{where}.NumPDBViolations")
        by_node[node] = uids, number
        if len(by_node) > MAX_NODES:
            _no(what, f"of at most {MAX_NODES} nodes")
        if reader.is_step():
            yield


def filter_result(answer: Filtered, args: NodesArgs | None) -> bytes:
    """ExtenderFilterResult in the form in which `args` asked: whole nodes, or names."""
    names: Sequence[str] | None = None
    nodes = "null"
    if args is not None and not answer.error:
        if args.raw_nodes is None:
            names = list(answer.fitting)
        else:
            nodes = f'{{"metadata":{{}},"items":[{",".join(args.raw_nodes[name] for name in answer.fitting)}]}}'
    others = _encoded(
        {
            "NodeNames": names,
            "FailedNodes": dict(sorted(answer.failed.items())),
            "FailedAndUnresolvableNodes": dict(sorted(answer.unresolvable.items())),
            "Error": answer.error,
        }
    )
    return b'{"Nodes":' + nodes.encode("utf-8") + b"," + others[1:]


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


_VICTIMS = {name.lower(): name for name in ("NodeNameToVictims", "NodeNameToMetaVictims")}


def _null(reader: JsonReader, where: str, expected: str) -> None:
    """The value is not `expected`: it must be null, which Go writes for what is empty."""
    if reader.part() is not None:
        _no(where, expected)


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
    names: list[str] = _list(raw_names, "ExtenderArgs.NodeNames")
    if len(names) > MAX_NODES:
        _no("ExtenderArgs.NodeNames", f"of at most {MAX_NODES} nodes")
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


def _list(value: Any, where: str) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else _no(where, "a list")


def _no(where: str, wanted: str) -> Any:
    raise Corrupt(f"{where}: is not {wanted}")


def _encoded(raw: Any) -> bytes:
    return json.dumps(raw, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
