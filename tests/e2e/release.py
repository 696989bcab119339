"""The product as a user installs it with Helm, as docs/how-to/install.md has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.cluster import DEADLINE_S, Cluster, Object
from tests.e2e.installation import NODE_LABEL, SYSTEM, Installation, take_off_node
from tests.manifests.support_chart import CHART, RELEASE, helm

WAIT_S = 2 * DEADLINE_S


class Release:
    """One release of the chart, on the node of the run."""

    def __init__(self, cluster: Cluster, *, folder: Path, image: str) -> None:
        repository, _, tag = image.rpartition(":")
        self._cluster = cluster
        self._file = folder / "values.yaml"
        self._values: Object = {
            "image": {"repository": repository, "tag": tag},
            "nodeSelector": {"kubernetes.io/hostname": cluster.hostname},
            "simulated": {"enabled": True},
        }

    def install(self) -> None:
        self._cluster.run("label", "node", self._cluster.node, f"{NODE_LABEL}=enable", "--overwrite")
        self._helm("install", RELEASE, CHART, "--create-namespace", "-f", self._with_values())

    def upgrade(self, **values: Any) -> None:
        """With further values; it does not wait for the rollout."""
        self._values |= values
        self._helm("upgrade", RELEASE, CHART, "-f", self._with_values())

    def rendered(self) -> str:
        """What it creates with its values: the manifests that another tool would apply."""
        done = helm("template", RELEASE, CHART, "-n", SYSTEM, "-f", self._with_values())
        assert done.returncode == 0, done.stderr
        return done.stdout

    def test(self) -> str:
        """`helm test`, and what its pod printed."""
        self._helm("test", RELEASE, "--timeout", "5m")
        return self._cluster.run("-n", SYSTEM, "logs", "gpushare-check")

    def remove(self) -> None:
        """The steps 1 and 2 of docs/how-to/uninstall.md."""
        take_off_node(self._cluster)
        self._helm("uninstall", RELEASE)
        self._cluster.run("delete", "namespace", SYSTEM, f"--timeout={DEADLINE_S:.0f}s", timeout_s=DEADLINE_S + 20)

    @property
    def is_there(self) -> bool:
        return bool(self._cluster.items("secrets", "-n", SYSTEM, "-l", f"owner=helm,name={RELEASE}"))

    def _with_values(self) -> Path:
        self._file.write_text(json.dumps(self._values), encoding="utf-8")
        return self._file

    def _helm(self, *arguments: str | Path) -> None:
        done = helm(*arguments, "-n", SYSTEM, timeout_s=WAIT_S)
        assert done.returncode == 0, done.stdout + done.stderr


@contextmanager
def open_release(cluster: Cluster, installation: Installation, folder: Path) -> Iterator[Release]:
    """A release in the place of the run's own installation, ready. Skips the test without Helm."""
    helm("version")
    installation.remove()
    release = Release(cluster, folder=folder, image=installation.image)
    release.install()
    try:
        installation.wait_ready()
        yield release
    finally:
        if release.is_there:
            release.remove()
