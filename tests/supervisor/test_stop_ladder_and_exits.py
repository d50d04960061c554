"""The stop ladder has the right rungs, and exits of workers are diagnosed correctly."""

import signal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.process.worker_spec import EXIT_ASKED, EXIT_CONFIG, EXIT_ENGINE_FAULT, LOAD_ERROR_PREFIX
from supervisor.logs import files
from supervisor.reactor import CLEAR_AT, EarliestTimer, Timers
from supervisor.workers.exits import MAX_LINES, MAX_MESSAGE, classify, not_spawned
from supervisor.workers.life import IMPATIENT, PATIENT, LadderTimes, Rung, plan


def test_the_rungs_in_order() -> None:
    assert plan(100.0, LadderTimes(shutdown_s=5, sigterm_s=2), reads_messages=True) == [
        (100.0, Rung.SHUTDOWN),
        (105.0, Rung.SIGTERM),
        (107.0, Rung.SIGKILL),
    ]


def test_a_loading_worker_reads_nothing() -> None:
    assert plan(100.0, LadderTimes(shutdown_s=5, sigterm_s=2), reads_messages=False) == [
        (100.0, Rung.SIGTERM),
        (102.0, Rung.SIGKILL),
    ]


@given(st.floats(0, 1e6), st.floats(0, 100), st.floats(0, 100), st.booleans())
def test_it_begins_at_once_and_ends_with_what_is_certain(now: float, a: float, b: float, reads: bool) -> None:
    rungs = plan(now, LadderTimes(a, b), reads_messages=reads)
    assert rungs[0][0] == now
    assert rungs[-1][1] is Rung.SIGKILL
    assert [at for at, _ in rungs] == sorted(at for at, _ in rungs)
    assert rungs[-1][0] <= now + a + b + 1e-6


def test_impatience_is_about_a_second() -> None:
    assert IMPATIENT.shutdown_s + IMPATIENT.sigterm_s <= 1.0 < PATIENT.shutdown_s


@pytest.mark.parametrize(
    ("code", "reason", "retry", "says"),
    [
        (EXIT_CONFIG, "config", False, "cannot load"),
        (EXIT_ENGINE_FAULT, "engine fault", True, "ValueError: the engine broke"),
        (-signal.SIGKILL, "killed", True, "out of memory?"),
        (-signal.SIGSEGV, "signal", True, "SIGSEGV"),
        (-signal.SIGTERM, "signal", True, "SIGTERM"),
        (EXIT_ASKED, "exit", True, "without being asked"),
        (1, "exit", True, "exit code 1: ValueError: the engine broke"),
    ],
)
def test_unasked_exits(code: int, reason: str, retry: bool, says: str) -> None:
    report = classify(code, asked=False, log_tail=["Traceback", "ValueError: the engine broke", "", "  "])
    assert (report.code, report.reason, report.retry) == (code, reason, retry)
    assert says in report.message
    assert "\n" not in report.message


@pytest.mark.parametrize("code", [0, 70, 78, -9, -15, 1])
def test_an_exit_asked_for_is_no_failure(code: int) -> None:
    assert classify(code, asked=True, log_tail=["anything"]).reason == "asked"


def test_the_load_error_is_quoted_not_what_was_printed_after_it() -> None:
    tail = [LOAD_ERROR_PREFIX + "an older one", LOAD_ERROR_PREFIX + "no config.json", "a library says goodbye"]
    assert classify(EXIT_CONFIG, asked=False, log_tail=tail).message == LOAD_ERROR_PREFIX + "no config.json"


