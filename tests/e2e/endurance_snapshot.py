"""What one moment of an endurance run shows, and what is wrong with it. Pure; test_endurance.py reads the values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from tests.e2e.cluster import Object


def is_living(pod: Object) -> bool:
    return "deletionTimestamp" not in pod["metadata"]


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """`view`: the agent's node. `entries`: the kubelet's checkpoint. `claims`, `pods`: of the namespace, pods by name.
    `logs`: the last line of each container (share_program.py), with kubectl's prefix. `uuids`: by device name in claims."""

    namespace: str
    view: Object
    entries: Sequence[Object]
    claims: Sequence[Object]
    pods: Mapping[str, Object]
    logs: str
    uuids: Mapping[str, str]

    def said(self) -> dict[str, dict[str, Any]]:
        """pod/container -> what its program said last."""
        lines = re.findall(r"^\[pod/([^/]+/[^\]]+)\] (\{.*\})$", self.logs, flags=re.M)
        return {container: json.loads(line) for container, line in lines}

    def given(self) -> dict[str, set[str]]:
        """pod/container -> its GPUs: by the scheduler's allocation of what it uses of its claim, else by the ledger."""
        found = {
            f"{one['pod']}/{one['container']}": {gpu["uuid"] for gpu in one["gpus"]}
            for one in self.view["containers"]
            if one["namespace"] == self.namespace
        }
        for claim in self.claims:
            status = claim.get("status", {})
            results = status.get("allocation", {}).get("devices", {}).get("results", [])
            for user in status.get("reservedFor", []):
                for container in self.pods.get(user["name"], {}).get("spec", {}).get("containers", []):
                    [use] = container["resources"]["claims"]
                    of_use = [one for one in results if use.get("request", one["request"]) == one["request"]]
                    found[f"{user['name']}/{container['name']}"] = {self.uuids[one["device"]] for one in of_use}
        return found

    def wrong(self) -> Iterator[str]:
        """Containers that see another GPU than theirs, and device IDs that two running pods have."""
        said = self.said()
        for container, given in self.given().items():
            if container in said and set(said[container]["gpus"].split(",")) != given:
                yield f"{container} sees {said[container]['gpus']}, given is {sorted(given)}"
        running = {
            pod["metadata"]["uid"]: name
            for name, pod in self.pods.items()
            if pod["status"].get("phase") == "Running" and is_living(pod)
        }
        owners: dict[tuple[str, str], str] = {}
        for entry in self.entries:
            name = running.get(entry["PodUID"])
            for device in chain.from_iterable(entry["DeviceIDs"].values()) if name else ():
                if owners.setdefault((entry["ResourceName"], device), name) != name:
                    yield f"{device} is of {owners[entry['ResourceName'], device]} and of {name}"

    def over(self) -> Iterator[str]:
        """GPUs over their capacity."""
        for gpu in self.view["gpus"]:
            for unit in ("cores", "memory"):
                most, allocated = gpu[unit].values()
                if allocated > most:
                    yield f"{gpu['uuid']}: {allocated} of {most} {unit} allocated"
