"""A Pod from JSON, read once and never trusted: from the API server, the kubelet, the scheduler, an admission review.

`PodJson` is the schema of all that is read of a pod, but for what kube-scheduler alone looks at (scheduling.py). `parse_pod`
turns it into what the agent stores, with bounds: the store has every pod of the node. A pod is refused as Corrupt, with the
pod and the place, only where its identity or what it asks for cannot be read; anything else that is not as the Kubernetes
API defines it, reads as absent. Format: Kubernetes core/v1 Pod.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Raw, Struct, field
from msgspec.json import Decoder
from msgspec.structs import replace

from gpushare_agent.core.kit.json_schema import NULL, Entries, Lenient, decoded, decoded_or
from gpushare_agent.core.kit.near_names import AMONG_OTHERS, AMONG_OWN, nearest
from gpushare_agent.core.kube.objects import Condition, KubeObject, Quantity, whole_number
from gpushare_agent.core.model.errors import Corrupt
from gpushare_agent.core.model.names import (
    CORE_LIMIT_ANNOTATION,
    ENV_GPU_MEMORY_LIMIT,
    ENV_GPU_MEMORY_REQUEST,
    ENV_GPUSHARE_INDEX,
    ENV_PRELOAD,
    ENV_VISIBLE_DEVICES,
    GPU_ASSIGNED_ANNOTATION,
    GPU_CHOICE_ANNOTATIONS,
    GPUSHARE_ALLOCATION_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    ISOLATION_ANNOTATION,
    LIMIT_PATHS,
    MAX_ANNOTATION_CHARS,
    RESIZE_ANNOTATION,
    RESIZE_STATUS_ANNOTATION,
    RETRY_ANNOTATION,
    PodUid,
    clean_path,
    is_container_id,
    touches,
)
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod, PodPhase

_OWN_PREFIX = "gpushare-agent/"
_READ_PREFIXES = ("tencent.com/", _OWN_PREFIX)
PREDICATE_PREFIX = "tencent.com/predicate-"
READ_ANNOTATIONS = (
    "clusterName",
    RESIZE_ANNOTATION,
    RESIZE_STATUS_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_ALLOCATION_ANNOTATION,
    *GPU_CHOICE_ANNOTATIONS,
)
_USER_ANNOTATIONS = (CORE_LIMIT_ANNOTATION, ISOLATION_ANNOTATION, RESIZE_ANNOTATION)
"""Annotations of pods that users write; programs write the others."""
_PROGRAM_ANNOTATIONS = (GPU_ASSIGNED_ANNOTATION, RESIZE_STATUS_ANNOTATION, RETRY_ANNOTATION)
"""Those that are similar to a user's; gpushare-agent/claims-retry-at (agent/dra/wake_pods.py) is similar to none."""
MIRROR_ANNOTATION = "kubernetes.io/config.mirror"
"""The annotation of a static pod's object: the UID that the kubelet has for the pod."""
_LIMITS = (ENV_GPU_MEMORY_LIMIT, ENV_GPU_MEMORY_REQUEST, ENV_VISIBLE_DEVICES)
READ_ENV = ("compat32", "SUBMITTER", ENV_GPUSHARE_INDEX, ENV_PRELOAD, *_LIMITS)
_REASON = re.compile(r"[A-Za-z]{1,40}")
_STATIC_UID = re.compile(r"[0-9a-f]{32}")
"""The kubelet's hash of the file. Unlike every UID that the API server gives: no forged mirror pod names another's pod."""
EXTENDED_CLAIM = "extended-resources"
"""The name in the pod of the claim that the scheduler made for its extended resources."""
_SECOND_EXTENDED_CLAIM = f"{EXTENDED_CLAIM}."
"""The same where the spec has a claim of that name: no claim of a spec can be named so."""
MAX_ANNOTATIONS = 64
MAX_CONTAINERS = 1000
"""Containers beyond this count only where they ask for something."""
MAX_MOUNTS_OF_PATH = 4
"""The mounts at each of LIMIT_PATHS: mounts at other paths must not crowd them out."""
MAX_COMPARED = 16
"""Unknown annotations of a pod that are compared with those that are known."""
MAX_NAME_CHARS = 320
"""The longest name of an annotation: 253 of its prefix, a slash, 63 of its name."""
MAX_MESSAGE_CHARS = 2048
MAX_SCHEDULER_CHARS = 1000
CUT = "…"
"""Ends what was cut, so that a cut value is never taken for a whole one."""


