"""The series of GPUs and containers: names, labels, values, and what has none."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from gpushare_agent.agent.gpus.nvml.usage import throttle_reasons
from gpushare_agent.agent.observability.attribution import AllocatedContainers, join_usage
from gpushare_agent.agent.observability.display import usage_document
from gpushare_agent.agent.observability.metrics.agent import AgentMetrics
from gpushare_agent.agent.observability.metrics.dcgm import dcgm_series
from gpushare_agent.agent.observability.metrics.node import THROTTLE_REASONS, ContainerSeries, node_series
from gpushare_agent.agent.observability.metrics.text import MAX_LABEL, NodePage, Series, labels_text, line
from gpushare_agent.agent.observability.node_snapshot import ContainerFacts, NodeSnapshot
from gpushare_agent.agent.runtime.cgroup_paths import PeerIdentity
from gpushare_agent.core.model.allocations import Allocation
from gpushare_agent.core.model.names import MIB, device_id
from gpushare_agent.core.model.resources import ResourceKind
from gpushare_agent.core.model.usage import GpuSample, UsageRound
from gpushare_agent.kubectl.inspect import node_of_document
from tests.observability.support_usage import (
    GPU_MIB,
    UUIDS,
    allocation,
    driver_sample,
    facts,
    gpu_sample,
    id_of,
    inventory,
    key_of,
    owner,
    process,
    snapshot,
)
from tests.support_core import mig_instance
from tests.support_json import written_node

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"
LEGACY = {"pod_name": "p", "namespace": "default", "node": "n1", "container_name": "main"}
OWN = {"namespace": "default", "pod": "p", "container": "main", "node": "n1"}

Rows = dict[str, list[tuple[dict[str, str], float]]]


def rows_of(shown: NodeSnapshot) -> Rows:
    """As Prometheus reads them."""
    found: Rows = {}
    for family in parse_text(page_of(node_series(shown)).exposition("")[1].decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((dict(sample.labels), sample.value))
    return found


def page_of(series: Iterable[Series]) -> AgentMetrics:
    metrics, shown = AgentMetrics(), list(series)
    metrics.show_node(NodePage(lambda _: shown, max_age_s=60.0))
    return metrics


def used(*gpus: GpuSample, allocated: Sequence[Allocation] = (), owners: dict[int, PeerIdentity]) -> UsageRound:
    """The containers of the allocations have the IDs 1, 2 and so on."""
    by_id = {id_of(number): one.key for number, one in enumerate(allocated, 1)}
    known = AllocatedContainers(gpus={one.key: one.gpus for one in allocated}, by_id=by_id)
    return join_usage(driver_sample(*gpus), owners, known, sampled_at=999.5)


def one_share(*processes: Any, **others: Any) -> NodeSnapshot:
    """A container with 40 cores and 2 GiB of GPU 0."""
    allocated = allocation(key_of(1))
    gpus, owners = (gpu_sample(0, *processes, **others), gpu_sample(1)), {10: owner(1), 11: owner(1)}
    return snapshot(facts(allocated), usage=used(*gpus, allocated=[allocated], owners=owners))


def test_gpu_managers_four_series_keep_their_names_labels_and_units() -> None:
    """Percent of a GPU and MiB, a row for the GPU and one for the total; requests in GPUs and MiB."""
    rows = rows_of(one_share(process(10, memory=300 * MIB, sm=0.1), process(11, memory=212 * MIB, sm=0.15)))
    assert rows["container_gpu_utilization"] == [({**LEGACY, "gpu": "gpu0"}, 25.0), ({**LEGACY, "gpu": "total"}, 25.0)]
    assert rows["container_gpu_memory_total"] == [
        ({**LEGACY, "gpu_memory": "gpu0"}, 512.0),
        ({**LEGACY, "gpu_memory": "total"}, 512.0),
    ]
    assert rows["container_request_gpu_utilization"] == [({**LEGACY, "req_of_gpu": "total"}, 0.4)]
    assert rows["container_request_gpu_memory"] == [({**LEGACY, "req_of_gpu_memory": "total"}, 2048.0)]


def test_compute_that_follows_the_memory_is_requested_compute_as_the_usage_report_has_it() -> None:
    """A container that asks for GPUShare's memory alone has no core IDs, and 66 of 100 cores by its part of the memory."""
    key = key_of(1)
    units = frozenset(device_id(UUIDS[0], number) for number in range(16))
    one = replace(allocation(key, cores=0, blocks=0), ids={ResourceKind.GPU_MEM: units})
    shown = snapshot(replace(facts(one), cores=66, allocated_cores=66))
    assert rows_of(shown)["container_request_gpu_utilization"] == [({**LEGACY, "req_of_gpu": "total"}, 0.66)]
    (pod_usage,) = usage_document(shown).usage.values()
    assert pod_usage.spec[key.container].gpu == 0.66
    # It takes no cores from others: `inspect` shows none next to a GPU of which none are allocated.
    (inspected,) = node_of_document(written_node(shown))["containers"]
    assert (inspected["cores"], written_node(shown)["containers"][0]["cores"]) == (0, 66)


