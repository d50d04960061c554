"""Order commands check names before they do anything, cope with other operators' orders, and have --json."""

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from modelctl import Client
from modelctl.cli.waiting import coming_generation, settled_down, settled_up
from tests.cli.programs import MODELCTL
from tests.conftest import Serve
from tests.serving import Serving, engine, is_alive, wait_until


@pytest.fixture(scope="module")
def serving() -> Iterator[Serving]:
    models = {"a": engine(context=200_000), "b": engine(autostart=False), "slow": engine("SlowLoad", autostart=False)}
    with Serving(models) as serving:
        yield serving


def order(serving: Serving, *arguments: str) -> "subprocess.Popen[str]":
    """Start a command in the background."""
    return subprocess.Popen(
        [*MODELCTL, *arguments, "--runtime-dir", str(serving.runtime_dir)],
        env=serving.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def busy(client: Client) -> Any:
    """Start a stream of model a that goes on until it is cancelled."""
    stream = client.generate("a", "endless", max_tokens=100_000)
    next(stream)
    return stream


@pytest.mark.parametrize("verb", ["start", "stop", "restart"])
def test_names_are_checked_before_the_first_order(serving: Serving, verb: str) -> None:
    before = {name: (serving.status(name)["state"], serving.status(name)["generation"]) for name in ("a", "b")}
    done = serving.modelctl(verb, "a", "b", "nosuch")
    assert done.returncode == 1
    assert "no model 'nosuch' is configured: there is a, b, slow" in done.stderr
    assert {name: (serving.status(name)["state"], serving.status(name)["generation"]) for name in before} == before


def test_patterns_and_all_mean_models(serving: Serving) -> None:
    def states() -> dict[str, str]:
        return {model["name"]: model["state"] for model in serving.overview()["models"]}

    assert serving.modelctl("start", "[ab]").returncode == 0
    assert states() == {"a": "ready", "b": "ready", "slow": "stopped"}
    wrong = serving.modelctl("stop", "b*", "x*")
    assert (wrong.returncode, wrong.stderr) == (1, "modelctl: no model matches 'x*': there is a, b, slow\n")
    assert states()["b"] == "ready", "no order is given if one pattern is wrong"
    assert serving.modelctl("stop", "b*").returncode == 0
    assert states()["b"] == "stopped"
    restarted = json.loads(serving.modelctl("restart", "?", "a", "--json").stdout)
    assert [model["name"] for model in restarted] == ["a", "b"]
    assert serving.modelctl("reload", "[ab]").stdout.splitlines() == [
        "a: exchanged, the new worker beside the old", "b: exchanged, the new worker beside the old",
    ]  # fmt: skip
    stopped = serving.modelctl("stop", "--all")
    assert stopped.returncode == 0
    assert set(states().values()) == {"stopped"}
    for arguments, says in ((["--all", "a"], "leave out the names"), ([], "name a MODEL, or give --all")):
        done = serving.modelctl("start", *arguments)
        assert done.returncode == 2
        assert says in done.stderr
    assert serving.modelctl("start", "a").returncode == 0


def test_ps_and_status_of_some_models(serving: Serving) -> None:
    def names(*arguments: str) -> list[str]:
        return [model["name"] for model in json.loads(serving.modelctl("ps", *arguments, "--json").stdout)]

    assert names() == ["a", "b", "slow"]
    assert names("slow", "a") == ["a", "slow"]
    assert names("s*") == ["slow"]
    assert names("b") == ["b"]
    done = serving.modelctl("ps", "a", "nosuch")
    assert (done.returncode, done.stdout) == (1, "")
    assert "no model 'nosuch' is configured: there is a, b, slow" in done.stderr
    assert "no model matches 'x?'" in serving.modelctl("status", "x?").stderr
    shown = serving.modelctl("status", "[ab]").stdout.splitlines()
    assert [line for line in shown if not line.startswith(" ")] == ["a", "b"]


def test_a_name_given_twice_is_one_order(serving: Serving) -> None:
    done = serving.modelctl("restart", "a", "a", "--json")
    assert done.returncode == 0
    (only,) = json.loads(done.stdout)
    assert only["generation"] == serving.status("a")["generation"]


def test_a_stop_is_over_when_somebody_starts_the_model_again(serving: Serving) -> None:
    with serving.client() as client:
        stream = busy(client)
        before = serving.status("a")["generation"]
        stopping = order(serving, "stop", "a")
        serving.wait_state("a", "draining")
        serving.order("start", model="a")
        stream.cancel()
        _, said = stopping.communicate(timeout=60)
    assert stopping.returncode == 0
    assert "modelctl: a was stopped, and started again meanwhile" in said
    assert serving.wait_state("a", "ready")["generation"] == before + 1


def test_a_restart_is_over_when_somebody_stops_the_model(serving: Serving) -> None:
    with serving.client() as client:
        stream = busy(client)
        restarting = order(serving, "restart", "a")
        serving.wait_state("a", "draining")
        serving.order("stop", model="a")
        stream.cancel()
        _, said = restarting.communicate(timeout=60)
    assert restarting.returncode == 1
    assert "modelctl: a: somebody else's order stopped it before it was ready\n" in said
    assert serving.modelctl("start", "a").returncode == 0


def test_a_start_is_over_when_somebody_stops_the_model(serving: Serving) -> None:
    starting = order(serving, "start", "slow")
    serving.wait_state("slow", "loading")
    serving.order("stop", model="slow", now=True)
    _, said = starting.communicate(timeout=60)
    assert starting.returncode == 1
    assert "modelctl: slow: somebody else's order stopped it before it was ready\n" in said
    serving.wait_state("slow", "stopped")


def test_a_start_of_a_model_on_its_way_down_waits_for_the_next_one(serving: Serving) -> None:
    with serving.client() as client:
        stream = busy(client)
        before = serving.status("a")["generation"]
        serving.order("stop", model="a")
        serving.wait_state("a", "draining")
        # two are left: this client and the querying one. The connection of the order to stop may still be closing
        wait_until(lambda: serving.overview()["supervisor"]["connections"] == 2)
        starting = order(serving, "start", "a", "--json")
        wait_until(lambda: serving.overview()["supervisor"]["connections"] > 2)
        stream.cancel()
        output, said = starting.communicate(timeout=60)
    assert (starting.returncode, said) == (0, "")
    (model,) = json.loads(output)
    assert (model["state"], model["generation"]) == ("ready", before + 1)


def test_what_counts_as_settled() -> None:
    def model(state: str, generation: int) -> dict[str, Any]:
        return {"state": state, "generation": generation}

    assert coming_generation(model("ready", 3)) == 3
    assert coming_generation(model("starting", 3)) == 3
    assert coming_generation(model("draining", 3)) == coming_generation(model("stopping", 3)) == 4
    for state in ("ready", "stopped", "failed"):
        assert settled_up(model(state, 3), 3), state
    for state in ("starting", "loading", "backoff", "draining", "stopping"):
        assert not settled_up(model(state, 3), 3), state
        assert not settled_up(model(state, 4), 3), "it is being tried again"
    assert not settled_up(model("draining", 2), 3), "it makes room"
    assert not settled_up(model("ready", 2), 3), "the order to restart is not carried out yet"
    assert settled_up(model("stopped", 2), 3), "somebody stopped it before it came"
    assert not settled_down(model("stopping", 3), 3)
    assert settled_down(model("stopped", 3), 3)
    assert settled_down(model("loading", 4), 3)


def test_a_start_that_a_shutdown_ends_blames_the_shutdown(serve: Serve) -> None:
    """A supervisor that shuts down stops a loading model at once, and answers for as long as others finish."""
    serving = serve({"a": engine(context=200_000), "slow": engine("SlowLoad", autostart=False)})
    with serving.client() as client:
        stream = busy(client)
        with order(serving, "start", "slow") as starting:
            assert starting.stderr is not None
            while "slow: loading" not in (line := starting.stderr.readline()):
                assert line, "the command has ended"
            serving.process.terminate()
            wait_until(lambda: client.status("slow")["models"][0]["state"] == "stopped")
            with pytest.raises(subprocess.TimeoutExpired):  # twenty times as long as the command's pause
                starting.wait(1)
            stream.cancel()
            _, said = starting.communicate(timeout=60)
    serving.process.wait(60)  # else the end of the test could find it about to end
    assert starting.returncode == 69
    assert "somebody else" not in said


def test_json_without_waiting(serving: Serving) -> None:
    before = serving.status("slow")["generation"]
    done = serving.modelctl("start", "slow", "--no-wait", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    (model,) = json.loads(done.stdout)
    assert (model["name"], model["generation"]) == ("slow", before + 1)
    assert model["state"] in ("starting", "loading")
    done = serving.modelctl("stop", "slow", "--no-wait", "--json")
    (model,) = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert model["state"] in ("stopping", "stopped")
    done = serving.modelctl("restart", "b", "--no-wait", "--json")
    assert (done.returncode, done.stderr, len(json.loads(done.stdout))) == (0, "", 1)
    serving.wait_state("slow", "stopped")


def test_without_waiting_the_state_is_told(serving: Serving) -> None:
    done = serving.modelctl("stop", "b", "slow", "--no-wait")
    assert (done.returncode, done.stdout) == (0, "")
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == ["b", "slow"]


def test_logs_as_json(serving: Serving) -> None:
    before = serving.log().splitlines()
    output = serving.modelctl("logs", "-n", "3", "--json").stdout
    after = serving.log().splitlines()  # a line may have been added meanwhile
    ends = [[{"line": line} for line in after[end - 3 : end]] for end in range(len(before), len(after) + 1)]
    assert [json.loads(line) for line in output.splitlines()] in ends


def test_logs_as_json_while_they_grow(serving: Serving) -> None:
    log = serving.runtime_dir / "logs" / "b.log"
    log.write_text("old\n")
    with order(serving, "logs", "b", "-f", "-n", "1", "--json") as follower:
        assert follower.stdout is not None
        assert json.loads(follower.stdout.readline()) == {"line": "old"}
        with open(log, "a") as file:
            file.write("in two ")
            file.flush()
            file.write('"pieces" ✓\nhalf')
            file.flush()
            assert json.loads(follower.stdout.readline()) == {"line": 'in two "pieces" ✓'}
        log.rename(log.with_name("b.log.1"))
        log.write_text("new\n")
        assert json.loads(follower.stdout.readline()) == {"line": "half"}
        assert json.loads(follower.stdout.readline()) == {"line": "new"}
        follower.send_signal(2)
        assert follower.wait(60) == 130


def test_shutdown_as_json(serve: Serve) -> None:
    serving = serve({"a": engine()})
    processes = serving.processes()
    done = serving.modelctl("shutdown", "--json")
    assert (done.returncode, done.stderr, json.loads(done.stdout)) == (0, "", {"pid": serving.pid})
    serving.process.wait(60)
    wait_until(lambda: not any(map(is_alive, processes)))
