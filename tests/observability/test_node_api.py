"""`/api/v1/node`, `/history` and `/decisions` over real HTTP: their content, and the answer to a wrong query."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import pytest
from aiohttp import ClientSession
from msgspec import to_builtins
from msgspec.structs import replace

from bench.sample_node import SampleNode, uuid_of
from gpushare_agent.agent.observability.http import node_api
from gpushare_agent.agent.observability.node_snapshot import NodeSnapshot, node_document
from gpushare_agent.agent.observability.usage_history import UsageHistory
from gpushare_agent.core.kit import http_answers as web_answers
from gpushare_agent.core.model.errors import NodeEventReason, Unavailable
from gpushare_agent.core.model.gpu_health import GpuEvent, GpuEventKind
from gpushare_agent.core.model.usage import ProcessFacts, ProcessSample
from tests.cluster.support_kube import running
from tests.observability.support_web import no_past, served_node
from tests.support_json import written_node


async def _get(url: str, **headers: str) -> tuple[int, Any, dict[str, str]]:
    async with (
        ClientSession(auto_decompress=False) as session,
        session.get(url, headers={"Accept-Encoding": "identity"} | headers) as answer,
    ):
        body = await answer.read()
        found = dict(answer.headers)
    return answer.status, json.loads(body) if found.get("Content-Encoding") is None else body, found


async def test_the_node_is_the_one_document() -> None:
    """What node_document makes of the snapshot, to the last field but the time."""
    node = SampleNode(gpus=2, containers=3)
    async with served_node(node) as served:
        status, found, headers = await _get(f"{served.url}/api/v1/node")
    wanted = json.loads(json.dumps(written_node(node.snapshot())))
    for document in (found, wanted):
        del document["at"], document["agent"]["sampled_at"], document["agent"]["started_at"]
    assert (status, found) == (200, wanted)
    assert headers["Content-Type"] == "application/json; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"


async def test_processes_are_named_only_where_that_is_asked_for() -> None:
    """Next to the PIDs, the 64 with the most memory, and those of no container; what is not known of one is null."""
    node = CrowdedContainer(gpus=1, containers=1, unattributed={0: 2})
    asked: list[tuple[frozenset[int], float]] = []

    async def describe(pids: Collection[int], before_s: float) -> Mapping[int, ProcessFacts]:
        asked.append((frozenset(pids), before_s))
        return {10_000: ProcessFacts(pid_in_container=7, command="python3"), 901: ProcessFacts(command="Xorg")}

    async with served_node(node, describe=describe) as served:
        url = f"{served.url}/api/v1/node"
        plain = [(await _get(url + query))[1] for query in ("", "?processes=false")]
        _, found, _ = await _get(f"{url}?processes=true")
    usage = found["containers"][0]["gpus"][0]["usage"]
    processes, pids = usage.pop("processes"), usage["pids"]
    assert [one["pid"] for one in processes] == [10_000, *range(10_079, 10_016, -1)]
    assert processes[0] == {
        "pid": 10_000, "pid_in_container": 7, "command": "python3", "memory_bytes": 4096, "sm_ratio": 0.25,
    }  # fmt: skip
    assert (processes[1]["pid_in_container"], processes[1]["command"]) == (None, None)
    strangers = found["gpus"][0]["unattributed"]
    assert [(one["pid"], one.pop("command"), one.pop("pid_in_container")) for one in strangers] == [
        (900, None, None),
        (901, "Xorg", None),
    ]
    assert len(pids) == 80 and asked == [({*pids, 900, 901}, 50.0)]
    for one in plain:
        assert (one["containers"], one["gpus"]) == (found["containers"], found["gpus"])


async def test_processes_that_cannot_be_read_cost_their_names_alone() -> None:
    """/proc hangs."""

    async def describe(pids: Collection[int], before_s: float) -> Mapping[int, ProcessFacts]:
        raise Unavailable("no answer")

    async with served_node(CrowdedContainer(gpus=1, containers=1), describe=describe) as served:
        _, found, _ = await _get(f"{served.url}/api/v1/node?processes=true")
    processes = found["containers"][0]["gpus"][0]["usage"]["processes"]
    assert len(processes) == 64 and {one["command"] for one in processes} == {None}


class CrowdedContainer(SampleNode):
    """80 processes in the one container of its GPU, the last ones with the most memory but for the first."""

    def snapshot(self) -> NodeSnapshot:
        taken = super().snapshot()
        assert taken.usage is not None
        own = [
            ProcessSample(pid=10_000 + n, memory_bytes=n or 4096, sm_ratio=0.25 if n == 0 else None) for n in range(80)
        ]
        [(key, use)] = taken.usage.containers.items()
        [(uuid, gpu)] = taken.usage.gpus.items()
        use = replace(use, pids=tuple(one.pid for one in own))
        gpu = replace(gpu, processes=(*taken.usage.unattributed.get(uuid, ()), *own))
        usage = replace(taken.usage, containers={key: use}, gpus={uuid: gpu}, sampled_boot_s=50.0)
        return replace(taken, usage=usage)


async def test_a_document_of_many_processes_lets_the_loop_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between what is known and its JSON; and no container's processes are searched for among all of the GPU."""
    steps: list[str] = []

    class Listed(tuple[ProcessSample, ...]):
        __slots__ = ()

        def __iter__(self) -> Iterator[ProcessSample]:
            raise AssertionError("all processes of the GPU were looked at")

    def document(snapshot: NodeSnapshot, described: Any) -> Any:
        assert snapshot.usage is not None
        [use], [(uuid, gpu)] = snapshot.usage.containers.values(), snapshot.usage.gpus.items()
        usage = replace(snapshot.usage, gpus={uuid: replace(gpu, processes=Listed(gpu.processes or ()))})
        assert len(replace(snapshot, usage=usage).processes_of(use)) == 64
        asyncio.get_running_loop().call_soon(steps.append, "the loop turns")
        return node_document(snapshot, described)

    def encoded(document: Any) -> Any:
        steps.append("JSON")
        return to_builtins(document)

    monkeypatch.setattr(node_api, "node_document", document)
    monkeypatch.setattr(node_api, "to_builtins", encoded)
    async with served_node(CrowdedContainer(gpus=1, containers=1)) as served:
        await _get(f"{served.url}/api/v1/node?processes=true")
    assert steps == ["the loop turns", "JSON"]