@pytest.mark.parametrize(("blocks", "mib"), [(30, 7680), (0, 2 * 24576)])
def test_requested_memory_of_whole_gpus_is_what_was_requested(blocks: int, mib: int) -> None:
    """Where nothing was, what the GPUs have."""
    shown = snapshot(facts(allocation(key_of(1), (0, 1), cores=200, blocks=blocks)))
    ((_, value),) = rows_of(shown)["container_request_gpu_memory"]
    assert value == mib
    (in_usage,) = (spec for pod in usage_document(shown).usage.values() for spec in pod.spec.values())
    assert (in_usage.gpu, in_usage.mem) == (2, mib)


def test_who_keeps_a_container_to_its_share_is_one_row_of_one() -> None:
    """However many GPUs it has, and also where two containers have the same name."""
    shares = [facts(allocation(key_of(n), (0,), blocks=8)) for n in (1, 2)]
    namesakes = [replace(one, allocation=replace(one.allocation, pod_name="same")) for one in shares]
    whole = facts(allocation(key_of(3), (0, 1), cores=200, blocks=0))
    unknown = replace(facts(allocation(key_of(4))), isolation="", kept=None)
    rows = rows_of(snapshot(*namesakes, whole, unknown))["gpushare_container_isolation_info"]
    assert [value for _, value in rows] == [1.0, 1.0]
    (share,) = [labels for labels, _ in rows if labels["pod"] == "same"]
    assert (share["isolation"], share["memory_by"], share["compute_by"]) == ("vcuda", "vcuda", "vcuda")
    assert share["not_kept"] == (
        "async-allocations,bypass,copies,extended-launches,graphs,managed-memory,other-apis,pools,small-launches,"
        "virtual-memory"
    )
    (of_whole,) = [labels for labels, _ in rows if labels["pod"] != "same"]
    assert (of_whole["memory_by"], of_whole["compute_by"], of_whole["not_kept"]) == ("whole-gpu", "whole-gpu", "")


def test_a_container_without_a_limit_has_a_row_and_no_other_has_one() -> None:
    limited, unlimited = (facts(allocation(key_of(n), (0,), blocks=8)) for n in (1, 2))
    assert "gpushare_container_not_limited" not in rows_of(snapshot(limited))
    [(labels, value)] = rows_of(snapshot(limited, replace(unlimited, not_limited="why")))[
        "gpushare_container_not_limited"
    ]
    assert (labels["pod"], labels["container"], value) == (unlimited.allocation.pod_name, "main", 1.0)