class ContainerClaim(Struct):
    name: str
    request: str | None = None


class ResourcesJson(Struct):
    limits: dict[str, Quantity] | None = None
    requests: dict[str, Quantity] | None = None
    raw_claims: Raw = field(name="claims", default=NULL)
    claims = Entries(ContainerClaim, of="raw_claims")


class ContainerPort(Struct, rename="camel"):
    name: str | None = None
    container_port: int = 0
    host_port: int = 0


class EnvVar(Struct):
    name: str
    value: str | None = None


class VolumeMount(Struct, rename="camel"):
    mount_path: str


class ContainerJson(Struct, rename="camel"):
    name: str | None = None
    resources: ResourcesJson | None = None
    restart_policy: object = None
    raw_env: Raw = field(name="env", default=NULL)
    raw_ports: Raw = field(name="ports", default=NULL)
    raw_mounts: Raw = field(name="volumeMounts", default=NULL)
    env = Entries(EnvVar, of="raw_env")
    ports = Entries(ContainerPort, of="raw_ports")
    mounts = Entries(VolumeMount, of="raw_mounts")

    @property
    def limits(self) -> Mapping[str, Quantity]:
        return (self.resources.limits if self.resources is not None else None) or {}

    @property
    def requests(self) -> Mapping[str, Quantity]:
        """Where there is none the limit counts: the API server fills it in, and a manifest may not have passed one."""
        return {**self.limits, **((self.resources.requests if self.resources is not None else None) or {})}


class PodClaim(Struct, rename="camel"):
    """A claim in the pod's spec or status."""

    name: str
    resource_claim_name: str | None = None


class PodSpec(Struct, rename="camel"):
    node_name: str | None = None
    init_containers: list[ContainerJson] | None = None
    containers: list[ContainerJson] | None = None
    raw_claims: Raw = field(name="resourceClaims", default=NULL)
    raw_resources: Raw = field(name="resources", default=NULL)
    raw_overhead: Raw = field(name="overhead", default=NULL)
    raw_selector: Raw = field(name="nodeSelector", default=NULL)
    raw_affinity: Raw = field(name="affinity", default=NULL)
    scheduler_name: object = None
    runtime_class: object = field(name="runtimeClassName", default=None)
    raw_spread: Raw = field(name="topologySpreadConstraints", default=NULL)
    raw_tolerations: Raw = field(name="tolerations", default=NULL)
    raw_volumes: Raw = field(name="volumes", default=NULL)
    raw_gates: Raw = field(name="schedulingGates", default=NULL)
    priority: object = None
    preemption_policy: object = None
    claims = Entries(PodClaim, of="raw_claims")
    resources = Lenient(ResourcesJson, of="raw_resources")
    overhead = Lenient(dict[str, Quantity], of="raw_overhead")

    @property
    def requests(self) -> Mapping[str, Quantity]:
        """The requests of the pod as a whole."""
        return self.resources.requests or {}


class _State(Struct):
    running: object = None
    terminated: object = None
    waiting: object = None

    @property
    def reason(self) -> str:
        """Why it waits or has ended, in the kubelet's word; empty where there is none."""
        reasons = [one.get("reason") for one in (self.waiting, self.terminated) if isinstance(one, dict)]
        # A tenant who may write the status may write a page here.
        return next((one for one in reasons if isinstance(one, str) and _REASON.fullmatch(one)), "")


class ContainerStatus(Struct, rename="camel"):
    name: str | None = None
    raw_id: Raw = field(name="containerID", default=NULL)
    id = Lenient(str, of="raw_id")
    restart_count: int = 0
    state: _State | None = None
    last_state: _State | None = None

    @property
    def is_running(self) -> bool:
        return self.state is not None and isinstance(self.state.running, dict)

    @property
    def has_started(self) -> bool:
        """A container of an admitted pod has run, runs, or was restarted. A pod refused at admission has no statuses."""
        states = [state for state in (self.state, self.last_state) if state is not None]
        return self.restart_count > 0 or any(one.running is not None or one.terminated is not None for one in states)


class _RequestMapping(Struct, rename="camel"):
    container_name: str
    request_name: str


