"""The claim of a RegisterVDevice message: its fields, once they are valid names.

Lengths and alphabets are checked before anything else uses the message, so a claim can be compared, logged and passed to
the runtime. isolation/vcuda/server.py checks whether it is true.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpushare_agent.isolation.vcuda.format import is_bus_id, is_pod_uid, split_container_name
from gpushare_agent.model.names import is_container_id
from gpushare_agent.wire.vcuda import VDeviceRequest

_SHOWN_CHARS = 60


class InvalidClaim(Exception):  # noqa: N818 - a fault of the peer, answered INVALID_ARGUMENT
    """A field is invalid; the text names it and the valid form."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """`pod_uids`: the field's, and the one inside a dockershim name. At least one of the two names is there."""

    pod_uids: frozenset[str]
    container: str | None
    container_id: str | None


def read_claim(request: VDeviceRequest) -> Claim:
    """
    Raises:
        InvalidClaim: a field has the wrong length or alphabet, or the container is not named.
    """
    if not is_pod_uid(request.pod_uid):
        raise InvalidClaim(f"pod_uid {_shown(request.pod_uid)} is no pod UID: send the UID of your own pod")
    if not is_bus_id(request.bus_id):
        raise InvalidClaim(f"bus_id {_shown(request.bus_id)} is no PCI bus ID of at most 15 characters: leave it empty")
    if request.container_id and not is_container_id(request.container_id):
        raise InvalidClaim(f"container_id {_shown(request.container_id)} is not 64 hexadecimal digits in lower case")
    if not request.container_name and not request.container_id:
        raise InvalidClaim("neither container_name nor container_id is set: send one of them")
    container, named_uid = _read_name(request.container_name)
    return Claim(
        pod_uids=frozenset({request.pod_uid, named_uid} - {None}),  # type: ignore[arg-type]  # None is taken out here
        container=container,
        container_id=request.container_id or None,
    )


def _read_name(text: str) -> tuple[str | None, str | None]:
    if not text:
        return None, None
    split = split_container_name(text)
    if split is None:
        raise InvalidClaim(
            f"container_name {_shown(text)} is neither a container's name (letters a to z, digits and dashes, at most 63) "
            f"nor of the form /k8s_<container>_<pod>_<namespace>_<pod UID>_<attempt>"
        )
    return split


def _shown(text: str) -> str:
    return ascii(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…") + f" ({len(text)} characters)"