def test_the_total_of_whole_gpus_is_the_sum_over_them() -> None:
    """Two busy GPUs are up to 200 percent, as gpu-manager counts."""
    allocated = allocation(key_of(1), (0, 1), cores=200, blocks=0)
    gpus = (gpu_sample(0, process(10, sm=0.5)), gpu_sample(1, process(11, sm=0.75)))
    usage = used(*gpus, allocated=[allocated], owners={10: owner(1), 11: owner(1)})
    rows = rows_of(snapshot(facts(allocated), usage=usage))
    assert [(labels["gpu"], value) for labels, value in rows["container_gpu_utilization"]] == [
        ("gpu0", 50.0),
        ("gpu1", 75.0),
        ("total", 125.0),
    ]
    assert [value for _, value in rows["gpushare_container_memory_limit_bytes"]] == [GPU_MIB * MIB] * 2
    assert [value for _, value in rows["gpushare_container_allocated_cores_ratio"]] == [1.0, 1.0]


def test_our_series_of_a_container_are_in_base_units_for_each_gpu() -> None:
    """Given, limit, used."""
    rows = rows_of(one_share(process(10, memory=300 * MIB, sm=0.1), process(11, memory=212 * MIB, sm=0.15)))
    labels = {**OWN, "uuid": UUIDS[0], "gpu": "0"}
    own = {name: found for name, found in rows.items() if name.startswith("gpushare_container_")}
    del own["gpushare_container_isolation_info"]
    assert own == {
        "gpushare_container_allocated_cores_ratio": [(labels, 0.4)],
        "gpushare_container_cores_limit_ratio": [(labels, 0.4)],
        "gpushare_container_memory_limit_bytes": [(labels, 2048.0 * MIB)],
        "gpushare_container_memory_used_bytes": [(labels, 512.0 * MIB)],
        "gpushare_container_sm_utilization_ratio": [(labels, 0.25)],
        "gpushare_container_sm_utilization_info": [({**labels, "source": "driver"}, 1.0)],
        "gpushare_container_memory_bandwidth_utilization_ratio": [(labels, 0.25)],
        "gpushare_container_processes": [(labels, 2.0)],
    }


def test_before_the_first_round_what_is_given_is_known_and_no_use() -> None:
    """What was not sampled is not zero. The limit of an elastic share is the pod's ceiling."""
    rows = rows_of(snapshot(facts(allocation(key_of(1)), core_limit=90)))
    assert not {name for name in rows if "used" in name or "utilization_ratio" in name}
    assert "container_gpu_memory_total" not in rows
    given = {
        "gpushare_container_allocated_cores_ratio": [0.4],
        "gpushare_container_cores_limit_ratio": [0.9],
        "gpushare_container_memory_limit_bytes": [2048.0 * MIB],
        "gpushare_gpu_cores_allocated_ratio": [0.4, 0.0],
        "gpushare_gpu_memory_allocated_bytes": [2048.0 * MIB, 0.0],
        "gpushare_gpu_cores_capacity_ratio": [1.0, 1.0],
    }
    assert {name: [value for _, value in rows[name]] for name in given} == given


def test_a_container_admitted_after_the_last_round_uses_nothing_yet() -> None:
    """From the moment of its allocation it has its series."""
    rows = rows_of(snapshot(facts(allocation(key_of(1))), usage=used(gpu_sample(0), owners={})))
    assert [value for _, value in rows["gpushare_container_memory_used_bytes"]] == [0.0]
    assert [value for _, value in rows["container_gpu_utilization"]] == [0.0, 0.0]


def test_what_the_driver_does_not_tell_has_no_row() -> None:
    """A GPU without lists of processes: no used series, neither zero nor anything else, also of a new container."""
    rows = rows_of(one_share(lists=False))
    assert "gpushare_container_memory_used_bytes" not in rows
    assert "gpushare_container_sm_utilization_ratio" not in rows
    assert {labels["uuid"] for labels, _ in rows["gpushare_gpu_stranger_processes"]} == {UUIDS[1]}
    counted_elsewhere = rows_of(one_share(process(10, sm=None)))  # in the process of the MPS server
    assert "gpushare_container_sm_utilization_ratio" not in counted_elsewhere
    assert "gpushare_container_memory_used_bytes" in counted_elsewhere
    new = snapshot(facts(allocation(key_of(1))), usage=used(gpu_sample(0, lists=False), owners={}))
    assert "gpushare_container_memory_used_bytes" not in rows_of(new)


