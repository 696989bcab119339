"""GPUShare's demos on the embedded node, built from their fields: demo/binpack-1 of gpushare-device-plugin, and samples/
1.yaml to 4.yaml of gpushare-scheduler-extender."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.sandbox.support_sandbox_cli import sandbox

pytestmark = pytest.mark.slow
IMAGE = "cheyang/gpu-player:v2"


def workload(kind: str, version: str, name: str, units: int, **spec: Any) -> dict[str, Any]:
    labels = {"app": name}
    limits = {"resources": {"limits": {"aliyun.com/gpu-mem": units}}}
    container = {"name": name, "image": IMAGE, **limits}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    made = {"selector": {"matchLabels": labels}, "template": template, **spec}
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": made}


def binpack() -> list[dict[str, Any]]:
    """A StatefulSet of a version that Kubernetes 1.16 removed, as it is there, its Service, and the Job next to it."""
    service = {"ports": [{"port": 80, "name": "web"}], "clusterIP": "None", "selector": {"app": "binpack-1"}}
    limits = {"limits": {"aliyun.com/gpu-mem": 2}}
    job = {"name": "gpu-job", "image": "alpine:3.6", "resources": limits, "command": ["sleep", "30s"]}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "binpack-1"}, "spec": service},
        workload("StatefulSet", "apps/v1beta1", "binpack-1", 2, replicas=3, serviceName="binpack-1"),
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": "gpu-job"},
            "spec": {"backoffLimit": 0, "template": {"spec": {"containers": [job], "restartPolicy": "Never"}}},
        },
    ]


async def shown(short_dir: Path, *flags: str, objects: list[dict[str, Any]]) -> tuple[int, dict[str, Any], str]:
    manifest = short_dir / "demo.yaml"
    manifest.write_text(yaml.safe_dump_all(objects))
    once = ("--state-dir", short_dir / "s", "--port", "0", "--once", "-o", "json", "--samples", "none")
    done = await sandbox(*once, "--gpus", "2", *flags, "--apply", manifest)
    return done.code, json.loads(done.out), done.err


async def test_the_binpack_demo_runs_on_one_gpu(short_dir: Path) -> None:
    """With GPUShare's own flag for the unit, on GPUs of 24 GiB."""
    code, document, errors = await shown(short_dir, "--memory-unit=GiB", objects=binpack())
    assert code == 0, errors
    pods = {one["name"]: one for one in document["pods"]}
    named = {name if name.startswith("binpack") else name[: len("gpu-job")]: one for name, one in pods.items()}
    assert named.keys() == {"binpack-1-0", "binpack-1-1", "binpack-1-2", "gpu-job"}
    assert {one["phase"] for one in named.values()} == {"Running"}
    assert {tuple(one["containers"][0]["gpus"]) for one in named.values()} == {(0,)}
    env = named["binpack-1-2"]["containers"][0]["env"]
    assert (env["ALIYUN_COM_GPU_MEM_CONTAINER"], env["ALIYUN_COM_GPU_MEM_DEV"]) == ("2", "24")


async def test_the_samples_run_and_the_one_in_mib_waits_where_units_are_gib(short_dir: Path) -> None:
    """samples/4.yaml asks for 16276, which are GiB here; the other three run."""
    objects = [
        workload("Deployment", "apps/v1", f"binpack-{n}", 2 if n < 4 else 16276, replicas=1) for n in range(1, 5)
    ]
    code, document, _ = await shown(short_dir, "--memory-unit=GiB", objects=objects)
    phases = {one["name"][: len("binpack-1")]: one["phase"] for one in document["pods"]}
    assert (code, phases) == (
        1,
        {"binpack-1": "Running", "binpack-2": "Running", "binpack-3": "Running", "binpack-4": "Pending"},
    )
