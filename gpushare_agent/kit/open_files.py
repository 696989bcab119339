"""How many files this process may have open. Changes the process's own limit when asked; no other state.

Every container with a share may hold 64 connections on its vDevice socket, so the usual soft limit of 1,024 is used up by
sixteen hostile ones. The soft limit is that low for programs that call select(); the agent does not.
"""

from __future__ import annotations

import resource
import sys

ENOUGH_OPEN_FILES = 65_536
"""1,000 containers with all their connections. More would only make a leak show later."""


def read_open_files_limit() -> tuple[int, int]:
    """The soft limit, which counts, and the hard limit, up to which a process may raise it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _as_number(soft), _as_number(hard)


def raise_open_files_limit() -> tuple[int, int]:
    """Raises the soft limit to the hard one, at most to 65,536; it is never lowered. Returns both as they are then."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(_as_number(hard), ENOUGH_OPEN_FILES)
    if _as_number(soft) < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (
            OSError,
            ValueError,
        ):  # a hard limit above fs.nr_open cannot be set to itself: the old soft one holds
            pass
    return read_open_files_limit()


def _as_number(limit: int) -> int:
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