class StillNode(SampleNode):
    """Only time passes on it, until `step`."""

    def snapshot(self) -> NodeSnapshot:
        taken = replace(super().snapshot(), usage=None)
        return replace(taken, at=taken.at + self.asked)

    asked = 0


@pytest.mark.parametrize("accepted", ["gzip", "identity"])
async def test_a_node_that_has_not_changed_is_not_sent_again(accepted: str) -> None:
    """304 without a body to who has its ETag, whatever the time; the document once more when something has changed."""
    node = StillNode(gpus=2, containers=10)
    async with served_node(node) as served, ClientSession() as session:
        url, headers = f"{served.url}/api/v1/node", {"Accept-Encoding": accepted}

        async def asked(**more: str) -> tuple[int, bytes, str]:
            node.asked += 1
            async with session.get(url, headers=headers | more) as answer:
                return answer.status, await answer.read(), answer.headers["ETag"]

        status, first, tag = await asked()
        assert (status, json.loads(first)["containers"] != []) == (200, True)
        assert await asked(**{"If-None-Match": tag}) == (304, b"", tag)
        assert (await asked(**{"If-None-Match": f'"other", {tag}'}))[0] == 304
        assert (await asked(**{"If-None-Match": '"other"'}))[0] == 200
        assert (await asked(**{"If-None-Match": "\x80, no tag"}))[0] == 200
        node.cordoned[0] = "fan is noisy"
        status, second, other = await asked(**{"If-None-Match": tag})
    assert (status, other != tag, json.loads(second)["gpus"][0]["cordoned"]) == (200, True, "fan is noisy")


async def test_decisions_come_newest_first_and_as_asked_for() -> None:
    """By pod, by namespace, above a number, one by its number, and at most so many. With the record's fields: nested values
    too, enums by their value."""
    node = SampleNode(gpus=2, containers=0)
    async with served_node(node) as served:
        for number in (1, 2, 3):
            served.decisions.add(node.decision(number, refused=number == 2))

        async def decisions(query: str) -> list[dict[str, Any]]:
            status, found, _ = await _get(f"{served.url}/api/v1/decisions{query}")
            assert status == 200
            return list(found["decisions"])

        for query, numbers in {
            "": [3, 2, 1],
            "?limit=2": [3, 2],
            "?after=1": [3, 2],
            "?number=9": [],
            "?pod=trainer-1&namespace=team-a": [1],
            "?pod=trainer-1&namespace=team-b": [],
        }.items():
            assert [one["number"] for one in await decisions(query)] == numbers, query
        [one] = await decisions("?number=2")
    assert (one["outcome"], one["reason"], one["gpus"]) == ("refused", "Fragmented", [])
    assert one["asked"] == {"cores": 100, "memory_bytes": 4096 * 2**20, "hint": [], "must_gpus": []}
    assert [(gpu["index"], gpu["verdict"]) for gpu in one["candidates"]] == [
        (0, "lacks 60 cores"),
        (1, "lacks 60 cores"),
    ]


