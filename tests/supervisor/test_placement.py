"""Placement decides correctly on boxes that are given as data."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from supervisor.cluster.launcher import limits_elsewhere
from supervisor.config.spelling import Limit, parse_limit, parse_size
from supervisor.placement.gpus import Gpu
from supervisor.placement.policy import (
    CONTEXT_BYTES,
    GpuRequest,
    Holding,
    Needs,
    Placed,
    PlacementRefused,
    Split,
    divide,
    near_cpus,
    parts_on,
    place,
    place_unseen,
    ranges,
    rooms,
)
from tests.boxes import read_box

GIB = 1 << 30
BOX = read_box("two-sizes")
AUTO = GpuRequest(None)


def gib(size: float) -> int:
    return int(size * GIB)


def whole(size: float) -> dict[int, Needs]:
    """Return needs of ``size`` GiB in all, CUDA context included, on one GPU or two."""
    return {count: Needs(declared=(gib(size),)) for count in (1, 2)}


def pinned(*pins: str, split: Split | None = None) -> GpuRequest:
    return GpuRequest(pins, split or Split())


def placed(*arguments: object) -> list[int]:
    verdict = place(*arguments)  # type: ignore[arg-type]
    assert isinstance(verdict, Placed), verdict
    return [gpu.index for gpu in verdict.gpus]


def refused(*arguments: object) -> str:
    verdict = place(*arguments)  # type: ignore[arg-type]
    assert isinstance(verdict, PlacementRefused), verdict
    return verdict.message


def loading(worker: str, size: float, gpu: int, pid: int | None = None) -> Holding:
    return Holding(worker, pid, {gpu: gib(size)}, loading=True)


def test_auto_takes_the_gpu_with_most_room() -> None:
    verdict = place(AUTO, whole(20), rooms(BOX, []))
    assert isinstance(verdict, Placed)
    assert ([gpu.index for gpu in verdict.gpus], verdict.devices) == ([2], BOX[2].uuid)
    assert verdict.bytes == {2: gib(20)}


def test_on_a_recorded_box_the_drivers_own_share_is_not_free() -> None:
    box = read_box("two-h200s")
    ours: list[Holding] = []
    for number in range(8):  # 140 GiB each: four models of 30 GiB fit on each GPU
        (gpu,) = placed(AUTO, whole(30), rooms(box, ours))
        assert gpu == number % 2
        ours.append(loading(str(number), 30, gpu))
    assert refused(AUTO, whole(30), rooms(box, ours)).startswith("needs 30.0 GiB (vram in models.yaml), no GPU")
    others = read_box("two-h200s", gpu0={4711: gib(100)})
    assert [placed(AUTO, whole(30), rooms(others, ours[1:n:2])) for n in (1, 3, 5, 7)] == [[1]] * 4
    assert placed(AUTO, whole(30), rooms(others, ours[1::2])) == [0]
    assert refused(AUTO, whole(40), rooms(others, ours[1::2])) == (
        "needs 40.0 GiB (vram in models.yaml), no GPU has that much: "
        "GPU 0 has 39.8 of 140.4 free: other processes 100.6, 0.20 missing"
    )
    assert placed(pinned("0", "1"), whole(60), rooms(others, [])) == [0, 1]


def test_auto_counts_what_is_about_to_load() -> None:
    ours = [loading("a", 30, 2)]
    assert placed(AUTO, whole(20), rooms(BOX, ours)) == [3]
    ours.append(loading("b", 20, 3))
    assert placed(AUTO, whole(20), rooms(BOX, ours)) == [0]
    ours.append(loading("c", 20, 0))
    assert placed(AUTO, whole(20), rooms(BOX, ours)) == [1]
    ours.append(loading("d", 20, 1))
    assert refused(AUTO, whole(20), rooms(BOX, ours)) == (
        "needs 20.0 GiB (vram in models.yaml), no GPU has that much: "
        "GPU 2 has 17.3 of 48.0 free: a about to load 30.0, other processes 0.7, 2.7 missing"
    )
    both = {1: Needs(weights=gib(40)), 2: Needs(weights=gib(40))}
    assert refused(AUTO, both, rooms(BOX, ours[:1])).endswith("; `gpus: 2` would divide it among GPUs 0 and 3")
    large = {count: Needs(weights=gib(70)) for count in AUTO.counts}
    assert refused(AUTO, large, rooms(BOX, ours[:1])).endswith("; `gpus: 4` would divide it among GPUs 0, 1, 2 and 3")
    larger = {count: Needs(weights=gib(76)) for count in AUTO.counts}
    wanted = GpuRequest(None, count=2)
    assert "; `gpus: 3` would divide it among GPUs " in refused(wanted, larger, rooms(BOX, []))


def test_auto_takes_several_gpus() -> None:
    """``gpus: 2`` takes the two GPUs with the most room, and counts the model's share on each."""
    needs = {2: Needs(weights=gib(60))}
    verdict = place(GpuRequest(None, count=2), needs, rooms(BOX, []))
    assert isinstance(verdict, Placed)
    first, second = (gpu for gpu in BOX if gpu.index in verdict.bytes)
    assert [gpu.index for gpu in verdict.gpus] == [first.index, second.index]
    assert verdict.devices == f"{first.uuid},{second.uuid}"
    assert {first.index, second.index} < {0, 1, 2, 3}
    assert 2 in verdict.bytes, "GPU 2 has the most room"
    assert sum(verdict.bytes.values()) >= gib(60) + 2 * CONTEXT_BYTES
    full = place(GpuRequest(None, count=2), {2: Needs(weights=gib(90))}, rooms(BOX, []))
    assert isinstance(full, PlacementRefused)
    assert full.message.startswith("needs 91.2 GiB (weights 90.0, context 1.2), GPU ")
    assert full.missing
    assert refused(GpuRequest(None, count=5), None, rooms(BOX, [])) == (
        "gpu: auto: 5 GPUs are wanted (gpus), and 4 can be used"
    )
    assert GpuRequest(None, count=2).counts[:3] == (2, 3, 4), "the first is its own; the others serve as a remedy"
    assert GpuRequest(None, Split(by_hand=(gib(20), gib(22))), count=2).counts == (2,)
    assert (AUTO.one_suffices, GpuRequest(None, count=2).one_suffices) == (True, False)


