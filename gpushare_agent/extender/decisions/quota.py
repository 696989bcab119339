"""The quota of a namespace: how it is read, counted and enforced. No clock, no I/O.

Source of the format: gpu-admission 1.0 (docs/reference/formats.md, section 9), which also decides what an absent namespace,
model or pool means; docs/reference/quota.md has the cases. The totals `vcore` and `vmemory`, and parts of
GPUs, are our own. GPUs are counted in 1/100, as vcore is.

State owned by `QuotaState`: the quota in force (which QuotaFeed in cluster_feed.py reads), what each namespace uses, and the
memory of the nodes' GPUs. ClusterState says which pods and nodes count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal, InvalidOperation

from msgspec import Struct, field
from msgspec.structs import replace

from gpushare_agent.core.model.errors import Corrupt, RefusalReason, Refused
from gpushare_agent.core.model.names import CORES_PER_GPU, PodUid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec, Pod
from gpushare_agent.core.model.resources import ResourceNames, request_of
from gpushare_agent.core.placement.gpu_account import blocks_of_units
from gpushare_agent.extender.values import ClusterNode

QUOTA_KEY = "gpu_quota"
"""The one key of the ConfigMap that is read, as in gpu-admission."""
MAX_QUOTA_CHARS = 1024 * 1024
"""Kubernetes keeps no larger ConfigMap."""
MAX_NAMESPACES = 20_000
MAX_NAMES = 256
"""The most models, and the most pools, in one namespace's quota."""
MAX_NAME_CHARS = 253
MAX_GPUS = 1_000_000
MAX_TOTAL = 10**12
_SHOWN_NAMES = 8
_SHOWN_CHARS = 80
_FIELDS = ("pool", "quota", "vcore", "vmemory")
_REMEDY = "Wait until pods of the namespace end, ask for less, or have its quota raised."


class QuotaUse(Struct, frozen=True):
    """The use of a namespace's quota by one pod, or by all its pods together: 1/100 GPUs, vcore, blocks of memory."""

    gpus: int = 0
    vcore: int = 0
    vmemory: int = 0

    def plus(self, other: QuotaUse) -> QuotaUse:
        return QuotaUse(self.gpus + other.gpus, self.vcore + other.vcore, self.vmemory + other.vmemory)

    def minus(self, other: QuotaUse) -> QuotaUse:
        return QuotaUse(self.gpus - other.gpus, self.vcore - other.vcore, self.vmemory - other.vmemory)

    def at_least(self, other: QuotaUse) -> QuotaUse:
        """The greater of each."""
        return QuotaUse(max(self.gpus, other.gpus), max(self.vcore, other.vcore), max(self.vmemory, other.vmemory))


def use_of(pod: Pod, names: ResourceNames, *, gpu_memory_mib: int) -> QuotaUse:
    """What a pod counts on a node whose GPUs have `gpu_memory_mib`.

    As Kubernetes counts a pod's requests: main containers and sidecars together, or an init container with the sidecars
    started before it where that is more. Whole GPUs count with all their memory, because no other pod can use it; GPUShare's
    memory as that part of a GPU, rounded up.
    """
    peak = sidecars = mains = QuotaUse()
    for container in pod.containers:
        use = _use_of_container(container, names, gpu_memory_mib)
        match container.kind:
            case ContainerKind.INIT:
                # It runs with the sidecars before it and ends before the next: the highest moment counts.
                peak = peak.at_least(sidecars.plus(use))
            case ContainerKind.SIDECAR:
                sidecars = sidecars.plus(use)
                peak = peak.at_least(sidecars)
            case ContainerKind.MAIN:
                mains = mains.plus(use)
    return peak.at_least(sidecars.plus(mains))