def test_every_sample_of_a_gpu_has_its_series() -> None:
    """By UUID, index and node; counters are counters."""
    sample = GpuSample(
        uuid=UUIDS[0],
        sm_ratio=0.5,
        memory_ratio=0.25,
        encoder_ratio=0.125,
        decoder_ratio=0.0,
        memory_used_bytes=100,
        temperature_celsius=61.0,
        power_watts=250.5,
        power_limit_watts=700.0,
        sm_clock_hertz=1.98e9,
        memory_clock_hertz=2.6e9,
        ecc_corrected_total=3,
        ecc_uncorrected_total=1,
        throttle_reasons=("power_cap", "sun_storm"),
        pcie_received_bytes_per_second=1e9,
        pcie_sent_bytes_per_second=5e8,
        nvlink_received_bytes_total=2**40,
        nvlink_sent_bytes_total=2**41,
        processes=(process(77, memory=42),),
    )
    sick = inventory(sick={1: "lost"})
    rows = rows_of(snapshot(usage=used(sample, owners={}), gpus=sick, cordoned={UUIDS[1]: "by hand"}))
    first, second = ({"uuid": UUIDS[index], "gpu": str(index), "node": "n1"} for index in (0, 1))
    expected = {
        "sm_utilization_ratio": 0.5,
        "memory_bandwidth_utilization_ratio": 0.25,
        "encoder_utilization_ratio": 0.125,
        "decoder_utilization_ratio": 0.0,
        "memory_used_bytes": 100,
        "temperature_celsius": 61.0,
        "power_watts": 250.5,
        "power_limit_watts": 700.0,
        "sm_clock_hertz": 1.98e9,
        "memory_clock_hertz": 2.6e9,
        "pcie_received_bytes_per_second": 1e9,
        "pcie_sent_bytes_per_second": 5e8,
        "nvlink_received_bytes_total": 2**40,
        "nvlink_sent_bytes_total": 2**41,
        "stranger_processes": 1,
        "stranger_memory_used_bytes": 42,
    }
    assert {name: rows[f"gpushare_gpu_{name}"] for name in expected} == {
        name: [(first, float(value))] for name, value in expected.items()
    }
    assert rows["gpushare_gpu_ecc_errors_total"] == [
        ({**first, "kind": "corrected"}, 3.0),
        ({**first, "kind": "uncorrected"}, 1.0),
    ]
    throttled = {labels["reason"]: value for labels, value in rows["gpushare_gpu_throttled"]}
    assert throttled == dict.fromkeys(THROTTLE_REASONS, 0.0) | {"power_cap": 1.0, "sun_storm": 1.0}
    assert rows["gpushare_gpu_healthy"] == [(first, 1.0), (second, 0.0)]
    assert rows["gpushare_gpu_cordoned"] == [(first, 0.0), (second, 1.0)]
    assert rows["gpushare_gpu_memory_capacity_bytes"] == [(one, float(GPU_MIB * MIB)) for one in (first, second)]
    info = rows["gpushare_gpu_info"][0][0]
    assert (info["name"], info["driver_version"]) == ("NVIDIA H100 80GB HBM3", "550.54.14")
    assert rows["gpushare_usage_sampled_timestamp_seconds"] == [({"node": "n1"}, 999.5)]


