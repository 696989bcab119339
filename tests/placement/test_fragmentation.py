"""Expected fragmentation and the cost of a place: what policy fgd decides by."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from bench.inflation import choices, fits
from gpushare_agent.core.placement.fragmentation import WHOLE, FreeNode, KindCosts, PodKind, TypicalPods

MODELS = ("A10", "T4", "")
kinds = st.builds(
    lambda gpus, parts, cpu, memory, models: PodKind(
        cpu, memory, gpus, (parts if gpus == 1 else WHOLE) if gpus else 0, tuple(sorted(models))
    ),
    st.integers(0, 3),
    st.integers(1, WHOLE),
    st.integers(0, 8).map(lambda count: 1000 * count),
    st.integers(0, 64),
    st.sets(st.sampled_from(("A10", "T4")), max_size=2),
)
nodes = st.builds(
    lambda cpu, memory, gpus, model: FreeNode(cpu, memory, tuple(sorted(gpus)), model),
    st.integers(0, 8).map(lambda count: 1000 * count),
    st.integers(0, 64),
    st.lists(st.integers(0, WHOLE) | st.just(WHOLE), min_size=1, max_size=4),
    st.sampled_from(MODELS),
)


def useless_to(kind: PodKind, node: FreeNode) -> int:
    """The paper's definition, word for word: all free parts where the node cannot take the pod, else those too small."""
    takes = [free for free in node.gpus if free >= kind.parts]
    is_model = not kind.models or node.model in kind.models
    if len(takes) < kind.gpus or node.cpu_milli < kind.cpu_milli or node.memory_mib < kind.memory_mib or not is_model:
        return sum(node.gpus)
    return sum(free for free in node.gpus if free < kind.parts)


def cost(typical: TypicalPods, node: FreeNode, kind: PodKind) -> float:
    return KindCosts(typical, kind).of(node)


@given(nodes, st.lists(kinds, min_size=1, max_size=6))
def test_fragmentation_is_the_mean_of_what_typical_pods_cannot_use(node: FreeNode, pods: list[PodKind]) -> None:
    """Over those that ask for GPUs; the others use none."""
    asking = [pod for pod in pods if pod.gpus]
    mean = Fraction(sum(useless_to(pod, node) for pod in asking), len(asking)) if asking else Fraction(0)
    typical = TypicalPods(Counter(pods), {})
    masks = typical.masks(node.gpu_mib)
    roomy = masks.roomy(node.model, node.cpu_milli, node.memory_mib)
    assert abs(typical.fragmentation_of(masks, roomy, node.gpus) - mean) < 1e-6


@given(nodes, kinds)
def test_what_is_left_has_exactly_what_the_pod_does_not_have(node: FreeNode, kind: PodKind) -> None:
    """For every choice, and a node fits exactly where the definition says that it can take the pod."""
    takes = useless_to(kind, node) < sum(node.gpus) or not kind.gpus
    if not fits(node, kind):
        assert not takes or node.cpu_milli < kind.cpu_milli or node.memory_mib < kind.memory_mib
        return
    for left in choices(node, kind):
        assert sum(node.gpus) - sum(left.gpus) == kind.gpus * kind.parts
        assert min(left.gpus) >= 0
        assert list(left.gpus) == sorted(left.gpus)
        assert (left.cpu_milli, left.memory_mib) == (node.cpu_milli - kind.cpu_milli, node.memory_mib - kind.memory_mib)


def test_a_share_completes_a_gpu_that_nobody_else_could_use() -> None:
    """Thirty hundredths are left of one GPU, fifty of another; most pods ask for fifty: the thirty are of no other use."""
    assert FreeNode(8000, 64, (30, 50)).left(PodKind(0, 0, 1, 30)).gpus == (0, 50)


def test_a_pod_leaves_the_node_whose_cpus_others_need_beside_the_gpus() -> None:
    """Both nodes have a free GPU; on the first one the pod takes the CPUs that typical pods ask for with it."""
    typical = TypicalPods({PodKind(4000, 0, 1, WHOLE): 1}, {"": 2})
    cpu_pod = PodKind(4000, 0, 0, 0)
    strands, harmless = FreeNode(4000, 64, (WHOLE,)), FreeNode(16000, 64, (WHOLE,))
    assert cost(typical, harmless, cpu_pod) < cost(typical, strands, cpu_pod)


def test_a_model_that_others_name_is_left_to_them() -> None:
    """A pod that may run anywhere goes to the T4 where half of the pods need an A10."""
    typical = TypicalPods({PodKind(0, 0, 1, WHOLE, ("A10",)): 1, PodKind(0, 0, 1, WHOLE): 1}, {"A10": 8, "T4": 8})
    anywhere = PodKind(0, 0, 1, WHOLE)
    a10, t4 = (FreeNode(8000, 64, (WHOLE,) * 4, model) for model in ("A10", "T4"))
    assert cost(typical, t4, anywhere) < cost(typical, a10, anywhere)


def test_without_typical_pods_fuller_nodes_are_preferred() -> None:
    """As binpack does, until pods have been seen."""
    typical, share = TypicalPods({}, {}), PodKind(0, 0, 1, 50)
    fuller, emptier = FreeNode(8000, 64, (50, WHOLE)), FreeNode(8000, 64, (WHOLE, WHOLE))
    assert cost(typical, fuller, share) < cost(typical, emptier, share)
    assert fuller.left(share).gpus == (0, WHOLE)