def _curves() -> UsageHistory:
    """Two containers on two GPUs, one round."""
    history = UsageHistory(60, 6, clock=lambda: 600.0)
    history.add(SampleNode(gpus=2, containers=2).snapshot().usage)
    return history


async def test_the_history_can_be_asked_for_one_half() -> None:
    """GPUs alone are a tenth of it: the dashboard needs no more."""
    async with served_node(SampleNode(gpus=1, containers=0), history=_curves()) as served:
        whole = (await _get(f"{served.url}/api/v1/history"))[1]
        assert set(whole) == {"at", "step_seconds", "gpus", "containers"}
        assert len(whole["gpus"]) == len(whole["containers"]) == 2
        for half, other in (("gpus", "containers"), ("containers", "gpus")):
            found = (await _get(f"{served.url}/api/v1/history?only={half}"))[1]
            assert found == {name: value for name, value in whole.items() if name != other}
        name = next(iter(whole["containers"]))
        one = (await _get(f"{served.url}/api/v1/history?only=containers&container={name}"))[1]
        assert one["containers"] == {name: whole["containers"][name]}


async def test_the_day_and_the_changes_of_the_gpus_can_be_asked_for() -> None:
    """The day in the shape of the last minutes; of each GPU what happened to it, newest first."""
    history = _curves()
    past = no_past(history)
    past.day.clock = lambda: 86_400.0
    past.day.fold(history)
    uuid = uuid_of(0)
    past.changes.clock = lambda: 5.0
    past.changes.health_changed(uuid, NodeEventReason.GPU_CORDONED, "fan")
    past.changes.event_came(GpuEvent(kind=GpuEventKind.XID, uuid=uuid, xid=31), 2)
    asked = "history?span=day", "history?span=day&only=gpus", "history", "changes"
    async with served_node(SampleNode(gpus=1, containers=0), history=history, past=past) as served:
        whole, gpus, recent, changes = [(await _get(f"{served.url}/api/v1/{one}"))[1] for one in asked]
    assert (whole["at"], whole["step_seconds"], recent["step_seconds"]) == (86_400.0, 300.0, 10.0)
    assert {half: whole[half].keys() for half in ("gpus", "containers")} == {
        half: recent[half].keys() for half in ("gpus", "containers")
    }
    assert gpus == {name: value for name, value in whole.items() if name != "containers"}
    assert len(gpus["gpus"][uuid]["sm_ratio"]) == 288
    assert gpus["gpus"][uuid]["sm_ratio"][-1] == recent["gpus"][uuid]["sm_ratio"][-1]
    xid = "Xid 31 (GPU memory page fault)"
    assert changes == {
        "changes": {
            uuid: [
                {"at": 5.0, "uuid": uuid, "what": "xid", "reason": xid, "xid": 31, "count": 2},
                {"at": 5.0, "uuid": uuid, "what": "cordoned", "reason": "fan", "xid": 0, "count": 1},
            ]
        }
    }


