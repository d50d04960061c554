"""Workers on the machines of a real Ray cluster. It needs Ray, root and network namespaces: ``make test-ray``."""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelctl import Client, Stream
from protocol import __version__
from supervisor.cluster.ray_starter import RayStarter
from supervisor.cluster.store_messages import CHUNK
from tests.deterministic_engine import answer
from tests.keyed import free_port
from tests.ray_cluster import RayCluster, can_make_namespaces
from tests.serving import Serving, engine, is_alive, is_helper, wait_until
from tests.supervisor.test_model_store import content, write_model
from tools.demo_models import corpus

pytest.importorskip("ray")
pytestmark = pytest.mark.skipif(not can_make_namespaces(), reason="needs root, ip, and network namespaces")
LONG = 100_000
STREAMS = 64
LEASE, CUT_S = "12s", 5.0
Serve = Callable[..., Serving]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayCluster]:
    machines = {"one": 1, "two": 1}
    with RayCluster(tmp_path_factory.mktemp("ray"), machines) as cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        starter = RayStarter(cluster.address, logging.getLogger())
        wait_until(lambda: starter.ended() == [] and len(starter.nodes) == 3, 60, "three machines")
        starter.close()
        yield cluster


@pytest.fixture
def serve(cluster: RayCluster) -> Iterator[Serve]:
    started: list[Serving] = []

    def start(models: dict[str, dict[str, Any]], of: RayCluster = cluster, **more: Any) -> Serving:
        section = {"ray": of.address, "advertise": of.advertise, "lease": LEASE, **more}
        serving = Serving(models, cluster=section, environment=of.environment, wait=False)
        started.append(serving.__enter__())
        return serving

    yield start
    for serving in started:
        serving.__exit__(None, None, None)


def nodes(serving: Serving) -> list[str]:
    found = serving.overview()["supervisor"]["cluster"]["nodes"]
    return sorted(node["name"] for node in found)


def test_answers_come_from_other_machines(serve: Serve) -> None:
    entry = {"engine": "transformers", "gpu": "cpu", "max_batch_size": 32}
    serving = serve(
        {
            "letters": {"model_dir": "demo:letters", "node": "one", **entry},
            "stories": {"model_dir": "demo:stories", "node": "two", **entry},
        }
    )
    for model, node in ("letters", "one"), ("stories", "two"):
        status = serving.wait_state(model, "ready", 120)
        assert status["node"] == node
    assert nodes(serving) == ["head", "one", "two"]
    with serving.client() as client:
        for model, questions in ("letters", corpus.LETTERS_TEST_PROMPTS), ("stories", corpus.TEST_PROMPTS["stories"]):
            for prompt, expected in questions[:8]:
                assert client.complete(model, prompt, temperature=0, max_tokens=1000).text == expected
    seen = json.loads(serving.modelctl("cluster", "--json").stdout)
    assert (seen["trouble"], seen["gone"], seen["waiting"]) == (None, [], [])
    for node, names in zip(seen["nodes"], ([], ["letters"], ["stories"]), strict=True):
        assert [worker["name"] for worker in node["workers"]] == names
        assert node["version"] == (__version__ if names else None)
        assert (node["heard_s"] is None) is not bool(names)
    serving.order("stop", model="letters")
    status = serving.wait_state("letters", "stopped")
    assert (status["last_exit"]["reason"], status["last_exit"]["code"]) == ("asked", 0)


def begin(client: Client, tokens: int) -> list[tuple[str, Stream]]:
    """Begin the streams. Return the first text of each."""
    streams = [client.generate("a", f"x {number}", max_tokens=tokens) for number in range(STREAMS)]
    return [(next(stream).text, stream) for stream in streams]


def check(streams: list[tuple[str, Stream]], tokens: int) -> None:
    for number, (first, stream) in enumerate(streams):
        text = first + "".join(delta.text for delta in stream)
        assert stream.finish_reason == "length"
        assert text == answer(f"x {number}", tokens), "a token was lost, doubled or wrong"


def spread(serving: Serving) -> dict[str, str]:
    return {model["name"]: model["node"] for model in serving.overview()["models"]}


def test_streams_survive_a_cut_and_the_loss_of_a_machine(serve: Serve, cluster: RayCluster) -> None:
    tokens = 3000
    slow = {"step_s": 0.005, "context": 2 * LONG, "max_batch_size": STREAMS}
    serving = serve({"a": engine(replicas=2, **slow) | {"node": "auto"}})
    for worker in ("a:1", "a:2"):
        serving.wait_state(worker, "ready", 60)
    assert sorted(spread(serving).values()) == ["one", "two"]
    generations = {m["name"]: m["generation"] for m in serving.overview()["models"]}
    with serving.client() as client:
        streams = begin(client, tokens)
        cluster.cut("one")
        healed_at = time.monotonic() + CUT_S
        wait_until(lambda: time.monotonic() > healed_at)
        cluster.heal("one")
        check(streams, tokens)
    assert {m["name"]: m["generation"] for m in serving.overview()["models"]} == generations, "a short cut ended one"
    lost = next(name for name, node in spread(serving).items() if node == "one")
    with serving.client() as client:
        streams = begin(client, tokens)
        cluster.kill("one")
        check(streams, tokens)
    wait_until(lambda: [each["name"] for each in serving.overview()["supervisor"]["cluster"]["gone"]] == ["one"], 60)
    wait_until(lambda: spread(serving)[lost] == "two" and serving.status(lost)["state"] == "ready", 90)
    assert serving.status(lost)["restarts"] >= 1
    cluster.start_node("one")
    wait_until(lambda: nodes(serving) == ["head", "one", "two"], 60)


