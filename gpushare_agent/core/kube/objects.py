"""Schemas of the API server's objects that several parts read or write: ObjectMeta, Node, ObjectReference; and quantities.

Format: Kubernetes meta/v1 ObjectMeta, core/v1 Node; apimachinery's resource.Quantity, `<signedNumber><suffix>`
with suffixes n u m k M G T P E, Ki Mi Gi Ti Pi Ei, or a decimal exponent. No state.
"""

from __future__ import annotations

import re
from fractions import Fraction

from msgspec import Raw, Struct, field
from msgspec.json import Decoder

from gpushare_agent.core.kit.json_schema import NULL, Entries, Lenient, decoded, decoded_or, texts
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.names import PodUid

Quantity = str | int | float
"""An amount of a resource, as the API server and manifests write it; `whole_number` reads it."""


class OwnerReference(Struct, rename="camel", kw_only=True):
    api_version: str | None = None
    kind: str | None = None
    name: str | None = None
    uid: str | None = None
    controller: bool | None = None


_TIME_CHARS = len("2026-01-01T00:00:00Z")


class ObjectMeta(Struct, rename="camel"):
    """Identity is read exactly; of labels, annotations, owners and version, what is as Kubernetes defines it."""

    namespace: str | None = None
    name: str | None = None
    uid: str | None = None
    raw_version: object = field(name="resourceVersion", default=None)
    deleted_at: object = field(name="deletionTimestamp", default=None)
    raw_created: object = field(name="creationTimestamp", default=None)
    raw_labels: Raw = field(name="labels", default=NULL)
    raw_annotations: Raw = field(name="annotations", default=NULL)
    raw_owners: Raw = field(name="ownerReferences", default=NULL)

    @property
    def created_at(self) -> str:
        """In Kubernetes' form of RFC 3339, empty where there is none."""
        return self.raw_created[:_TIME_CHARS] if isinstance(self.raw_created, str) else ""

    @property
    def version(self) -> str:
        """The resourceVersion, empty where there is none."""
        return self.raw_version if isinstance(self.raw_version, str) else ""

    @property
    def labels(self) -> dict[str, str]:
        return texts(self.raw_labels)

    @property
    def annotations(self) -> dict[str, str]:
        return texts(self.raw_annotations)

    owners = Entries(OwnerReference, of="raw_owners")


class KubeObject(Struct):
    """Any object, without what is special to its kind."""

    metadata: ObjectMeta | None = None

    @property
    def meta(self) -> ObjectMeta:
        return self.metadata or ObjectMeta()


_OBJECT = Decoder(KubeObject)


def object_meta(raw: Raw, what: str) -> ObjectMeta:
    """Raises Corrupt."""
    return decoded(_OBJECT, raw, what).meta


def pod_uid(raw: Raw) -> PodUid:
    """The UID alone, where nothing else of an event matters. Raises Corrupt where there is none."""
    uid = object_meta(raw, "pod").uid
    if not uid:
        raise Corrupt("pod: the UID is missing")
    return PodUid(uid)


def object_name(raw: Raw, what: str) -> str:
    """An object's name. Raises Corrupt where there is none."""
    name = object_meta(raw, what).name
    if not name:
        raise Corrupt(f"{what}: the name is missing")
    return name


class Condition(Struct):
    type: str | None = None
    status: str | None = None
    message: str | None = None


class NodeInfo(Struct, rename="camel"):
    kubelet_version: str = ""


class NodeStatus(Struct):
    capacity: dict[str, Quantity] | None = None
    allocatable: dict[str, Quantity] | None = None
    raw_conditions: Raw = field(name="conditions", default=NULL)
    raw_info: Raw = field(name="nodeInfo", default=NULL)
    conditions = Entries(Condition, of="raw_conditions")
    info = Lenient(NodeInfo, of="raw_info")


class NodeSpec(Struct):
    unschedulable: object = None
    raw_taints: Raw = field(name="taints", default=NULL)