def test_a_gpu_that_is_left_out_on_purpose_is_neither_healthy_nor_not() -> None:
    """A rule for unhealthy GPUs would fire for ever where one with MIG enabled is excluded."""
    rows = rows_of(replace(snapshot(gpus=inventory(sick={1: "MIG is enabled"})), excluded=frozenset({UUIDS[1]})))
    assert [labels["uuid"] for labels, _ in rows["gpushare_gpu_healthy"]] == [UUIDS[0]]
    assert [labels["uuid"] for labels, _ in rows["gpushare_gpu_info"]] == list(UUIDS[:2])


def test_the_throttle_reasons_are_those_of_the_driver() -> None:
    """Every bit that has a name, so that each can be alerted on before it is ever set."""
    assert throttle_reasons(0x7FF) == THROTTLE_REASONS


def test_the_order_of_containers_does_not_depend_on_who_came_first() -> None:
    """By namespace, pod and container."""
    allocated = [
        facts(allocation(key_of(number), cores=10, blocks=1, pod=name)) for number, name in ((1, "b"), (2, "a"))
    ]
    one, other = (list(node_series(snapshot(*order))) for order in (allocated, allocated[::-1]))
    assert one == other
    assert [labels["pod"] for labels, _ in rows_of(snapshot(*allocated))["gpushare_container_memory_limit_bytes"]] == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("value", ['a"b', "a\\b", "a\\nb", "a\\", "a\nb", 'é,}="', "x" * 1000])
def test_no_label_breaks_out_of_its_quotes(value: str) -> None:
    """Whatever is in a name, a reader gets it back, cut at the longest name of a pod."""
    series = Series("gpushare_x", "X.", lines=[line("gpushare_x", labels_text(pod=value, a="1"), 1)])
    text = NodePage(lambda _: [series], max_age_s=1).text(is_openmetrics=False).decode()
    (family,) = parse_text(text)
    assert family.samples[0].labels == {"pod": value[:MAX_LABEL], "a": "1"}


def test_namesakes_are_one_row_with_the_sum() -> None:
    """A pod deleted by force whose processes run on, and the one made again under its name: no series is there twice."""
    old, new = allocation(key_of(1)), allocation(key_of(2), (0, 1), cores=200, blocks=0)
    gpus = (gpu_sample(0, process(10, sm=0.25), process(20, sm=0.5)), gpu_sample(1, process(21, sm=0.125)))
    usage = used(*gpus, allocated=[old, new], owners={10: owner(1), 20: owner(2), 21: owner(2)})
    shown = snapshot(facts(old), facts(new), usage=usage)
    rows = rows_of(shown)
    assert rows["container_request_gpu_utilization"] == [({**LEGACY, "req_of_gpu": "total"}, 2.4)]
    assert [(labels["gpu"], value) for labels, value in rows["container_gpu_utilization"]] == [
        ("gpu0", 75.0),
        ("total", 87.5),
        ("gpu1", 12.5),
    ]
    assert [(labels["gpu"], value) for labels, value in rows["gpushare_container_processes"]] == [
        ("0", 2.0),
        ("1", 1.0),
    ]
    few = {one.name: "".join(one.lines) for one in node_series(shown, ContainerSeries())}
    assert [one.split()[-1] for one in few["gpushare_container_sm_utilization_ratio"].splitlines()] == ["0.75", "0.125"]
    for found in rows.values():
        assert len({tuple(sorted(labels.items())) for labels, _ in found}) == len(found)
    opened = page_of(node_series(shown)).exposition(OPENMETRICS)[1].decode()
    assert list(parse_openmetrics(opened))  # raises for a series that is there twice


def test_openmetrics_and_text_say_the_same() -> None:
    """Both parse, a counter keeps its samples' names, and OpenMetrics ends with its last line once."""
    metrics = page_of(node_series(one_share(process(10), nvlink_sent_bytes_total=5)))
    type_of_text, text = metrics.exposition("")
    type_of_open, opened = metrics.exposition(OPENMETRICS)
    assert (type_of_text.partition(";")[0], type_of_open.partition(";")[0]) == (
        "text/plain",
        "application/openmetrics-text",
    )
    assert opened.endswith(b"\n# EOF\n") and opened.count(b"# EOF") == 1

    def samples(families: Any) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
        return {(s.name, tuple(sorted(s.labels.items()))) for family in families for s in family.samples}

    assert samples(parse_openmetrics(opened.decode())) == samples(parse_text(text.decode()))
    assert b"gpushare_gpu_nvlink_sent_bytes_total{" in opened