def _use_of_container(container: ContainerSpec, names: ResourceNames, gpu_memory_mib: int) -> QuotaUse:
    asked = request_of(container, names)
    cores, blocks, units = asked.cores, asked.blocks, asked.units
    # Nobody else can use the rest of a whole GPU's memory, so all of it counts.
    if cores >= CORES_PER_GPU:
        whole = cores // CORES_PER_GPU * (gpu_memory_mib // names.memory_block_mib)
        blocks = max(blocks, whole)
    # Up, so that many small pods cannot get more GPUs than the quota has.
    part = -(-units * names.gpu_mem_unit_mib * CORES_PER_GPU // max(1, gpu_memory_mib))
    return QuotaUse(
        cores + part, cores, blocks + blocks_of_units(units, names.memory_block_mib, names.gpu_mem_unit_mib)
    )


class NamespaceQuota(Struct, frozen=True, kw_only=True):
    """The quota of one namespace. No pools: every pool. `gpus` is by model, in 1/100 GPU; a model that it does not name
    may not be used at all, and None limits no model. A total that is None limits nothing."""

    pools: tuple[str, ...] = ()
    gpus: Mapping[str, int] | None = None
    vcore: int | None = None
    vmemory: int | None = None


class Quota(Struct, frozen=True, kw_only=True):
    """The quotas by namespace. A namespace that is not named may use everything."""

    namespaces: Mapping[str, NamespaceQuota] = field(default_factory=dict)


def check_quota(
    quota: Quota, namespace: str, asked: QuotaUse, used: QuotaUse, *, model: str, pool: str
) -> Refused | None:
    """Why a pod of the namespace may not go to nodes of this model and pool, None where it may. `used` is without the pod:
    its namespace's GPUs of this model, and the namespace's totals (QuotaState.used)."""
    limits = quota.namespaces.get(namespace)
    if limits is None:
        return None
    if limits.pools and pool not in limits.pools:
        where = f"pool {pool}" if pool else "no pool"
        return Refused(
            reason=RefusalReason.WRONG_POOL,
            detail=f"the quota of namespace {namespace} allows nodes of the pools {_listed(limits.pools)}, and this node is "
            f"in {where}. Have the pool added to the quota, or use nodes of a pool that it names.",
        )
    # As gpu-admission: a model that is not named is not allowed, not unlimited.
    if limits.gpus is not None and model not in limits.gpus:
        return _exceeded(_no_such_model(namespace, limits.gpus, model))
    allowed = limits.gpus[model] if limits.gpus is not None else None
    return (
        _over(namespace, f"{model} GPUs", allowed, asked.gpus, used.gpus, CORES_PER_GPU)
        or _over(namespace, "vcore", limits.vcore, asked.vcore, used.vcore, 1)
        or _over(namespace, "vmemory blocks", limits.vmemory, asked.vmemory, used.vmemory, 1)
    )


def raised(
    limits: NamespaceQuota, asked: QuotaUse, used: QuotaUse, *, model: str, pool: str
) -> tuple[NamespaceQuota, tuple[str, ...]]:
    """The least quota that contains `limits` and allows the pod, and each change in words, none where it is allowed already.
    `used` as in `check_quota`."""
    changes = []
    if limits.pools and pool not in limits.pools:
        limits = replace(limits, pools=tuple(sorted((*limits.pools, pool))))
        changes.append(f"pool {pool} added")
    if limits.gpus is not None and limits.gpus.get(model, -1) < used.gpus + asked.gpus:
        changes.append(_raise(f"{model} GPUs", limits.gpus.get(model), used.gpus + asked.gpus, CORES_PER_GPU))
        limits = replace(limits, gpus={**limits.gpus, model: used.gpus + asked.gpus})
    for name in ("vcore", "vmemory"):
        total, more = getattr(limits, name), getattr(asked, name)
        if total is not None and more and total < (needed := getattr(used, name) + more):
            changes.append(_raise(name, total, needed, 1))
            limits = replace(limits, **{name: needed})
    return limits, tuple(changes)


def _raise(what: str, allowed: int | None, needed: int, parts: int) -> str:
    return f"{what} from {_number(allowed, parts) if allowed is not None else 'none'} to {_number(needed, parts)}"


def _no_such_model(namespace: str, gpus: Mapping[str, int], model: str) -> str:
    if not gpus:
        return f"the quota of namespace {namespace} allows no GPUs at all. Have models added to it."
    named = f"the quota of namespace {namespace} names {_listed(sorted(gpus))}"
    if not model:
        return f"{named}, and this node has no label with its GPUs' model. Label the node, or use another."
    return f"{named}, and none of {model} GPUs, which this node has. Have the model added to it, or use other nodes."


def _over(namespace: str, what: str, allowed: int | None, asked: int, used: int, parts: int) -> Refused | None:
    # A pod that asks for none of it is not refused for a total that others have exceeded.
    if allowed is None or not asked or used + asked <= allowed:
        return None
    return _exceeded(
        f"the pod asks for {_number(asked, parts)} {what}; namespace {namespace} has used {_number(used, parts)} of its "
        f"quota of {_number(allowed, parts)}, so {_number(max(0, allowed - used), parts)} are left. {_REMEDY}"
    )


def _exceeded(detail: str) -> Refused:
    return Refused(reason=RefusalReason.QUOTA_EXCEEDED, detail=detail)


def _number(count: int, parts: int) -> str:
    """`3.75` for 375 parts of 100, `4` for 400 and for 4 parts of 1."""
    text = f"{count // parts}.{count % parts:02}"
    return text.rstrip("0").rstrip(".")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN_NAMES} more" if len(names) > _SHOWN_NAMES else ""
    return ", ".join(names[:_SHOWN_NAMES]) + more