class ExtendedClaim(Struct, rename="camel"):
    """The claim that the scheduler made for the pod's extended resources."""

    resource_claim_name: str | None = None
    raw_mappings: Raw = field(name="requestMappings", default=NULL)
    mappings = Entries(_RequestMapping, of="raw_mappings")


class PodStatus(Struct, rename="camel"):
    phase: str | None = None
    start_time: str | None = None
    nominated_node_name: str | None = None
    reason: str | None = None
    message: str | None = None
    raw_conditions: Raw = field(name="conditions", default=NULL)
    raw_init_statuses: Raw = field(name="initContainerStatuses", default=NULL)
    raw_statuses: Raw = field(name="containerStatuses", default=NULL)
    raw_claims: Raw = field(name="resourceClaimStatuses", default=NULL)
    extended_resource_claim_status: ExtendedClaim | None = None
    conditions = Entries(Condition, of="raw_conditions")
    claims = Entries(PodClaim, of="raw_claims")
    init_statuses = Entries(ContainerStatus, of="raw_init_statuses")
    statuses = Entries(ContainerStatus, of="raw_statuses")


class PodJson(KubeObject):
    """The fields that are read from a pod."""

    given_spec: PodSpec | None = field(name="spec", default=None)
    raw_status: Raw = field(name="status", default=NULL)
    status = Lenient(PodStatus, of="raw_status")
    """Empty where it is not as Kubernetes defines it."""

    @property
    def spec(self) -> PodSpec:
        return self.given_spec or PodSpec()


_OBJECT, _POD = Decoder(KubeObject), Decoder(PodJson)
_PHASES: Mapping[str, PodPhase] = {phase.value: phase for phase in PodPhase}


def read_pod_json(raw: Raw | bytes, where: str = "pod") -> PodJson:
    """Raises Corrupt, with the pod's name where it has one."""
    try:
        return decoded(_POD, raw, where)
    except Corrupt as e:
        meta = decoded_or(_OBJECT, raw, KubeObject).meta
        # Without a name the place in the JSON is all that can be said.
        if not (meta.namespace and meta.name):
            raise
        raise Corrupt(f"{where} {_cut(f'{meta.namespace}/{meta.name}', 600)}: {e}") from e


def parse_pod(pod: PodJson, resources: Collection[str], *, has_env_and_mounts: bool = True) -> Pod:
    """Only the limits of these resources are read. Without `has_env_and_mounts` its containers lack both, which take half
    of the time.

    Raises:
        Corrupt: name or UID is missing, or what the containers ask for is no number.
    """
    meta = pod.meta
    what = f"pod {_cut(meta.namespace or '', 300)}/{_cut(meta.name or '', 300)}"
    if not (meta.uid and meta.name and meta.namespace):
        raise Corrupt(f"{what}: namespace, name or UID is missing")
    status = pod.status
    # Claims from a template have a name only once the controller has made them: the status tells.
    claims = _claims(pod.spec, status)
    containers = tuple(_with_extended_claim(_containers(pod.spec, what, resources, has_env_and_mounts), status, claims))
    raw_annotations, statuses = meta.annotations, status.init_statuses + status.statuses
    is_mirror = MIRROR_ANNOTATION in raw_annotations
    running = [one for one in statuses if one.is_running and one.name]
    names = frozenset(c.name for c in containers)
    return Pod(
        uid=PodUid(meta.uid),
        namespace=meta.namespace,
        name=meta.name,
        phase=_phase(status.phase),
        containers=containers,
        annotations=_read_annotations(raw_annotations),
        resource_version=meta.version,
        node_name=pod.spec.node_name or "",
        runtime_class=_cut(pod.spec.runtime_class, MAX_NAME_CHARS) if isinstance(pod.spec.runtime_class, str) else "",
        # Whatever it is: a pod with a deletion timestamp is on its way out.
        is_deleting=meta.deleted_at is not None,
        reason=_cut(status.reason or "", MAX_MESSAGE_CHARS),
        message=_cut(status.message or "", MAX_MESSAGE_CHARS),
        controller_kind=_cut(next((one.kind or "" for one in meta.owners if one.controller), ""), MAX_NAME_CHARS),
        is_static=is_mirror,
        mirror_uid=meta.uid if is_mirror else "",
        has_started=any(one.has_started for one in statuses),
        # Only names of the spec: a status may name what any tenant with the right to write it likes.
        running=names.intersection(one.name for one in running if one.name),
        not_running={
            one.name: one.state.reason
            for one in statuses
            if one.name in names and one.state is not None and not one.is_running and one.state.reason
        },
        container_ids=_container_ids(containers, running),
        claims=claims,
    )