def test_the_text_is_made_once_until_it_is_old_or_expired() -> None:
    """However many readers ask: once for each format that is asked for."""
    now, made = 0.0, []

    def series(is_all: bool) -> list[Series]:
        made.append(now)
        return [Series("gpushare_x", "X.", lines=[line("gpushare_x", "", len(made))])]

    page = NodePage(series, max_age_s=1.0, clock=lambda: now)
    for _ in range(10):
        page.text(is_openmetrics=False)
        page.text(is_openmetrics=True)
    assert len(made) == 2
    now = 1.0
    page.text(is_openmetrics=True)
    assert len(made) == 3
    page.expire()
    assert b" 4\n" in page.text(is_openmetrics=False)


def test_events_with_foreign_words_make_a_bounded_number_of_series() -> None:
    """Xid numbers beyond the catalogue, words that are none, and too many of them share `other`."""
    metrics = AgentMetrics()
    for xid in range(0, 1000, 10):
        metrics.gpu_event("xid", xid, is_ignored=xid == 0, uuid=None)
    for number in range(200):
        metrics.driver_error(f"word_{number}")
        metrics.gpu_health_changed(f"GPU-{number}", healthy=False)
    metrics.driver_error('a"b\nc')
    values = metrics.registry.get_sample_value
    assert values("gpushare_gpu_events_total", {"kind": "xid", "xid": "other", "ignored": "false", "uuid": ""}) == 79
    assert values("gpushare_gpu_events_total", {"kind": "xid", "xid": "", "ignored": "true", "uuid": ""}) == 1
    assert values("gpushare_driver_errors_total", {"error": "other"}) == 200 - 64 + 1
    assert values("gpushare_gpu_health_changes_total", {"uuid": "other", "to": "unhealthy"}) == 200 - 64


def test_known_label_sets_begin_at_zero() -> None:
    """rate() of the first refusal is seen, for each resource and reason."""
    metrics = AgentMetrics()
    metrics.know_resources(["r"])
    metrics.know_gpus(["GPU-0"], 0)
    value = metrics.registry.get_sample_value
    for labels in (("allocated", ""), ("refused", "Fragmented"), ("refused", "NotEnoughMemory")):
        assert value("gpushare_admissions_total", {"resource": "r", "outcome": labels[0], "reason": labels[1]}) == 0
    assert value("gpushare_reconcile_corrections_total", {"kind": "adopted"}) == 0
    assert value("gpushare_identifications_total", {"method": "listed"}) == 0
    assert value("gpushare_gpu_health_changes_total", {"uuid": "GPU-0", "to": "unhealthy"}) == 0
    assert value("gpushare_rpc_duration_seconds_count", {"resource": "r", "method": "Allocate"}) == 0


def test_a_registration_after_the_first_counts_as_another() -> None:
    """For each resource of its own."""
    metrics = AgentMetrics()
    for resource in ("a", "a", "b", "a"):
        metrics.registered(resource)
    value = metrics.registry.get_sample_value
    assert value("gpushare_registrations_total", {"resource": "a"}) == 3
    assert value("gpushare_reregistrations_total", {"resource": "a"}) == 2
    assert value("gpushare_reregistrations_total", {"resource": "b"}) == 0


