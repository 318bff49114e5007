"""What is remembered: sliding minima and shares of time, against the plain definitions."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpu_oom_exporter.analysis.history import RANK_SAMPLES, ShareOfTime, SlidingMin

STEPS = st.lists(st.tuples(st.floats(0.1, 30), st.integers(0, 100)), min_size=1, max_size=60)


@given(STEPS)
def test_sliding_min_is_the_minimum_over_the_window(steps: list[tuple[float, int]]) -> None:
    """Whatever came before, the answer is the plain minimum over the last 60 seconds."""
    window, seen, now = SlidingMin(60.0), [], 0.0
    for gap, value in steps:
        now += gap
        seen.append((now, value))
        assert window.add(now, value) == min(v for t, v in seen if t >= now - 60.0)


def test_share_of_time() -> None:
    """Each poll stands for the time since the one before, however uneven the polls are."""
    share = ShareOfTime(600.0)
    assert share.ratio() is None
    share.add(0.0, True)
    assert share.ratio() is None, "one sample says nothing about time"
    share.add(30.0, True)
    share.add(40.0, False)
    assert share.ratio() == 0.75
    share.add(1000.0, False)
    assert share.ratio() is None, "everything older has left the window"


def test_memory_is_bounded() -> None:
    """A period of a millisecond cannot fill the memory."""
    share = ShareOfTime(600.0)
    for n in range(10 * RANK_SAMPLES):
        share.add(n * 0.001, True)
    assert len(share._samples) == RANK_SAMPLES
    assert share.ratio() is not None
