"""Workers are exchanged and models.yaml is applied while requests go on, and no request is lost."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import yaml

from protocol.errors import ErrorCode, WireError
from protocol.messages import Cancel
from tests.conftest import Serve
from tests.deterministic_engine import answer
from tests.raw_client import Heard, RawClient
from tests.serving import Serving, engine, wait_until


def turnover(serving: Serving, number: int) -> dict[str, Any]:
    turnovers: list[dict[str, Any]] = serving.overview()["supervisor"]["turnovers"]
    return next(report for report in turnovers if report["number"] == number)


def turned_over(serving: Serving, number: int, within: float = 30.0) -> dict[str, dict[str, Any]]:
    """Wait until the turnover is over, and return its outcome for each model."""

    def done() -> dict[str, dict[str, Any]] | None:
        report = turnover(serving, number)
        return None if report["running"] else {model["model"]: model for model in report["models"]}

    return wait_until(done, within, "the reload to be over")


def reload(serving: Serving, **params: Any) -> dict[str, dict[str, Any]]:
    return turned_over(serving, serving.order("reload", **params)["turnover"])


class Load:
    """Requests that begin one after the other while a turnover goes on."""

    def __init__(self, client: RawClient, model: str, tokens: int) -> None:
        self._client, self._model, self._tokens = client, model, tokens
        self.asked = 0

    def ask(self) -> None:
        self.asked += 1
        self._client.generate(self.asked, self._model, f"ask {self.asked}", max_tokens=self._tokens)

    def ask_until(self, serving: Serving, number: int) -> None:
        def over() -> bool:
            self.ask()
            while self._client.socket.poll(10):
                self._client.receive()
            return not turnover(serving, number)["running"]

        wait_until(over, 30, "the reload to be over")

    def check(self) -> set[int]:
        """Check that every request has ended well, each in one generation. Return the generations."""
        self._client.read_until_ended(*range(1, self.asked + 1), within=30)
        generations: set[int] = set()
        for request in range(1, self.asked + 1):
            heard = self._client.heard[request]
            assert (heard.text, heard.ends) == (answer(f"ask {request}", self._tokens), ["length"])
            assert heard.seqs == list(range(self._tokens))
            assert len(heard.generations) == 1, "it was served by one worker from beginning to end"
            generations |= heard.generations
        return generations


@pytest.mark.parametrize("how", ["beside", "exchange"])
def test_no_request_is_lost(serve: Serve, how: str) -> None:
    serving = serve({"a": engine("SlowLoad", load_s=0.2), "b": engine()})
    others = serving.status("b")["pid"]
    with RawClient(serving.runtime_dir) as client:
        load = Load(client, "a", 30)
        for _ in range(8):
            load.ask()
        while not client.heard.get(1, Heard()).tokens:
            client.receive()
        for generation in (2, 3):
            load.ask_until(serving, serving.order("reload", model="a", how=how)["turnover"])
            assert serving.status("a")["generation"] == generation
        load.ask()
        assert load.check() == {1, 2, 3}
        assert not client.errors
    assert serving.status("b")["pid"] == others
    assert [model["name"] for model in serving.overview()["models"]] == ["a", "b"]
    assert serving.status("a")["totals"]["tokens"] == 30 * load.asked, "what earlier workers did counts on"
    exchanged, other = (model["speeds"] for model in serving.order("status", history=True)["models"])
    assert len(exchanged) == len(other), "what earlier workers did is in the line of speeds"


def test_the_difference_of_a_file_is_applied(serve: Serve) -> None:
    models = {name: engine(context=64) for name in ("same", "other", "waits", "gone")} | {
        "rests": engine(autostart=False)
    }
    serving = serve(models)
    before = {model["name"]: model["pid"] for model in serving.overview()["models"]}
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "gone", "leaves", max_tokens=50)
        client.generate(2, "other", "leaves", max_tokens=50)
        del models["gone"]
        serving.write_models(
            models | {"other": engine(context=128), "rests": engine(context=32, autostart=False),
                      "waits": engine(context=64, max_queue=1), "new": engine()}
        )  # fmt: skip
        serving.process.send_signal(signal.SIGHUP)
        wait_until(lambda: serving.overview()["supervisor"]["turnovers"], 10, "the signal to be taken")
        report = turned_over(serving, 1)
        assert {name: model["change"] for name, model in report.items()} == {
            "same": "unchanged", "other": "workers", "waits": "settings", "rests": "workers", "new": "added",
            "gone": "removed",
        }  # fmt: skip
        assert {model["state"] for model in report.values()} == {"done"}
        client.read_until_ended(1, 2)
        assert [client.heard[request].ends for request in (1, 2)] == [["length"]] * 2
        client.generate(3, "gone", "x")
        client.generate(4, "new", "here", max_tokens=4)
        client.read_until_ended(4)
        assert client.errors[0][1]["name"] == "model_not_found"
        assert client.heard[4].text == answer("here", 4)
    after = {model["name"]: model for model in serving.overview()["models"]}
    assert set(after) == {"same", "other", "waits", "rests", "new"}
    assert {name: model["pid"] for name, model in after.items() if model["pid"] == before.get(name)} == {
        "same": before["same"], "waits": before["waits"], "rests": None,
    }  # fmt: skip
    assert after["other"]["context"] == 128
    serving.order("start", model="rests")
    assert serving.wait_state("rests", "ready")["context"] == 32
    assert reload(serving)["other"]["change"] == "unchanged"


@pytest.mark.long
def test_changed_settings_of_the_supervisor_are_applied_and_named(serve: Serve) -> None:
    serving = serve({"a": engine(context=1_000_000)}, stop={"drain": "10m"})

    def settings(**sections: Any) -> str:
        file = yaml.safe_load(serving.config.read_text())
        file["supervisor"] |= sections
        serving.config.write_text(yaml.safe_dump(file))
        done = serving.modelctl("reload")
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert settings() == "nothing has changed\n"
    reported = settings(stop={"drain": "10ms"}, watch={"step": "50s"}, stall="30s", poison={"limit": 3})
    assert sorted(reported.splitlines()) == [
        "supervisor.poison: applied",
        "supervisor.stall: applied",
        "supervisor.stop: applied",
        "supervisor.watch: applied to workers that are started from now on",
    ]
    assert settings() == "nothing has changed\n"
    assert "reload ordered: applied supervisor.stop, supervisor.poison" in serving.log()
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "x", max_tokens=900_000)
        while not client.heard:
            client.receive()
        serving.order("stop", model="a")
        client.read_until_ended(1)
        assert client.heard[1].ends == ["draining"], "the drain's new time is what counts"
    serving.wait_state("a", "stopped")
    assert settings(stall="40s").splitlines() == ["supervisor.stall: applied"]
    serving.config.write_text(serving.config.read_text().replace("40s", "45s"))
    assert "supervisor." not in serving.modelctl("reload", "a").stdout
    assert "supervisor.stall" in serving.modelctl("reload").stdout, "one model's reload leaves the section as it was"


def test_an_invalid_file_changes_nothing_and_says_why(serve: Serve) -> None:
    serving = serve({"a": engine()})
    pid = serving.status("a")["pid"]
    serving.config.write_text("models:\n  a: {model_dir: ., engine: transformers, contxt: 3}\n")
    with pytest.raises(WireError, match=r"nothing is changed: .*models.yaml:2: models.a.contxt: unknown key"):
        serving.order("reload")
    done = serving.modelctl("reload")
    assert done.returncode == 78
    assert "models.yaml:2: models.a.contxt: unknown key" in done.stderr
    with pytest.raises(WireError) as caught:
        serving.order("reload", how="sideways")
    assert caught.value.field == "how"
    serving.process.send_signal(signal.SIGHUP)
    wait_until(lambda: "SIGHUP: nothing is changed" in serving.log(), 10, "the log")
    serving.write_models({"a": engine()})
    with pytest.raises(WireError) as caught:
        serving.order("reload", model="z")
    assert caught.value.code is ErrorCode.MODEL_NOT_FOUND
    assert (serving.status("a")["pid"], serving.overview()["supervisor"]["turnovers"]) == (pid, [])


def test_a_file_behind_links_is_read_where_they_lead_now() -> None:
    def update(version: str, name: str) -> None:
        """Exchange the directory as Kubernetes does with that of a ConfigMap: the former one is removed."""
        former = (mounted / "..data").resolve() if (mounted / "..data").exists() else None
        (mounted / version).mkdir(parents=True)
        serving.config.unlink()
        serving.write_models({name: engine(lazy=True)})
        serving.config.rename(mounted / version / "models.yaml")
        serving.config.symlink_to("mounted/..data/models.yaml")
        (mounted / "..next").symlink_to(version)
        (mounted / "..next").replace(mounted / "..data")
        if former is not None:
            shutil.rmtree(former)

    def names() -> list[str]:
        return [model["name"] for model in serving.overview()["models"]]

    serving = Serving({"first": engine(lazy=True)}, begin=False, options=["--watch"])
    mounted = serving.directory / "mounted"
    update("..v1", "first")
    serving.start_again({"first": engine(lazy=True)})
    with serving:
        assert serving.overview()["supervisor"]["config"] == str(serving.config)
        update("..v2", "second")
        wait_until(lambda: names() == ["second"], what="the file that is watched")
        update("..v3", "third")
        done = serving.modelctl("reload")
        assert (done.returncode, names()) == (0, ["third"]), done.stderr
        update("..v4", "fourth")
        serving.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP" in serving.log(), what="the order")
        assert names() == ["fourth"]


@pytest.mark.long
def test_where_the_new_worker_does_not_come_up_the_old_one_goes_on(serve: Serve) -> None:
    serving = serve({"a": engine(step_s=0.005)})
    pid = serving.status("a")["pid"]
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "a", "goes on", max_tokens=100)
        serving.write_models({"a": engine(step_s=0.005) | {"options": {"wrong": 1}}})
        report = reload(serving, how="beside")["a"]
        assert report["state"] == "failed"
        assert report["message"].startswith("the new worker did not come up: ")
        assert report["message"].endswith("; the old one goes on")
        assert "unknown options" in report["message"]
        client.read_until_ended(1)
        assert client.heard[1].ends == ["length"]
    models = serving.overview()["models"]
    assert [(model["name"], model["state"], model["pid"]) for model in models] == [("a", "ready", pid)]
    done = serving.modelctl("reload", "--beside")
    assert done.returncode == 1
    assert "modelctl: a: the new worker did not come up" in done.stderr
    serving.write_models({"a": engine(step_s=0.001)})
    done = serving.modelctl("reload")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "a: exchanged, the new worker beside the old")


@pytest.mark.long
def test_replicas_come_and_go_and_a_restart_leaves_one(serve: Serve) -> None:
    serving = serve({"a": engine("SlowLoad", load_s=0.2)})
    with RawClient(serving.runtime_dir) as client:
        load = Load(client, "a", 20)
        for replicas, names in ((3, ["a:1", "a:2", "a:3"]), (2, ["a:1", "a:2"])):
            serving.write_models({"a": engine("SlowLoad", load_s=0.2, replicas=replicas)})
            load.ask_until(serving, serving.order("reload")["turnover"])
            assert [(m["name"], m["state"]) for m in serving.overview()["models"]] == [(n, "ready") for n in names]
        number = serving.order("restart", model="a")["turnover"]

        def both() -> bool:
            load.ask()
            models = serving.overview()["models"]
            assert "ready" in {model["state"] for model in models}, "one is always there"
            return not turnover(serving, number)["running"]

        wait_until(both, 30, "both to be restarted")
        assert [m["generation"] for m in serving.overview()["models"]] == [2, 2]
        load.check()
        assert not client.errors


def test_a_stop_while_workers_are_exchanged_stops_both(serve: Serve) -> None:
    serving = serve({"a": engine("SlowLoad")} | {"b": engine()}, wait=False)
    serving.wait_state("b", "ready")
    serving.write_models({"a": engine("SlowLoad"), "b": engine("SlowLoad")})
    number = serving.order("reload", model="b", how="beside")["turnover"]
    wait_until(lambda: any(m["name"] == "b~2" for m in serving.overview()["models"]), 10, "the new one")
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "b", "still served", max_tokens=5)
        client.read_until_ended(1)
        assert client.heard[1].ends == ["length"]
    for verb in ("start", "restart"):
        with pytest.raises(WireError, match="for as long as a reload takes"):
            serving.order(verb, model="b~2")
    serving.order("stop", model="b")
    assert turned_over(serving, number)["b"]["state"] == "failed"
    serving.wait_state("b", "stopped")
    assert [model["name"] for model in serving.overview()["models"]] == ["a", "b"]
    assert serving.order("start", model="b")["state"] == "starting"
    serving.wait_state("b", "loading")
    assert serving.status("b")["generation"] == 3, "one of them was the new worker that was stopped"


def test_the_end_of_its_terminal_is_no_order_to_reload(serve: Serve) -> None:
    """Both the end of a terminal and an order to reload come as SIGHUP."""
    serving = serve({"a": engine()}, script=Path(__file__).with_name("supervisor_in_terminal.py"))
    (supervisor,) = (process for process in serving.processes() if process.ppid() == serving.pid)
    supervisor.send_signal(signal.SIGHUP)
    wait_until(lambda: serving.overview()["supervisor"]["turnovers"], 30, "a reload")
    assert serving.status("a")["state"] == "ready"
    serving.process.send_signal(signal.SIGUSR1)
    assert serving.process.wait(30) == 0
    assert "shutting down: SIGHUP" in serving.log()


def test_a_request_for_a_model_that_a_reload_has_yet_to_come_to_is_refused(serve: Serve) -> None:
    """Regression: the model had no workers yet, and refusing the request ended the supervisor."""
    serving = serve({"a": engine("SlowLoad", load_s=0.2)})
    serving.write_models({"a": engine("SlowLoad", load_s=0.3), "new": engine()})
    number = serving.order("reload", how="exchange")["turnover"]
    with RawClient(serving.runtime_dir) as client:
        client.generate(1, "new", "x")
        while not client.errors:
            client.receive()
        assert client.errors[0][1]["name"] == "model_not_running"
        assert client.errors[0][1]["retry_after_ms"]
        turned_over(serving, number)
        client.generate(2, "new", "here", max_tokens=4)
        client.read_until_ended(2)
        assert client.heard[2].text == answer("here", 4)


def test_a_model_that_is_being_stopped_or_removed_does_not_come_back(serve: Serve) -> None:
    serving = serve({"a": engine(step_s=0.01), "b": engine(step_s=0.01, context=100_000)})
    with RawClient(serving.runtime_dir) as client:
        for request, model, tokens in (1, "a", 150), (2, "b", 90_000):  # b drains until its request is cancelled
            client.generate(request, model, "long", max_tokens=tokens)
        while not (client.heard.get(1, Heard()).tokens and client.heard.get(2, Heard()).tokens):
            client.receive()
        serving.order("stop", model="a")
        serving.write_models({"a": engine(step_s=0.01, context=32), "c": engine()})
        number = serving.order("reload")["turnover"]
        serving.wait_state("b", "draining")
        serving.order("start", model="b")  # models.yaml no longer has b
        serving.order("reload", model="b")
        client.send(Cancel(2))
        client.read_until_ended(1, 2)
        assert [client.heard[request].ends for request in (1, 2)] == [["length"], ["cancelled"]]
    assert {report["state"] for report in turned_over(serving, number).values()} == {"done"}
    serving.wait_state("a", "stopped")
    assert [(m["name"], m["generation"]) for m in serving.overview()["models"]] == [("a", 1), ("c", 1)]


@pytest.mark.long
def test_a_restart_in_turns_is_of_what_is_there_when_its_turn_comes(serve: Serve) -> None:
    serving = serve({"a": engine("SlowLoad", load_s=0.3, replicas=2)})
    serving.order("stop", model="a:1")
    serving.wait_state("a:1", "stopped")
    serving.write_models({"a": engine("SlowLoad", load_s=0.3, context=64)})
    serving.order("reload")
    number = serving.order("restart", model="a")["turnover"]
    turned_over(serving, number)
    (worker,) = serving.overview()["models"]
    assert (worker["name"], worker["state"], worker["context"]) == ("a", "ready", 64)


def test_a_restart_of_several_starts_those_that_are_down(serve: Serve) -> None:
    serving = serve({"a": engine(replicas=2)})
    serving.order("stop", model="a:1")
    serving.wait_state("a:1", "stopped")
    done = serving.modelctl("restart", "a")
    assert done.returncode == 0, done.stderr
    assert [(m["state"], m["generation"]) for m in serving.overview()["models"]] == [("ready", 2)] * 2


@pytest.mark.long
def test_a_load_that_keeps_crashing_does_not_keep_the_next_reload_waiting(serve: Serve) -> None:
    serving = serve({"a": engine()}, restart={"limit": 100, "initial": "10ms", "max": "50ms"})
    serving.write_models({"a": engine("CrashesInLoad")})
    report = reload(serving, how="exchange")["a"]
    assert report["state"] == "failed"
    assert report["message"].endswith("it is tried on")
    serving.write_models({"a": engine()})
    assert reload(serving, how="exchange")["a"]["state"] == "done"
    serving.wait_state("a", "ready")
