"""The last decisions: numbered, bounded, found by pod."""

from __future__ import annotations

from gpushare_agent.agent.admission.outcomes import DecisionLog
from gpushare_agent.core.model.decision_records import DecisionRecord, Outcome


def record(pod: str, namespace: str = "default") -> DecisionRecord:
    return DecisionRecord(
        number=0,
        at=1.0,
        namespace=namespace,
        pod=pod,
        pod_uid=f"uid-{pod}",
        container="main",
        resource="tencent.com/vcuda-core",
        outcome=Outcome.ALLOCATED,
        reason="",
        explanation="GPU 0",
        policy="share",
        gpus=(0,),
        labels=("0",),
        asked=None,
        candidates=(),
    )


def test_only_the_last_decisions_are_kept_newest_first() -> None:
    """Numbers continue though old records are dropped."""
    log = DecisionLog(3)
    for name in "abcde":
        log.add(record(name))
    assert [(r.number, r.pod) for r in log.newest(10)] == [(5, "e"), (4, "d"), (3, "c")]
    assert [r.pod for r in log.newest(2)] == ["e", "d"]


def test_decisions_are_found_by_pod_and_since_a_number() -> None:
    """A name alone finds it in every namespace."""
    log = DecisionLog(10)
    for name, namespace in (("a", "x"), ("a", "y"), ("b", "x")):
        log.add(record(name, namespace))
    assert [r.namespace for r in log.newest(10, pod="a")] == ["y", "x"]
    assert [r.number for r in log.newest(10, pod="a", namespace="x")] == [1]
    assert [r.number for r in log.newest(10, after=2)] == [3]


def test_a_reload_keeps_the_records_and_their_numbers() -> None:
    """As many as the new settings keep."""
    old, new = DecisionLog(10), DecisionLog(2)
    for name in "abc":
        old.add(record(name))
    new.take_over(old)
    assert [(r.number, r.pod) for r in new.newest(10)] == [(3, "c"), (2, "b")]
    new.add(record("d"))
    assert [r.number for r in new.newest(1)] == [4]
