"""Patches between two documents of a node: applied to the old one they give the new one, and they stay small."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sample_node import SampleNode, uid_of, uuid_of
from gpushare_agent.observability.http.live_patch import CONTAINER_USE, GPU_USE, container_key, patch, rounded
from gpushare_agent.observability.node_snapshot import node_document

Document = dict[str, Any]


def shown(node: SampleNode) -> Document:
    return rounded(node_document(node.snapshot()))


def applied(document: Document, change: Mapping[str, Any]) -> Document:
    """As a reader of the stream does it."""
    new = copy.deepcopy(document)
    gpus = {gpu["uuid"]: gpu for gpu in new["cards"]}
    containers = {container_key(one): one for one in new["containers"]}
    for name in ("at", "schema", "node", "resources", "topology"):
        new[name] = change.get(name, new[name])
    new["agent"] |= change.get("agent", {})
    for uuid, fields in change.get("cards", {}).items():
        gpus[uuid] = gpus.get(uuid, {}) | fields
    for uuid, values in change.get("card_use", {}).items():
        gpus[uuid]["usage"] |= _named(GPU_USE, values)
    containers |= change.get("containers", {})
    for key, uses in change.get("container_use", {}).items():
        for index, *values in uses:
            allocated = next(one for one in containers[key]["cards"] if one["index"] == index)
            allocated["usage"] |= _named(CONTAINER_USE, values)
    for name in change.get("gone", ()):
        gpus.pop(name, None)
        containers.pop(name, None)
    new["cards"] = sorted(gpus.values(), key=lambda gpu: gpu["index"])
    new["containers"] = sorted(containers.values(), key=_order)
    return new


def _named(names: tuple[str, ...], values: list[Any]) -> Document:
    return dict(zip(names, [*values, *[None] * (len(names) - len(values))], strict=True))


def _order(container: Document) -> tuple[str, ...]:
    return container["namespace"], container["pod"], container["pod_uid"], container["container"]


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_an_applied_patch_gives_the_new_document(data: st.DataObject) -> None:
    """Whatever came, went, fell ill or merely used something else between two moments."""

    def made() -> Document:
        gpus = data.draw(st.integers(1, 4))
        node = SampleNode(
            gpus=gpus,
            containers=data.draw(st.integers(0, 2 * gpus)),
            moment=data.draw(st.integers(0, 50)),
            unhealthy=data.draw(st.dictionaries(st.integers(0, gpus - 1), st.sampled_from(["lost", "Xid 79"]))),
            cordoned=data.draw(st.dictionaries(st.integers(0, gpus - 1), st.just("fan"))),
            unattributed=data.draw(st.dictionaries(st.integers(0, gpus - 1), st.integers(0, 30))),
        )
        document = shown(node)
        for thing in [*document["cards"], *(allocated for one in document["containers"] for allocated in one["cards"])]:
            thing["usage"] = data.draw(
                st.sampled_from([thing["usage"], thing["usage"], None, dict.fromkeys(thing["usage"])])
            )
        return document

    old, new = made(), made()
    new["node"] = old["node"]
    change = json.loads(json.dumps(patch(old, new)))
    assert applied(old, change | {"at": new["at"]}) == json.loads(json.dumps(new))


def test_a_node_that_stands_still_has_no_patch() -> None:
    """The time alone makes no patch."""
    node = SampleNode(gpus=2, containers=3)
    old = shown(node)
    still = shown(node) | {"at": old["at"] + 60, "agent": old["agent"]}
    assert patch(old, still) == {}


def test_only_numbers_that_changed_are_sent_as_lists() -> None:
    """A step of the use names no field, no static value and no topology."""
    node = SampleNode(gpus=2, containers=2)
    old = shown(node)
    node.step()
    found = patch(old, shown(node) | {"agent": old["agent"]})
    assert set(found) == {"at", "card_use", "container_use"}
    assert set(found["card_use"]) == {uuid_of(0), uuid_of(1)}
    key = f"{uid_of(1)}/main"
    [[index, *values]] = found["container_use"][key]
    container = next(one for one in shown(node)["containers"] if container_key(one) == key)
    assert (index, values) == (1, [container["cards"][0]["usage"][name] for name in CONTAINER_USE])


def test_an_unhealthy_gpu_sends_only_its_changed_fields() -> None:
    """Health and reason of that GPU, nothing of the other."""
    node = SampleNode(gpus=2, containers=0)
    old = shown(node)
    node.unhealthy[1] = "Xid 79"
    found = patch(old, shown(node) | {"agent": old["agent"]})
    assert found["cards"] == {uuid_of(1): {"is_healthy": False, "health_reason": "Xid 79"}}
    assert "card_use" not in found


def test_a_container_that_ends_is_named_gone() -> None:
    """By its key; its GPU's sums follow."""
    node = SampleNode(gpus=1, containers=2)
    old = shown(node)
    node.containers = 1
    found = patch(old, shown(node))
    assert found["gone"] == [f"{uid_of(1)}/main"]
    assert set(found["cards"][uuid_of(0)]) == {"cores", "memory"}


def test_a_new_process_sends_the_container_anew() -> None:
    """PIDs are no numbers of the use: a list in the middle would need a name."""
    node = SampleNode(gpus=1, containers=1)
    old, new = shown(node), shown(node)
    new["containers"][0]["cards"][0]["usage"] |= {"pids": [1, 2]}
    found = patch(old, new)
    assert found["containers"][f"{uid_of(0)}/main"]["cards"][0]["usage"]["pids"] == [1, 2]
    assert "container_use" not in found


def test_uses_are_rounded_to_three_digits_and_counts_are_not() -> None:
    """Ratios get at most three digits behind the point, numbers that are none become unknown."""
    document = node_document(SampleNode(gpus=1, containers=0).snapshot())
    document["cards"][0]["usage"] |= {
        "sm_ratio": 0.123456,
        "memory_ratio": 0.00004,
        "memory_used_bytes": 12_345_678_901,
        "power_watts": 312.789,
        "temperature_celsius": float("nan"),
        "ecc_corrected_total": 123_456_789,
        "encoder_ratio": None,
    }
    usage = rounded(document)["cards"][0]["usage"]
    assert usage["sm_ratio"] == 0.123
    assert usage["memory_ratio"] == 0
    assert usage["memory_used_bytes"] == 12_300_000_000
    assert usage["power_watts"] == 313
    assert usage["temperature_celsius"] is None
    assert usage["ecc_corrected_total"] == 123_456_789
    assert usage["encoder_ratio"] is None


def test_many_unattributed_are_cut_to_the_largest_and_counted() -> None:
    """A node's other programs do not fill the stream."""
    gpu = shown(SampleNode(gpus=1, containers=0, unattributed={0: 500}))["cards"][0]
    assert len(gpu["strangers"]) == 20
    assert gpu["strangers_count"] == 500
    assert gpu["strangers"][0]["pid"] == 900 + 499


def test_sixteen_gpus_and_two_hundred_containers_that_all_change_fit_twenty_kilobytes() -> None:
    """With everything different at each of thirty steps."""
    node = SampleNode(gpus=16, containers=200)
    old, sizes = shown(node), []
    for _ in range(30):
        node.step()
        new = shown(node)
        change = patch(old, new)
        assert len(change["container_use"]) > 190
        sizes.append(len(json.dumps(change, separators=(",", ":"))))
        old = new
    assert max(sizes) <= 20_000
