"""The texts of HTTP/2 frames, which h2 makes of everything that is received."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hyperframe.frame import DataFrame

from gpushare_agent.kit.h2_frames import omit_data_texts


@pytest.fixture
def _own_text() -> Iterator[None]:
    text = DataFrame.__repr__
    yield
    DataFrame.__repr__ = text  # type: ignore[method-assign]


@pytest.mark.usefixtures("_own_text")
def test_the_text_of_a_data_frame_leaves_its_content_out() -> None:
    """What h2 logs of a frame costs no time that grows with it, and still names which it was."""
    omit_data_texts()
    assert repr(DataFrame(5, data=b"x" * 16384)) == "DataFrame(stream_id=5, 16384 bytes)"
