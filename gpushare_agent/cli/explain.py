"""`gpushare-agent explain POD`: why a pod's containers got their GPUs, or why they were refused.

The agent has its last decisions in memory (setting decisions.kept), none from before its start; the answer states that.
Exit codes: 0 with a decision, 1 without.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.cli.agent_client import AgentClient, read_decisions
from gpushare_agent.cli.agent_documents import DecisionDocument
from gpushare_agent.cli.agent_pods import AgentTarget, open_agent
from gpushare_agent.cli.command_line import Form
from gpushare_agent.cli.render_explain import decision_parts
from gpushare_agent.cli.render_text import counted, plain, print_as
from gpushare_agent.model.errors import NotFound
from gpushare_agent.settings.settings import Settings

SCHEMA = 2
_SEARCHED_FOR_UNATTRIBUTED = 200


class PodQuery(Struct, frozen=True, kw_only=True):
    """Which pod: an empty namespace means any, an empty container means all."""

    pod: str
    namespace: str = ""
    container: str = ""
    is_any_namespace: bool = False


async def run(settings: Settings, target: AgentTarget, query: PodQuery, *, form: Form) -> int:
    """Raises AgentError, NotFound where nothing was decided about the pod."""
    is_in_default = (target.is_remote or target.node) and not query.is_any_namespace
    namespace = query.namespace or ("default" if is_in_default else "")
    async with open_agent(settings, target, pod=query.pod, namespace=namespace) as agent:
        decisions = await read_decisions(agent, pod=query.pod, namespace=namespace)
        chosen = newest_of_containers(decisions, query.container)
        if not chosen:
            raise NotFound(await _nothing_known(agent, query, namespace, decisions))
    document = {"schema": SCHEMA, "pod": query.pod, "decisions": chosen}

    def tables(width: int) -> Sequence[RenderableType]:
        return [part for decision in chosen for part in (*decision_parts(decision, width), Text(""))]

    print_as(form, document, tables)
    return 0


def newest_of_containers(decisions: Sequence[DecisionDocument], container: str) -> list[DecisionDocument]:
    """Of each container the newest decision, in the order in which they were decided. `decisions` begins with the newest.

    A pod created again under the same name is another pod: only the newest one's count, in each namespace.
    """
    pods: dict[str, str] = {}
    newest: dict[tuple[str, str], DecisionDocument] = {}
    for decision in decisions:
        pod = pods.setdefault(decision["namespace"], decision["pod_uid"])
        if decision["pod_uid"] == pod and (not container or decision["container"] == container):
            newest.setdefault((decision["namespace"], decision["container"]), decision)
    return sorted(newest.values(), key=lambda decision: (decision["namespace"], decision["number"]))


async def _nothing_known(
    agent: AgentClient, query: PodQuery, namespace: str, decisions: Sequence[DecisionDocument]
) -> str:
    name = f"{namespace}/{query.pod}" if namespace else query.pod
    if decisions:
        known = ", ".join(sorted({plain(decision["container"]) for decision in decisions}))
        return f"{agent.name} has decided nothing about container {query.container} of pod {name}, but about: {known}"
    latest = await read_decisions(agent, limit=_SEARCHED_FOR_UNATTRIBUTED)
    unattributed = [decision for decision in latest if not decision["pod"]]
    seen = (
        f" It has refused {counted(len(unattributed), 'call')} for a pod that it could not identify, the last one so: "
        f"{plain(unattributed[0]['explanation'])}."
        if unattributed
        else ""
    )
    in_namespace = f" -n {namespace}" if namespace else ""
    return (
        f"{agent.name} has decided nothing about pod {name}. It may be on another node, wait for the scheduler, or request"
        f" no share of a GPU, or the decision was before the agent started or too long ago.{seen} See its Events: "
        f"kubectl describe pod{in_namespace} {query.pod}"
    )
