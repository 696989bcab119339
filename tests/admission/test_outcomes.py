"""How an outcome is reported: a record, and an Event that names what each GPU lacked; and the last records."""

from __future__ import annotations

from msgspec.structs import replace

from gpushare_agent.agent.admission.decisions.decide import Decision
from gpushare_agent.agent.admission.decisions.identity import Target
from gpushare_agent.agent.admission.outcomes import DecisionLog, OutcomeReporter
from gpushare_agent.core.kube.events import MAX_MESSAGE_CHARS
from gpushare_agent.core.model.decision_records import Asked, Candidate, DecisionRecord, Outcome
from gpushare_agent.core.model.errors import RefusalReason, Refused
from gpushare_agent.core.model.names import VCORE_RESOURCE, VMEMORY_RESOURCE, GpuUuid
from gpushare_agent.core.model.pods import Pod
from gpushare_agent.core.placement.place import Placed
from tests.support_core import allocation, container, ids, pod
from tests.support_node import node_of


class Reported:
    """Every destination of a report."""

    def __init__(self) -> None:
        self.log = DecisionLog(10)
        self.events: list[str] = []
        self.counted: list[tuple[str, str]] = []
        self.reporter = OutcomeReporter(
            node=node_of(metrics=self, decisions=self.log),
            events=self,
            wall_clock_ns=lambda: 1_700_000_000_000_000_000,
        )

    def admission(self, resource: str, outcome: str, reason: str) -> None:
        self.counted.append((outcome, reason))

    def refused(self, pod: Pod, refused: Refused) -> None:
        self.events.append(refused.detail)


def why(verdict: str = "10 cores short", gpus: int = 2, chosen: int | None = None) -> Decision:
    return Decision(
        target=TARGET,
        resource=VCORE_RESOURCE,
        asked=Asked(cores=30, memory_bytes=1),
        candidates=tuple(
            Candidate(
                index=index,
                label=str(index),
                uuid=GpuUuid(f"GPU-{index}"),
                is_healthy=True,
                free_cores=20,
                free_memory_bytes=0,
                total_memory_bytes=0,
                is_chosen=index == chosen,
                verdict="chosen" if index == chosen else verdict,
            )
            for index in range(gpus)
        ),
        placed=Placed(gpus=(), policy="share", explanation="GPU 1: the fullest of 2 GPUs that fit"),
    )


OWNER = pod("p", container(cores=30, blocks=10))
TARGET = Target(pod=OWNER, container=OWNER.containers[0])


def test_an_allocation_is_recorded_with_its_reason() -> None:
    """Once: what follows the plan is only counted."""
    reported = Reported()
    given = allocation(OWNER, "main", ids(1, range(30)), [])
    reported.reporter.allocated(why(chosen=1), given)
    reported.reporter.allocated(Decision(target=TARGET, resource=VMEMORY_RESOURCE), given)
    (record,) = reported.log.newest(5)
    assert (record.namespace, record.pod, record.container, record.at) == ("default", "p", "main", 1_700_000_000.0)
    assert (record.outcome, record.policy, record.gpus) == ("allocated", "share", (1,))
    assert record.explanation == "GPU 1: the fullest of 2 GPUs that fit"
    assert reported.counted == [("allocated", "")] * 2


def test_a_record_names_the_annotations_that_were_mistyped() -> None:
    """For `explain`, whatever became of the container."""
    owner = replace(OWNER, annotations={"tencent.com/gpu-isolatoin": "mps"})
    reported = Reported()
    decision = replace(why(), target=Target(pod=owner, container=owner.containers[0]))
    reported.reporter.refused(decision, Refused(reason=RefusalReason.FRAGMENTED, detail="x"))
    assert reported.log.newest(1)[0].ignored == (
        "annotation tencent.com/gpu-isolatoin is unknown and has no effect: did you mean tencent.com/gpu-isolation?"
    )


def test_a_refusals_event_names_what_each_gpu_lacked() -> None:
    """The record keeps the refusal's own text next to the candidates."""
    reported = Reported()
    refused = Refused(reason=RefusalReason.FRAGMENTED, detail="no GPU for this.")
    reported.reporter.refused(why(chosen=0), refused)
    assert reported.events == ["no GPU for this. GPU by GPU: GPU 0: it was planned here; GPU 1: 10 cores short."]
    (record,) = reported.log.newest(5)
    assert (record.reason, record.explanation, record.gpus) == ("Fragmented", "no GPU for this.", ())
    assert not any(candidate.is_chosen for candidate in record.candidates)


def test_an_event_keeps_within_its_length() -> None:
    """The refusal itself comes first; GPUs are left out rather than cut."""
    reported = Reported()
    long = Refused(reason=RefusalReason.FRAGMENTED, detail="d" * (MAX_MESSAGE_CHARS - 100) + ".")
    reported.reporter.refused(why(gpus=64), long)
    reported.reporter.refused(why(), Refused(reason=long.reason, detail="d" * 2000))
    assert len(reported.events[0]) <= MAX_MESSAGE_CHARS and reported.events[0].endswith("; ….")
    assert reported.events[1] == "d" * 2000


def test_a_refused_start_is_recorded_and_reported_and_no_admission() -> None:
    """The container was admitted before."""
    reported = Reported()
    reported.reporter.start_refused(TARGET, VCORE_RESOURCE, Refused(reason=RefusalReason.NOT_READY, detail="disk full"))
    assert reported.log.newest(5)[0].explanation == "disk full"
    assert reported.events == ["disk full"] and reported.counted == []


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