async def test_the_history_is_encoded_once_for_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask; a new round is seen at once. So is the day, of which a step passes also without a point."""
    history = _curves()
    past, wall = no_past(history), [86_400.0]
    past.day.clock = lambda: wall[0]
    past.day.fold(history)
    asked: list[int] = []
    pieces = UsageHistory.pieces

    def counted(history: UsageHistory, **wanted: Any) -> Iterator[bytes]:
        asked.append(history.version)
        return pieces(history, **wanted)

    monkeypatch.setattr(UsageHistory, "pieces", counted)
    async with served_node(SampleNode(gpus=1, containers=0), history=history, past=past) as served:
        first = [(await _get(f"{served.url}/api/v1/history"))[1] for _ in range(3)]
        history.add(SampleNode(gpus=2, containers=2, moment=9).snapshot().usage)
        last = (await _get(f"{served.url}/api/v1/history"))[1]
        assert asked == [1, 2]
        day = f"{served.url}/api/v1/history?span=day"
        found = [(await _get(day + half))[1]["at"] for half in ("", "&only=gpus", "", "&only=gpus")]
        wall[0] += 300.0
        assert (found, (await _get(day))[1]["at"]) == ([86_400.0] * 4, 86_700.0)
    assert asked == [1, 2, 1, 1, 1]
    assert first[0] == first[1] == first[2] != last


async def test_a_long_answer_lets_the_loop_turn_between_its_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """With slices of no length at all: a turn after each piece, and the text is whole."""
    monkeypatch.setattr(web_answers, "SLICE_S", 0.0)
    turns: list[int] = []
    made: list[int] = []

    def pieces() -> Iterator[bytes]:
        for number in range(5):
            made.append(number)
            yield b"%d" % number

    async def count() -> None:
        while True:
            turns.append(len(made))
            await asyncio.sleep(0)

    async with running(count):
        await asyncio.sleep(0)
        assert await web_answers.join_in_slices(pieces()) == b"01234"
    assert {1, 2, 3, 4} <= set(turns)


async def test_many_decisions_are_the_same_bytes_each_time() -> None:
    """More than are remembered as text; a large answer is packed in a thread and reads the same."""
    node = SampleNode(gpus=16, containers=0)
    async with served_node(node) as served:
        for number in range(1, 521):
            served.decisions.add(node.decision(number))
        plain = [(await _get(f"{served.url}/api/v1/decisions?limit=500"))[1] for _ in range(2)]
        url = f"{served.url}/api/v1/decisions?limit=500"
        async with ClientSession() as session, session.get(url) as answer:
            assert answer.headers["Content-Encoding"] == "gzip"
            packed = await answer.json()
    assert plain[0] == plain[1] == packed
    assert [one["number"] for one in packed["decisions"]] == list(range(520, 20, -1))


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("node?pretty=1", 'the parameter "pretty" is not known here; known: processes'),
        ("node?processes=1", "must be one of true, false"),
        ("decisions?pods=a", "known: after, limit, namespace, number, pod"),
        ("decisions?limit=0", 'limit="0": must be a whole number from 1 to 500'),
        ("decisions?limit=501", "from 1 to 500"),
        ("decisions?limit=%D9%A3", "a whole number"),
        ("decisions?limit=1&limit=2", "limit is given twice"),
        ("decisions?after=-1", "from 0 to"),
        ("decisions?after=" + "9" * 5000, "…"),
        ("decisions?pod=", "1 to 253 characters"),
        ("decisions?pod=" + "a" * 254, "1 to 253 characters"),
        ("history?span=week", "one of day"),
        ("changes?gpu=0", "known: none"),
        ("history?only=pods", "one of gpus, containers"),
        ("decisions?%3Cscript%3E=1", '"<script>"'),
        ("node?from=3", "known: processes"),
    ],
)
async def test_a_wrong_query_is_reported_what_is_wrong(query: str, words: str) -> None:
    """400 with a bounded text as JSON, never a silent default."""
    async with served_node(SampleNode(gpus=1, containers=0)) as served:
        status, found, headers = await _get(f"{served.url}/api/v1/{query}")
    assert status == 400
    assert words in found["error"]
    assert len(found["error"]) < 300
    assert headers["X-Content-Type-Options"] == "nosniff"


@pytest.mark.parametrize(
    ("accepted", "is_packed"),
    [
        ("gzip", True),
        ("br, gzip;q=0.5", True),
        ("*", True),
        ("gzip;q=0", False),
        ("gzip;q=0.000, br", False),
        ("br", False),
    ],
)
async def test_a_large_answer_is_packed_where_that_is_asked_for(accepted: str, is_packed: bool) -> None:
    """By Accept-Encoding, a refusal of gzip included; with a Vary header for caches."""
    async with served_node(SampleNode(gpus=2, containers=10)) as served:
        _, _, headers = await _get(f"{served.url}/api/v1/node", **{"Accept-Encoding": accepted})
    assert (headers.get("Content-Encoding") == "gzip") is is_packed
    assert headers["Vary"] == "Accept-Encoding"


async def test_only_reading_is_possible() -> None:
    """Every method that could change something is 405 with what is allowed; HEAD answers without a body."""
    async with served_node(SampleNode(gpus=1, containers=0)) as served, ClientSession() as session:
        for path in ("", "api/v1/node", "api/v1/decisions", "dashboard/app.js"):
            for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
                async with session.request(method, f"{served.url}/{path}") as answer:
                    assert (answer.status, answer.headers["Allow"]) == (405, "GET,HEAD"), (method, path)
            async with session.head(f"{served.url}/{path}") as answer:
                assert (answer.status, await answer.read()) == (200, b"")
