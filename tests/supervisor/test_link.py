"""The worker's frames: bounded, nothing lost between two of them."""

from hypothesis import given
from hypothesis import strategies as st

from model_worker.link import MAX_FRAME_BYTES, MAX_FRAME_EVENTS, _slices


@given(st.lists(st.integers(0, MAX_FRAME_BYTES // 2), max_size=30))
def test_slices_cover_everything_in_order_and_are_bounded(sizes: list[int]) -> None:
    chunks = [bytes(size) for size in sizes] or [b""]
    slices = list(_slices(chunks))
    assert [i for first, last in slices for i in range(first, last)] == list(range(len(chunks)))
    for first, last in slices:
        assert sum(map(len, chunks[first:last])) <= MAX_FRAME_BYTES
        assert last - first <= MAX_FRAME_EVENTS


def test_many_small_events_are_cut_by_their_number() -> None:
    slices = list(_slices([b"x"] * (2 * MAX_FRAME_EVENTS + 1)))
    assert [last - first for first, last in slices] == [MAX_FRAME_EVENTS, MAX_FRAME_EVENTS, 1]


def test_one_event_larger_than_a_frame_should_be_goes_alone() -> None:
    assert list(_slices([b"x", bytes(2 * MAX_FRAME_BYTES), b"x"])) == [(0, 1), (1, 2), (2, 3)]
