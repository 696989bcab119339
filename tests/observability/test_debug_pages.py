"""observability/http/debug_pages.py: what is shown, what is left out as possibly secret, and the bounds."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from gpushare_agent.agent.observability.http import debug_pages
from gpushare_agent.agent.observability.http.debug_pages import (
    MAX_ROWS,
    allocations_page,
    device_ranges,
    pods_page,
    settings_page,
    task_stack,
    tasks_page,
    topology_page,
)
from gpushare_agent.core.model.names import PodUid
from tests.observability.support_debug import sources
from tests.observability.support_display import SECRET, train_pod
from tests.support_json import written


def test_allocations_are_shown_by_pod_with_runs_of_devices() -> None:
    """Sorted by namespace and name; hundreds of IDs are one range."""
    found = written(allocations_page(sources()))
    assert [row["pod"] for row in found["allocations"]] == ["big", "train"]
    assert found["allocations"][1]["devices"] == {"vcore": {"GPU-0": "0-29"}, "vmemory": {"GPU-0": "0-7"}}
    assert found["allocations"][1]["age_seconds"] == 12.5
    assert found["left_out"] == 0


def test_devices_are_runs_by_gpu() -> None:
    """Single numbers stand alone, an ID that names no GPU stands as it is."""
    assert device_ranges(["GPU-1::3", "GPU-0::7", "GPU-0::0", "GPU-0::1", "GPU-0::2", "odd"]) == {
        "GPU-0": "0-2,7",
        "GPU-1": "3",
        "odd": "",
    }


def test_values_that_may_be_secrets_are_left_out() -> None:
    """Of variables and foreign annotations only the names are shown; the agent's own annotations with values."""
    own = replace(train_pod(), annotations={"tencent.com/predicate-node": "n1", "note": SECRET}, labels={"app": SECRET})
    found = written(pods_page(replace(sources(), pods=lambda: [own])))
    text = json.dumps(found)
    assert SECRET not in text
    (row,) = found["pods"]
    assert row["annotations"] == {"note": "(not shown)", "tencent.com/predicate-node": "n1"}
    assert row["containers"][0]["env_names"] == ["PASSWORD", "SUBMITTER"]
    assert row["label_names"] == ["app"]


def test_many_pods_are_cut_and_counted() -> None:
    """An answer is bounded whatever is in the store."""
    many = [replace(train_pod(), uid=PodUid(f"u{n}")) for n in range(MAX_ROWS + 7)]
    found = written(pods_page(replace(sources(), pods=lambda: many)))
    assert (len(found["pods"]), found["left_out"]) == (MAX_ROWS, 7)


def test_the_topology_is_shown_as_matrix_tree_and_text() -> None:
    """All three agree on two GPUs."""
    found = written(topology_page(sources()))
    assert found["links"] == [["X", "PIX"], ["PIX", "X"]]
    assert found["tree"]["gpus"] == [0, 1]
    assert found["graph"][0] == "ROOT:0"
    assert [gpu["uuid"] for gpu in found["gpus"]] == ["GPU-0", "GPU-1"]


def test_settings_tell_their_value_and_whether_it_is_the_default() -> None:
    """As one would write it in a flag."""
    found = written(settings_page(sources("--health.check-period-s=7")))["settings"]
    assert found["health.check_period_s"] == {"value": "7", "is_default": False}
    assert found["web.port"] == {"value": "5678", "is_default": True}
    assert found["web.debug_token_file"] == {"value": "", "is_default": True}


@asynccontextmanager
async def waiting(names: list[str]) -> AsyncIterator[list[asyncio.Task[None]]]:
    async def outer(event: asyncio.Event) -> None:
        secret_local = SECRET
        await inner(event)
        del secret_local

    async def inner(event: asyncio.Event) -> None:
        await event.wait()

    event = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(outer(event), name=name) for name in names]
        await asyncio.sleep(0)
        yield tasks
        event.set()


async def test_a_waiting_task_is_shown_down_to_what_it_waits_for() -> None:
    """Every coroutine on the way, outermost first, with file and line."""
    async with waiting(["one"]) as (task,):
        stack = task_stack(task)
    assert [line.split(" at ")[0].rpartition(".")[2] for line in stack[:3]] == ["outer", "inner", "wait"]
    assert "test_debug_pages.py:" in stack[0]
    assert stack[2].split(" at ")[1].startswith("asyncio") or "asyncio/locks.py" in stack[2]


async def test_tasks_at_the_same_place_are_one_group() -> None:
    """The number and the first names; no variable of a frame."""
    async with waiting([f"worker {n:02}" for n in range(30)]) as tasks:
        text = tasks_page([*tasks, *asyncio.all_tasks()])
    assert "30 x worker 00, worker 01" in text or "60 x worker 00" in text
    assert ", and " in text
    assert SECRET not in text


async def test_the_list_of_tasks_is_bounded() -> None:
    """What does not fit is counted."""
    async with waiting([f"worker {n}" for n in range(5)]) as tasks:
        text = tasks_page(tasks * (debug_pages.MAX_TASKS // 5 + 1))
    assert text.endswith("\n5 further tasks\n")
