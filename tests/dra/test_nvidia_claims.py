"""Claims in the forms of the suites and examples of NVIDIA's DRA driver, with the real agent in the sandbox.

What tests/e2e/test_nvidia_dra.py has shown on a cluster, without one. The claims are our own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.dra.support_claims import gpu_config
from tests.sandbox.support_containers import needs_processes
from tests.sandbox.support_sandbox_cli import sandbox

pytestmark = [pytest.mark.slow, needs_processes]
Manifest = dict[str, Any]


def template(name: str, *config: Manifest, **request: Any) -> Manifest:
    """One whole GPU, or what else the request says."""
    return claim(name, *config, **request) | {
        "kind": "ResourceClaimTemplate",
        "spec": {"spec": claim(name, *config, **request)["spec"]},
    }


def claim(name: str, *config: Manifest, **request: Any) -> Manifest:
    exactly = {"deviceClassName": "gpu.nvidia.com", **request}
    devices = {
        "requests": [{"name": "gpu", "exactly": exactly}],
        "config": [{"opaque": one["opaque"]} for one in config],
    }
    version, kind = "resource.k8s.io/v1", "ResourceClaim"
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}, "spec": {"devices": devices}}


def pod(name: str, *containers: Sequence[str], kind: str = "resourceClaimTemplateName", **claims: str) -> Manifest:
    """`claims` are templates, or ResourceClaims by the other kind, by their names in the pod; `containers` have the names
    that each uses, and one container uses all where none is given."""
    uses = containers or [tuple(claims)]
    spec = {
        "containers": [
            {"name": f"c{n}", "image": "i", "resources": {"claims": [{"name": one} for one in used]}}
            for n, used in enumerate(uses)
        ],
        "resourceClaims": [{"name": own, kind: one} for own, one in claims.items()],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def selecting(name: str, expression: str) -> Manifest:
    return template(name, selectors=[{"cel": {"expression": expression}}])


async def gpus_of(short_dir: Path, *objects: Manifest, flags: Sequence[str] = ()) -> dict[str, list[list[int]]]:
    """By pod: the GPUs of each container; none of a pod that waits."""
    manifest = short_dir / "claims.yaml"
    manifest.write_text(yaml.safe_dump_all(objects))
    once = ("--state-dir", short_dir / "s", "--port", "0", "--once", "-o", "json", "--samples", "none")
    done = await sandbox(*once, "--dra", "--dra.nvidia-names=true", "--gpus", "10", *flags, "--apply", manifest)
    pods = json.loads(done.out)["pods"]
    return {one["name"]: [c["gpus"] for c in one["containers"]] * (one["phase"] == "Running") for one in pods}


async def test_whole_gpus_are_given_and_shared_as_the_claims_say(short_dir: Path) -> None:
    """BATS basic, sharing and robustness; gpu-test1, 2, 3, 7 and 8."""
    sliced = gpu_config("TimeSlicing", timeSlicingConfig={"interval": "Short"})
    found = await gpus_of(
        short_dir,
        template("whole"),
        template("two", count=2),
        template("sliced", sliced),
        claim("shared"),
        pod("one", g="whole"),
        pod("together", ["g"], ["g"], g="sliced"),
        pod("each", ["g"], ["h"], g="whole", h="whole"),
        pod("both", g="whole", h="whole"),
        pod("first", g="shared", kind="resourceClaimName"),
        pod("second", g="shared", kind="resourceClaimName"),
        pod("by-count", g="two"),
    )
    assert found == {
        "one": [[0]],
        "together": [[1], [1]],
        "each": [[2], [3]],
        "both": [[4, 5]],
        "first": [[6]],
        "second": [[6]],
        "by-count": [[7, 8]],
    }


async def test_claims_select_by_what_the_driver_has_and_share_by_memory(short_dir: Path) -> None:
    """The Go suite; BATS consumable_shares by memory; gpu-test6."""
    attributes, capacity = "device.attributes['gpu.nvidia.com']", "device.capacity['gpu.nvidia.com']"
    found = await gpus_of(
        short_dir,
        selecting("version", f"{attributes}.driverVersion.compareTo(semver('535.0.0')) >= 0"),
        selecting("memory", f"{capacity}.memory.compareTo(quantity('21Gi')) >= 0"),
        selecting("architecture", f"{attributes}.architecture == 'Ampere'"),
        *(
            selecting(name, f"{attributes}.productName.lowerAscii().matches('^.*{name}.*$')")
            for name in ("a100", "h300")
        ),
        template("part", capacity={"requests": {"memory": "2Gi"}}),
        *(pod(f"by-{name}", g=name) for name in ("version", "memory", "architecture", "a100", "h300")),
        *(pod(name, g="part") for name in ("part-0", "part-1")),
        flags=("--simulated.gpu-name=NVIDIA A100 24GB",),
    )
    assert found == {
        "by-version": [[0]],
        "by-memory": [[1]],
        "by-architecture": [[2]],
        "by-a100": [[3]],
        "by-h300": [],
        "part-0": [[4]],
        "part-1": [[4]],
    }


@pytest.mark.parametrize(("shares", "asked"), [("unlimited", {}), ("4", {"capacity": {"requests": {"shares": "1"}}})])
async def test_gpus_are_shared_without_limits_by_the_setting(short_dir: Path, shares: str, asked: Manifest) -> None:
    """The Go suite's unlimited spec, BATS consumable_shares by number: five pods, and four shares of a GPU."""
    objects = [pod(f"p{n}", g="share") for n in range(5)]
    found = await gpus_of(short_dir, template("share", **asked), *objects, flags=(f"--dra.consumable-shares={shares}",))
    assert found == {f"p{n}": [[0 if n < 4 or shares == "unlimited" else 1]] for n in range(5)}


async def test_a_container_has_the_gpus_of_several_claims_by_cdi(short_dir: Path) -> None:
    """Of claims that no template makes too: the lists add up."""
    shared = [
        pod(name, **claims, kind="resourceClaimName")
        for name, claims in (("p", {"a": "one", "b": "two"}), ("q", {"a": "one"}))
    ]
    found = await gpus_of(short_dir, claim("one"), claim("two"), *shared, flags=("--device-list-strategy=cdi-cri",))
    assert found == {"p": [[0, 1]], "q": [[0]]}
