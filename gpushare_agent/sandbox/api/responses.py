"""Status bodies and request bodies of the embedded API server: each error in the JSON that clients of a real one parse."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from aiohttp import web

from gpushare_agent.core.model.errors import AgentError, Conflict, NotFound, Rejected
from gpushare_agent.sandbox.api import protobuf
from gpushare_agent.sandbox.api.kinds import Kind
from gpushare_agent.sandbox.api.store import AlreadyExists, Expired
from gpushare_agent.sandbox.pod_manifest import RawObject

AS_YAML = (
    "Have the object written as YAML (kubectl create … --dry-run=client -o yaml) and apply that (kubectl apply -f -)"
)
MAX_VALUES = 50_000
"""In one body, by the characters that separate values, those in texts too. Small ones cost the most: three mebibytes of
empty lists keep the event loop for a second, in a thread too, because reading and freeing them holds the interpreter's
lock."""
_REASONS: tuple[tuple[type[AgentError], int, str], ...] = (
    (NotFound, 404, "NotFound"),
    (AlreadyExists, 409, "AlreadyExists"),
    (Expired, 410, "Expired"),
    (Conflict, 409, "Conflict"),
    (Rejected, 422, "Invalid"),
)


class RefusedRequest(Exception):  # noqa: N818 - the request's end, not a fault
    """Ends a request with this Status."""

    def __init__(self, code: int, reason: str, message: str, details: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.status: RawObject = {
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message,
            "reason": reason, **({"details": details} if details else {}), "code": code,
        }  # fmt: skip

    def response(self) -> web.Response:
        return web.json_response(self.status, status=self.code)


def bad_request(message: str) -> NoReturn:
    raise RefusedRequest(400, "BadRequest", message)


async def refusal_for(error: AgentError, kind: Kind, request: web.Request) -> RefusedRequest:
    # The first that fits: AlreadyExists and Expired are Conflicts too.
    code, reason = next((c, r) for error_type, c, r in _REASONS if isinstance(error, error_type))
    details: dict[str, Any] = {"name": request.match_info.get("name", ""), "kind": kind.resource}
    if code == 422:  # kubectl shows kind, name and causes of an invalid object, and not the message
        field, _, text = str(error).partition(": ")
        causes = [{"reason": "FieldValueInvalid", "field": field, "message": text}]
        details = {"name": details["name"] or _name_in(await request.read()), "kind": kind.name, "causes": causes}
    return RefusedRequest(code, reason, str(error), details)


def _name_in(body: bytes) -> str:
    try:
        name = json.loads(body)["metadata"]["name"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return name if isinstance(name, str) else ""


async def read_body(request: web.Request) -> bytes:
    """Refuses a body of too many values before it is parsed."""
    body = await request.read()
    # By counting bytes, which takes microseconds: a parser has built everything before it can count.
    values = sum(map(body.count, (b",", b"{", b"[", b"\n")))
    if values > MAX_VALUES:
        message = f"the request has {values} values; the sandbox reads at most {MAX_VALUES}"
        raise RefusedRequest(413, "RequestEntityTooLarge", message)
    return body


async def json_body(request: web.Request, of: type | tuple[type, ...] = dict) -> Any:
    """The body, of JSON or of kubectl's protobuf."""
    try:
        if request.content_type == protobuf.CONTENT_TYPE:
            body = await asyncio.to_thread(protobuf.decoded, await request.read())
        else:
            body = json.loads(await read_body(request))
    except protobuf.UnreadFieldError as error:
        message = f"the sandbox does not read this of a protobuf body: {error}. {AS_YAML}"
        raise RefusedRequest(415, "UnsupportedMediaType", message) from error
    except (ValueError, RecursionError) as error:
        bad_request(f"the object provided is unrecognized: {error}")
    if not isinstance(body, of):
        bad_request(f"the object provided is unrecognized: expected a JSON object, got {type(body).__name__}")
    # Patches may be lists.
    if isinstance(body, dict):
        check_sections(body)
    return body


def check_sections(body: Mapping[str, Any]) -> None:
    """Refuses an object if its metadata, spec or status is no object."""
    for name in ("metadata", "spec", "status"):
        if not isinstance(body.get(name) or {}, dict):
            bad_request(f"the object provided is unrecognized: {name} must be an object")


def query_number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    # int() would take signs, blanks and thousands of digits.
    if text and re.fullmatch("[0-9]{1,18}", text) is None:
        bad_request(f"invalid {name}: {text!r:.80}")
    return int(text) if text else default
