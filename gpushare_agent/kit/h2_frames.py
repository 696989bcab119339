"""Keeps h2 from formatting the content of received frames, and from remembering every stream of a connection.

h2 4.4 hands `repr(frame)` of every received frame to its logger, which by default drops it. For a DATA frame that text
is formatted from all of its bytes in hexadecimal: 0.4 ms of a List answer of 390 kB, which every admission waits for
(docs/reference/measurements.md).

h2 remembers how each of the last 65,536 streams of a connection was closed, 107 bytes for one (measured). The kubelet keeps
its connections for months, and each pod takes about ten streams: a kilobyte for each pod, until it is 7 MiB a connection.

No state but what is replaced in h2 and hyperframe.
"""

from __future__ import annotations

from h2.connection import H2Connection
from hyperframe.frame import DataFrame

MAX_CLOSED_STREAMS = 512
"""Of a connection. They are remembered for frames that come late, within a round trip."""


def bound_closed_streams() -> None:
    """For connections that are made from now on. Calling it again changes nothing."""
    H2Connection.MAX_CLOSED_STREAMS = MAX_CLOSED_STREAMS


def omit_data_texts() -> None:
    """From now on the repr of a DATA frame names its stream and size, not its content. Calling it again changes nothing."""
    DataFrame.__repr__ = _text  # type: ignore[method-assign, assignment]  # hyperframe offers no other way


def _text(frame: DataFrame) -> str:
    return f"DataFrame(stream_id={frame.stream_id}, {len(frame.data)} bytes)"
