"""The JSON between kube-scheduler and its extender, read by schemas with bounds and written with the exact names.

Format: k8s.io/kube-scheduler/extender/v1 (its Go types have no JSON tags: fields are written as they are named there, and
read so). Any client may reach the port: whatever does not fit raises Corrupt. No state.

Only what a schema names becomes an object, the rest is skipped: the time for which the loop waits is bounded by the numbers
below, not by what a client sends.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, TypeVar

from msgspec import Meta, Raw, Struct, field
from msgspec.json import Decoder, encode

from gpushare_agent.core.kit.json_schema import NULL, UNREADABLE, decoded
from gpushare_agent.core.kube.pods import PodJson, PodSpec, read_pod_json
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.extender.cluster_state import Filtered
from gpushare_agent.extender.objects import lean_pod
from gpushare_agent.extender.steps import Steps

T = TypeVar("T")

MAX_NAME_CHARS = 253
MAX_NODES = 20_000
"""The most in a request; Kubernetes goes to 5,000."""
MAX_POD_BYTES = 1024 * 1024
"""256 containers of 4 KiB each."""
MAX_CONTAINERS = 256
"""The most entries of a kind in a pod: far more than a node runs; each takes 60 µs to read."""
BIND_BYTES = 16 * 1024
"""The longest request to bind: four names."""
FREE_VALUES = 10_000
BYTES_OF_A_VALUE = 16
"""Bytes of a value in a longer request, on average and at least; victims have 17 and more. What a schema skips takes no
memory, and 8 MiB of it 35 ms; but as many small values in a list that is read would take eight times their size."""
BYTES_OF_A_NODES_VALUE = 12
"""The same for filter and prioritize: whole nodes have 16.7 and more. With 12 no 8 MiB are decoded in more than 35 ms, or
into more than 42 MiB (measured)."""
MAX_VICTIMS = 1024
"""The most on one node; the kubelet's default is 110 pods."""
VICTIMS_OF_A_STEP = 1000
"""About a millisecond to read, and three to answer."""
MAX_VIOLATIONS = (1 << 63) - 1

Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME_CHARS)]


class NodesArgs(Struct, frozen=True, kw_only=True):
    """ExtenderArgs. `names` are the nodes in the order given; `raw_nodes` has their JSON by name where the scheduler sent
    whole nodes (nodeCacheCapable false), else None. `prefers_nodes`: the pod has preferences of its own, by which
    kube-scheduler scores."""

    pod: Pod
    names: Sequence[str]
    raw_nodes: Mapping[str, Raw] | None = None
    prefers_nodes: bool = False


class BindArgs(
    Struct,
    frozen=True,
    kw_only=True,
    rename={"namespace": "PodNamespace", "pod": "PodName", "uid": "PodUID", "node": "Node"},
):
    """ExtenderBindingArgs."""

    namespace: Name
    pod: Name
    uid: Annotated[PodUid, Meta(min_length=1, max_length=MAX_NAME_CHARS)]
    node: Name


class PreemptArgs(Struct, frozen=True, kw_only=True):
    """ExtenderPreemptionArgs: by node the UIDs of its victims, and how many disruption budgets that violates."""

    pod: Pod
    victims: Mapping[str, Sequence[PodUid]]
    violations: Mapping[str, int]


class Result(Struct, frozen=True):
    """A verb's answer: a body for status 200, or an error's text for another."""

    body: bytes
    outcome: str = "ok"
    status: int = 200


Verb = Callable[[bytes], Awaitable[Result]]


def bad_request(error: Corrupt) -> Result:
    """Its text may have a name of the request, and in that half a surrogate pair, which UTF-8 cannot have."""
    return Result(f"{error}\n".encode(errors="backslashreplace"), "bad", 400)


class _Preferred(Struct):
    """The preferences of a nodeAffinity, podAffinity or podAntiAffinity. Requirements decide before the extender is
    asked."""

    terms: Raw = field(name="preferredDuringSchedulingIgnoredDuringExecution", default=NULL)


class _SpreadConstraint(Struct, rename="camel"):
    when_unsatisfiable: str = ""


class _Named(Struct):
    name: Name


class _Node(Struct):
    metadata: _Named


class _NodeList(Struct):
    items: Annotated[list[Raw], Meta(max_length=MAX_NODES)] | None = None


