"""Hostile chat templates harm no other request. The rendering processes are really stopped, starved and killed."""

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import model_worker.rendering
from model_worker.engine import ChatTemplate
from model_worker.rendering import MOST_CHILDREN, RENDER_S, Renderer
from protocol.errors import ErrorCode, WireError
from tests.meddling import Meddler
from tests.serving import ROOT, is_alive, wait_until

WITHIN = 120.0
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(t='x' * 99999) %}{% for i in range(99) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}"
EITHER = "{% if messages[0].content == 'loop' %}" + LOOP + "{% endif %}{{ messages[0].content }}"
"""A template that loops if a message says so."""
SAYS = "{{ messages[0].content }}"


def conversation(content: str, **fields: Any) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "tools": None,
        "variables": {},
        "add_generation_prompt": True,
        "continue_final_message": False,
    } | fields


class Rendering:
    """A renderer, and the outcome of each key."""

    def __init__(self, source: str, limit: int = 1 << 20) -> None:
        self.renderer = Renderer(ChatTemplate(source, {"bos_token": "<s>"}), limit)
        self.outcomes: dict[int, str | WireError] = {}
        self.order: list[int] = []
        self.looks = 0

    def ask(self, key: int, content: str, channel: int = 1) -> None:
        self.renderer.ask(key, channel, conversation(content))

    def look(self) -> None:
        self.looks += 1
        for key, outcome in self.renderer.collect():
            assert key not in self.outcomes
            self.outcomes[key] = outcome
            self.order.append(key)

    def wait(self, *keys: int) -> None:
        def done() -> bool:
            self.look()
            return all(key in self.outcomes for key in keys)

        wait_until(done, WITHIN, f"{keys} among {self.outcomes}")

    def at_work(self) -> int:
        """Wait until a process is rendering, and return its pid."""

        def busy() -> int | None:
            self.look()
            return next((c.pid for c in self.renderer._children if c.at_work and c.ready and not c.gone), None)

        return wait_until(busy, WITHIN, "a process at work") or 0

    def error(self, key: int) -> WireError:
        outcome = self.outcomes[key]
        assert isinstance(outcome, WireError)
        return outcome


def pids_of(renderer: Renderer) -> list[int]:
    """Return the pids of the processes that a renderer has now."""
    return [child.pid for child in renderer._children]


@pytest.fixture
def rendering(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Rendering]]:
    # On a busy machine, a looping template needs over ten seconds of wall time to use its second of processor time.
    monkeypatch.setattr(model_worker.rendering, "LEASE_S", WITHIN)
    made: list[Rendering] = []

    def make(source: str, limit: int = 1 << 20) -> Rendering:
        made.append(Rendering(source, limit))
        return made[-1]

    yield make
    for one in made:
        processes = [psutil.Process(pid) for pid in pids_of(one.renderer)]
        one.renderer.close()
        assert not [p for p in processes if is_alive(p)]


def assert_takes_too_long(error: WireError) -> None:
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, "messages")
    assert "takes longer than 1 s" in error.message


def test_a_long_conversation_passes_whole(rendering: Callable[..., Rendering]) -> None:
    one = rendering(SAYS, 16 << 20)
    long = "é🐻x" * 500_000
    one.ask(1, long)
    one.ask(2, "short")
    one.wait(1, 2)
    assert one.outcomes == {1: long, 2: "short"}


@pytest.mark.long
def test_a_template_that_loops_costs_its_own_request_a_second(rendering: Callable[..., Rendering]) -> None:
    one = rendering(EITHER)
    for key in (1, 2):
        began = time.monotonic()
        one.ask(key, "loop")
        one.wait(key)
        assert_takes_too_long(one.error(key))
        assert time.monotonic() - began >= RENDER_S * 0.9
    one.ask(3, "fine")
    one.wait(3)
    assert one.outcomes[3] == "fine"
    assert one.looks > 20, "a look must not wait for the template, which takes a second"


@pytest.mark.parametrize("source", ["{{ 9 ** 99999999 }}", "{% set x = 7 ** 9999999 %}{{ x }}"])
def test_a_template_that_costs_too_much_to_compile(rendering: Callable[..., Rendering], source: str) -> None:
    one = rendering(source)
    one.ask(1, "x")
    one.wait(1)
    assert_takes_too_long(one.error(1))


@pytest.mark.parametrize("source", [DOUBLING, "{{ 'x' * 10 ** 10 }}"])
def test_a_template_that_allocates_without_end_is_stopped(rendering: Callable[..., Rendering], source: str) -> None:
    one = rendering("{% if messages[0].content == 'loop' %}" + source + "{% endif %}" + SAYS)
    one.ask(1, "loop")
    one.ask(2, "fine")
    one.wait(1, 2)
    assert one.outcomes[2] == "fine"
    # on a busy machine the second may be used up before the memory
    assert "more memory than it is given" in one.error(1).message or "takes longer" in one.error(1).message
    assert (one.error(1).code, one.error(1).field) == (ErrorCode.INVALID_REQUEST, "messages")
    assert one.looks > 20, "a look must not wait for the template"