# --- what counts ---

NOTHING = QuotaUse()


class Usage:
    """The use of each namespace, by pod, so that a pod put twice counts once. QuotaState owns it."""

    def __init__(self) -> None:
        self._pods: dict[PodUid, tuple[str, str, QuotaUse]] = {}
        self._sums: dict[tuple[str, str | None], QuotaUse] = {}
        """By namespace and model; None: all models."""

    def put(self, uid: PodUid, namespace: str, model: str, use: QuotaUse) -> None:
        """The pod is on a node with GPUs of this model, or will be."""
        self.remove(uid)
        self._pods[uid] = namespace, model, use
        self._add(namespace, model, use)

    def remove(self, uid: PodUid) -> bool:
        """The pod has ended, or is not bound after all. Whether it counted."""
        namespace, model, use = self._pods.pop(uid, ("", "", NOTHING))
        self._add(namespace, model, NOTHING.minus(use))
        return bool(namespace)

    def of(self, namespace: str, model: str | None, *, without: PodUid | None = None) -> QuotaUse:
        """As QuotaState.used."""
        total, of_model = (self._sums.get((namespace, group), NOTHING) for group in (None, model))
        # A pod that is reserved already asks again for what it has.
        its_namespace, its_model, use = self._pods.get(without, ("", "", NOTHING)) if without else ("", "", NOTHING)
        if its_namespace == namespace:
            total, of_model = total.minus(use), of_model.minus(use) if its_model == model else of_model
        return QuotaUse(of_model.gpus, total.vcore, total.vmemory)

    def totals(self) -> dict[str, QuotaUse]:
        """By namespace."""
        return {namespace: use for (namespace, model), use in self._sums.items() if model is None}

    def _add(self, namespace: str, model: str, use: QuotaUse) -> None:
        for group in ((namespace, None), (namespace, model)):
            self._sums[group] = self._sums.get(group, NOTHING).plus(use)
            # Groups without use are removed, or deleted namespaces would stay for ever.
            if self._sums[group] == NOTHING:
                del self._sums[group]


