"""The mutating webhooks for new pods: limits become ResourceClaims with their templates; the names of HAMi and vgpu-manager
become vcuda's.

decisions/claims.py and decisions/vgpu_names.py decide what becomes of a pod. Any replica answers: nothing here depends on
who leads. A template is created when a pod needs it first, never changed, and never removed: a later pod may name it. A dry
run creates none. Format: admission.k8s.io/v1 AdmissionReview. State owned: how many templates may still be created now.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import msgspec
import structlog
from msgspec import Meta, Raw, Struct
from msgspec.json import Decoder

from gpushare_agent.core.kit.json_schema import decoded_or
from gpushare_agent.core.kit.rate import TokenBucket
from gpushare_agent.core.kit.supervision import bounded
from gpushare_agent.core.kube.claims import API_VERSION as RESOURCE_API_VERSION
from gpushare_agent.core.kube.client import ClusterApi
from gpushare_agent.core.kube.pods import PodJson
from gpushare_agent.core.model.errors import AgentError, Conflict, Corrupt, NotFound, Refused, Unavailable
from gpushare_agent.core.model.resources import ResourceNames
from gpushare_agent.core.placement.mistakes import mistakes
from gpushare_agent.extender.decisions.claims import Conversion, Template, convert_pod
from gpushare_agent.extender.decisions.vgpu_names import translate_pod
from gpushare_agent.extender.messages import MAX_NAME_CHARS, Name, Result, bad_request, pod_json, request_of

log = structlog.get_logger(__name__)

API_VERSION = "admission.k8s.io/v1"
MANAGED_BY = "gpushare-agent-extender"
API_TIMEOUT_S = 2.0
"""The time for all requests for one pod."""
MAX_TEMPLATES = 32
"""The most templates that one pod may need: each takes a request to the API server, and anybody may reach the webhook."""
PODS_AT_ONCE = 8
"""Pods for which requests to the API server may be under way: the extender's binds share its connections."""
MOST_NEW = 100
NEW_PER_S = 1.0
"""Templates created at once, and later. API servers show no certificate unless they are configured to, so others may call
the webhook as well: this bounds what they can write."""
MAX_WARNING_CHARS = 256
"""The API server cuts longer ones."""


Change = Callable[[PodJson, ResourceNames], Conversion | Refused]