FRAMES = [
    "Traceback (most recent call last):",
    '  File "/srv/model_worker/loop.py", line 71, in run',
    "    for event in self._engine.step():",
    "                 ^^^^^^^^^^^^^^^^^^^^",
]
TORCH_OOM = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 23.69 GiB "
    "of which 512.06 MiB is free. Including non-PyTorch memory, this process has 23.17 GiB memory in use. Of the "
    "allocated memory 22.61 GiB is allocated by PyTorch, and 251.52 MiB is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
    "fragmentation."
)
TORCH_OOM_BEFORE_2_1 = (
    "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 23.69 GiB total capacity; "
    "22.01 GiB already allocated; 15.06 MiB free; 22.31 GiB reserved in total by PyTorch)"
)
CUDA_ADVICE = [
    "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.",
    "For debugging consider passing CUDA_LAUNCH_BLOCKING=1",
    "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
    "",
]


@pytest.mark.parametrize(
    ("raised", "reason", "says"),
    [
        ([TORCH_OOM], "out of VRAM", ["2.00 GiB more were wanted", "512.06 MiB of 23.69 GiB were free", "cache_size"]),
        ([TORCH_OOM_BEFORE_2_1], "out of VRAM", ["20.00 MiB more were wanted", "15.06 MiB of 23.69 GiB were free"]),
        (["RuntimeError: CUDA error: out of memory", *CUDA_ADVICE], "out of VRAM", ["used up;"]),
        (
            ["RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"],
            "out of VRAM",
            ["max_batch_size"],
        ),
        (["MemoryError"], "out of memory", ["RAM, not VRAM"]),
        (
            ["numpy._core._exceptions._ArrayMemoryError: Unable to allocate 7.28 TiB for an array"],
            "out of memory",
            ["Unable to allocate 7.28 TiB"],
        ),
        (
            [
                "RuntimeError: [enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate "
                "memory: you tried to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
            ],
            "out of memory",
            ["4000000000000 bytes"],
        ),
        (
            ["RuntimeError: CUDA error: an illegal memory access was encountered", *CUDA_ADVICE],
            "CUDA error",
            ["CUDA error: an illegal memory access was encountered;", "xid"],
        ),
        (
            ["torch.AcceleratorError: CUDA error: device-side assert triggered", *CUDA_ADVICE],
            "CUDA error",
            ["device-side assert triggered", "out of its range"],
        ),
        (
            ["RuntimeError: CUDA error: no kernel image is available for execution on the device", *CUDA_ADVICE],
            "CUDA error",
            ["not made for this GPU"],
        ),
        (
            ["RuntimeError: Triton Error [CUDA]: an illegal memory access was encountered"],
            "CUDA error",
            ["an illegal memory access"],
        ),
        (["ValueError: the first line", "and the second"], "engine fault", ["ValueError: the first line"]),
        (["AssertionError"], "engine fault", ["AssertionError"]),
    ],
)
def test_what_the_engine_raised_is_told_apart(raised: list[str], reason: str, says: list[str]) -> None:
    before = [*FRAMES, TORCH_OOM] if reason == "engine fault" else [*FRAMES, "ValueError: of the worker before"]
    report = classify(EXIT_ENGINE_FAULT, asked=False, log_tail=[*before, *FRAMES, *raised])
    assert (report.code, report.reason, report.retry) == (EXIT_ENGINE_FAULT, reason, True)
    assert [text for text in says if text not in report.message] == []
    assert len(report.message) <= MAX_MESSAGE
    assert "GPU 0" not in report.message


def test_the_cause_of_an_exception_counts_but_not_one_that_was_dealt_with() -> None:
    caused = "The above exception was the direct cause of the following exception:"
    meanwhile = "During handling of the above exception, another exception occurred:"
    last = [*FRAMES, "RuntimeError: the step failed"]
    report = classify(EXIT_ENGINE_FAULT, asked=False, log_tail=[*FRAMES, TORCH_OOM, "", caused, "", *last])
    assert report.reason == "out of VRAM"
    report = classify(EXIT_ENGINE_FAULT, asked=False, log_tail=[*FRAMES, TORCH_OOM, "", meanwhile, "", *last])
    assert (report.reason, report.message) == ("engine fault", "RuntimeError: the step failed")


