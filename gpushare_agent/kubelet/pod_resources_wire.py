"""From the bytes of a PodResources answer to the model's values.

Not for asking the kubelet: that is kubelet/pod_resources.py. No state.
Format: protos/podresources.proto, read by kit/wire_scan.py.
"""

from __future__ import annotations

from collections.abc import Collection

from gpushare_agent.kit.wire_scan import PodEntry, decode_pod_containers, scan_pod_entries, scan_pod_entry
from gpushare_agent.kubelet.records import ListedContainer, ListedPod

__all__ = ["PodEntry", "decode_pod_entry", "scan_pod_entries"]


def decode_pod_entry(body: bytes, resources: Collection[str] | None = None) -> ListedPod:
    """Decodes one pod of a List answer (`PodEntry.body`); `resources` names those to keep, None keeps all.

    Raises:
        MalformedMessageError: the bytes are no such message.
    """
    entry = scan_pod_entry(body)
    containers = decode_pod_containers(body, resources)
    return ListedPod(
        namespace=entry.namespace,
        name=entry.name,
        containers=tuple(ListedContainer(name=name, devices=devices) for name, devices in containers),
    )