class _NodesArgs(Struct, rename="pascal"):
    pod: Raw
    nodes: _NodeList | None = None
    node_names: Annotated[list[Name], Meta(max_length=MAX_NODES)] | None = None


class _WithUid(Struct):
    uid: Name


class _Victim(Struct, rename={"uid": "UID"}):
    """A MetaPod has its UID at the top, a whole pod in its metadata."""

    uid: Name | None = None
    metadata: _WithUid | None = None


# Exact: a spelling that is not read would be a node where nothing has to end.
class _Victims(Struct, rename={"pods": "Pods", "violations": "NumPDBViolations"}, forbid_unknown_fields=True):
    pods: Raw = Raw(b"null")
    """A list of `_Victim`, decoded in steps."""
    violations: Annotated[int, Meta(ge=0, le=MAX_VIOLATIONS)] = 0


_VictimsOfNodes = Annotated[dict[Name, _Victims], Meta(max_length=MAX_NODES)]


class _PreemptArgs(Struct, rename="pascal"):
    pod: Raw
    node_name_to_victims: _VictimsOfNodes | None = None
    node_name_to_meta_victims: _VictimsOfNodes | None = None


_NODES_ARGS, _BIND_ARGS, _PREEMPT_ARGS = Decoder(_NodesArgs), Decoder(BindArgs), Decoder(_PreemptArgs)
_NODE = Decoder(_Node)
_AFFINITIES = Decoder(dict[str, _Preferred | None] | None)
_CONSTRAINTS = Decoder(list[_SpreadConstraint] | None)
_PODS = Decoder(Annotated[list[_Victim], Meta(max_length=MAX_VICTIMS)] | None)


def parse_nodes_args(content: bytes, names: ResourceNames) -> NodesArgs:
    """Raises Corrupt."""
    what = "ExtenderArgs"
    args = request_of(_NODES_ARGS, content, what, BYTES_OF_A_NODES_VALUE)
    read = pod_json(args.pod, f"{what}.Pod")
    pod, prefers_nodes = lean_pod(read, names), _prefers_nodes(read.spec)
    # nodeCacheCapable: kube-scheduler sends names where it may, else whole nodes.
    if args.node_names is not None:
        return NodesArgs(pod=pod, names=args.node_names, prefers_nodes=prefers_nodes)
    if args.nodes is None:
        raise Corrupt(f"{what}: neither Nodes nor NodeNames is there")
    # Only each node's name is read: the rest is sent back as it came, and the state has what counts.
    items = enumerate(args.nodes.items or ())
    by_name = {decoded(_NODE, raw, f"{what}.Nodes.items[{n}]").metadata.name: raw for n, raw in items}
    return NodesArgs(pod=pod, names=list(by_name), raw_nodes=by_name, prefers_nodes=prefers_nodes)


def parse_bind_args(content: bytes) -> BindArgs:
    """Raises Corrupt."""
    what = "ExtenderBindingArgs"
    # Before it is decoded: a bind has no list that could be long.
    if len(content) > BIND_BYTES:
        raise Corrupt(f"{what}: {len(content)} bytes are no scheduler's request")
    return request_of(_BIND_ARGS, content, what)


def parse_preempt_args(content: bytes, names: ResourceNames) -> Steps[PreemptArgs]:
    """Reads the request in steps: a large cluster's candidates have tens of thousands of victims. Raises Corrupt."""
    what = "ExtenderPreemptionArgs"
    args = request_of(_PREEMPT_ARGS, content, what)
    pod = lean_pod(pod_json(args.pod, f"{what}.Pod"), names)
    victims: dict[str, Sequence[PodUid]] = {}
    violations: dict[str, int] = {}
    read = 0
    # kube-scheduler sends whole pods, or with nodeCacheCapable their UIDs. Both are read in the same way.
    for where in ("NodeNameToVictims", "NodeNameToMetaVictims"):
        of_nodes = args.node_name_to_victims if where == "NodeNameToVictims" else args.node_name_to_meta_victims
        for node, of_node in (of_nodes or {}).items():
            victims[node], violations[node] = _uids(of_node, f"{what}.{where}, node {node}"), of_node.violations
            read += 1 + len(victims[node])
            # A node without victims counts as well: there may be thousands of them.
            if read >= VICTIMS_OF_A_STEP:
                read = 0
                yield
    return PreemptArgs(pod=pod, victims=victims, violations=violations)


