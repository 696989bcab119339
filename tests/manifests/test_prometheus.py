"""A real Prometheus scrapes an agent on the embedded node: what autoscalers and dashboards ask it has the right values."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import yaml
from aiohttp import ClientError, ClientSession

from tests.agent.support_agent import open_agent
from tests.kit.support_http import free_port
from tests.manifests.test_monitoring import GRAFANA_VARIABLES, autoscaling, expressions
from tests.sandbox.support_sandbox import container, open_test_node, pod
from tests.support_deadline import DEADLINE_S
from tests.support_process import running_process

PROMETHEUS = shutil.which("prometheus")
pytestmark = pytest.mark.skipif(PROMETHEUS is None, reason="prometheus is missing: apt-get install prometheus")
Found = dict[str, float]


async def ask(session: ClientSession, url: str, query: str, label: str) -> Found:
    """By the value of a label; nothing while Prometheus does not answer yet."""
    try:
        async with session.get(f"{url}/api/v1/query", params={"query": query}) as response:
            answer = await response.json() if response.status == 200 else {}
    except ClientError:
        return {}
    return {one["metric"].get(label, ""): float(one["value"][1]) for one in answer.get("data", {}).get("result", ())}


async def test_the_autoscalers_queries_and_dcgms_names_have_the_load_that_there_is(tmp_path: Path) -> None:
    """Two replicas with 30 cores: one uses half of its share, one all."""
    files = autoscaling()
    (rule,) = files["prometheus-adapter"]["rules"]["custom"]
    of_pods = rule["metricsQuery"].replace("<<.LabelMatchers>>", 'namespace="default",pod=~"inference-a|inference-b"')
    of_pods = of_pods.replace("<<.GroupBy>>", "pod")
    whole: str = files["scaledobject"]["spec"]["triggers"][0]["metadata"]["query"]
    async with (
        open_test_node() as node,
        open_agent(
            node, "--sample-period-s=0.05", "--simulated.gpus=1", "--isolation=none", "--web.dcgm-names"
        ) as agent,
        ClientSession() as session,
    ):
        loads = {"inference-a": 0.15, "inference-b": 0.3}
        for name in loads:
            node.api.create_pod(pod(name, container(cores=30, blocks=4)))
        await node.wait_running(*loads)
        pids = {name: node.kubelet.runtime.living(node.uid_of(name))[0].pid for name in loads}
        used = [{"pid": pids[name], "gpu": 0, "sm": sm, "memory_bytes": 2**30} for name, sm in loads.items()]
        node.paths.usage.write_text(json.dumps({"processes": used}))
        port, agents = free_port(), await agent.parts.observability.web.wait_listening()
        scrape = {"job_name": "agent", "honor_labels": True, "static_configs": [{"targets": [f"127.0.0.1:{agents}"]}]}
        configuration = {"global": {"scrape_interval": "500ms", "scrape_timeout": "500ms"}, "scrape_configs": [scrape]}
        (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
        url = f"http://127.0.0.1:{port}"
        # What was scraped before the use was known goes out of the range.
        of_pods, whole = (query.replace("[2m]", "[3s]") for query in (of_pods, whole))
        expected = {
            (of_pods, "pod"): {"inference-a": 0.5, "inference-b": 1.0},
            (whole, ""): {"": 0.75},
            ("DCGM_FI_DEV_GPU_UTIL", "gpu"): {"0": 45.0},
            ("DCGM_FI_DEV_FB_USED", "device"): {"nvidia0": 2048.0},
        }
        command = (
            "prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
            f"--web.listen-address=127.0.0.1:{port}", "--log.level=error",
        )  # fmt: skip
        async with running_process(*command, cwd=tmp_path), asyncio.timeout(DEADLINE_S):
            for (query, label), wanted in expected.items():
                while (await ask(session, url, query, label)) != pytest.approx(wanted):
                    await asyncio.sleep(0.1)
            used_s = 'gpushare_container_gpu_seconds_total{kind="used"}'
            while not (first := await ask(session, url, used_s, "pod")):
                await asyncio.sleep(0.1)
            while (later := await ask(session, url, used_s, "pod")) == first:
                await asyncio.sleep(0.1)
            for expression in expressions():
                for variable, value in {**GRAFANA_VARIABLES, "$__rate_interval": "10s", "$__range": "10s"}.items():
                    expression = expression.replace(variable, value)
                async with session.get(f"{url}/api/v1/query", params={"query": expression}) as response:
                    assert response.status == 200, (expression, await response.text())
    assert set(later) == set(loads)
    assert all(later[name] >= first[name] for name in first)
