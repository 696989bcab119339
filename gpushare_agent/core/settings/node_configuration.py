"""Named configurations, one for each node: the settings that say where they are, and the choice of a node's configuration.

A configuration is a file of a ConfigMap that is mounted as a directory; a label of the Node names it. The rules are those
of the config-manager of NVIDIA's plugin (cmd/config-manager/main.go of k8s-device-plugin v0.20.0), with a label of our own
that comes first.
"""

import re
from collections.abc import Collection, Mapping

from msgspec import Struct
from pydantic import Field

from gpushare_agent.core.settings.values import OptionalPath, Section

LABELS = ("gpushare-agent/config", "nvidia.com/device-plugin.config")
"""The first that the Node has counts."""
DEFAULT_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", re.ASCII)


class NodeConfigurationSettings(Section):
    """Settings per node, by a label of the Node (docs/how-to/configure-single-nodes.md)."""

    directory: OptionalPath = None
    """Mounted ConfigMap with the named configurations. Empty: all nodes have the same settings."""
    default: str = Field(default="", max_length=253)
    """Configuration of nodes without the label. Empty: the only one, else the one named default, else none."""


class NamedConfiguration(Struct, frozen=True, kw_only=True):
    """A configuration as it was read."""

    name: str
    content: bytes

    @property
    def source(self) -> str:
        """The name in messages, and in what shows where a value came from."""
        return f"configuration {self.name}"


def choose_name(labels: Mapping[str, str], names: Collection[str], default: str) -> str:
    """The name of a node's configuration, one of `names`; empty where it has none. Raises ValueError: there is none of the
    name that is asked for. What a label says is compared with `names` and used for nothing else."""
    # A label without a value asks for nothing, as for NVIDIA's config-manager.
    label = next((label for label in LABELS if labels.get(label)), None)
    requested = labels[label] if label is not None else default
    if requested:
        if requested in usable_names(names):
            return requested
        asks = f"the Node's label {label}" if label is not None else "node_configuration.default"
        known = ", ".join(usable_names(names)) or "none"
        raise ValueError(
            f"{asks} names the configuration {requested[:253]!r}, which is not there; there are: {known[:500]}"
        )
    usable = usable_names(names)
    if len(usable) == 1:
        return usable[0]
    # Among several none is guessed: the node then has the settings of all nodes.
    return DEFAULT_NAME if DEFAULT_NAME in usable else ""


def usable_names(names: Collection[str]) -> list[str]:
    """The names that can be configurations, sorted: a mounted ConfigMap also has the kubelet's `..data`."""
    return sorted(name for name in names if _NAME.fullmatch(name))
