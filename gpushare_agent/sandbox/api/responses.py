"""Status bodies and request bodies of the embedded API server: each error in the JSON that clients of a real one parse."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from aiohttp import web

from gpushare_agent.model.errors import AgentError, Conflict, NotFound, Rejected
from gpushare_agent.sandbox.api import protobuf
from gpushare_agent.sandbox.api.store import KINDS, AlreadyExists, Expired
from gpushare_agent.sandbox.pod_manifest import RawObject

AS_YAML = (
    "Have the object written as YAML (kubectl create … --dry-run=client -o yaml) and apply that (kubectl apply -f -)"
)
MAX_VALUES = 50_000
"""In one body, by the characters that separate values, those in texts too. Small ones cost the most: three mebibytes of
empty lists keep the event loop for a second, in a thread too, for to read and to free them keeps the interpreter's
lock."""
_REASONS: tuple[tuple[type[AgentError], int, str], ...] = (
    (NotFound, 404, "NotFound"),
    (AlreadyExists, 409, "AlreadyExists"),
    (Expired, 410, "Expired"),
    (Conflict, 409, "Conflict"),
    (Rejected, 422, "Invalid"),
)


def status_body(code: int, reason: str, message: str, details: Mapping[str, Any] | None = None) -> RawObject:
    """A Status of meta/v1."""
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
    }
    return {**body, **({"details": dict(details)} if details else {}), "code": code}


def status_response(code: int, reason: str, message: str, details: Mapping[str, Any] | None = None) -> web.Response:
    return web.json_response(status_body(code, reason, message, details), status=code)


async def error_response(error: AgentError, resource: str, request: web.Request) -> web.Response:
    # The first that fits: AlreadyExists and Expired are Conflicts too.
    code, reason = next((c, r) for kind, c, r in _REASONS if isinstance(error, kind))
    details: dict[str, Any] = {"name": request.match_info.get("name", ""), "kind": resource}
    if code == 422:  # kubectl shows kind, name and causes of an invalid object, and not the message
        field, _, text = str(error).partition(": ")
        name = details["name"] or _name_in(await request.read())
        causes = [{"reason": "FieldValueInvalid", "field": field, "message": text}]
        details = {"name": name, "kind": KINDS[resource], "causes": causes}
    return status_response(code, reason, str(error), details)


def _name_in(body: bytes) -> str:
    try:
        name = json.loads(body)["metadata"]["name"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return name if isinstance(name, str) else ""


def bad_request(message: str) -> NoReturn:
    raise web.HTTPBadRequest(text=json.dumps(status_body(400, "BadRequest", message)), content_type="application/json")


async def read_body(request: web.Request) -> bytes:
    """Refuses a body of too many values before it is parsed."""
    body = await request.read()
    # By counting bytes, which takes microseconds: a parser has built everything before it can count.
    values = sum(map(body.count, (b",", b"{", b"[", b"\n")))
    if values > MAX_VALUES:
        message = f"the request has {values} values; the sandbox reads at most {MAX_VALUES}"
        status = status_body(413, "RequestEntityTooLarge", message)
        raise web.HTTPRequestEntityTooLarge(
            max_size=MAX_VALUES, actual_size=values, text=json.dumps(status), content_type="application/json"
        )
    return body


async def json_body(request: web.Request, of: tuple[type, ...] = (dict,)) -> Any:
    """The body, of JSON or of kubectl's protobuf."""
    try:
        if request.content_type == protobuf.CONTENT_TYPE:
            body = await asyncio.to_thread(protobuf.decoded, await request.read())
        else:
            body = json.loads(await read_body(request))
    except protobuf.UnreadFieldError as error:
        raise web.HTTPUnsupportedMediaType(
            text=json.dumps(
                status_body(
                    415,
                    "UnsupportedMediaType",
                    f"the sandbox does not read this of a protobuf body: {error}. {AS_YAML}",
                )
            ),
            content_type="application/json",
        ) from error
    except (ValueError, RecursionError) as error:
        bad_request(f"the object provided is unrecognized: {error}")
    if not isinstance(body, of):
        bad_request(f"the object provided is unrecognized: expected a JSON object, got {type(body).__name__}")
    # Patches may be lists.
    if isinstance(body, dict):
        check_sections(body)
    return body


def check_sections(body: Mapping[str, Any]) -> None:
    """Refuses an object whose metadata, spec or status is none."""
    for name in ("metadata", "spec", "status"):
        if not isinstance(body.get(name) or {}, dict):
            bad_request(f"the object provided is unrecognized: {name} must be an object")


def query_number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, "")
    # int() would take signs, blanks and thousands of digits.
    if text and re.fullmatch("[0-9]{1,18}", text) is None:
        bad_request(f"invalid {name}: {text!r:.80}")
    return int(text) if text else default
