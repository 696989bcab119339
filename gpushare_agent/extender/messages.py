"""The JSON between kube-scheduler and its extender, read with bounds and written with the exact names.

Format: k8s.io/kube-scheduler/extender/v1 (its Go types have no JSON tags: fields are written as they are named there, and
read in any case, as Go does). Any client may reach the port: whatever does not fit the format raises Corrupt.
The pod's annotations are not read. No state.

A request is decoded in steps, between which the event loop may run other tasks (`verbs.in_steps`): field by field, and nodes
and victims one by one. What is decoded at once is PART_CHARS at most, so the time for which the loop
waits does not depend on a request's length. A thread would not help: Python's decoder keeps the interpreter's lock.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.decoder import scanstring  # type: ignore[attr-defined]  # undocumented, in C
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
PART_CHARS = 1024 * 1024
"""Of a pod, a node, or the list of names: 20,000 names of 50 characters, 256 containers of 4 KiB each. The costliest takes
40 ms to decode."""
TRIED_CHARS = (2 * 1024, 32 * 1024, PART_CHARS)
"""Lengths of text given to Python's decoder, which takes no end position, one after the other until a value is complete."""
STEP_CHARS = 32 * 1024
"""Decoded in one step, where parts are small; some milliseconds."""
BIND_BYTES = 16 * 1024
"""Of a bind's request: four names."""
MAX_FIELDS = 64
"""Of a request's top level, whose names are folded one by one."""
MAX_CONTAINERS = 256
"""Of a pod. Far more than a node runs; each takes 60 µs to read."""
MAX_VIOLATIONS = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesArgs:
    """ExtenderArgs. `names` are the nodes in the order given; `raw_nodes` has their JSON by name where the scheduler sent
    whole nodes (nodeCacheCapable false), else None."""

    pod: Pod
    names: Sequence[str]
    raw_nodes: Mapping[str, str] | None = None


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


def parse_nodes_args(content: bytes, names: ResourceNames) -> Generator[None, None, NodesArgs]:
    """In steps. Raises Corrupt."""
    reader, raw = _Reader(content, "ExtenderArgs"), dict[str, Any]()
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


def _read_nodes(reader: _Reader) -> Generator[None, None, dict[str, str]]:
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
    reader = _Reader(content, what)
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
    reader, raw = _Reader(content, what), dict[str, Any]()
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
    reader: _Reader, what: str, by_node: dict[str, tuple[list[PodUid], int]]
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


class _Reader:
    """Reads the JSON of one request from its beginning to its end. `what` names it in errors; all raise Corrupt."""

    def __init__(self, content: bytes, what: str) -> None:
        values = sum(map(content.count, (b",", b"{", b"[")))  # at least so many, and those in texts
        if values > FREE_VALUES + len(content) // BYTES_OF_A_VALUE:
            raise Corrupt(f"{what}: {values} values in {len(content)} bytes are no scheduler's request")
        self._what = what
        try:
            self._text = content.decode("utf-8")
        except UnicodeDecodeError as e:
            raise self._malformed(str(e)) from e
        self._at = self._step_began = 0

    def fields(self) -> Iterator[str]:
        """The names of an object's fields in small letters; the caller reads the value of each before the next."""
        for number, key in enumerate(self.entries(), start=1):
            if number > MAX_FIELDS:
                raise Corrupt(f"{self._what}: more than {MAX_FIELDS} fields are no scheduler's request")
            yield key.lower()

    def entries(self) -> Iterator[str]:
        """An object's keys, unchanged and of any number; as `fields` otherwise."""
        if self.next_char() != "{":
            self.part()
            _no(self._what, "an object")
        for _ in self._members("}"):
            key = self.part()
            if not isinstance(key, str) or self.next_char() != ":":
                raise self._malformed(f"a field is expected at {self._at}")
            self._at += 1
            yield key

    def elements(self) -> Iterator[int]:
        """Positions in a list; the caller reads the value of each before the next."""
        return self._members("]")

    def _members(self, closing: str) -> Iterator[int]:
        self._at += 1
        if self.next_char() == closing:
            self._at += 1
            return
        number = 0
        while True:
            yield number
            number += 1
            char = self.next_char()
            if char not in ("," + closing) or not char:
                raise self._malformed(f"{closing} or a comma is expected at {self._at}")
            self._at += 1
            if char == closing:
                return

    def part(self) -> Any:
        """One value of at most PART_CHARS."""
        return self.part_and_text()[0]

    def part_and_text(self) -> tuple[Any, str]:
        """The value and its JSON; the JSON of a string is left empty."""
        if self.next_char() == '"':  # a text needs no bound: a mebibyte of escapes takes 3 ms
            return self._string(), ""
        for most in TRIED_CHARS:
            text = self._text[self._at : self._at + most]
            try:
                value, end = _DECODER.raw_decode(text)
            except (ValueError, RecursionError) as e:
                if len(text) < most or isinstance(e, RecursionError):
                    raise self._malformed(str(e)) from e
                continue
            self._at += end
            return value, text[:end]
        raise Corrupt(f"{self._what}: one value at {self._at} is longer than {PART_CHARS} characters, or malformed")

    def _string(self) -> str:
        value: str
        try:
            value, self._at = scanstring(self._text, self._at + 1)
        except ValueError as e:
            raise self._malformed(str(e)) from e
        return value

    def next_char(self) -> str:
        """The next character that is no blank; empty at the end."""
        found = _BLANKS.match(self._text, self._at)
        self._at = found.end() if found else self._at
        return self._text[self._at : self._at + 1]

    def end(self) -> None:
        if self.next_char():
            raise self._malformed(f"more follows at {self._at}")

    def is_step(self) -> bool:
        """Whether enough was read since the last step."""
        if self._at - self._step_began < STEP_CHARS:
            return False
        self._step_began = self._at
        return True

    def _malformed(self, error: str) -> Corrupt:
        return Corrupt(f"{self._what}: the request is no JSON ({error})")


_VICTIMS = {name.lower(): name for name in ("NodeNameToVictims", "NodeNameToMetaVictims")}
_DECODER = json.JSONDecoder()
_BLANKS = re.compile(r"[ \t\r\n]*")


def _null(reader: _Reader, where: str, expected: str) -> None:
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
