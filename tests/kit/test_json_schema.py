"""Every reader of JSON against texts that make parsers fail: an answer or an error of ours, nothing else."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from inspect import isawaitable
from pathlib import Path

import pytest
from msgspec import Raw
from structlog.testing import capture_logs

from gpushare_agent.agent.admission.resizing import ResizeFile
from gpushare_agent.agent.delivery.cdi_files import _NoSpecError, _spec
from gpushare_agent.agent.delivery.device_nodes import read_extra_devices
from gpushare_agent.agent.delivery.volume_config import read_volume_config
from gpushare_agent.agent.dra.claim_files import ClaimFiles
from gpushare_agent.agent.gpus.saved_health import HealthStateFile
from gpushare_agent.agent.isolation.gpushare.probing import STATE_NAME, state_file
from gpushare_agent.agent.kubelet.records import read_checkpoint
from gpushare_agent.agent.observability.saved_past import FILE
from gpushare_agent.agent.observability.usage_history import UsageHistory
from gpushare_agent.core.claims.claim import claim_ref, read_claim, read_config
from gpushare_agent.core.claims.gpu_config import read_gpu_config
from gpushare_agent.core.formats.simulated_gpus import parse_faults, parse_usage
from gpushare_agent.core.kube.objects import object_meta, read_node_json
from gpushare_agent.core.kube.pods import parse_pod, read_pod_json
from gpushare_agent.core.model.errors import AgentError
from gpushare_agent.core.node_report.annotations import parse_allocations, parse_gpus
from gpushare_agent.extender.app import read_admission_config
from gpushare_agent.extender.decisions.quota import QUOTA_KEY, parse_quota
from gpushare_agent.extender.objects import read_quota
from gpushare_agent.kubectl.agent_client import _json_object
from tests.observability.support_web import no_past
from tests.support_core import NAMES
from tests.support_json import HOSTILE

Read = Callable[[bytes, Path], object | Awaitable[object]]


def _in_file(read: Callable[[Path], object | Awaitable[object]]) -> Read:
    def reading(content: bytes, directory: Path) -> object | Awaitable[object]:
        path = directory / "file.json"
        path.write_bytes(content)
        path.chmod(0o600)
        return read(path)

    return reading


def _text(content: bytes) -> str:
    return content.decode("utf-8", "surrogatepass" if b"\xed" in content else "replace")


def _load_claim(path: Path) -> object:
    uid = "11111111-2222-3333-4444-555555555555"
    path.rename(path.with_name(f"{uid}.json"))
    return ClaimFiles(path.parent, path.parent).load()


READERS: dict[str, Read] = {
    "gpus": lambda content, _: parse_gpus(_text(content)),
    "allocations": lambda content, _: parse_allocations(_text(content), range(4)),
    "quota": lambda content, _: parse_quota({QUOTA_KEY: _text(content)}),
    "quota's ConfigMap": lambda content, _: read_quota(Raw(content)),
    "pod": lambda content, _: parse_pod(read_pod_json(Raw(content)), NAMES.names),
    "node": lambda content, _: read_node_json(Raw(content)),
    "object": lambda content, _: object_meta(Raw(content), "object"),
    "claim": lambda content, _: read_claim(Raw(content), pool="n1"),
    "claim's name": lambda content, _: claim_ref(Raw(content)),
    "claim's parameters": lambda content, _: read_config(Raw(content)),
    "NVIDIA's parameters": lambda content, _: read_gpu_config(Raw(content)),
    "CDI spec": lambda content, _: _spec(content, is_json=True),
    "CDI spec in YAML": lambda content, _: _spec(content[:2000], is_json=False),
    "an agent's answer": lambda content, _: _json_object(content, "it"),
    "health.json": _in_file(lambda path: HealthStateFile(path).load()),
    "history.json": _in_file(
        lambda path: no_past(UsageHistory(60, 6), path.rename(path.with_name(FILE)).parent).load()
    ),
    "resize.json": _in_file(lambda path: ResizeFile(path).load()),
    "probe.json": _in_file(lambda path: state_file(path.rename(path.with_name(STATE_NAME)).parent).load(bool, int)),
    "claims": _in_file(_load_claim),
    "checkpoint": _in_file(read_checkpoint),
    "volume.conf": _in_file(read_volume_config),
    "extra config": _in_file(read_extra_devices),
    "gpu-admission's configuration": _in_file(read_admission_config),
    "simulated faults": lambda content, _: parse_faults(_text(content)),
    "simulated usage": lambda content, _: parse_usage(_text(content)),
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("reader", READERS)
async def test_no_content_gets_past_a_reader(reader: str, name: str, short_dir: Path) -> None:
    with capture_logs():
        try:
            found = READERS[reader](HOSTILE[name], short_dir)
            if isawaitable(found):
                await found
        except (AgentError, _NoSpecError):
            pass
        except ValueError:
            assert reader.startswith("simulated")  # as its callers expect
