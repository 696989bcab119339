"""Keeps a repeated condition from filling the log: it is reported when it begins, when its reason changes, and when it ends.

State owned: the reason that was reported last for each subject, at most `capacity` subjects, the oldest forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict


class ReportOnce:
    """One instance per kind of condition; `subject` names what it is about (a pod, a file), "" where there is only one."""

    def __init__(self, capacity: int = 256) -> None:
        self._capacity = capacity
        self._reasons: OrderedDict[str, str] = OrderedDict()

    def is_new(self, reason: str, subject: str = "") -> bool:
        """Whether to report `reason` now: it differs from what was last reported of the subject. It then counts as such."""
        if self._reasons.get(subject) == reason:
            return False
        self._reasons[subject] = reason
        self._reasons.move_to_end(subject)
        if len(self._reasons) > self._capacity:
            self._reasons.popitem(last=False)
        return True

    def is_over(self, subject: str = "") -> bool:
        """Whether to report that the condition has ended: something was reported of the subject. It is then forgotten."""
        return self._reasons.pop(subject, None) is not None
