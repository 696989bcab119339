"""The quota of namespaces: reading it, counting against it, saying no."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpushare_agent.core.model.errors import Corrupt, RefusalReason, Refused
from gpushare_agent.core.model.names import PodUid
from gpushare_agent.core.model.pods import ContainerKind, ContainerSpec
from gpushare_agent.extender.decisions.quota import (
    QUOTA_KEY,
    NamespaceQuota,
    Quota,
    Usage,
    check_quota,
    parse_quota,
    use_of,
)
from gpushare_agent.extender.decisions.quota import QuotaUse as Use
from tests.support_core import GPU_MEM_NAMES, NAMES, container, pod
from tests.support_json import any_json

GPU_MIB = 24 * 1024
GPU_ADMISSION = {
    "default": {"pool": ["public"], "quota": {"M40": 4, "P100": 4}},
    "B": {"pool": ["wx"], "quota": {"M40": 8, "P100": 2}},
}


def quota_of(**namespaces: Any) -> Quota:
    return parse_quota({QUOTA_KEY: json.dumps(namespaces)})


def check(
    quota: Quota, asked: Use, used: Use | None = None, *, namespace: str = "a", model: str = "M40", pool: str = "public"
) -> Refused | None:
    return check_quota(quota, namespace, asked, used or Use(), model=model, pool=pool)


# --- reading ---


def test_gpu_admissions_own_example_is_read() -> None:
    """GPUs become hundredths."""
    assert parse_quota({QUOTA_KEY: json.dumps(GPU_ADMISSION)}) == Quota(
        namespaces={
            "default": NamespaceQuota(pools=("public",), gpus={"M40": 400, "P100": 400}),
            "B": NamespaceQuota(pools=("wx",), gpus={"M40": 800, "P100": 200}),
        }
    )


def test_parts_of_gpus_are_read_exactly() -> None:
    """A float would make 114.99 of 1.15."""
    text = '{"a": {"quota": {"M40": 1.15, "P40": 0.3, "T4": 2.50, "L4": 1e1}}}'
    assert parse_quota({QUOTA_KEY: text}).namespaces["a"].gpus == {"M40": 115, "P40": 30, "T4": 250, "L4": 1000}


def test_other_keys_of_the_config_map_are_left_to_others() -> None:
    """gpu-admission does not look at them either."""
    assert parse_quota({QUOTA_KEY: "{}", "notes": "not JSON"}) == Quota()


@pytest.mark.parametrize(
    ("entry", "read"),
    [
        ({}, NamespaceQuota(gpus={})),
        ({"pool": ["x"]}, NamespaceQuota(pools=("x",), gpus={})),
        ({"quota": {}}, NamespaceQuota(gpus={})),
        ({"quota": {}, "vcore": 100}, NamespaceQuota(gpus={}, vcore=100)),
        ({"vcore": 400}, NamespaceQuota(vcore=400)),
        ({"vmemory": 64, "pool": []}, NamespaceQuota(vmemory=64)),
        ({"pool": ["b", "a", "b"], "quota": {"M40": 0}}, NamespaceQuota(pools=("a", "b"), gpus={"M40": 0})),
    ],
)
def test_what_is_left_out_means_what_the_document_says(entry: dict[str, Any], read: NamespaceQuota) -> None:
    """No models and no total: no GPUs at all, as in gpu-admission. A total alone limits no model."""
    assert quota_of(a=entry).namespaces["a"] == read


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no JSON"),
        ("{", "no JSON"),
        ("[" * 100_000, "too deeply nested"),
        ("9" * 5_000, "no JSON"),
        ("[]", "a list is not an object with a quota for each namespace"),
        (" " * (1024 * 1024 + 1), "characters, at most"),
        ('{"a": {"vcore": 1}, "a": {"vcore": 2}}', '"a" is given twice'),
        ('{"a": {"quota": {"M40": 1, "M40": 2}}}', '"M40" is given twice'),
        ('{"": {}}', 'namespace "": "" is no name'),
        ('{"a": 4}', 'namespace "a": 4 is no object with the fields pool, quota, vcore, vmemory'),
        ('{"a": {"qouta": {"M40": 4}}}', 'the field "qouta" is not known'),
        ('{"a": {"pool": "public"}}', 'field pool: "public" is no list'),
        ('{"a": {"pool": [""]}}', 'field pool: "" is no name'),
        ('{"a": {"quota": ["M40"]}}', "field quota: a list is no object with GPUs"),
        ('{"a": {"quota": {"M40": "4"}}}', 'model "M40": "4" is no number of GPUs'),
        ('{"a": {"quota": {"M40": -1}}}', 'model "M40": -1 is no number of GPUs'),
        ('{"a": {"quota": {"M40": true}}}', "true is no number of GPUs"),
        ('{"a": {"quota": {"M40": 1.005}}}', "1.005 is no number of GPUs from 0 to 1000000 with at most two decimals"),
        ('{"a": {"quota": {"M40": 1e-999999999}}}', "1E-999999999 is no number of GPUs"),
        ('{"a": {"quota": {"M40": 1e999999999}}}', "1E+999999999 is no number of GPUs"),
        ('{"a": {"quota": {"M40": NaN}}}', "NaN is no number of GPUs"),
        ('{"a": {"quota": {"M40": 1000001}}}', "1000001 is no number of GPUs"),
        ('{"a": {"quota": {"\\ud800": 1}}}', '"\\ud800" is no name'),
        ('{"a": {"vcore": 0.5}}', "field vcore: 0.5 is no whole number"),
        ('{"a": {"vmemory": -1}}', "field vmemory: -1 is no whole number"),
        ('{"a": {"vcore": 10000000000000}}', "field vcore: 10000000000000 is no whole number"),
        (json.dumps({"a": {"pool": [f"p{n}" for n in range(257)]}}), "is no list of at most 256 pools"),
        (json.dumps({"a": {"quota": {f"m{n}": 1 for n in range(257)}}}), "each of at most 256 models"),
        (json.dumps({f"n{n}": {} for n in range(20_001)}), "20001 namespaces, at most 20000"),
    ],
    ids=range(29),
)
def test_a_mistake_is_reported_with_the_key_and_the_place(text: str, said: str) -> None:
    """Nothing is guessed: the last good quota stays."""
    with pytest.raises(Corrupt) as caught:
        parse_quota({QUOTA_KEY: text})
    assert said in str(caught.value)
    assert f"key {QUOTA_KEY}" in str(caught.value)


def test_a_config_map_without_the_key_is_reported_with_the_keys_it_has() -> None:
    """A namespace as a key is the likely mistake."""
    with pytest.raises(Corrupt, match=r'no key gpu_quota; it has "team-a", "team-b"'):
        parse_quota({"team-b": "{}", "team-a": "{}"})


_JSON = any_json("a", "pool", "quota", "vcore", "vmemory", "M40")


@given(_JSON.map(json.dumps) | st.text(max_size=100))
def test_any_text_is_read_or_refused_as_corrupt(text: str) -> None:
    """Whatever somebody edits into the ConfigMap, and what is read has only what was checked."""
    try:
        quota = parse_quota({QUOTA_KEY: text})
    except Corrupt:
        return
    for limits in quota.namespaces.values():
        numbers = [*(limits.gpus or {}).values(), limits.vcore, limits.vmemory]
        assert all(number is None or (type(number) is int and number >= 0) for number in numbers)


# --- counting ---


KINDS = (ContainerKind.MAIN, ContainerKind.INIT, ContainerKind.SIDECAR)
main, init, sidecar = (partial(container, "c", kind=kind) for kind in KINDS)


@pytest.mark.parametrize(
    ("containers", "counts"),
    [
        ([main(30, 16)], Use(30, 30, 16)),
        ([main(30, 16), main(20, 8)], Use(50, 50, 24)),
        ([main(200)], Use(200, 200, 2 * 96)),
        ([main(100, 8)], Use(100, 100, 96)),
        ([main(100, 500)], Use(100, 100, 500)),
        ([main()], Use()),
        ([init(60, 4), main(30, 16)], Use(60, 60, 16)),
        ([init(10, 4), main(30, 16)], Use(30, 30, 16)),
        ([init(40, 4), init(50, 2), main(30, 3)], Use(50, 50, 4)),
        ([sidecar(20, 8), main(30, 16)], Use(50, 50, 24)),
        ([sidecar(20, 8), init(70, 1), main(30, 16)], Use(90, 90, 24)),
        ([init(70, 1), sidecar(20, 8), main(30, 16)], Use(70, 70, 24)),
    ],
    ids=range(12),
)
def test_a_pod_counts_what_kubernetes_would_count(containers: list[ContainerSpec], counts: Use) -> None:
    """Init containers next to nothing but the sidecars before them; whole GPUs with all their memory."""
    assert use_of(pod("p", *containers), NAMES, gpu_memory_mib=GPU_MIB) == counts


@pytest.mark.parametrize(("units", "gpus"), [(1, 5), (6, 25), (24, 100)])
def test_gpushares_memory_counts_as_that_part_of_a_gpu(units: int, gpus: int) -> None:
    """Rounded up, and its blocks; it takes no cores."""
    counted = use_of(pod("p", container(units=units)), GPU_MEM_NAMES, gpu_memory_mib=GPU_MIB)
    assert counted == Use(gpus, 0, units * 4)


def test_gpushares_memory_on_gpus_of_unknown_memory_is_not_free() -> None:
    """A node that reports no memory divides nothing by zero."""
    assert use_of(pod("p", container(units=1)), GPU_MEM_NAMES, gpu_memory_mib=0).gpus >= 100


_USES = st.builds(Use, *[st.integers(min_value=0, max_value=300)] * 3)


@given(
    st.lists(
        st.tuples(st.sampled_from("uvw"), st.sampled_from("ab"), st.sampled_from(["M40", "P40"]), st.none() | _USES)
    )
)
def test_usage_is_the_sum_of_its_pods_whatever_came_before(steps: list[tuple[str, str, str, Use | None]]) -> None:
    """Once each, however often it is put; without the one that asks again. Nothing is left once all have gone."""
    usage, known = Usage(), dict[str, tuple[str, str, Use]]()
    for uid, namespace, model, use in steps:
        if use is None:
            usage.remove(PodUid(uid))
            known.pop(uid, None)
        else:
            usage.put(PodUid(uid), namespace, model, use)
            known[uid] = namespace, model, use
    for namespace in "ab":
        for uid in (None, *map(PodUid, "uvw")):
            own = [(model, use) for other, (owner, model, use) in known.items() if owner == namespace and other != uid]
            gpus = sum(use.gpus for model, use in own if model == "M40")
            expected = Use(gpus, sum(use.vcore for _, use in own), sum(use.vmemory for _, use in own))
            assert usage.of(namespace, "M40", without=uid) == expected
    for uid in "uvw":
        usage.remove(PodUid(uid))
    assert all(usage.of(namespace, model) == Use() for namespace in "ab" for model in ("M40", "P40"))


# --- the answer ---


def test_a_namespace_that_the_quota_does_not_name_may_use_everything() -> None:
    """As in gpu-admission."""
    assert check(quota_of(b={}), Use(10_000, 10_000, 10_000), model="", pool="") is None


@pytest.mark.parametrize(
    ("pools", "pool", "said"),
    [
        (["public"], "public", ""),
        (["public", "wx"], "wx", ""),
        (["wx", "public"], "spare", "allows nodes of the pools public, wx, and this node is in pool spare."),
        (["public"], "", "allows nodes of the pools public, and this node is in no pool."),
        ([], "wx", ""),
        ([], "", ""),
    ],
)
def test_a_namespace_uses_the_pools_that_its_quota_names(pools: list[str], pool: str, said: str) -> None:
    """No pools named: every pool, also no pool. The refusal names those that are allowed, and the node's."""
    refused = check(quota_of(a={"pool": pools, "quota": {"M40": 4}}), Use(100, 100, 96), pool=pool)
    assert (refused is None) == (said == "")
    assert refused is None or (refused.reason is RefusalReason.WRONG_POOL and said in refused.detail)