def processes(one: Rendering) -> list[psutil.Process]:
    """Return the processes of a renderer."""
    with suppress(psutil.NoSuchProcess):  # a process has ended meanwhile
        return [p for p in map(psutil.Process, list(pids_of(one.renderer))) if is_alive(p)]
    return []


def test_a_process_that_is_killed_costs_nobody_a_request(rendering: Callable[..., Rendering]) -> None:
    one = rendering(EITHER)
    with Meddler(lambda: processes(one), signal.SIGKILL, most=1) as meddler:  # killed while it starts
        one.ask(1, "fine")
        one.wait(1)
    assert len(meddler.met) == 1
    one.ask(2, "loop")
    pid = one.at_work()
    one.ask(3, "fine")
    os.kill(pid, signal.SIGKILL)
    one.wait(2, 3)
    assert one.outcomes[1] == one.outcomes[3] == "fine"
    assert_takes_too_long(one.error(2))  # it then used up its second in the next process
    idle = processes(one)  # several, if conversations had to wait for each other
    for process in idle:
        process.kill()
    wait_until(lambda: not any(is_alive(process) for process in idle), WITHIN, "their ends")
    one.ask(4, "fine again")
    one.wait(4)
    assert one.outcomes[4] == "fine again"


@pytest.mark.long
@pytest.mark.parametrize("at_start", [False, True])
def test_a_process_that_is_stopped_costs_nobody_a_request(
    rendering: Callable[..., Rendering], monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    one = rendering(EITHER)
    if at_start:
        monkeypatch.setattr(model_worker.rendering, "START_S", 10.0)
    else:
        one.ask(1, "fine")
        one.wait(1)
        monkeypatch.setattr(model_worker.rendering, "LEASE_S", 3.0)
    with Meddler(lambda: processes(one), signal.SIGSTOP, most=1) as meddler:
        wait_until(lambda: at_start or meddler.met, WITHIN, "the process is stopped")
        one.ask(2, "fine")
        one.wait(2)
    assert len(meddler.met) == 1
    assert one.outcomes[2] == "fine", "another process renders it"


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL])
def test_without_a_process_a_request_is_asked_to_be_sent_again(
    rendering: Callable[..., Rendering], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    one = rendering(SAYS)
    with monkeypatch.context() as patched, Meddler(lambda: processes(one), number, most=99) as meddler:
        patched.setattr(model_worker.rendering, "START_S", 1.0 if number == signal.SIGSTOP else WITHIN)
        patched.setattr(model_worker.rendering, "LEASE_S", 1.0)
        one.ask(1, "fine")
        one.wait(1)
    assert len(meddler.met) == 2, "it is tried once more, and not for ever"
    assert (one.error(1).code, one.error(1).retryable) == (ErrorCode.HELPER_FAILED, True)
    one.ask(2, "fine")
    one.wait(2)
    assert one.outcomes[2] == "fine"


def test_a_client_whose_chats_take_long_delays_others_little(rendering: Callable[..., Rendering]) -> None:
    one = rendering(EITHER)
    many = list(range(1, 13))
    for key in many:
        one.ask(key, "loop", channel=1)
    one.at_work()
    for key in (101, 102):
        one.ask(key, "fine", channel=2)
    one.wait(101, 102)
    assert [one.outcomes[101], one.outcomes[102]] == ["fine", "fine"]
    assert len(one.order) < 2 + len(many) / 2, "it does not wait for all of another's"
    assert len(pids_of(one.renderer)) <= MOST_CHILDREN
    for key in many:
        one.renderer.cancel(key)


def test_what_is_cancelled_has_no_outcome(rendering: Callable[..., Rendering]) -> None:
    one = rendering(EITHER)
    one.ask(1, "loop")
    one.at_work()
    for key in (2, 3):
        one.ask(key, "fine")
    one.renderer.cancel(1)
    one.renderer.cancel(2)
    one.renderer.cancel(99)
    one.wait(3)

    def idle() -> bool:
        one.look()
        return not one.renderer.busy

    wait_until(idle, WITHIN, "nothing under way")
    assert one.outcomes == {3: "fine"}


def test_one_process_does_where_templates_behave(rendering: Callable[..., Rendering]) -> None:
    one = rendering(SAYS)
    assert not pids_of(one.renderer), "none before it is needed"
    for key in range(50):
        one.ask(key, str(key), channel=key % 5)
    one.wait(*range(50))
    assert one.outcomes == {key: str(key) for key in range(50)}
    assert len(pids_of(one.renderer)) == 1
    maps = Path(f"/proc/{pids_of(one.renderer)[0]}/maps").read_text()
    assert not re.search("torch|zmq|tokenizers|cuda", maps)
    assert psutil.Process(pids_of(one.renderer)[0]).rlimit(psutil.RLIMIT_AS)[0] <= 512 << 20


def test_out_of_descriptors(rendering: Callable[..., Rendering]) -> None:
    one = rendering(SAYS)
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    fillers: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, hard))
        while True:
            try:
                fillers.append(os.dup(0))
            except OSError:
                break
        for room in range(4):
            one.ask(room, "x")
            one.wait(room)
            if isinstance(one.outcomes[room], str):
                break
            assert one.error(room).code == ErrorCode.HELPER_FAILED
            os.close(fillers.pop())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)
    one.ask(100, "x")
    one.wait(100)
    assert one.outcomes[100] == "x"
    assert len(os.listdir("/proc/self/fd")) <= before + 3, "a link, a pidfd and a file for the one process"


