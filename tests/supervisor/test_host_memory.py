"""Host memory has a bound. Those that have slept longest leave first, and nobody leaves for nothing."""

import random
from pathlib import Path

from supervisor.placement.gpus import Gpu
from supervisor.placement.policy import Placed, Room, room_to_wake
from supervisor.placement.vram import HostCopy, free_bytes, room, to_unload

GIB = 1 << 30
OLD, NEW, AWAKE = HostCopy("old", 4, 10.0), HostCopy("new", 4, 20.0), HostCopy("awake", 3, None)


def test_who_slept_longest_leaves_first() -> None:
    assert to_unload(2, [NEW, OLD], 10) == ()
    assert to_unload(3, [NEW, OLD], 10) == ("old",)
    assert to_unload(7, [NEW, OLD], 10) == ("old", "new")


def test_nobody_leaves_if_that_is_not_enough() -> None:
    assert to_unload(11, [NEW, OLD], 10) is None
    assert to_unload(8, [NEW, OLD, AWAKE], 10) is None, "a copy of a model that is awake stays"
    assert room([NEW, OLD, AWAKE], 10) == 7


def test_the_bound_holds_whoever_sleeps() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(500):
        copies = [HostCopy(str(i), chance.randint(0, 9), chance.choice([None, float(i)])) for i in range(8)]
        size, bound = chance.randint(1, 20), chance.randint(0, 40)
        leave = to_unload(size, copies, bound)
        if leave is not None:
            assert not leave or sum(copy.bytes for copy in copies if copy.worker not in leave) + size <= bound
        if size <= room(copies, bound):
            assert leave is not None


def test_free_memory_is_that_of_the_tightest_cgroup(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 80 kB\n")
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    inner = groups / "outer" / "inner"
    inner.mkdir(parents=True)
    assert free_bytes(proc, groups) == 80 * 1024
    for place, limit in (inner, "max"), (inner.parent, str(50 * 1024)):
        (place / "memory.max").write_text(limit)
        (place / "memory.current").write_text(str(10 * 1024))
    assert free_bytes(proc, groups) == 40 * 1024
    assert free_bytes(tmp_path / "none", groups) == 0


def test_only_what_is_missing_beside_the_context_must_be_free() -> None:
    gpu = Gpu(0, "GPU-0", total=24 * GIB, used=15 * GIB, free=9 * GIB, processes={})
    placed = Placed((gpu,), {0: 10 * GIB}, "GPU-0")
    assert room_to_wake(placed, {0: 1 * GIB}, [Room(gpu)]) is None
    refused = room_to_wake(placed, {0: GIB // 2}, [Room(gpu)])
    assert refused is not None
    assert refused.missing == {0: GIB // 2}
    assert refused.message.startswith("needs 9.5 GiB more on GPU 0 to wake, GPU 0 has 9.0 of 24.0 free")
