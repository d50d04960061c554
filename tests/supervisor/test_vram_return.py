"""The supervisor waits for the VRAM of dead workers, notices when it is back, and gives up waiting in time."""

from supervisor.placement.gpus import Gpu
from supervisor.placement.memory import VramReturns, listing

GIB = 1 << 30


def box(**held: dict[int, int | None]) -> list[Gpu]:
    """Return two GPUs of 80 GiB. g0 and g1: pid → bytes."""
    return [Gpu(index, f"GPU-{index}a2b3c4d", 80 * GIB, GIB, 79 * GIB, held.get(f"g{index}", {})) for index in range(2)]


def test_memory_is_awaited_until_no_gpu_lists_the_process() -> None:
    returns = VramReturns(10.0)
    returns.died("a", 7, listing(box(g0={7: GIB}, g1={8: GIB}), 7), 100.0)
    assert (returns.gpus, returns.pids_on({0, 1}), returns.pids_on({1})) == ({0}, [7], [])
    assert returns.over(box(g0={7: GIB}), 100.05) == []
    (over,) = returns.over(box(), 100.095)
    assert (over.worker, over.pid, over.back, round(over.after_s, 3)) == ("a", 7, True, 0.095)
    assert not returns.gpus


def test_what_no_gpu_lists_is_not_awaited() -> None:
    assert listing(box(g0={8: GIB}), 7) == frozenset()
    returns = VramReturns()
    assert not returns.gpus
    assert returns.over(None, 0.0) == []


def test_the_deadline_ends_the_wait_and_says_so() -> None:
    returns = VramReturns(10.0)
    returns.died("a", 7, listing(box(g0={7: None}), 7), 0.0)
    assert returns.over(box(g0={7: None}), 9.99) == []
    (over,) = returns.over(box(g0={7: None}), 10.0)
    assert not over.back
    assert not returns.gpus


def test_while_the_gpus_answer_late_only_time_ends_the_wait() -> None:
    returns = VramReturns(10.0)
    returns.died("a", 7, frozenset({0, 1}), 0.0)
    returns.died("b", 8, frozenset({0}), 5.0)
    assert returns.over(None, 9.99, late=True) == []
    assert (returns.gpus, returns.pids_on({1})) == ({0, 1}, [7])
    (over,) = returns.over(None, 10.0, late=True)
    assert (over.worker, over.back, over.after_s) == ("a", False, 10.0)
    assert returns.over(box(g0={8: GIB}), 10.1) == []
    (over,) = returns.over(box(), 10.2)
    assert (over.worker, over.back) == ("b", True)


def test_without_gpus_nothing_is_awaited() -> None:
    returns = VramReturns(10.0)
    returns.died("a", 7, frozenset({0}), 0.0)
    (over,) = returns.over(None, 0.5)
    assert (over.worker, over.back, over.after_s, returns.gpus) == ("a", False, 0.5, frozenset())


def test_a_pin_means_an_index_or_a_uuid() -> None:
    gpu = box()[1]
    assert gpu.is_meant("1")
    assert gpu.is_meant("GPU-1A2B3C4D")
    assert not gpu.is_meant("0")
