"""The one limit of the log lines that tenants can cause: BURST at once and PER_S from then on, so at most 80 in a minute.

A structlog processor: no caller knows of it. Lines below `info` pass, as whoever sets that level wants them.

The share of one tenant: a line costs a token of a bucket. The first line of a namespace and its pod passes while there is a
token; a further one only while as many are left as its namespace and its pod used lately, on average. So a flood leaves to
others about as many tokens as it takes, with whatever number of pods. Many lines name a pod's UID alone: its namespace is
known from the lines before that name both, as each Allocate's does; where it is not, the event takes its place.

State owned: the bucket, who used how much of it, the namespaces of UIDs, and what was left out since the last report. Any
thread may log.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, MutableMapping
from typing import Any

import structlog

from gpushare_agent.kit.rate import TokenBucket

TENANT_FIELDS = ("pod_uid", "claim_uid", "pod", "claim", "about")
"""The first that a line has is its subject. The namespace, where it is known, is beside it or in it (`NAMESPACE/NAME`)."""
TENANT_EVENTS = frozenset(
    {
        "allocate",
        "claim_template_created",
        "container_ids_unknown",
        "debug_request_failed",
        "device_plugin_call_failed",
        "gpu_event",
        "gpu_event_ignored",
        "gpu_event_of_no_gpu",
        "gpu_event_of_unknown_gpu",
        "kubelet_checkpoint_unreadable",
        "object_unreadable",
        "path_replaced",
        "pod_not_identified",
        "pre_start_container",
        "pre_start_refused",
        "preferred_allocation_failed",
        "preferred_allocation_timed_out",
        "private_cache_not_prepared",
        "reconcile_failed",
        "rpc_failed",
        "vdevice_directory_not_ours",
        "vdevice_not_prepared",
        "vdevice_poll_failed",
    }
)


log = structlog.get_logger(__name__)

BURST = 50
PER_S = 0.5
REPORT_S = 60.0
_REPORT = "log_lines_left_out"
_FORGET_S = 60.0
"""In which what was used counts a third (1/e) of what it did."""
_LEAST = 0.05
_MAX_USERS = 2048
_NAME_CHARS = 320

Key = tuple[str, str]


class TenantLines:
    """`report` is called now and then, from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # never locked while something is logged
        self._tokens = TokenBucket(rate=PER_S, burst=BURST, clock=clock)
        self._used: OrderedDict[Key, tuple[float, float]] = OrderedDict()
        self._namespaces: OrderedDict[str, str] = OrderedDict()
        """By UID; one of a line that was left out counts too."""
        self._left_out: Counter[str] = Counter()
        self._since = 0.0

    def __call__(self, _logger: Any, method: str, line: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        """The processor. Raises DropEvent: the line is left out."""
        keys = self._user(line) if method != "debug" and line.get("event") != _REPORT else ()
        if not keys:
            return line
        with self._lock:
            if self._take(keys):
                return line
            if not self._left_out:
                self._since = self._clock()
            self._left_out[str(line.get("event"))] += 1
        raise structlog.DropEvent

    def report(self, *, is_end: bool = False) -> None:
        """Logs how many lines of each event were left out, once a minute where some were."""
        with self._lock:
            if not self._left_out or (self._clock() - self._since < REPORT_S and not is_end):
                return
            left_out, self._left_out = self._left_out, Counter()
        log.warning(
            _REPORT,
            lines=left_out.total(),
            events=dict(left_out.most_common()),
            why=f"tenants caused more than {BURST} at once, or {PER_S * 60:g} a minute",
        )

    def _take(self, keys: tuple[Key, ...]) -> bool:
        now = self._clock()
        used = {key: self._lately(key, now) for key in keys}
        reserve = sum((1 + one) / len(keys) for one in used.values() if one > 0)
        if self._tokens.level < 1 + reserve:
            return False
        self._tokens.take()
        for key, one in used.items():
            self._used[key] = one + 1, now
            self._used.move_to_end(key)
        while len(self._used) > _MAX_USERS:
            self._used.popitem(last=False)
        return True

    def _lately(self, key: Key, now: float) -> float:
        used, at = self._used.get(key, (0.0, now))
        left = used * math.exp((at - now) / _FORGET_S)
        return left if left >= _LEAST else 0.0

    def _user(self, line: MutableMapping[str, Any]) -> tuple[Key, ...]:
        """Namespace and subject of a line that a tenant can cause, its event where it has none; nothing for other lines."""
        event = ("event", str(line.get("event")))
        found = (name for field in TENANT_FIELDS if isinstance(name := line.get(field), str))
        subject = next(found, None)
        if subject is None:
            return (event,) if event[1] in TENANT_EVENTS else ()
        subject = subject[:_NAME_CHARS]
        other = next(found, "") or subject  # beside a UID the pod's name, which may be `NAMESPACE/NAME`
        named = (
            (subject if "/" in subject else other).rpartition("/")[0].rpartition(" ")[2]
        )  # of "Pod NAMESPACE/NAME" too
        namespace = str(line.get("namespace") or named)[:_NAME_CHARS]
        with self._lock:
            if namespace and "/" not in subject:
                self._namespaces[subject] = namespace
                self._namespaces.move_to_end(subject)
                if len(self._namespaces) > _MAX_USERS:
                    self._namespaces.popitem(last=False)
            elif not namespace:
                namespace = self._namespaces.get(subject, "")
        return ("namespace", namespace) if namespace else event, ("subject", subject)