def test_a_reservation_counts_once() -> None:
    """Memory that a loading worker already holds is subtracted from its reservation."""
    box = read_box("two-sizes", gpu2={77: gib(12)})
    (*_, before, _) = rooms(BOX, [loading("a", 30, 2, pid=77)])
    (*_, during, _) = rooms(box, [loading("a", 30, 2, pid=77)])
    assert before.bytes == during.bytes
    assert (during.ours, during.coming) == ({"a": gib(12)}, {"a": gib(18)})
    # a worker that holds more than its estimate counts with the memory that it holds
    full = read_box("two-sizes", gpu2={77: gib(31)})
    (*_, beyond, _) = rooms(full, [loading("a", 30, 2, pid=77)])
    assert (beyond.bytes, beyond.coming) == (full[2].free, {})
    # a ready worker counts with its measured memory only
    ready = Holding("a", 77, {2: gib(30)}, loading=False)
    assert rooms(box, [ready])[2].bytes == box[2].free


def test_a_pin_is_refused_with_the_arithmetic_and_who_holds_the_rest() -> None:
    box = read_box("two-sizes", gpu1={77: gib(12)})
    ours = [Holding("qwen", 77, {1: gib(12.5)}, loading=False), loading("phi", 3, 1)]
    needs = Needs(weights=gib(16.1), cache=gib(4), workspace=gib(0.6), per_gpu=gib(0.3))
    verdict = place(pinned("1"), {1: needs}, rooms(box, ours))
    assert isinstance(verdict, PlacementRefused)
    assert verdict.message == (
        "needs 21.3 GiB (weights 16.1, cache 4.0, workspace 0.6, context 0.6), "
        "GPU 1 has 5.5 of 24.0 free: qwen 12.0, phi about to load 3.0, other processes 3.5; "
        "GPUs 0, 2, 3 have room"
    )
    assert verdict.missing == {1: needs.total(1) - rooms(box, ours)[1].bytes}
    small = Needs(weights=gib(8))
    assert refused(pinned("1"), {1: small}, rooms(box, ours)).endswith(
        "; without qwen it would fit; GPUs 0, 2, 3 have room"
    )


