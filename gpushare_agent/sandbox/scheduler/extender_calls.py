"""The scheduler's side of a scheduler extender: JSON over HTTP, extender v1 of kube-scheduler, `nodeCacheCapable`.

Field names are those of k8s.io/kube-scheduler/extender/v1 (its types have no JSON tags, so they are the names in Go).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from gpushare_agent.model.errors import Rejected, Unavailable
from gpushare_agent.sandbox.pod_manifest import RawObject

if TYPE_CHECKING:
    from aiohttp import ClientSession

TIMEOUT_S = 10.0


class FilterAnswer(Struct, frozen=True, kw_only=True):
    """Where the pod fits, and why it does not elsewhere, by node."""

    names: tuple[str, ...]
    failed: Mapping[str, str]


@asynccontextmanager
async def open_extender_calls(url: str, *, timeout_s: float = TIMEOUT_S) -> AsyncIterator[ExtenderCalls]:
    """`url` is the prefix before the verbs, such as `http://127.0.0.1:3456/scheduler`."""
    from aiohttp import ClientSession

    async with ClientSession() as session:
        yield ExtenderCalls(url, session, timeout_s)


class ExtenderCalls:
    """All methods raise Unavailable where no usable answer came, Rejected where the extender gave an error."""

    def __init__(self, url: str, session: ClientSession, timeout_s: float) -> None:
        self._url = url.rstrip("/")
        self._session = session
        self._timeout_s = timeout_s

    async def filter(self, pod: RawObject, names: Sequence[str]) -> FilterAnswer:
        answer = _object(await self._post("filter", {"Pod": pod, "NodeNames": list(names)}), "filter")
        _raise_error(answer, "filter")
        failed = {**(answer.get("FailedAndUnresolvableNodes") or {}), **(answer.get("FailedNodes") or {})}
        return FilterAnswer(names=tuple(answer.get("NodeNames") or ()), failed=failed)

    async def prioritize(self, pod: RawObject, names: Sequence[str]) -> dict[str, int]:
        answer = await self._post("priorities", {"Pod": pod, "NodeNames": list(names)})
        if not isinstance(answer, list):
            raise Unavailable(f"the extender's answer to prioritize is no list: {answer!r:.80}")
        return {str(entry["Host"]): int(entry["Score"]) for entry in answer}

    async def bind(self, pod: RawObject, node_name: str) -> None:
        metadata = pod["metadata"]
        body = {
            "PodName": metadata["name"], "PodNamespace": metadata["namespace"], "PodUID": metadata["uid"],
            "Node": node_name,
        }  # fmt: skip
        _raise_error(_object(await self._post("bind", body), "bind"), "bind")

    async def _post(self, verb: str, body: Mapping[str, Any]) -> Any:
        from aiohttp import ClientError

        try:
            async with (
                asyncio.timeout(self._timeout_s),
                self._session.post(f"{self._url}/{verb}", json=body) as answer,
            ):
                if answer.status != 200:
                    text = (await answer.text())[:200]
                    raise Unavailable(f"the extender answered {verb} with HTTP {answer.status}: {text}")
                return await answer.json()
        except (ClientError, OSError, ValueError, TimeoutError) as error:
            why = str(error) or f"no answer within {self._timeout_s:g} s"
            raise Unavailable(f"the extender at {self._url} cannot be asked to {verb}: {why}") from error


def _object(answer: Any, verb: str) -> dict[str, Any]:
    if not isinstance(answer, dict):
        raise Unavailable(f"the extender's answer to {verb} is no object: {answer!r:.80}")
    return answer


def _raise_error(answer: Mapping[str, Any], verb: str) -> None:
    if answer.get("Error"):
        raise Rejected(f"the extender refused to {verb}: {answer['Error']}")