def test_a_reload_counts_on_and_shows_the_new_state_alone() -> None:
    """Counters never go down while the process lives; states that an ended part reported are gone with it."""
    metrics = AgentMetrics()
    metrics.show_pod_event_age(lambda: 7.0)
    metrics.show_isolations(lambda: {"mps": True})
    metrics.show_node(NodePage(lambda _: node_series(one_share()), max_age_s=60.0))
    metrics.listed("pods", 0.1)
    assert metrics.begin_again() is metrics
    metrics.show_pod_event_age(lambda: 8.0)
    lines = metrics.exposition("")[1].decode().splitlines()
    assert "gpushare_pod_lists_total 1.0" in lines
    assert [line for line in lines if line.startswith("gpushare_pod_event_age_seconds")] == [
        "gpushare_pod_event_age_seconds 8.0"
    ]
    assert not [line for line in lines if line.startswith(("gpushare_isolation_", "gpushare_container_"))]


def test_a_version_that_is_no_number_gets_the_plain_text() -> None:
    """prometheus_client compares versions as numbers."""
    content_type, _ = AgentMetrics().exposition("application/openmetrics-text;version=x")
    assert content_type.startswith("text/plain")


def test_a_share_has_seven_series_unless_all_are_wanted() -> None:
    """What the dashboard, alerts and autoscalers read; the rest costs the reader twice as much."""
    processes = [replace(process(pid, memory=MIB, sm=0.1), encoder_ratio=0.1, decoder_ratio=0.1) for pid in (10, 11)]
    shown = one_share(*processes)

    def rows(containers: ContainerSeries) -> list[str]:
        series = node_series(shown, containers)
        return [
            one.partition("{")[0]
            for each in series
            for one in "".join(each.lines).splitlines()
            if "container_" in each.name
        ]

    few, every = rows(ContainerSeries()), rows(ContainerSeries(is_all=True))
    assert (len(few), len(set(few)), len(every)) == (7, 7, 17)
    monitoring = Path(__file__).parents[2] / "manifests/monitoring"
    texts = [(monitoring / name).read_text() for name in ("dashboard.json", "alerts.yaml")]
    read = {name for text in texts for name in re.findall(r"gpushare_container_\w+", text)}
    read.remove("gpushare_container_gpu_seconds_total")  # made apart from these: consumption.py
    assert read - {*few, "gpushare_container_not_limited"} == set()
    assert set(every) - set(few) == {
        *("container_request_gpu_utilization", "container_request_gpu_memory"),
        *("container_gpu_utilization", "container_gpu_memory_total", "gpushare_container_processes"),
        *(f"gpushare_container_{one}_utilization_ratio" for one in ("memory_bandwidth", "encoder", "decoder")),
    }


def test_lines_that_are_kept_show_every_change() -> None:
    """Of use, of a limit, of the GPUs, of who has the name; and what has not changed is not written again."""
    kept, share, gpus = ContainerSeries(is_all=True), facts(allocation(key_of(1))), inventory()

    def shown(one: ContainerFacts, sm: float, memory: int = MIB, **others: Any) -> NodeSnapshot:
        sample = gpu_sample(0, process(10, memory=memory, sm=sm))
        usage = used(sample, allocated=[one.allocation], owners={10: owner(1)})
        return replace(snapshot(one, usage=usage), **({"inventory": gpus} | others))

    renamed = replace(gpus, gpus=tuple(replace(gpu, index=gpu.index + 4) for gpu in gpus.gpus))
    other_pod = replace(share, allocation=replace(share.allocation, pod_name="other"))
    for one in (
        shown(share, 0.25),
        shown(share, 0.5),
        shown(share, 0.5, memory=2 * MIB),
        replace(shown(share, 0.5), usage=None),
        shown(share, 0.5, inventory=renamed),
        shown(replace(share, core_limit=90), 0.5),
        shown(replace(share, not_limited="why"), 0.5),
        shown(other_pod, 0.5),
        snapshot(),
        shown(share, 0.25),
    ):
        assert kept.series(one) == ContainerSeries(is_all=True).series(one)
    first, second, again = ({one.name: one.lines for one in kept.series(shown(share, sm))} for sm in (0.25, 0.5, 0.5))
    of_sm = "gpushare_container_sm_utilization_ratio"
    assert first[of_sm][0] is not second[of_sm][0]
    assert first["gpushare_container_memory_limit_bytes"][0] is second["gpushare_container_memory_limit_bytes"][0]
    assert all(second[name][0] is again[name][0] for name in second)