def test_a_limit_leaves_less_than_is_free() -> None:
    box = read_box("two-sizes", gpu2={77: gib(12)})
    ours = [Holding("qwen", 77, {2: gib(12)}, loading=False)]
    limited = rooms(box, ours, {"2": Limit(bytes=gib(20)), BOX[3].uuid: Limit(share=0.5)})
    assert [room.limit for room in limited] == [None, None, gib(20), BOX[3].total // 2]
    assert refused(pinned("2"), whole(9), limited) == (
        "needs 9.0 GiB (vram in models.yaml), GPU 2 has 8.0 left of its vram_limit, 20.0: qwen 12.0; "
        "without qwen it would fit; GPUs 0, 1, 3 have room"
    )
    assert placed(pinned("2"), whole(8), limited) == [2]
    assert placed(AUTO, whole(8), rooms(box, ours, Limit(bytes=gib(10)))) != [2]


def test_limits_by_index_hold_on_the_own_machine_only() -> None:
    limit, other = Limit(share=0.5), Limit(bytes=gib(8))
    assert limits_elsewhere(None) == {}
    assert limits_elsewhere({"0": limit, BOX[3].uuid: other}) == {BOX[3].uuid: other}
    everywhere = limits_elsewhere(limit)
    assert [room.limit for room in rooms(BOX, [], everywhere)] == [gpu.total // 2 for gpu in BOX]


def test_what_our_workers_hold_in_another_pid_namespace_is_what_was_reckoned() -> None:
    box = read_box("two-sizes", gpu2={4_000_000_001: gib(12)})
    room = rooms(box, [Holding("qwen", 77, {2: gib(12)}, loading=False)], Limit(bytes=gib(20)))[2]
    assert (room.ours, room.bytes) == ({"qwen": gib(12)}, gib(8))
    assert room.others < GIB


@pytest.mark.parametrize(
    ("gpu_request", "outer", "says"),
    [
        (pinned("7"), None, "GPU 7 does not exist: there is 0, 1, 2, 3"),
        (pinned("GPU-b7d2e8a4"), None, "GPU-b7d2e8a4 means several GPUs, 1 (GPU-b7d2e8a4-13c6-4f5a-a9d0-77e0c0de0002)"),
        (pinned("2", "GPU-b7d2e8a4-5e21"), None, "gpu names GPU 2 twice"),
        (pinned("1"), "0,2", "CUDA_VISIBLE_DEVICES=0,2 of the supervisor does not leave GPU 1: it leaves 0, 2"),
        (pinned("2"), "0,9,2", "does not leave GPU 2: it leaves 0"),  # CUDA stops at the first invalid index
        (pinned("0"), "", "does not leave GPU 0: it leaves none"),
        (pinned("0"), "MIG-1234", "names a MIG instance, which is not supported"),
        (AUTO, "-1", "gpu: auto: CUDA_VISIBLE_DEVICES=-1 of the supervisor leaves no GPU"),
    ],
)
def test_gpus_that_cannot_be_had(gpu_request: GpuRequest, outer: str | None, says: str) -> None:
    assert says in refused(gpu_request, None, rooms(BOX, []), outer)


def test_the_outer_limit_counts_as_nvidia_smi_does() -> None:
    """A pin to 1 under CUDA_VISIBLE_DEVICES=1,3 means nvidia-smi's GPU 1, and not the second visible GPU."""
    assert placed(pinned("1"), whole(1), rooms(BOX, []), "3,1") == [1]
    assert placed(AUTO, whole(1), rooms(BOX, []), f"0, {BOX[1].uuid.upper()[:20]}") == [0]
    verdict = place(AUTO, whole(1), rooms(BOX, []), "1,3")
    assert isinstance(verdict, Placed)
    assert verdict.devices == BOX[3].uuid  # CUDA would count an index among the visible GPUs only


def test_a_gpu_in_mig_mode_is_refused_by_name() -> None:
    box = [Gpu(0, "GPU-0a2b3c4d", 80 * GIB, 0, 80 * GIB, mig=True), Gpu(1, "GPU-1a2b3c4d", GIB, 0, GIB)]
    assert "GPU 0 is in MIG mode, which is not supported" in refused(pinned("0"), None, rooms(box, []))
    assert placed(AUTO, None, rooms(box, [])) == [1]
    assert "every GPU is in MIG mode" in refused(AUTO, None, rooms(box[:1], []))


def test_unknown_needs_are_not_refused_and_spread() -> None:
    box = [Gpu(i, f"GPU-{i}a2b3c4d", 80 * GIB, 80 * GIB if i == 2 else 0, 0 if i == 2 else 80 * GIB) for i in range(3)]
    assert placed(pinned("2"), None, rooms(box, [])) == [2]
    first = place(AUTO, None, rooms(box, []))
    assert isinstance(first, Placed)
    assert ([gpu.index for gpu in first.gpus], first.bytes) == ([0], {})


@pytest.mark.parametrize(
    ("gpu_request", "outer", "devices"),
    [(pinned("2"), None, "2"), (pinned("2", "0"), "0,2", "2,0"), (pinned("GPU-0a2b3c4d"), "0", "GPU-0a2b3c4d")],
)
def test_without_nvml_pins_are_obeyed(gpu_request: GpuRequest, outer: str | None, devices: str) -> None:
    verdict = place_unseen(gpu_request, outer)
    assert isinstance(verdict, Placed)
    assert verdict.devices == devices


@pytest.mark.parametrize(("gpu_request", "outer"), [(AUTO, None), (pinned("1"), "0,2"), (pinned("1"), "")])
def test_without_nvml_what_cannot_be_obeyed_is_refused(gpu_request: GpuRequest, outer: str | None) -> None:
    assert isinstance(place_unseen(gpu_request, outer), PlacementRefused)


NEEDS = Needs(weights=gib(30), cache=gib(6), draft=gib(1), workspace=gib(3), per_gpu=gib(1))


def test_layers_fill_one_gpu_after_the_other() -> None:
    first, second = divide(NEEDS, [gib(24), gib(24)], Split())
    assert first == gib(23.5)
    assert first + second == NEEDS.total(2)
    assert sum(parts_on(NEEDS, first, 0, 2).values()) == pytest.approx(first, abs=4)
    assert parts_on(NEEDS, second, 1, 2)["workspace"] > NEEDS.per_gpu
    assert divide(NEEDS, [gib(24), gib(24)], Split(reserve=(4 * GIB, 0)))[0] == gib(19.75)
    # memory that is reserved for the load must be free on the last GPU, too
    tight = divide(NEEDS, [gib(21), gib(21)], Split())
    assert sum(tight) > NEEDS.total(2)
    assert tight[1] > gib(21)


def test_a_limit_that_the_engines_own_split_would_not_keep_is_refused() -> None:
    limited = rooms(BOX, [], {"2": Limit(bytes=gib(30))})
    message = refused(pinned("2", "3", split=Split(engine_chooses=True)), {2: NEEDS}, limited)
    assert "GPU 2 has 30.0 left of its vram_limit, 30.0; the engine's own split would fill GPU 2 beyond that" in message
    assert placed(pinned("2", "3", split=Split(by_hand=(gib(15), gib(15)))), {2: NEEDS}, limited) == [2, 3]


def test_layers_split_by_hand_take_their_cache_along() -> None:
    first, second = divide(NEEDS, [gib(24), gib(24)], Split(by_hand=(gib(10), gib(25))))
    assert first == CONTEXT_BYTES + gib(1) + gib(1) + gib(37) // 3
    assert first + second == pytest.approx(NEEDS.total(2), abs=4)
    assert "it would take 14.9 on GPU 0, 26.3 on GPU 1" in refused(
        pinned("0", "1", split=Split(by_hand=(gib(10), gib(25)))), {2: NEEDS}, rooms(BOX, [])
    )


def test_tensor_parallel_divides_by_what_is_free() -> None:
    shares = divide(NEEDS, [gib(40), gib(20)], Split(tensors=True))
    assert shares[0] > shares[1]
    assert sum(shares) == pytest.approx(NEEDS.total(2), abs=4)
    assert divide(NEEDS, [0, 0], Split(tensors=True))[0] > 0


def test_declared_needs_are_divided_evenly_or_as_declared() -> None:
    assert divide(Needs(declared=(9,)), [5, 5], Split()) == [5, 5]
    assert divide(Needs(declared=(2, 7)), [5, 5], Split()) == [2, 7]


SIZE = st.integers(0, 60).map(lambda size: size * GIB // 2)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 96), st.integers(0, 100)), min_size=1, max_size=5),
    wanted=st.lists(st.tuples(SIZE, SIZE, st.booleans(), st.lists(st.integers(0, 4), unique=True)), max_size=12),
    limit=st.none() | st.builds(Limit, bytes=st.integers(1, 80).map(lambda size: size * GIB)),
)
def test_nothing_is_promised_twice(
    sizes: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int, bool, list[int]]], limit: Limit | None
) -> None:
    """However many workers start at once, all that are placed on a GPU fit into its free memory and its limit."""
    box = [
        Gpu(i, f"GPU-{i}a2b3c4d", total * GIB, total * GIB * used // 100, total * GIB - total * GIB * used // 100)
        for i, (total, used) in enumerate(sizes)
    ]
    ours: list[Holding] = []
    for number, (weights, cache, auto, pins) in enumerate(wanted):
        gpu_request = AUTO if auto or not pins else pinned(*map(str, pins))
        needs = {count: Needs(weights, cache, 0, count * GIB, GIB) for count in gpu_request.counts}
        verdict = place(gpu_request, needs, rooms(box, ours, limit))
        if isinstance(verdict, PlacementRefused):
            assert verdict.message
            continue
        assert sum(verdict.bytes.values()) == pytest.approx(needs[len(verdict.gpus)].total(len(verdict.gpus)), abs=9)
        if gpu_request.pins is not None:
            assert [str(gpu.index) for gpu in verdict.gpus] == list(gpu_request.pins)
        ours.append(Holding(str(number), None, verdict.bytes, loading=True))
    for gpu in box:
        taken = sum(holding.placed.get(gpu.index, 0) for holding in ours)
        assert taken <= gpu.free
        assert limit is None or taken <= limit.of(gpu.total)


@pytest.mark.parametrize(
    ("text", "size"),
    [("20GiB", 20 << 30), ("24G", 24 << 30), ("1.5 GiB", 3 << 29), ("20GB", 20 * 10**9), ("512M", 512 << 20),
     ("100kB", 100_000), ("7B", 7), (4096, 4096)],
)  # fmt: skip
def test_sizes(text: object, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "20", "GiB", "-1GiB", "0G", 0, True, 1.5, None, "20 gib", "9999999T", "nanG"])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="must be a size"):
        parse_size(text)


def test_limits() -> None:
    assert parse_limit("90%").of(100) == 90
    assert parse_limit("1KiB").of(100) == 1024
    for text in ("0%", "101%", "x"):
        with pytest.raises(ValueError, match="share of the GPU"):
            parse_limit(text)


def test_a_worker_keeps_to_the_cpus_next_to_its_gpus() -> None:
    every = range(64)
    assert ranges(near_cpus(BOX[:1], every)) == "0-15,32-47"
    assert near_cpus([BOX[0], BOX[2]], every) == ()  # GPUs on both sockets: every CPU is near
    assert near_cpus(BOX[2:3], range(18)) == (16, 17)
    assert near_cpus(BOX[2:3], range(16)) == ()  # the supervisor may use none of the near CPUs
    assert near_cpus([], every) == near_cpus([Gpu(0, "GPU-x", 1, 0, 1)], every) == ()
    assert (ranges([]), ranges([3]), ranges([5, 1, 2])) == ("", "3", "1-2,5")