def test_words_in_a_message_do_not_make_it_out_of_memory() -> None:
    """Only the class of an exception or an allocator's own wording means out of memory."""
    for line in ("ValueError: no MemoryError here", "KeyError: 'OutOfMemoryError'", "MemoryErrorLikeThing: x"):
        report = classify(EXIT_ENGINE_FAULT, asked=False, log_tail=[*FRAMES, line])
        assert (report.reason, report.message) == ("engine fault", line)


def test_a_traceback_whose_beginning_is_cut_off() -> None:
    tail = [*FRAMES[1:], "RuntimeError: CUDA error: an illegal memory access was encountered", *CUDA_ADVICE]
    assert classify(EXIT_ENGINE_FAULT, asked=False, log_tail=tail).reason == "CUDA error"


ABORTED = ["Fatal Python error: Aborted", "", "Current thread 0x00007f (most recent call first):", '  File "x.py"']
TERMINATE = "terminate called after throwing an instance of 'c10::Error'"


def test_an_abort_is_told_by_what_cpp_said_before_it() -> None:
    error = ["  what():  CUDA error: an illegal memory access was encountered", *CUDA_ADVICE, "frame #0: c10::Error"]
    report = classify(-signal.SIGABRT, asked=False, log_tail=[TERMINATE, *error, *ABORTED])
    assert (report.reason, report.retry) == ("CUDA error", True)
    assert "illegal memory access" in report.message
    bad_alloc = ["terminate called after throwing an instance of 'std::bad_alloc'", "  what():  std::bad_alloc"]
    assert classify(-signal.SIGABRT, asked=False, log_tail=[*bad_alloc, *ABORTED]).reason == "out of memory"
    # lines of a former worker do not count
    later = [TERMINATE, *error, *ABORTED, "free(): invalid pointer", *ABORTED]
    report = classify(-signal.SIGABRT, asked=False, log_tail=later)
    assert (report.reason, report.message) == ("signal", "ended by SIGABRT")


def test_sigkill_by_somebody_else_is_not_explained_by_a_former_traceback() -> None:
    report = classify(-signal.SIGKILL, asked=False, log_tail=[*FRAMES, TORCH_OOM])
    assert (report.reason, report.message) == ("killed", "killed by SIGKILL, not by us (out of memory?)")


def test_an_unknown_signal_number_is_reported_too() -> None:
    """Real-time signals have no name in the signal module."""
    assert "42" in classify(-42, asked=False, log_tail=[]).message


def test_an_empty_log_is_no_obstacle() -> None:
    assert classify(EXIT_ENGINE_FAULT, asked=False, log_tail=[]).message
    assert classify(3, asked=False, log_tail=[]).message == "exit code 3"
    assert not_spawned(OSError(11, "Resource temporarily unavailable")).retry


def test_timers_run_in_order_and_once() -> None:
    timers, ran = Timers(), []
    for name, at in (("late", 3.0), ("first", 1.0), ("same", 1.0), ("middle", 2.0)):
        timers.at(at, lambda name=name: ran.append(name))  # type: ignore[misc]
    assert timers.wait_s(0.5) == 0.5
    assert timers.due(0.9) == []
    for timer in timers.due(2.0):
        timer.callback()
    assert ran == ["first", "same", "middle"]
    assert timers.wait_s(2.0) == 1.0
    assert timers.wait_s(7.0) == 0.0
    assert len(timers.due(7.0)) == 1
    assert timers.wait_s(7.0) is None


def test_cancelled_timers_are_not_waited_for() -> None:
    timers = Timers()
    early, late = timers.at(1.0, lambda: None), timers.at(5.0, lambda: None)
    early.cancel()
    early.cancel()
    assert timers.wait_s(0.0) == 5.0
    due = timers.due(9.0)
    late.cancel()  # cancelled after it became due, and before it is run
    assert [timer.cancelled for timer in due] == [True]