def test_no_process_can_be_had(rendering: Callable[..., Rendering], monkeypatch: pytest.MonkeyPatch) -> None:
    one = rendering(SAYS)
    monkeypatch.setattr(sys, "executable", "/nowhere")
    one.ask(1, "x")
    one.wait(1)
    assert one.error(1).code == ErrorCode.HELPER_FAILED
    monkeypatch.undo()
    one.ask(2, "x")
    one.wait(2)
    assert one.outcomes[2] == "x"


ODD = """
import os, sys, time
from protocol.process.helper_link import HelperLink
link, mailbox = HelperLink(0), int(sys.argv[1])
if ODDITY != "never ready":
    link.send(bytes(8))
link.receive(None)
if ODDITY == "leaves":
    sys.exit(3)
if ODDITY.startswith("says"):
    os.ftruncate(mailbox, 0)
    os.pwrite(mailbox, eval(ODDITY[4:]), 0)
    link.send((9).to_bytes(8, "little"))
if ODDITY == "boasts":
    link.send((2**62).to_bytes(8, "little"))
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("oddity", "message"),
    [
        ("never ready", "does not start"),
        ("leaves", "ended with code 3"),
        ("boasts", "answers nonsense"),
        (r"says b'\xc1'", "answers nonsense"),
        (r"says b'\x01\x02\x03'", "answers nonsense"),
        (r"says b''", "answers nonsense"),
        (r"says b'\x81\xa4text\x05'", "answers nonsense"),
        (r"says b'\x81\xa4text\xc4\x01\xff'", "answers nonsense"),
        (r"says b'\xdf\xff\xff\xff\xff'", "answers nonsense"),
    ],
)
def test_a_process_that_is_not_itself_costs_its_own_request_only(
    rendering: Callable[..., Rendering], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, oddity: str, message: str
) -> None:
    one = rendering(SAYS)
    program = tmp_path / "odd.py"
    program.write_text(ODD.replace("ODDITY", repr(oddity)))
    monkeypatch.setattr(model_worker.rendering, "_PROGRAM", str(program))
    monkeypatch.setattr(model_worker.rendering, "START_S", 1.0 if oddity == "never ready" else WITHIN)
    one.ask(1, "x")
    one.wait(1)
    stalled = oddity == "never ready"
    assert one.error(1).code == (ErrorCode.HELPER_FAILED if stalled else ErrorCode.INTERNAL)
    assert message in one.error(1).message
    monkeypatch.undo()
    one.ask(2, "fine")
    one.wait(2)
    assert one.outcomes[2] == "fine"


HOLDER = f"""
import time
import psutil
from model_worker.engine import ChatTemplate
from model_worker.rendering import Renderer
from tests.serving import wait_until
from tests.model_worker.test_hostile_templates import conversation
renderer = Renderer(ChatTemplate({LOOP!r}), 1000)
renderer.ask(1, 1, conversation("x"))
def is_stopped():
    if renderer.collect():  # its second was over before this was given the processor again
        renderer.ask(1, 1, conversation("x"))
    if not (renderer._children and renderer._children[0].ready):
        return False
    process = psutil.Process(renderer._children[0].pid)
    process.suspend()  # its own timer cannot end it now
    return process.status() == psutil.STATUS_STOPPED
wait_until(is_stopped, {WITHIN})
print(renderer._children[0].pid, flush=True)
time.sleep(60)
"""


def test_the_process_dies_with_its_worker() -> None:
    # the package must be found without PYTHONPATH: an editable install does not put the repository into sys.path
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    worker = subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    assert worker.stdout is not None
    with worker:
        try:
            child = psutil.Process(int(worker.stdout.readline()))
            assert child.status() == psutil.STATUS_STOPPED, "its own timer has not ended it"
        finally:
            worker.kill()
    wait_until(lambda: not is_alive(child), WITHIN, "the child's end")