class ClaimsWebhook:
    """The verbs of the webhooks. `clock` in seconds."""

    def __init__(self, *, api: ClusterApi, names: ResourceNames, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._names = names
        # A cluster that is filled asks for many kinds of shares at first, and later for hardly a new one.
        self._creations = TokenBucket(rate=NEW_PER_S, burst=MOST_NEW, clock=clock)
        self._turns = asyncio.Semaphore(PODS_AT_ONCE)

    async def mutate(self, content: bytes) -> Result:
        """The AdmissionReview with limits as claims."""
        return await self._review(content, convert_pod)

    async def translate(self, content: bytes) -> Result:
        """The same for the names of HAMi and vgpu-manager, which need nothing of the API server."""
        return await self._review(content, translate_pod)

    async def _review(self, content: bytes, change: Change) -> Result:
        try:
            review, pod = parse_review(content)
        except Corrupt as e:
            return bad_request(e)
        # The user gets the reason at once, where a device plugin would fail at admission.
        try:
            found = change(pod, self._names)
        except Corrupt as e:
            return _denied(review, mistakes(pod, self._names) or str(e))
        if isinstance(found, Refused):
            return _denied(review, found.detail)
        # Checked before any request: they would all be made before the limit was reached.
        if (kinds := len(found.templates)) > MAX_TEMPLATES:
            text = f"its containers ask for {kinds} different shares: at most {MAX_TEMPLATES} are turned into claims"
            return _denied(review, text)
        try:
            # The wait for a turn is in the time as well: the API server's webhook call has a limit of its own, 10 s by
            # default.
            if found.templates:
                late = (
                    f"the API server did not answer within {API_TIMEOUT_S:g} s about a ResourceClaimTemplate; try again"
                )
                async with bounded(API_TIMEOUT_S, late), self._turns:
                    for template in found.templates:
                        await self._ensure(review, template)
        # 503: whoever made the pod, a ReplicaSet's controller say, tries again.
        except AgentError as e:
            return _denied(review, str(e), 503)
        response: dict[str, object] = {}
        if found.patch:
            patch = base64.b64encode(msgspec.json.encode(found.patch)).decode()
            response |= {"patchType": "JSONPatch", "patch": patch}
        # kubectl prints them: what a claim cannot say is known to the person who applies the manifest.
        # Names that were translated are no mistakes any more.
        mistaken = mistakes(pod, self._names) if change is convert_pod else ""
        if warnings := [text for text in (mistaken, *found.warnings) if text]:
            response["warnings"] = [text[:MAX_WARNING_CHARS] for text in warnings]
        return Result(_answer(review, allowed=True, **response))

    async def _ensure(self, review: _Request, template: Template) -> None:
        """The template exists in the pod's namespace, as it must be. Raises AgentError."""
        name, spec = template.name, template.spec()
        try:
            raw = await self._api.get_claim_template(review.namespace, name)
        except NotFound:
            # `kubectl apply --dry-run=server` may write nothing.
            if review.dry_run:
                return
            raw = await self._create(review.namespace, name, spec)
        # Its name states the content, but anybody who may write templates can have made it: a pod must not get a wrong
        # share.
        if not _contains(decoded_or(_TEMPLATE, raw, _Template).spec.spec, spec):
            raise Conflict(
                f"the ResourceClaimTemplate {review.namespace}/{name} exists with another spec than the pod's limits mean:"
                " delete it, it is created again"
            )

    async def _create(self, namespace: str, name: str, spec: Mapping[str, object]) -> Raw:
        # Counted before the request: a caller that cuts the connection gets none back.
        if not self._creations.take():
            raise Unavailable(f"over {MOST_NEW} kinds of shares were asked for the first time just now; try again")
        template = {
            "apiVersion": RESOURCE_API_VERSION,
            "kind": "ResourceClaimTemplate",
            "metadata": {"name": name, "labels": {"app.kubernetes.io/managed-by": MANAGED_BY}},
            "spec": {"spec": spec},
        }
        try:
            made = await self._api.create_claim_template(namespace, template)
        except Conflict:  # another pod's, at the same time
            return await self._api.get_claim_template(namespace, name)
        # Once for each kind of share and namespace: templates are never removed.
        log.info("claim_template_created", namespace=namespace, template=name)
        return made


class _TemplateSpec(Struct, frozen=True):
    spec: object = None


class _Template(Struct, frozen=True):
    """The fields of a ResourceClaimTemplate that are compared."""

    spec: _TemplateSpec = _TemplateSpec()


class _Resource(Struct):
    resource: str = ""


class _Request(Struct, rename="camel"):
    uid: Name
    namespace: Annotated[str, Meta(max_length=MAX_NAME_CHARS)]
    object: Raw = Raw(b"null")
    operation: str = ""
    resource: _Resource | None = None
    sub_resource: str | None = None
    dry_run: bool | None = None


class _AdmissionReview(Struct, rename="camel"):
    api_version: str
    request: _Request


_REVIEW, _TEMPLATE = Decoder(_AdmissionReview), Decoder(_Template)


def parse_review(content: bytes) -> tuple[_Request, PodJson]:
    """The request for a pod that is created, and the pod, which may leave its namespace out. Raises Corrupt."""
    what = "AdmissionReview"
    review = request_of(_REVIEW, content, what)
    if review.api_version != API_VERSION:
        raise Corrupt(f"{what}: is not of {API_VERSION}")
    request = review.request
    asked = request.resource.resource if request.resource is not None else ""
    # An update, or a pod's subresource, must not be changed by a patch made for a creation.
    if asked != "pods" or request.sub_resource or request.operation != "CREATE":
        raise Corrupt(f"{what}: is not for the creation of a pod; the webhook's rules are wrong")
    # The schema of a pod would read null as a pod that asks for nothing.
    if bytes(request.object) == b"null":
        raise Corrupt(f"{what}.request.object: is not an object")
    return request, pod_json(request.object, f"{what}.request.object")


def _answer(review: _Request, **response: object) -> bytes:
    answer = {"uid": review.uid, **response}
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": answer})


def _denied(review: _Request, text: str, code: int = 422) -> Result:
    return Result(_answer(review, allowed=False, status={"code": code, "message": text}), "error")


def _contains(found: object, required: object) -> bool:
    """Whether `found` has everything of `required`; a later API server may add defaults to it."""
    if isinstance(required, Mapping):
        return isinstance(found, Mapping) and all(_contains(found.get(key), value) for key, value in required.items())
    # Lists are compared in order and whole: another request in the claim would be another allocation.
    if isinstance(required, Sequence) and not isinstance(required, str):
        return (
            isinstance(found, list)
            and len(found) == len(required)
            and all(_contains(a, b) for a, b in zip(found, required, strict=True))
        )
    return bool(found == required)