def test_cancelled_timers_do_not_pile_up() -> None:
    """A request may take a day, and each of many shorter requests replaces its timer."""
    timers, ran = Timers(), []
    for second in range(5000):
        day = timers.at(86_400.0, lambda: ran.append("day"))
        if second != 4999:
            day.cancel()
    assert len(timers._heap) <= CLEAR_AT
    for timer in timers.due(90_000.0):
        if not timer.cancelled:
            timer.callback()
    assert ran == ["day"]


def test_of_many_times_the_earliest_counts() -> None:
    timers, ran = Timers(), []
    timer = EarliestTimer(timers, lambda: ran.append("due"))
    for when in (5.0, 3.0, 4.0):
        timer.set(when)
    assert timers.wait_s(0.0) == 3.0
    for due in timers.due(9.0):
        if not due.cancelled:
            due.callback()
    assert ran == ["due"]
    assert timers.wait_s(9.0) is None
    timer.set(12.0)
    assert timers.wait_s(9.0) == 3.0


@given(st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=50), st.floats(0, 100))
def test_due_takes_out_exactly_what_is_due(entries: list[tuple[float, bool]], now: float) -> None:
    timers = Timers()
    made = [timers.at(at, lambda: None) for at, _ in entries]
    for timer, (_, cancelled) in zip(made, entries, strict=True):
        if cancelled:
            timer.cancel()
    wanted = {id(t) for t in made if t.at <= now and not t.cancelled}
    assert {id(t) for t in timers.due(now) if not t.cancelled} == wanted
    assert {id(t) for t in timers.due(now)} == set()


def test_a_hung_worker_is_told_apart_from_one_killed_for_nonsense() -> None:
    why = "hung: no progress for 2.4 s in a step (lease 2 s); it is stopped (SIGSTOP)"
    report = classify(-signal.SIGKILL, asked=False, log_tail=[], killed=("hung", why))
    assert (report.reason, report.message, report.retry) == ("hung", why, True)
    report = classify(-signal.SIGKILL, asked=False, log_tail=[], killed=("killed", "it cannot be reached"))
    assert (report.reason, report.message) == ("killed", "killed by the supervisor: it cannot be reached")
    # the worker had been told to stop, and then hung
    report = classify(-signal.SIGKILL, asked=True, log_tail=["x"], killed=("hung", why))
    assert (report.reason, report.message, report.lines) == ("asked", f"stopped; it was killed: {why}", ())


def test_the_last_lines_are_few_short_and_printable() -> None:
    report = classify(1, asked=False, log_tail=[f"line {i}" for i in range(50)] + ["", "a\x1b[31mb", "x" * 9999])
    assert len(report.lines) == MAX_LINES
    assert report.lines[0] == "line 40"
    assert report.lines[-2] == "a [31mb"
    assert len(report.lines[-1]) == MAX_MESSAGE


STACKS = [
    "Thread 0x00007f01 [helper] (most recent call first):",
    '  File "threading.py", line 1 in wait',
    "",
    "Current thread 0x00007f02 (most recent call first):",
    *(f'  File "x.py", line {i} in f{i}' for i in range(30)),
]


def test_of_stacks_the_innermost_calls_of_the_main_thread_are_kept() -> None:
    report = classify(-signal.SIGKILL, asked=False, log_tail=["loading", *STACKS], killed=("hung", "hung"))
    assert report.lines == tuple(STACKS[3 : 3 + MAX_LINES])
    # a line after the stacks is nearer to the end, so it is kept
    report = classify(1, asked=False, log_tail=[*STACKS, "and then it went on"])
    assert report.lines[-1] == "and then it went on"


def test_the_log_of_a_former_worker_is_not_read_as_this_ones(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    assert files.prepare(path) == 0
    path.write_text("ValueError: of the worker before\n")
    begin = files.prepare(path)
    assert files.tail(path, since=begin) == []
    with path.open("a") as log:
        log.write("one\ntwo\n")
    assert files.tail(path, since=begin) == ["one", "two"]
    assert files.tail(path, size=4, since=begin) == ["two"]
    path.write_text("cut\n")  # as a program that tidies logs does
    assert files.tail(path, since=begin) == ["cut"]
