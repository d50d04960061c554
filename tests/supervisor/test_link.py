"""The worker's frames: bounded, nothing lost between two of them."""

from hypothesis import given
from hypothesis import strategies as st

from model_worker.link import MAX_FRAME_BYTES, MAX_FRAME_EVENTS
from model_worker.sending import slices


@given(st.lists(st.integers(0, MAX_FRAME_BYTES // 2), max_size=30))
def test_slices_cover_everything_in_order_and_are_bounded(sizes: list[int]) -> None:
    chunks = [bytes(size) for size in sizes] or [b""]
    found = list(slices(chunks, MAX_FRAME_EVENTS, MAX_FRAME_BYTES))
    assert [i for first, last in found for i in range(first, last)] == list(range(len(chunks)))
    for first, last in found:
        assert sum(map(len, chunks[first:last])) <= MAX_FRAME_BYTES
        assert last - first <= MAX_FRAME_EVENTS


def test_many_small_events_are_cut_by_their_number() -> None:
    found = list(slices([b"x"] * (2 * MAX_FRAME_EVENTS + 1), MAX_FRAME_EVENTS, MAX_FRAME_BYTES))
    assert [last - first for first, last in found] == [MAX_FRAME_EVENTS, MAX_FRAME_EVENTS, 1]


def test_one_event_larger_than_a_frame_should_be_goes_alone() -> None:
    chunks = [b"x", bytes(2 * MAX_FRAME_BYTES), b"x"]
    assert list(slices(chunks, MAX_FRAME_EVENTS, MAX_FRAME_BYTES)) == [(0, 1), (1, 2), (2, 3)]