def filter_result(answer: Filtered, args: NodesArgs | None) -> bytes:
    """ExtenderFilterResult in the form in which `args` asked: whole nodes, or names."""
    names: Sequence[str] | None = None
    nodes = b"null"
    if args is not None and not answer.error:
        if args.raw_nodes is None:
            names = list(answer.fitting)
        else:
            # Joined as bytes, never decoded: whole nodes are several KiB each.
            nodes = b'{"metadata":{},"items":[' + b",".join(args.raw_nodes[name] for name in answer.fitting) + b"]}"
    others = _encoded(
        {
            "NodeNames": names,
            # Sorted, so that the same state gives the same bytes.
            "FailedNodes": dict(sorted(answer.failed.items())),
            "FailedAndUnresolvableNodes": dict(sorted(answer.unresolvable.items())),
            "Error": answer.error,
        }
    )
    return b'{"Nodes":' + nodes + b"," + others[1:]


def host_priorities(scores: Sequence[tuple[str, int]]) -> bytes:
    """HostPriorityList, scores from 0 to 10."""
    return _encoded([{"Host": name, "Score": score} for name, score in scores])


def binding_result(error: str) -> bytes:
    """ExtenderBindingResult; no error means bound."""
    return _encoded({"Error": error})


def preemption_result(victims: Mapping[str, Sequence[PodUid]], violations: Mapping[str, int]) -> Steps[bytes]:
    """ExtenderPreemptionResult, which always names victims by UID. In steps."""
    pieces: list[bytes] = []
    written = 0
    for node, uids in sorted(victims.items()):
        of_node = {"Pods": [{"UID": uid} for uid in uids], "NumPDBViolations": violations.get(node, 0)}
        # Node by node: the whole answer encoded at once held the loop for 107 ms with 140,000 victims.
        pieces.append(_encoded(node) + b":" + _encoded(of_node))
        written += 1 + len(uids)
        if written >= VICTIMS_OF_A_STEP:
            written = 0
            yield
    return b'{"NodeNameToMetaVictims":{' + b",".join(pieces) + b"}}"


def request_of(decoder: Decoder[T], content: bytes, what: str, bytes_of_a_value: int = BYTES_OF_A_VALUE) -> T:
    """A whole request, read by the schema. Raises Corrupt."""
    # An upper bound: it counts those in texts too. One pass: `count` takes four times as long where there are many.
    values = len(content) - len(content.translate(None, b",{["))
    if values > FREE_VALUES + len(content) // bytes_of_a_value:
        raise Corrupt(f"{what}: {values} values in {len(content)} bytes are no scheduler's request")
    return decoded(decoder, content, what)


def pod_json(raw: Raw, where: str) -> PodJson:
    """Raises Corrupt. Bounded before it is decoded: annotations of 8 MiB would hold the loop for 0.1 s."""
    if len(bytes(raw)) > MAX_POD_BYTES:
        raise Corrupt(f"{where}: of more than {MAX_POD_BYTES} bytes")
    found = read_pod_json(raw, where)
    spec = found.spec
    if max(len(spec.containers or ()), len(spec.init_containers or ())) > MAX_CONTAINERS:
        raise Corrupt(f"{where}: of more than {MAX_CONTAINERS} containers of a kind")
    return found


def _prefers_nodes(spec: PodSpec) -> bool:
    try:
        affinities, constraints = _AFFINITIES.decode(spec.raw_affinity), _CONSTRAINTS.decode(spec.raw_spread)
    except UNREADABLE:
        return True  # not understood, so nothing is kept from it
    if any(one is not None and bytes(one.terms) not in (b"null", b"[]") for one in (affinities or {}).values()):
        return True
    return any(one.when_unsatisfiable != "DoNotSchedule" for one in constraints or ())


def _uids(victims: _Victims, where: str) -> list[PodUid]:
    found = decoded(_PODS, victims.pods, where) or []
    uids = [victim.metadata.uid if victim.metadata is not None else victim.uid for victim in found]
    # The scheduler would believe that a victim that is left out need not end.
    if None in uids:
        raise Corrupt(f"{where}: a victim without a UID")
    return [PodUid(uid) for uid in uids if uid is not None]


def _encoded(raw: object) -> bytes:
    try:
        return encode(raw)
    except UnicodeEncodeError:
        # A reason may name what a node's annotation or a quota has: half a surrogate pair, which UTF-8 cannot have.
        return json.dumps(raw, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "replace")