def pod_of_node(raw: Raw, resources: Collection[str]) -> Pod:
    """The pod as the node's own agent needs it: a mirror pod has the UID of the static pod that it shows. Raises Corrupt."""
    read = read_pod_json(raw)
    pod = parse_pod(read, resources)
    # The kubelet's records, and the runtime's, have the static pod's UID.
    uid = read.meta.annotations.get(MIRROR_ANNOTATION, "") if pod.is_static else ""
    return replace(pod, uid=PodUid(uid)) if _STATIC_UID.fullmatch(uid) else pod


def static_pod(raw: Raw, resources: Collection[str]) -> Pod:
    """A static pod from the kubelet's own list of pods. Raises Corrupt, also for a file that sets metadata.uid."""
    pod = parse_pod(read_pod_json(raw), resources)
    if not _STATIC_UID.fullmatch(pod.uid):
        raise Corrupt(
            f"static pod {pod.namespace}/{pod.name}: its UID is not the kubelet's hash of its file; leave metadata.uid out"
        )
    # A kubelet's list has no versions of the API server; the mirror pod's would be compared with it.
    return replace(pod, is_static=True, resource_version="")


def _containers(
    spec: PodSpec, what: str, resources: Collection[str], has_env_and_mounts: bool
) -> Iterator[ContainerSpec]:
    # The kubelet's order of admission: init containers and sidecars, then the main ones.
    for place, found in (("initContainers", spec.init_containers), ("containers", spec.containers)):
        for position, one in enumerate(found or ()):
            where = f"{what}, container {one.name}" if one.name else f"{what}, {place}[{position}]"
            limits = one.limits
            asked = sorted(name for name in limits if name in resources)
            requests = {name: whole_number(limits[name], f"{where}, limit {_cut(name, 300)}") for name in asked}
            # A container that asks for GPUs has to be found again by its name.
            if not one.name and requests:
                raise Corrupt(f"{where}: the container has no name")
            if one.name and (requests or position < MAX_CONTAINERS):
                claims = one.resources.claims if one.resources is not None else ()
                # A sidecar is an init container that is restarted: it runs as long as the pod.
                init = ContainerKind.SIDECAR if one.restart_policy == "Always" else ContainerKind.INIT
                yield ContainerSpec(
                    name=one.name,
                    kind=ContainerKind.MAIN if place == "containers" else init,
                    position=position,
                    requests=requests,
                    env=_literal_env(one) if has_env_and_mounts else {},
                    claims=tuple((claim.name, claim.request or "") for claim in claims),
                    # Only a container with a share has limits that a mount could lift.
                    mounts=_limit_mounts(one) if requests and has_env_and_mounts else (),
                )


def _claims(spec: PodSpec, status: PodStatus) -> dict[str, str]:
    """Claims that the spec names, and those made from templates or for extended resources, which the status names."""
    own, extended = spec.claims, status.extended_resource_claim_status
    found = [(one.name, one.resource_claim_name) for one in own]
    if extended is not None:
        is_taken = any(one.name == EXTENDED_CLAIM for one in own)
        found.append((_SECOND_EXTENDED_CLAIM if is_taken else EXTENDED_CLAIM, extended.resource_claim_name))
    # The status is read only where it can name something: most pods have no claims.
    if found:
        found += [(one.name, one.resource_claim_name) for one in status.claims]
    return {name: claim for name, claim in found if claim is not None}


def _with_extended_claim(
    containers: Iterable[ContainerSpec], status: PodStatus, claims: Mapping[str, str]
) -> Iterator[ContainerSpec]:
    """The containers with the requests of the claim that the scheduler made for extended resources, where there is one."""
    extended = status.extended_resource_claim_status
    name_in_pod = _SECOND_EXTENDED_CLAIM if _SECOND_EXTENDED_CLAIM in claims else EXTENDED_CLAIM
    # The pod's status may be of an older claim, or forged: both places have to name the same one.
    if extended is None or claims.get(name_in_pod) in (None, "") or claims[name_in_pod] != extended.resource_claim_name:
        yield from containers
        return
    used: dict[str, list[tuple[str, str]]] = {}
    for one in extended.mappings:
        used.setdefault(one.container_name, []).append((name_in_pod, one.request_name))
    for container in containers:
        own = tuple(used.get(container.name, ()))
        yield replace(container, claims=container.claims + own) if own else container


