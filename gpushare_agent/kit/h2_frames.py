"""Keeps h2 from formatting the content of received frames.

h2 4.4 hands `repr(frame)` of every received frame to its logger, which by default drops it. For a DATA frame that text
is formatted from all of its bytes in hexadecimal: 0.4 ms of a List answer of 390 kB, which every admission waits for
(docs/measurements.md). No state but the method that is replaced.
"""

from __future__ import annotations

from hyperframe.frame import DataFrame


def omit_data_texts() -> None:
    """From now on the repr of a DATA frame names its stream and size, not its content. Calling it again changes nothing."""
    DataFrame.__repr__ = _text  # type: ignore[method-assign, assignment]  # hyperframe offers no other way


def _text(frame: DataFrame) -> str:
    return f"DataFrame(stream_id={frame.stream_id}, {len(frame.data)} bytes)"
