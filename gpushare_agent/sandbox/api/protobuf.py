"""The protobuf bodies that kubectl sends even to a server that takes only JSON: `create`, `autoscale`, `drain`, `auth`.

Only their fields are read, into the JSON that the rest of the server knows. Any other field with a value is refused, with
the advice to use YAML. Pure, bounded by kit/protobuf. The first object of a kind imports its models: not for the event loop.
Numbers: generated.proto in k8s.io/api and k8s.io/apimachinery of Kubernetes 1.36; types: validation.py's models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gpushare_agent.core.kit.protobuf import Fields, MalformedMessageError, scan_fields
from gpushare_agent.sandbox.api.validation import CONTAINER, fields_of_model, model_of
from gpushare_agent.sandbox.pod_manifest import RawObject

CONTENT_TYPE = "application/vnd.kubernetes.protobuf"
_MAGIC = b"k8s\x00"
_VARINT = 0
_QUANTITIES = frozenset({"limits", "requests", "hard"})
_TABLE = """\
V1ObjectMeta name=1 generateName=2 namespace=3 uid=5 labels=11 annotations=12 finalizers=14
V1Namespace metadata=1 spec=2 status=3
V1NamespaceSpec finalizers=1
V1ConfigMap metadata=1 data=2
V1ResourceQuota metadata=1 spec=2 status=3
V1ResourceQuotaSpec hard=1 scopes=2
V1Service metadata=1 spec=2 status=3
V1ServiceSpec ports=1 selector=2 clusterIP=3 type=4 externalName=10
V1ServicePort name=1 protocol=2 port=3 targetPort=4 nodePort=5
V1Deployment metadata=1 spec=2 status=3
V1DeploymentSpec replicas=1 selector=2 template=3 strategy=4 minReadySeconds=5
V1DeploymentStrategy type=1
V1Job metadata=1 spec=2 status=3
V1JobSpec parallelism=1 completions=2 template=6 backoffLimit=7
V1LabelSelector matchLabels=1
V1PodTemplateSpec metadata=1 spec=2
V1PodSpec containers=2 restartPolicy=3 terminationGracePeriodSeconds=4 nodeSelector=7 schedulerName=19
V1Container name=1 image=2 command=3 args=4 ports=6 env=7 resources=8 imagePullPolicy=14
V1ContainerPort name=1 hostPort=2 containerPort=3 protocol=4
V1EnvVar name=1 value=2
V1ResourceRequirements limits=1 requests=2
V1HorizontalPodAutoscaler metadata=1 spec=2 status=3
V1HorizontalPodAutoscalerSpec scaleTargetRef=1 minReplicas=2 maxReplicas=3 targetCPUUtilizationPercentage=4
V1CrossVersionObjectReference kind=1 name=2 apiVersion=3
V1Eviction metadata=1 deleteOptions=2
V1DeleteOptions gracePeriodSeconds=1 preconditions=2 propagationPolicy=4 dryRun=5
V1Preconditions uid=1 resourceVersion=2
V1SelfSubjectAccessReview metadata=1 spec=2 status=3
V1SelfSubjectAccessReviewSpec resourceAttributes=1 nonResourceAttributes=2
V1ResourceAttributes namespace=1 verb=2 group=3 version=4 resource=5 subresource=6 name=7
V1NonResourceAttributes path=1 verb=2
V1SelfSubjectRulesReview metadata=1 spec=2 status=3
V1SelfSubjectRulesReviewSpec namespace=1
V1SelfSubjectReview metadata=1 status=2
"""
_NUMBERS: dict[str, dict[int, str]] = {
    model: {int(number): name for name, _, number in (word.partition("=") for word in words)}
    for model, *words in map(str.split, _TABLE.splitlines())
}


class UnreadFieldError(ValueError):
    """A kind, or a field with a value, that the table does not have."""


def decoded(body: bytes) -> RawObject:
    """The object, without its status. Raises MalformedMessageError, UnreadFieldError."""
    if not body.startswith(_MAGIC):
        raise MalformedMessageError("it does not begin as Kubernetes' protobuf does")
    left = Fields()
    # An Unknown of k8s.io/apimachinery: its type, and the object.
    parts = dict(_fields(body.removeprefix(_MAGIC), left))
    names = dict(_fields(parts.get(1, b""), left))
    version, kind = (_text(names.get(number, b"")) for number in (1, 2))
    return {"apiVersion": version, "kind": kind, **_message(parts.get(2, b""), model_of(kind), left)}


def _fields(message: int | bytes, left: Fields) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each."""
    if isinstance(message, int):
        raise MalformedMessageError("a message is expected, there is a number")
    for key, value, start, stop in scan_fields(message, 0, len(message), left):
        yield key >> 3, value if key & 7 == _VARINT else message[start:stop]


def _message(content: int | bytes, model: str, left: Fields) -> RawObject:
    """The fields that have a value: protobuf writes empty texts and messages that JSON leaves out."""
    if model not in _NUMBERS:
        raise UnreadFieldError(model)
    names, types = _NUMBERS[model], fields_of_model(model) or {}
    found: RawObject = {}
    for number, value in _fields(content, left):
        name = names.get(number)
        if name is None and value:
            raise UnreadFieldError(f"field {number} of {model}")
        # Of a new object the status is its controller's.
        if name is None or name == "status":
            continue
        match = CONTAINER.fullmatch(types[name])
        if match is None:
            found[name] = _value(value, types[name], name, left)
        elif match["item"]:
            found.setdefault(name, []).append(_value(value, match["item"], name, left))
        else:
            entry = dict(_fields(value, left))
            found.setdefault(name, {})[_text(entry.get(1, b""))] = _value(entry.get(2, b""), match["value"], name, left)
    return {name: value for name, value in found.items() if value not in ("", {}, [])}


def _value(value: int | bytes, kind: str, name: str, left: Fields) -> Any:
    if kind in ("int", "bool"):
        if not isinstance(value, int):
            raise MalformedMessageError(f"{name} is no number")
        return bool(value) if kind == "bool" else value - (value >> 63 << 64)
    if kind == "str":
        return _text(dict(_fields(value, left)).get(1, b"") if name in _QUANTITIES else value)
    if kind == "object":  # IntOrString, the only one in the table: type, number, text
        either = dict(_fields(value, left))
        return _text(either.get(3, b"")) if either.get(1) else _value(either.get(2, 0), "int", name, left)
    return _message(value, kind, left)


def _text(value: int | bytes) -> str:
    try:
        return value.decode() if isinstance(value, bytes) else str(value)
    except UnicodeDecodeError as error:
        raise MalformedMessageError(f"a text is not UTF-8: {error}") from error