@pytest.mark.parametrize(
    ("limits", "model", "said"),
    [
        ({"quota": {"T4": 1, "M40": 4}}, "P40", "names M40, T4, and none of P40 GPUs"),
        ({"quota": {"T4": 1, "M40": 4}}, "", "names M40, T4, and this node has no label with its GPUs' model"),
        ({"quota": {f"m{n:02}": 1 for n in range(20)}}, "M40", "m07 and 12 more"),
        ({}, "M40", "allows no GPUs at all"),
        ({"vcore": 400}, "any", "asks for 50 vcore; namespace a has used 375 of its quota of 400, so 25 are left"),
        (
            {"vmemory": 42},
            "any",
            "asks for 4 vmemory blocks; namespace a has used 40 of its quota of 42, so 2 are left",
        ),
        ({"vmemory": 30}, "any", "used 40 of its quota of 30, so 0 are left"),
        (
            {"quota": {"M40": 4}},
            "M40",
            "the pod asks for 0.5 M40 GPUs; namespace a has used 3.75 of its quota of 4, so 0.25 are left. "
            "Wait until pods of the namespace end, ask for less, or have its quota raised.",
        ),
    ],
)
def test_a_refusal_says_which_limit_it_is_for(limits: dict[str, Any], model: str, said: str) -> None:
    """A model that is not named may not be used, as in gpu-admission; a node without the label is no model's. Long lists are
    cut for the scheduler's Event. Totals hold over all models, also where the quota was lowered below what is used."""
    refused = check(quota_of(a=limits), Use(50, 50, 4), Use(375, 375, 40), model=model)
    assert refused is not None
    assert refused.reason is RefusalReason.QUOTA_EXCEEDED
    assert said in refused.detail


_FEW = st.builds(Use, *[st.integers(min_value=0, max_value=2)] * 3)


@given(_FEW, _FEW, st.tuples(*[st.integers(min_value=0, max_value=4)] * 3))
def test_what_is_allowed_never_goes_over_the_quota(asked: Use, used: Use, limits: tuple[int, int, int]) -> None:
    """And what is refused would. What a pod does not ask for is not held against it, though others have used it up."""
    gpus, vcore, vmemory = limits
    quota = Quota(namespaces={"a": NamespaceQuota(gpus={"M40": gpus}, vcore=vcore, vmemory=vmemory)})
    amounts = zip((asked.gpus, asked.vcore, asked.vmemory), (used.gpus, used.vcore, used.vmemory), limits, strict=True)
    is_over = any(wanted and had + wanted > limit for wanted, had, limit in amounts)
    assert (check(quota, asked, used) is not None) == is_over
