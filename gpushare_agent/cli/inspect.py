"""`gpushare-agent inspect`: what is allocated of every GPU, of one node by its agent or of all by the API server.

The agent's ledger is the truth about its node. Over all nodes the sums come from what each agent reports of it on the
node's object (node_reports.py), never from a pod's annotations, which any tenant can write.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from gpushare_agent.cli.agent_client import read_node
from gpushare_agent.cli.agent_documents import GpuDocument, NodeDocument
from gpushare_agent.cli.agent_pods import AgentTarget, open_agent
from gpushare_agent.cli.cluster_nodes import open_cluster, read_cluster
from gpushare_agent.cli.command_line import Form
from gpushare_agent.cli.render_inspect import inspection_document, inspection_tables
from gpushare_agent.cli.render_text import in_namespace, print_as
from gpushare_agent.settings.settings import Settings

_GPU_FIELDS = ("index", "uuid", "name", "mig", "is_healthy", "health_reason", "cordoned", "cores", "memory")
_CONTAINER_FIELDS = ("namespace", "pod", "container", "cores", "memory_bytes")
_NO_NODE = (
    "no node has GPUs: none has the annotation gpushare-agent/cards, or a capacity of the resources; is the agent installed"
    " (docs/how-to/install.md)?"
)


async def run(
    settings: Settings, target: AgentTarget, *, is_all_nodes: bool, with_details: bool, namespace: str = "", form: Form
) -> int:
    """Raises AgentError."""
    if is_all_nodes:
        async with open_cluster(settings) as api:
            nodes = await read_cluster(api, settings)
    else:
        async with open_agent(settings, target) as agent:
            nodes = [node_of_document(await read_node(agent))]
    document = inspection_document(nodes)
    for node in document["nodes"]:
        node["containers"] = in_namespace(node["containers"], namespace)

    def tables(_width: int) -> Sequence[RenderableType]:
        return (
            inspection_tables(document, with_details=with_details, is_wide=form == "wide")
            if nodes
            else [Text(_NO_NODE)]
        )

    print_as(form, document, tables)
    return 0


def gpu_of_document(gpu: GpuDocument) -> dict[str, Any]:
    """Without its use."""
    return {name: value for name, value in gpu.items() if name in _GPU_FIELDS}


def node_of_document(document: NodeDocument) -> dict[str, Any]:
    """One node as its agent shows it."""
    return {
        "node": document["node"],
        "remark": "",
        "gpus": [gpu_of_document(gpu) for gpu in document["gpus"]],
        "containers": [
            {
                **{name: value for name, value in container.items() if name in _CONTAINER_FIELDS},
                "gpus": [gpu["index"] for gpu in container["gpus"]],
                "remark": "",
            }
            for container in document["containers"]
        ],
    }