def test_gpus_are_leased_and_there_is_a_limit(serve: Serve) -> None:
    serving = serve({"a": engine("ListsModules", replicas=3) | {"node": "auto", "gpu": "auto"}})
    for worker in ("a:1", "a:2"):
        assert serving.wait_state(worker, "ready", 60)["node"]
        log = Path(serving.status(worker)["log"])
        wait_until(lambda log=log: "devices '0'" in log.read_text())
    full = "no other machine of the Ray cluster has 1 GPUs free: one 0 of 1, two 0 of 1"
    wait_until(lambda: serving.status("a:3")["reason"] == full, 60)
    serving.order("stop", model="a:1")  # its GPU is free again, and the third worker gets it
    assert serving.wait_state("a:3", "ready", 60)["node"] in ("one", "two")


def doctored(serving: Serving) -> dict[str, list[tuple[str, str]]]:
    """Return verdicts and texts of the doctor, by what they are about."""
    done = serving.modelctl("doctor", str(serving.config), "--json", timeout=200)
    found: dict[str, list[tuple[str, str]]] = {}
    for each in json.loads(done.stdout)["findings"]:
        found.setdefault(each["what"], []).append((each["verdict"], each["says"]))
    return found


def test_the_doctor_looks_at_every_machine(serve: Serve, cluster: RayCluster) -> None:
    entry = engine() | {"autostart": False}
    serving = serve({"a": entry | {"node": "one"}, "b": entry | {"node": "three"}})
    wait_until(lambda: nodes(serving) == ["head", "one", "two"], 60)
    found = doctored(serving)
    assert found["advertise"] == [("ok", f"the supervisor listens at {cluster.advertise}")]
    assert found["cluster"] == [("ok", f"{cluster.address}, 3 machines; without the token nobody gets in")]
    missing = "its machine three is not in the cluster, which has one, two"
    assert ("bad", missing) in found["model b"]
    for name in ("one", "two"):
        (no_gpu, well) = found[f"machine {name}"]  # its GPU does not exist
        assert no_gpu[1].startswith("Ray leases 1 GPUs there, and none can be used: ")
        assert re.fullmatch(rf"modelctl {__version__}, Python 3\.\d+\.\d+, 1 GPUs, clock [+-]0\.0\d\d s", well[1])
    serving.kill()
    found = doctored(serving)
    assert found["advertise"] == [("ok", f"{cluster.advertise} is free, and an address of this machine")]
    assert len(found["machine one"]) == 2, "it does not reach this machine"
    elsewhere = f"tcp://127.0.0.1:{free_port()}"
    serving.config.write_text(serving.config.read_text().replace(cluster.advertise, elsewhere))
    found = doctored(serving)
    assert ("bad", f"it cannot connect to {elsewhere}: Connection refused") in found["machine one"]
    assert ("bad", f"it cannot connect to {elsewhere}: Connection refused") in found["machine two"]


def test_models_are_copied_to_the_machines(serve: Serve, cluster: RayCluster, tmp_path: Path) -> None:
    """Both machines have the disk of this one, so they share the copies."""
    model = write_model(tmp_path / "model", 50 * CHUNK)
    listen = cluster.advertise.replace("5599", "5598")
    store = {"listen": listen, "directory": str(tmp_path / "copies"), "size": "1GiB"}
    entry = engine("TellsDirectories") | {"model_dir": str(model)}
    serving = serve({"a": entry | {"node": "one"}, "b": entry | {"node": "two"}}, model_store=store)
    (of_store,) = [p for p in psutil.Process(serving.pid).children() if is_helper(p, "model store", "store_server")]
    seen: set[str] = set()

    def ready() -> bool:
        for worker in serving.overview()["models"]:
            if worker["progress"] is not None and worker["state"] == "starting":
                assert worker["progress"]["unit"] == "bytes"
                seen.add(worker["progress"]["phase"])
        return all(worker["state"] == "ready" for worker in serving.overview()["models"])

    wait_until(ready, 120)
    assert "copying model" in seen
    (copy,) = (tmp_path / "copies").glob("model-*")
    assert content(copy / "files") == content(model)
    for name in "a", "b":
        log = Path(serving.status(name)["log"])
        wait_until(lambda log=log: f"directories {copy}/files" in log.read_text())
    serving.order("stop", model="a")
    serving.wait_state("a", "stopped")
    of_store.kill()
    serving.order("start", model="a")
    serving.wait_state("a", "ready", 60)
    assert serving.overview()["supervisor"]["cluster"]["trouble"] is None


def test_nothing_is_left_of_a_supervisor_that_is_killed(serve: Serve) -> None:
    serving = serve({"a": engine("ForksChild") | {"node": "two"}})
    serving.wait_state("a", "ready", 60)
    worker = psutil.Process(serving.status("a")["pid"])
    processes = [worker, *worker.children(recursive=True)]
    assert len(processes) == 2
    serving.kill()
    wait_until(lambda: not any(map(is_alive, processes)), 60)


def test_a_cluster_without_tokens_is_refused(serve: Serve, tmp_path: Path, cluster: RayCluster) -> None:
    cluster.__exit__(None, None, None)
    with RayCluster(tmp_path, {"one": 1}, token=False) as open_cluster:
        serving = serve({"a": engine() | {"node": "one"}}, open_cluster)
        trouble = wait_until(lambda: serving.overview()["supervisor"]["cluster"]["trouble"], 60)
        assert "it lets anybody run code who can reach it" in trouble
        assert "RAY_AUTH_MODE=token" in trouble
        wait_until(lambda: serving.status("a")["reason"] == trouble, 10)