class QuotaState:
    """Decides whether a pod may use nodes of a model and pool."""

    def __init__(self, names: ResourceNames) -> None:
        self._names = names
        self._usage = Usage()
        self.used = self._usage.of
        self.totals = self._usage.totals
        self._nodes: dict[str, tuple[str, int]] = {}
        """Model, and memory of the largest GPU in MiB."""
        self._largest_mib: dict[str, int] | None = None
        """The memory of the largest GPU that nodes have now, by model; None: to be worked out."""
        self._quota: Quota | None = Quota()
        self.on_gain: Callable[[], None] = lambda: None
        """Called where a quota may allow more than before: it was read again, or a pod counts no more."""

    @property
    def quota(self) -> Quota | None:
        """The quota in force now; None: the ConfigMap was never readable."""
        return self._quota

    @quota.setter
    def quota(self, quota: Quota | None) -> None:
        self._quota = quota
        self.on_gain()

    def __call__(self, pod: Pod, *, model: str, pool: str) -> Refused | None:
        if self.quota is None:
            return Refused(
                reason=RefusalReason.NOT_READY,
                detail="the quota's ConfigMap cannot be read, and there was no good one before: the quota is unknown. "
                "Correct it (the extender's log and an Event on it name the mistake), or delete it to have no quota.",
            )
        # Most namespaces have none: nothing is added up for them.
        if pod.namespace not in self.quota.namespaces:
            return None
        used = self.used(pod.namespace, model, without=pod.uid)
        return check_quota(self.quota, pod.namespace, self._asked(pod, model), used, model=model, pool=pool)

    def raised(self, pod: Pod, *, model: str, pool: str) -> tuple[NamespaceQuota, tuple[str, ...]] | None:
        """The least quota of the pod's namespace that allows it on such nodes, and the changes in words. None where no quota
        limits it, and where none can name the nodes because they lack the label."""
        limits = self.quota.namespaces.get(pod.namespace) if self.quota is not None else None
        if limits is None or (limits.pools and not pool) or (limits.gpus is not None and not model):
            return None
        used = self.used(pod.namespace, model, without=pod.uid)
        return raised(limits, self._asked(pod, model), used, model=model, pool=pool)

    def _asked(self, pod: Pod, model: str) -> QuotaUse:
        if self._largest_mib is None:
            self._largest_mib = {}
            for of_node, memory_mib in self._nodes.values():
                self._largest_mib[of_node] = max(memory_mib, self._largest_mib.get(of_node, 0))
        # No node is chosen yet: the largest memory among the model's GPUs stands for all of them.
        return use_of(pod, self._names, gpu_memory_mib=self._largest_mib.get(model, 0))

    def standing(self, namespace: str, limits: NamespaceQuota) -> list[tuple[str, float, float]]:
        """What `limits` limits, how much of it the namespace has used, and may use, in GPUs, cores and blocks."""
        total = self.used(namespace, None)
        found: list[tuple[str, float, float]] = [
            (f"{model} GPUs", self.used(namespace, model).gpus / CORES_PER_GPU, most / CORES_PER_GPU)
            for model, most in (limits.gpus or {}).items()
        ]
        # Any GPU is one too many.
        if limits.gpus == {}:
            found.append(("GPUs", total.gpus / CORES_PER_GPU, 0))
        totals = ("vcore", total.vcore, limits.vcore), ("vmemory blocks", total.vmemory, limits.vmemory)
        return [*found, *((what, used, most) for what, used, most in totals if most is not None)]

    # --- from ClusterState ---

    def put_node(self, node: ClusterNode) -> bool:
        """Whether the pods on it have to be counted again: they count by its model and memory."""
        size = node.model, max((gpu.memory_mib for gpu in node.gpus), default=0)
        if self._nodes.get(node.name) == size:
            return False
        self._nodes[node.name], self._largest_mib = size, None
        return True

    def remove_node(self, name: str) -> None:
        self._nodes.pop(name, None)
        self._largest_mib = None

    def count(self, pod: Pod, node: str) -> None:
        """The pod is on this node, or will be."""
        model, memory_mib = self._nodes[node]
        self._usage.put(pod.uid, pod.namespace, model, use_of(pod, self._names, gpu_memory_mib=memory_mib))

    def uncount(self, uid: PodUid) -> None:
        """The pod has ended, or its bind was undone."""
        # Only what counted leaves something to others.
        if self._usage.remove(uid):
            self.on_gain()


# --- reading ---


def parse_quota(data: Mapping[str, str]) -> Quota:
    """The quota that the ConfigMap's `data` states. Keys other than `gpu_quota` are left to others.

    Raises:
        Corrupt: naming the key, the namespace, the field and what is wrong with it.
    """
    text = data.get(QUOTA_KEY)
    if not isinstance(text, str):
        raise Corrupt(f"quota: the ConfigMap has no key {QUOTA_KEY}{_keys_instead(data)}")
    if len(text) > MAX_QUOTA_CHARS:
        raise Corrupt(f"quota, key {QUOTA_KEY}: {len(text)} characters, at most {MAX_QUOTA_CHARS} are read")
    try:
        # By hand, not by a schema: twins, exact decimals and the place of each mistake are what matters here.
        raw = json.loads(text, parse_float=Decimal, object_pairs_hook=_without_twins)
    except RecursionError as error:
        raise Corrupt(f"quota, key {QUOTA_KEY}: too deeply nested") from error
    # An exponent of twenty digits is more than even a Decimal has.
    except InvalidOperation as error:
        raise Corrupt(f"quota, key {QUOTA_KEY}: a number with such an exponent is no number of GPUs") from error
    except ValueError as error:
        raise Corrupt(f"quota, key {QUOTA_KEY}: no JSON ({error})") from error
    if not isinstance(raw, dict):
        raise Corrupt(f"quota, key {QUOTA_KEY}: {_shown(raw)} is not an object with a quota for each namespace")
    if len(raw) > MAX_NAMESPACES:
        raise Corrupt(f"quota, key {QUOTA_KEY}: {len(raw)} namespaces, at most {MAX_NAMESPACES} are read")
    return Quota(namespaces={name: _namespace(name, entry) for name, entry in raw.items()})