def _limit_mounts(container: ContainerJson) -> tuple[str, ...]:
    """The few that may lift a limit, as a path without detours."""
    paths = sorted({clean_path(one.mount_path) for one in container.mounts})
    found = {path for own in LIMIT_PATHS for path in [one for one in paths if touches(one, own)][:MAX_MOUNTS_OF_PATH]}
    return tuple(_cut(path, MAX_NAME_CHARS) for path in sorted(found))


def _literal_env(container: ContainerJson) -> dict[str, str]:
    """The values that the agent reads, by name; a later entry wins, as in the kubelet. Only literal ones, except for a
    variable that limits a share: there it matters that it is set at all, and its value is empty where it is not literal."""
    return {
        one.name: _cut(one.value, MAX_ANNOTATION_CHARS) if one.value is not None else ""
        for one in container.env
        if one.name in READ_ENV and (one.value is not None or one.name in _LIMITS)
    }


def _phase(phase: str | None) -> PodPhase:
    return _PHASES.get(phase or PodPhase.PENDING, PodPhase.UNKNOWN)


def _container_ids(containers: Iterable[ContainerSpec], running: Iterable[ContainerStatus]) -> dict[str, str]:
    """`containerd://<ID>` without the runtime's name, of the containers that want something."""
    # No other container's processes are ever looked for.
    asking = {c.name for c in containers if c.requests or c.claims}
    found = {one.name: one.id for one in running if one.name in asking}
    # `containerd://ID`, `cri-o://ID`: cgroups have the ID alone.
    bare = {name: text.rpartition("://")[2] for name, text in found.items()}
    return {name: container_id for name, container_id in sorted(bare.items()) if is_container_id(container_id)}


def scheduler_message(pod: PodJson) -> str:
    """Why no node is chosen, by the condition PodScheduled; any tenant who may write the status may write it."""
    for condition in pod.status.conditions:
        if condition.type == "PodScheduled" and condition.message is not None:
            return condition.message[:MAX_SCHEDULER_CHARS]
    return ""


def _read_annotations(present: Mapping[str, str]) -> dict[str, str]:
    """Those that the agent reads, by name."""
    names = sorted(
        name
        for name in present
        if name in READ_ANNOTATIONS or (name.startswith(_READ_PREFIXES) and len(name) <= MAX_NAME_CHARS)
    )
    # Those that the extender writes, and that its admission policy lets nobody else write, come first: else a tenant could
    # push them out by sixty-four names of its own.
    names.sort(key=lambda name: not (name.startswith(PREDICATE_PREFIX) or name in READ_ANNOTATIONS))
    return {name: _cut(present[name], MAX_ANNOTATION_CHARS) for name in sorted(names[:MAX_ANNOTATIONS])}


def mistyped_annotations(present: Mapping[str, str]) -> str:
    """A sentence on each annotation that nothing reads and that is like one of _USER_ANNOTATIONS; empty where none is."""
    unknown = sorted(name for name in present if _is_unknown(name))[:MAX_COMPARED]
    return "; ".join(
        f"annotation {name} is unknown and has no effect: did you mean {meant}?"
        for name in unknown
        if (meant := _meant(name))
    )


def _is_unknown(name: str) -> bool:
    return (
        name.startswith(_READ_PREFIXES)
        and not name.startswith(PREDICATE_PREFIX)
        and name not in _USER_ANNOTATIONS
        and name not in _PROGRAM_ANNOTATIONS
        # A longer one is similar to none, and would only take time.
        and len(name) <= 2 * max(map(len, _USER_ANNOTATIONS))
    )


def _meant(name: str) -> str:
    """The user annotation that this one was meant to be; empty where none is similar. Compared without the domain: users
    write gpushare-agent/isolation for tencent.com/gpu-isolation."""
    domain, _, behind = name.partition("/")
    # In tencent.com other programs have names, too.
    is_own = f"{domain}/" == _OWN_PREFIX
    known = {one.partition("/")[2]: one for one in _USER_ANNOTATIONS if is_own or one.startswith(f"{domain}/")}
    found = nearest(behind.lower(), known, AMONG_OWN if is_own else AMONG_OTHERS)
    return known.get(found, "")


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + CUT
