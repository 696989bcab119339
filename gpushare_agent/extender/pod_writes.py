"""What a bind writes to the API server: the annotations, and the bind itself. No decisions.

A bind names the version of the pod that it is for. Where the watch has delivered a version without annotations that choose
GPUs, one request binds that version and writes the plan's. Every other try patches the annotations first, which does three
things: it carries the plan to the agent, returns the pod as it is now, and makes a new version of the pod, which invalidates
every earlier bind still under way. One accepted patch therefore resolves an unknown outcome: a pod that it shows without a
node can no longer be bound by an earlier request of ours.

Formats: docs/reference/formats.md, sections 1 and 5; Kubernetes core/v1 Binding. State owned: the last time written.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from msgspec import Raw, Struct

from gpushare_agent.cluster.kube.client import ClusterApi
from gpushare_agent.cluster.kube.objects import object_meta, pod_uid
from gpushare_agent.cluster.kube.pods import read_pod_json
from gpushare_agent.cluster.kube.session import Throttled
from gpushare_agent.extender.decisions.pod_plan import plan_annotations
from gpushare_agent.extender.objects import chooses_gpus, lean_pod
from gpushare_agent.extender.values import Reservation
from gpushare_agent.model.errors import AgentError, Conflict, NotFound, Rejected, Unavailable
from gpushare_agent.model.names import (
    GPU_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSIGNED_ANNOTATION,
    GPUSHARE_ASSUME_TIME_ANNOTATION,
    GPUSHARE_INDEX_ANNOTATION,
    PREDICATE_GPU_INDEX_PREFIX,
    PREDICATE_NODE_ANNOTATION,
    PREDICATE_TIME_ANNOTATION,
    RETRY_ANNOTATION,
)
from gpushare_agent.model.pods import Pod
from gpushare_agent.model.resources import ResourceNames

NOT_LEADING = "this replica of the extender does not lead any more"
FOREIGN_REMOVED = 64
"""Annotations in one patch. A pod can have thousands, and each patch names them all."""


class Bind(Struct):
    """One bind. `version` of the pod is known to have no annotations that choose GPUs; empty: none is. `is_open`: a bind was
    sent, and it is not known that it failed. `is_annotated`: a patch was sent."""

    reservation: Reservation
    version: str = ""
    is_open: bool = False
    is_annotated: bool = False


class ElsewhereError(Exception):
    """The pod was bound to another node meanwhile."""


class PodWrites(Struct, kw_only=True, eq=False):
    """`leads` is asked before each request: only a leader writes."""

    api: ClusterApi
    names: ResourceNames
    leads: Callable[[], bool]
    time_ns: Callable[[], int] = time.time_ns
    _last_ns: int = 0

    async def read(self, namespace: str, name: str) -> Pod:
        # A consistent read: the watch may lag behind the scheduler that asks.
        return lean_pod(read_pod_json(await self.api.get_pod(namespace, name)), self.names)

    async def bind_plain(self, pod: Pod, node: str) -> None:
        """A pod that asks for nothing of ours: one try, for no reservation depends on it."""
        self._check_leads()
        await self.api.bind_pod(pod.namespace, pod.name, pod.uid, node, pod.resource_version)

    async def ask_for_retry(self, pod: Pod) -> None:
        """An annotation that only makes a new version of the pod: the scheduler tries a pod again that was updated."""
        self._check_leads()
        written = {RETRY_ANNOTATION: str(self.time_ns())}
        await self.api.patch_pod_annotations(pod.namespace, pod.name, pod.uid, written)

    async def bind_once(self, bind: Bind) -> AgentError | None:
        """None when the pod is bound; an error that another try may mend. Raises the other errors."""
        # Once: where it fails, the next try's patch shows the pod as it is.
        version, bind.version = bind.version, ""
        if version:
            error = await self._bind(bind, version, self._annotations(bind.reservation))
            # Another version by now, as after the scheduler's own note that the pod waits: it takes a patch.
            if not isinstance(error, Conflict):
                return error
        try:
            # The annotations first: the agent may read the pod the moment that it is bound.
            raw_pod = await self.announce(bind)
        except (Unavailable, Conflict) as e:
            return e
        # An earlier try has bound it, of which the answer was lost.
        if raw_pod is None:
            return None
        return await self._bind(bind, object_meta(raw_pod, "pod").version)

    async def _bind(
        self, bind: Bind, version: str, annotations: Mapping[str, str] = MappingProxyType({})
    ) -> AgentError | None:
        """As bind_once."""
        reservation = bind.reservation
        self._check_leads()
        # Before the request: from here on only an answer tells whether the pod is bound.
        bind.is_open = True
        try:
            await self.api.bind_pod(
                reservation.namespace,
                reservation.pod,
                reservation.pod_uid,
                reservation.node,
                version,
                annotations,
            )
        except Unavailable as e:
            # With 429 the API server has done nothing; a timeout or a 500 may come after the write.
            bind.is_open = not isinstance(e, Throttled)
            return e
        except Conflict as e:  # not this version any more: the next patch shows what is
            bind.is_open = False
            return e
        except (NotFound, Rejected):
            bind.is_open = False
            raise
        bind.is_open = False
        return None

    async def announce(self, bind: Bind) -> Raw | None:
        """Does as `annotate`; in the version returned, the plan's are the pod's only annotations that choose GPUs, for
        an agent follows such annotations whoever wrote them.

        Raises Conflict where a client writes such annotations meanwhile, Rejected where there are too many of them.
        """
        reservation = bind.reservation
        raw_pod = await self.annotate(bind)
        # The pod in the version that the bind will name: what a client writes after this makes the bind fail with 409.
        foreign = foreign_annotations(raw_pod, reservation)
        if not foreign:
            return raw_pod
        raw_pod = await self.annotate(bind, removed=foreign[:FOREIGN_REMOVED])
        if raw_pod is None:
            return None
        # Only now, so that each bind removes some: the next ones go on where this one ended.
        if len(foreign) > FOREIGN_REMOVED:
            raise Rejected(
                f"it has {len(foreign)} annotations that choose GPUs and are not the plan's, the first of them "
                f"{foreign[0]}. {FOREIGN_REMOVED} of them were removed, which is all that one bind does; the pod's owner "
                "should remove the others, and find the client that writes them"
            )
        # A client that writes as fast as we remove would have us patch for ever.
        if left := foreign_annotations(raw_pod, reservation):
            raise Conflict(
                f"another client writes its annotation {left[0]}, which only an extender may, while it is being bound"
            )
        return raw_pod

    async def annotate(self, bind: Bind, removed: Iterable[str] = ()) -> Raw | None:
        """Writes the plan into the annotations. The pod as it is then, None where it is bound to our node.

        Once it returns, no earlier bind of ours can succeed. Raises NotFound where the pod is gone, ElsewhereError where it
        is on another node.
        """
        reservation = bind.reservation
        # The plan's come last and win: None removes a name in a merge patch.
        annotations = {**dict.fromkeys(removed), **self._annotations(reservation)}
        self._check_leads()
        bind.is_annotated = True
        try:
            raw_pod = await self.api.patch_pod_annotations(
                reservation.namespace, reservation.pod, reservation.pod_uid, annotations
            )
        except NotFound:
            # The pod is gone under this UID: nothing can be bound, and nothing is left to clean.
            bind.is_open = bind.is_annotated = False
            raise
        # The patch was accepted, so this version is newer than any that an earlier bind has named.
        pod = lean_pod(read_pod_json(raw_pod), self.names)
        bind.is_open = False
        if pod.node_name == reservation.node:
            return None
        if pod.node_name:
            bind.is_annotated = False  # that node's agent has written its own by now, or will
            raise ElsewhereError(f"it was bound to node {pod.node_name} meanwhile")
        return raw_pod

    async def is_gone(self, reservation: Reservation) -> bool:
        try:
            raw_pod = await self.api.get_pod(reservation.namespace, reservation.pod)
        except NotFound:
            return True
        # Another pod has taken the name: ours is gone.
        return pod_uid(raw_pod) != reservation.pod_uid

    async def clean(self, reservation: Reservation) -> None:
        """Removes the annotations from a pod that was not bound."""
        # All names that a bind writes, each None; the time does not matter for the names.
        nothing = dict.fromkeys(extender_annotations(reservation, 0))
        self._check_leads()
        await self.api.patch_pod_annotations(reservation.namespace, reservation.pod, reservation.pod_uid, nothing)

    def _check_leads(self) -> None:
        if not self.leads():
            raise Rejected(NOT_LEADING)

    def _annotations(self, reservation: Reservation) -> dict[str, str]:
        """The time is never the same twice, so that each patch makes a new version of the pod."""
        # An unchanged patch makes no new version; clocks may stand still or go back.
        self._last_ns = max(self.time_ns(), self._last_ns + 1)
        return extender_annotations(reservation, self._last_ns)


def extender_annotations(reservation: Reservation, time_ns: int) -> dict[str, str]:
    """What gpu-admission writes, and GPUShare's extender where one GPU serves all that the pod asks by its resource."""
    written = {
        PREDICATE_TIME_ANNOTATION: str(time_ns),
        PREDICATE_NODE_ANNOTATION: reservation.node,
        # The agent writes true once the devices are allocated, as gpu-manager does.
        GPU_ASSIGNED_ANNOTATION: "false",
        **plan_annotations(reservation.plan, PREDICATE_GPU_INDEX_PREFIX),
    }
    # GPUShare knows one GPU for a pod: with several its index would be wrong for one of the containers.
    shared = {container.gpus for container in reservation.plan.containers if container.request.units}
    if len(shared) == 1:
        written |= {
            GPUSHARE_INDEX_ANNOTATION: str(shared.pop()[0]),
            GPUSHARE_ASSIGNED_ANNOTATION: "false",
            GPUSHARE_ASSUME_TIME_ANNOTATION: str(time_ns),
        }
    return written


def foreign_annotations(raw_pod: Raw | None, reservation: Reservation) -> list[str]:
    """Names of the pod's annotations that choose GPUs, or state that an extender did, and are not the plan's. Sorted."""
    # None: the pod is bound, and what its agent follows is decided.
    present = object_meta(raw_pod, "pod").annotations if raw_pod is not None else {}
    ours = extender_annotations(reservation, 0)
    return sorted(name for name in present if name not in ours and chooses_gpus(name))