async def test_a_page_is_prepared_in_slices_and_is_of_one_round() -> None:
    """What was prepared for the round before counts no more, and what has ended is gone."""
    first, second = one_share(process(10, sm=0.25)), one_share(process(10, sm=0.5))
    ended = snapshot(*first.containers, facts(allocation(key_of(2), pod="ended")), usage=first.usage)
    containers, shown = ContainerSeries(), [ended, second]
    page = NodePage(lambda _: node_series(shown[0], containers), 60.0, prepared=lambda _: containers.prepared(shown[0]))
    slices = containers.prepared(ended)
    next(slices)
    assert len(containers._known) == 1
    metrics = AgentMetrics()
    metrics.show_node(page)
    await metrics.prepare()
    assert len(containers._known) == 2
    del shown[0]
    found = page.text(is_openmetrics=False)
    assert len(containers._known) == 1
    assert page_of(node_series(second, ContainerSeries())).exposition("")[1].startswith(found)
    assert b"0.5" in found and b'pod="ended"' not in found


def dcgm_rows(shown: NodeSnapshot) -> dict[str, dict[str, tuple[dict[str, str], float]]]:
    """By name and GPU, as Prometheus reads them."""
    return {
        family.name: {sample.labels["gpu"]: (dict(sample.labels), sample.value) for sample in family.samples}
        for family in parse_text(page_of(dcgm_series(shown)).exposition("")[1].decode())
        if family.name.startswith("DCGM_")
    }


def test_dcgms_names_have_its_labels_and_units() -> None:
    """Percent, MiB, MHz and watts; a GPU that one container has alone names it."""
    values = {"sm_ratio": 0.29, "memory_used_bytes": 1000 * MIB, "memory_free_bytes": 23276 * MIB, "power_watts": 71.5}
    shown = one_share(process(10), **values, sm_clock_hertz=1.98e9, temperature_celsius=61.0)
    rows = dcgm_rows(shown)
    of_pod = {"namespace": "default", "pod": "p", "container": "main"}
    labels = {
        "gpu": "0", "UUID": "GPU-0", "device": "nvidia0", "modelName": "NVIDIA H100 80GB HBM3", "Hostname": "n1",
        "pci_bus_id": "00000000:00:00.0",
    }  # fmt: skip
    assert rows["DCGM_FI_DEV_GPU_UTIL"] == {"0": ({**labels, **of_pod}, 29.0)}
    found = {name.removeprefix("DCGM_FI_DEV_"): one["0"][1] for name, one in rows.items()}
    assert found == {
        "GPU_UTIL": 29, "FB_USED": 1000, "FB_FREE": 23276, "GPU_TEMP": 61, "POWER_USAGE": 71.5, "SM_CLOCK": 1980,
    }  # fmt: skip


def test_dcgms_rows_name_nobody_where_several_share_the_gpu_and_mig_instances_have_none() -> None:
    """One row of each GPU: sums over them stay right."""
    usage = used(gpu_sample(0, sm_ratio=0.5), gpu_sample(1, sm_ratio=0.5), owners={})
    shares = [facts(allocation(key_of(number), pod=f"p{number}")) for number in (1, 2)]
    gpus = inventory()
    divided = replace(gpus, gpus=(gpus.gpus[0], replace(gpus.gpus[1], mig=mig_instance(1, 0, 0).mig)))
    rows = dcgm_rows(snapshot(*shares, usage=usage, gpus=divided))["DCGM_FI_DEV_GPU_UTIL"]
    assert list(rows) == ["0"] and "pod" not in rows["0"][0]