def _namespace(name: str, raw: object) -> NamespaceQuota:
    where = f"quota, key {QUOTA_KEY}, namespace {_shown(name)}"
    _check_name(name, where)
    if not isinstance(raw, dict):
        raise Corrupt(f"{where}: {_shown(raw)} is no object with the fields {', '.join(_FIELDS)}")
    unknown = sorted(raw.keys() - set(_FIELDS))
    if unknown:
        raise Corrupt(f"{where}: the field {_shown(unknown[0])} is not known; the fields are {', '.join(_FIELDS)}")
    vcore, vmemory = _total(raw, "vcore", where), _total(raw, "vmemory", where)
    gpus = _gpus(raw["quota"], where) if "quota" in raw else None
    # Only then: a quota with totals alone is ours, because gpu-admission has no such fields.
    if gpus is None and vcore is None and vmemory is None:
        gpus = {}  # gpu-admission allows no GPU where no model is named
    return NamespaceQuota(pools=_pools(raw, where), gpus=gpus, vcore=vcore, vmemory=vmemory)


def _pools(raw: Mapping[str, object], where: str) -> tuple[str, ...]:
    pools = raw.get("pool", [])
    if not isinstance(pools, list) or len(pools) > MAX_NAMES:
        raise Corrupt(f"{where}, field pool: {_shown(pools)} is no list of at most {MAX_NAMES} pools")
    for pool in pools:
        _check_name(pool, f"{where}, field pool")
    return tuple(sorted(set(pools)))


def _gpus(raw: object, where: str) -> dict[str, int]:
    if not isinstance(raw, dict) or len(raw) > MAX_NAMES:
        raise Corrupt(
            f"{where}, field quota: {_shown(raw)} is no object with GPUs for each of at most {MAX_NAMES} models"
        )
    gpus = {}
    for model, number in sorted(raw.items()):
        _check_name(model, f"{where}, field quota")
        hundredths = _hundredths(number)
        if hundredths is None:
            raise Corrupt(
                f"{where}, field quota, model {_shown(model)}: {_shown(number)} is no number of GPUs from 0 to {MAX_GPUS} "
                "with at most two decimals"
            )
        gpus[model] = hundredths
    return gpus


def _hundredths(number: object) -> int | None:
    # In Python True is a number; in JSON it is a mistake. The bound comes first: 1e999999999 cannot be written out.
    if isinstance(number, bool) or not isinstance(number, int | Decimal) or not 0 <= number <= MAX_GPUS:
        return None
    return int(number * CORES_PER_GPU) if number == round(number, 2) else None


def _total(raw: Mapping[str, object], name: str, where: str) -> int | None:
    if name not in raw:
        return None
    total = raw[name]
    if isinstance(total, bool) or not isinstance(total, int) or not 0 <= total <= MAX_TOTAL:
        raise Corrupt(f"{where}, field {name}: {_shown(total)} is no whole number from 0 to {MAX_TOTAL}")
    return total


def _check_name(name: object, where: str) -> None:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS or not name.isprintable():
        raise Corrupt(f"{where}: {_shown(name)} is no name of 1 to {MAX_NAME_CHARS} printable characters")


def _without_twins(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """JSON readers take the last of two values silently: one of the two is a mistake."""
    found: dict[str, object] = {}
    for name, value in pairs:
        # Two quotas of one namespace: which of them was meant is not ours to guess.
        if name in found:
            raise ValueError(f"{_shown(name)} is given twice")
        found[name] = value
    return found


def _keys_instead(data: Mapping[str, str]) -> str:
    return f"; it has {_listed([_shown(key) for key in sorted(data)])}" if data else ""


def _shown(value: object) -> str:
    """The text of a plain value, shortened; a nested one may be of any length, and is only named."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = str(value) if isinstance(value, Decimal) else json.dumps(value)
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 1] + "…"