class NodeJson(KubeObject):
    raw_spec: Raw = field(name="spec", default=Raw(b"{}"))
    raw_status: Raw = field(name="status", default=NULL)
    spec = Lenient(NodeSpec, of="raw_spec")
    status = Lenient(NodeStatus, of="raw_status")
    """Empty, both, where they are not as Kubernetes defines them."""

    @property
    def taints(self) -> list[dict[str, object]] | None:
        """With all their fields, because the list is replaced as a whole. None where it is not as Kubernetes defines it."""
        raw = self.spec.raw_taints
        return [] if bytes(raw) == b"null" else decoded_or(_TAINTS, raw, lambda: None)

    @property
    def is_cordoned(self) -> bool:
        """Set by `kubectl cordon`."""
        return self.spec.unschedulable is True

    @property
    def is_ready(self) -> bool:
        """Its condition Ready; a node that has none yet is not said to have failed."""
        return all(one.status == "True" for one in self.status.conditions if one.type == "Ready")


_NODE, _TAINTS = Decoder(NodeJson), Decoder(list[dict[str, object]])


def read_node_json(raw: Raw) -> NodeJson:
    """The node; empty where it is none."""
    return decoded_or(_NODE, raw, NodeJson)


class ObjectReference(Struct, rename="camel", omit_defaults=True, kw_only=True, frozen=True):
    """The object that an Event is about."""

    api_version: str = ""
    kind: str
    name: str
    uid: str
    namespace: str = ""
    resource_version: str = ""


# --- quantities; those of extended resources are whole, not negative, at most 2**63 - 1 ---

_QUANTITY = re.compile(
    r"([+-]?)([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,3}))?"
)
_DECIMAL_POWERS = {"n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_BINARY_POWERS = {"Ki": 10, "Mi": 20, "Gi": 30, "Ti": 40, "Pi": 50, "Ei": 60}
_MAX = 2**63 - 1
_PLAIN_DIGITS = 18


def whole_number(quantity: object, what: str) -> int:
    """The number of a quantity of an extended resource; JSON numbers are accepted as manifests write them.

    Raises:
        Corrupt: no quantity, not whole, negative, or beyond 64 bits; the text names `what`.
    """
    if isinstance(quantity, str) and quantity.isascii() and quantity.isdigit() and len(quantity) <= _PLAIN_DIGITS:
        return int(quantity)  # as nearly all are; the way below costs twenty times as much
    value = amount(quantity)
    if value is None:
        raise Corrupt(f"{what}: {shown(quantity)} is no Kubernetes quantity")
    if value < 0:
        raise Corrupt(f"{what}: {shown(quantity)} is negative")
    if value.denominator != 1 or value > _MAX:
        raise Corrupt(f"{what}: {shown(quantity)} is no whole number of at most 64 bits")
    return value.numerator


def amount(quantity: object) -> Fraction | None:
    """The exact number, `0.1` for `100m`; None where it is no quantity."""
    if isinstance(quantity, bool) or not isinstance(quantity, str | int | float):
        return None
    if isinstance(quantity, int):
        return Fraction(quantity)
    # A float of a manifest, 1e3 say, as Python writes it.
    match = _QUANTITY.fullmatch(quantity if isinstance(quantity, str) else repr(quantity))
    if match is None:
        return None
    sign, number, suffix, exponent = match.groups()
    # Exact: 0.1k is 100, and no float says so.
    value = Fraction(number.rstrip(".")) * (-1 if sign == "-" else 1)
    if suffix in _BINARY_POWERS:
        return value * (1 << _BINARY_POWERS[suffix])
    power = int(exponent) if exponent else _DECIMAL_POWERS.get(suffix, 0)
    scale: int = 10 ** abs(power)
    return value * scale if power >= 0 else value / scale


def binary_quantity(number: int) -> str:
    """The canonical form, as Kubernetes writes it: in the greatest binary unit that divides the number."""
    units = list(_BINARY_POWERS)
    power = 0
    while number and number % 1024 == 0 and power < len(units):
        number, power = number // 1024, power + 1
    return f"{number}{units[power - 1] if power else ''}"


def shown(value: object) -> str:
    """The value as a message quotes it, bounded."""
    text = repr(value)
    return text if len(text) <= 80 else text[:79] + "…"
