"""Costs of HTTP/2 that are left out: h2 and hyperframe have them at every call, and the admission of a pod is six calls.

| what they do | here |
|---|---|
| remember how each of 65,536 streams of a connection was closed | of 512 |
| make a text of every received frame for a logger that drops it | its kind, stream and length |

Both are set on the classes of h2 and hyperframe, for the whole process.
"""

from __future__ import annotations

from h2.connection import H2Connection
from hyperframe.frame import Frame

MAX_CLOSED_STREAMS = 512
"""Closed streams of a connection that are remembered, for frames that come late, within a round trip."""


def bound_closed_streams() -> None:
    """Bounds what connections remember that are made from now on. Calling it again changes nothing.

    h2 remembers how each of the last 65,536 streams of a connection was closed, 107 bytes for one (measured). The kubelet
    keeps its connections for months, and each pod takes about ten streams: a kilobyte for each pod, until it is 7 MiB a
    connection.
    """
    H2Connection.MAX_CLOSED_STREAMS = MAX_CLOSED_STREAMS


def shorten_frame_texts() -> None:
    """Leaves flags and content out of the repr of frames. Calling it again changes nothing.

    h2 4.4 hands `repr(frame)` of every received frame to its logger, which by default drops it. For a DATA frame that text
    is formatted from all of its bytes in hexadecimal: 0.4 ms of a List answer of 390 kB, which every admission waits for
    (docs/reference/measurements.md).
    """
    Frame.__repr__ = _text  # type: ignore[method-assign]  # hyperframe offers no other way


def _text(frame: Frame) -> str:
    return f"{type(frame).__name__}(stream_id={frame.stream_id}, {frame.body_len} bytes)"
