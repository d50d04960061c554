"""A model's log tells the events of its life, and never the content of requests."""

import re
import signal
import stat

from tests.conftest import Serve
from tests.serving import Serving, engine, wait_until

STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}[+-]\d\d:\d\d modelctl "


def wait_for_life(serving: Serving, name: str, *steps: str) -> None:
    """Wait until these patterns match lines of a model's log, in this order. Each line must be the supervisor's."""
    in_order = re.compile(".*\n(?:.*\n)*?".join(f"{STAMP}[A-Z]+ +{name}: {step}" for step in steps))
    wait_until(lambda: in_order.search(serving.log(name)), what=f"{steps} in the log of {name}")
    for line in serving.log(name).splitlines():
        assert re.match(STAMP, line), line


def test_a_normal_life(serve: Serve) -> None:
    serving = serve({"a": engine(lazy=True, ttl="100ms")}, wait=False)
    with serving.client() as client:
        client.complete("a", "the secret question", max_tokens=5)
    serving.wait_state("a", "unloaded")
    wait_for_life(
        serving,
        "a",
        r"stopped -> unloaded \(lazy\)",
        r"unloaded -> starting ",
        r"spawned pid \d+, generation 1, devices: cpu",
        r"starting -> loading ",
        r"loading -> ready \(loaded in [0-9.]+ s on none, attention: none, context 4096 tokens, [1-9]\d* MiB of RAM\)",
        r"ready -> stopping \(idle for 0.1 s\) pid \d+",
        r"SHUTDOWN to pid \d+",
        r"stopping -> stopped ",
        r"stopped -> unloaded \(idle for 0.1 s\)",
    )
    log = serving.runtime_dir / "logs" / "a.log"
    assert "secret" not in log.read_text()
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    assert "spawned pid" in serving.modelctl("logs", "a").stdout


def test_a_death_and_its_reason(serve: Serve) -> None:
    serving = serve({"a": engine()})
    serving.worker("a").send_signal(signal.SIGKILL)
    wait_for_life(
        serving,
        "a",
        r"spawned pid \d+, generation 1, ",
        r"pid \d+: killed by SIGKILL, not by us \(out of memory\?\); next try in ",
        r"ready -> backoff ",
        r"spawned pid \d+, generation 2, ",
        r"loading -> ready ",
    )


def test_what_the_supervisor_wrote_is_not_taken_for_the_workers_last_words(serve: Serve) -> None:
    serving = serve(
        {"a": {**engine(), "engine": "tests.faulty_engines:LeavesInLoad"}},
        wait=False,
        restart={"limit": 2, "initial": "1ms"},
    )
    last = serving.wait_state("a", "failed")["last_exit"]
    assert last["message"] == "exit code 7"
    assert last["lines"] == []
    assert "spawned pid" in serving.log("a")


def test_a_log_stays_small_while_its_worker_runs(serve: Serve) -> None:
    """The child of a worker does not open the log again, as a worker does that looks for its log once a second."""
    serving = serve({"a": engine("Floods")})
    log = serving.runtime_dir / "logs" / "a.log"
    copy = log.with_name("a.log.1")

    def said() -> bytes:
        return b"".join(path.read_bytes() for path in (log, copy) if path.exists())

    wait_until(lambda: b"all said\n" in said(), what="the end of the flood")
    wait_until(copy.exists, what="the copy")
    wait_until(lambda: log.stat().st_size <= 8 << 20, what="a small log")
    assert copy.stat().st_size < 25 << 20
    assert [path.name for path in log.parent.glob("a.log*")] in (["a.log", "a.log.1"], ["a.log.1", "a.log"])
    serving.order("restart", model="a")  # the supervisor's own lines go on
    wait_until(lambda: "SHUTDOWN to pid" in serving.log("a"), what="a line of the supervisor")


def test_two_workers_have_a_log_each(serve: Serve) -> None:
    serving = serve({"pair": engine(replicas=2)})
    for name in ("pair:1", "pair:2"):
        wait_for_life(serving, name, "stopped -> starting ", r"spawned pid \d+", "loading -> ready ")
        other = {"pair:1": "pair:2", "pair:2": "pair:1"}[name]
        assert other not in serving.log(name)


def test_a_log_that_was_moved_is_made_anew(serve: Serve) -> None:
    serving = serve({"a": engine()})
    log = serving.runtime_dir / "logs" / "a.log"
    log.rename(log.with_name("moved.log"))
    serving.order("stop", model="a")
    wait_for_life(serving, "a", r"ready -> draining \(stop ordered\)", "stopping -> stopped ")
