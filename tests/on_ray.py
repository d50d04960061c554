"""Workers on the machines of a real Ray cluster. It needs Ray, root and network namespaces: ``make test-ray``."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from modelctl import Client, Progress, Stream
from protocol import __version__
from protocol.errors import WireError
from supervisor.cluster.messages import CHUNK
from tests.deterministic_engine import answer
from tests.keyed import free_port
from tests.nvml_box import GIB, STRANGER, Box
from tests.ray_cluster import RayCluster, can_make_namespaces, wait_for_spare
from tests.serving import ROOT, Serving, engine, is_alive, is_helper, wait_until
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
    machines = {"one": 1, "two": 2}
    directory = tmp_path_factory.mktemp("ray")
    Box(directory / "box.json", (24, 48))
    boxes, labels = {"two": directory / "box.json"}, {"one": "zone=a", "two": "zone=b,disk=fast"}
    cluster = RayCluster(directory, machines, boxes=boxes, labels=labels)
    with cluster, pytest.MonkeyPatch.context() as patch:
        for name, value in cluster.environment.items():
            patch.setenv(name, value)
        cluster.wait_for_nodes()
        yield cluster


@pytest.fixture
def serve(cluster: RayCluster) -> Iterator[Serve]:
    started: list[Serving] = []

    def start(
        models: dict[str, dict[str, Any]],
        of: RayCluster = cluster,
        store: dict[str, Any] | None = None,
        vram_limit: Any = None,
        spare: int = 0,
        **environment: str,
    ) -> Serving:
        section = {"ray": of.address, "advertise": of.advertise, "lease": LEASE}
        if store is not None:
            section["model_store"] = store
        environment = of.environment | environment
        serving = Serving(
            models, cluster=section, environment=environment, vram_limit=vram_limit, spare=spare, wait=False
        )
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


def test_a_spare_agent_becomes_the_next_one(serve: Serve, cluster: RayCluster) -> None:
    entry = {"engine": "transformers", "gpu": "cpu", "max_batch_size": 8, "autostart": False}
    away = {"model_dir": "demo:letters", "node": "one", **entry}
    leasing = {"model_dir": "demo:letters", "node": "two", **entry, "gpu": "auto", "vram": "1GiB"}
    serving = serve({"away": away, "leasing": leasing}, spare=1)
    question, expected = corpus.LETTERS_TEST_PROMPTS[0]

    def start() -> int:
        serving.order("start", model="away")
        pid = int(serving.wait_state("away", "ready", 120)["pid"])
        with serving.client() as client:
            assert client.complete("away", question, temperature=0, max_tokens=1000).text == expected
        serving.order("stop", model="away")
        serving.wait_state("away", "stopped")
        return pid

    for _ in range(3):  # on a busy machine its imports may go on after a pause
        spare = wait_for_spare(lambda: cluster.pids("one"))
        if start() == spare["worker"].pid:
            break
    else:
        pytest.fail("no spare worker was used")
    wait_until(lambda: not is_alive(spare["agent"]), what="the agent leaves with its worker")
    spare = wait_for_spare(lambda: cluster.pids("one"))
    spare["agent"].kill()
    assert start() != spare["worker"].pid, "another agent takes the order of a dead one"
    # What has ended on the other machine while nobody needed it is replaced: a worker by its agent, an agent by Ray.
    spare = wait_for_spare(lambda: cluster.pids("two"))
    spare["worker"].kill()
    again = wait_for_spare(lambda: cluster.pids("two"))
    assert again["agent"] == spare["agent"]
    again["agent"].kill()
    # There the lease of a GPU is held by an actor of its own. There is no real GPU, so the load fails.
    spare = wait_for_spare(lambda: cluster.pids("two"))
    assert spare["agent"] != again["agent"]
    serving.order("start", model="leasing")
    status = serving.wait_state("leasing", "failed", 120)
    assert "placed on GPU 0 of two" in serving.log("leasing")
    assert status["last_exit"]["reason"] == "config"

    def free() -> list[float]:
        return [node["free"] for node in serving.overview()["supervisor"]["cluster"]["nodes"]]

    wait_until(lambda: free() == [0, 1, 2], what="the GPU is given back")
    wait_until(lambda: not is_alive(spare["agent"]), what="the agent of the worker that could not load")


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
    serving = serve({"a": engine(replicas=2, **slow) | {"node": "others"}})
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
    serving = serve({"a": engine("ListsModules", replicas=4) | {"node": "others", "gpu": "auto"}})
    seen = []
    for worker in ("a:1", "a:2", "a:3"):
        node = serving.wait_state(worker, "ready", 60)["node"]
        log = Path(serving.status(worker)["log"])
        wait_until(lambda log=log: "devices " in log.read_text())
        seen.append((node, log.read_text().partition("devices ")[2].split()[0]))
    assert sorted(seen) == [("one", "'0'"), ("two", "'0'"), ("two", "'1'")]
    full = "no other machine of the Ray cluster has 1 GPUs free: one 0 of 1, two 0 of 2"
    wait_until(lambda: serving.status("a:4")["reason"] == full, 60)
    serving.order("stop", model="a:1")  # its GPU is free again, and the fourth worker gets it
    assert serving.wait_state("a:4", "ready", 60)["node"] in ("one", "two")


def test_a_worker_gets_several_gpus_of_one_machine(serve: Serve) -> None:
    entry = engine("ListsModules") | {"node": "others", "gpu": "auto"}
    serving = serve({"a": {**entry, "gpus": 2}, "b": {**entry, "gpus": 3}})
    assert serving.wait_state("a", "ready", 60)["node"] == "two"
    log = Path(serving.status("a")["log"])
    wait_until(lambda: "devices '0,1'" in log.read_text())
    full = "no other machine of the Ray cluster has 3 GPUs free: one 1 of 1, two 0 of 2"
    wait_until(lambda: serving.status("b")["reason"] == full, 60)
    serving.order("stop", model="b")
    assert serving.wait_state("b", "stopped")["last_exit"]["reason"] == "asked"


def test_a_model_that_does_not_fit_is_refused_with_the_arithmetic(serve: Serve, cluster: RayCluster) -> None:
    """The machine "two" has an NVML that shows two GPUs, of 24 and 48 GiB."""
    box = Box(cluster.directory / "box.json", (24, 48))
    entry = engine(autostart=False) | {"node": "two", "gpu": "auto"}
    serving = serve({"a": {**entry, "vram": "20GiB"}, "b": {**entry, "vram": "100GiB", "gpus": 2}})

    def devices() -> Any:
        found = {node["name"]: node["devices"] for node in serving.overview()["supervisor"]["cluster"]["nodes"]}
        return found.get("two")

    read = wait_until(devices, 60, "what is read of a machine without workers")
    assert [(gpu["index"], gpu["total_bytes"], gpu["free_bytes"]) for gpu in read] == [
        (0, 24 * GIB, 24 * GIB), (1, 48 * GIB, 48 * GIB)
    ]  # fmt: skip
    serving.order("start", model="a")
    serving.wait_state("a", "ready", 60)
    status = serving.status("a")
    assert (status["placed"], status["vram_estimate_bytes"]) == ([0], 20 * GIB)
    row = next(line for line in serving.modelctl("ps").stdout.splitlines() if line.startswith("a "))
    assert "auto:0" in row
    assert "(20.0 GiB)" in row
    box.holds(1, STRANGER, 8 * GIB)
    wait_until(lambda: devices()[1]["free_bytes"] == 40 * GIB, 20, "what the worker's agent reports")
    box.gives_back(STRANGER)
    serving.order("stop", model="a")
    serving.wait_state("a", "stopped")
    serving.order("start", model="b")
    message = serving.wait_state("b", "failed", 60)["last_exit"]["message"]
    assert message.startswith("two: needs 100.0 GiB (vram in models.yaml), GPU 0 has 24.0 of 24.0 free; GPU 1 has 48.0")
    assert serving.status("b")["last_exit"]["reason"] == "no room"


def test_a_gpu_that_is_full_is_passed_over_and_the_limits_hold(serve: Serve, cluster: RayCluster) -> None:
    """Ray leases GPU 0 first, and knows nothing of the process that fills it."""
    box = Box(cluster.directory / "box.json", (24, 48))
    box.holds(0, STRANGER, 20 * GIB)
    entry = engine(autostart=False) | {"node": "two", "gpu": "auto"}
    models = {name: entry | {"vram": f"{size}GiB"} for name, size in (("a", 20), ("b", 20), ("c", 40))}
    serving = serve(models, vram_limit={"GPU-1a2b3c4d": "30GiB"})
    wait_until(lambda: nodes(serving) == ["head", "one", "two"], 60)

    def machine() -> Any:
        return next(n for n in serving.overview()["supervisor"]["cluster"]["nodes"] if n["name"] == "two")

    serving.order("start", model="a")
    serving.wait_state("a", "ready", 60)
    assert serving.status("a")["placed"] == [1]
    wait_until(lambda: machine()["free"] == 1, 20, "the end of the other lease")
    assert [gpu["limit_bytes"] for gpu in machine()["devices"]] == [None, 30 * GIB]
    serving.order("start", model="b")
    message = serving.wait_state("b", "failed", 60)["last_exit"]["message"]
    assert "GPU 0 has 4.0 of 24.0 free: other processes 20.0; GPU 1 has room; Ray cannot lease other GPUs" in message
    serving.order("stop", model="a")
    serving.wait_state("a", "stopped")
    serving.order("start", model="c")
    message = serving.wait_state("c", "failed", 60)["last_exit"]["message"]
    assert message.endswith("GPU 0 has 4.0 of 24.0 free: other processes 20.0"), "the limit leaves no room on GPU 1"
    box.gives_back(STRANGER)


def test_the_own_machine_is_used_first(serve: Serve, tmp_path: Path) -> None:
    box = Box(tmp_path / "box.json", (24,))
    path = f"{ROOT}:{ROOT / 'tests' / 'stand_in_nvml'}"
    entry = engine(replicas=4, autostart=False) | {"node": "auto", "gpu": "auto", "vram": "20GiB"}
    serving = serve({"a": entry}, MODELCTL_TEST_BOX=str(tmp_path / "box.json"), PYTHONPATH=path)
    wait_until(lambda: nodes(serving) == ["head", "one", "two"], 60)
    serving.order("start", model="a")
    for worker in ("a:1", "a:2", "a:3", "a:4"):
        serving.wait_state(worker, "ready", 60)
    found = sorted(str(node) for node in spread(serving).values())
    assert found == ["None", "one", "two", "two"]
    here = next(name for name, node in spread(serving).items() if node is None)
    assert serving.status(here)["placed"] == [0]
    pid = serving.status(here)["pid"]
    box.holds(0, pid, 20 * GIB)
    wait_until(lambda: serving.status(here)["vram_bytes"], 10, "what NVML lists")
    box.gives_back(pid)
    with serving.client() as client:  # at once, so that each worker gets some
        streams = [client.generate("a", f"x {i}", max_tokens=5) for i in range(8)]
        assert ["".join(delta.text for delta in stream) for stream in streams] == [
            answer(f"x {i}", 5) for i in range(8)
        ]
    assert all(serving.status(worker)["restarts"] == 0 for worker in spread(serving))
    # one that is started when nothing has room waits, and takes the first GPU that becomes free
    there = next(name for name, node in spread(serving).items() if node == "one")
    box.holds(0, STRANGER, 10 * GIB)
    serving.order("stop", model=here)
    serving.wait_state(here, "stopped")
    serving.order("start", model=here)
    reason = wait_until(lambda: serving.status(here)["reason"], 30)
    assert "needs 20.0 GiB (vram in models.yaml), no GPU has that much: GPU 0 has 14.0 of 24.0 free" in reason
    assert reason.endswith("no other machine of the Ray cluster has 1 GPUs free: one 0 of 1, two 0 of 2")
    serving.order("stop", model=there)
    assert serving.wait_state(here, "ready", 60)["node"] == "one"
    assert "NVML never listed" not in serving.log(), "the NVML of this machine does not list processes of others"


def test_machines_are_chosen_by_labels(serve: Serve) -> None:
    serving = serve({"a": engine() | {"node": "disk=fast"}, "b": engine() | {"node": "zone=c"}})
    assert serving.wait_state("a", "ready", 60)["node"] == "two"
    none = "the Ray cluster has no other machine with the labels zone=c"
    wait_until(lambda: serving.status("b")["reason"] == none, 30)


def test_an_idle_model_leaves_for_another_one(serve: Serve) -> None:
    entry = engine(lazy=True, step_s=0.01, context=LONG) | {"node": "one", "gpu": "auto"}
    serving = serve({"a": entry, "b": entry})
    with serving.client() as client:
        busy = client.generate("a", "x 1", max_tokens=600)
        serving.wait_state("a", "ready", 60)
        waiting = client.generate("b", "x 2", max_tokens=5)
        wait_until(lambda: serving.status("b")["reason"] == "one has 0 of 1 GPUs free, and 1 are needed", 30)
        assert "".join(delta.text for delta in busy).endswith(answer("x 1", 600)[-20:]), "a busy model stays"
        assert "".join(delta.text for delta in waiting) == answer("x 2", 5)
        assert serving.status("a")["unloaded"] == "evicted for b"
        with pytest.raises(WireError, match="would keep its lease of the GPU: `modelctl unload b` frees it"):
            serving.order("sleep", model="b")
        # a reload finds no GPU for a second worker, and exchanges the one that there is
        serving.write_models({"a": entry, "b": entry | {"max_batch_size": 3}})
        serving.order("reload")
        wait_until(lambda: serving.status("b")["max_batch_size"] == 3 and serving.status("b")["state"] == "ready", 60)
        assert client.complete("b", "x 3", max_tokens=5).text == answer("x 3", 5)
        serving.order("unload", model="b")
        serving.wait_state("b", "unloaded", 60)
        assert client.complete("b", "x 4", max_tokens=5).text == answer("x 4", 5)
        last = client.generate("b", "x 4", max_tokens=300)
        begun = next(last).text
        serving.order("stop", model="b")
        assert begun + "".join(delta.text for delta in last) == answer("x 4", 300), "a stop lets it finish"
        assert serving.wait_state("b", "stopped")["last_exit"]["reason"] == "asked"


STRANGER_PROGRAM = """
import ray, sys
ray.init(address=sys.argv[1], log_to_driver=False)
actor = ray.remote(num_cpus=0, num_gpus=1)(type("Holder", (), {"hold": lambda self: 1})).options(
    label_selector={"zone": "a"}).remote()
print(ray.get(actor.hold.remote()), flush=True)
sys.stdin.read()
"""


def test_gpus_that_other_programs_have_leased_are_waited_for(serve: Serve, cluster: RayCluster) -> None:
    command = [sys.executable, "-c", STRANGER_PROGRAM, cluster.address]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, env={**os.environ, **cluster.environment}) as stranger:
        assert stranger.stdout is not None
        assert stranger.stdout.readline() == b"1\n"
        serving = serve({"a": engine(autostart=False) | {"node": "one", "gpu": "auto"}})
        wait_until(lambda: nodes(serving) == ["head", "one", "two"], 60)
        serving.order("start", model="a")
        wait_until(lambda: serving.status("a")["reason"] == "one has 0 of 1 GPUs free, and 1 are needed", 30)
        stranger.communicate(b"")
    assert serving.wait_state("a", "ready", 60)["node"] == "one"


def doctored(serving: Serving) -> dict[str, list[tuple[str, str]]]:
    """Return verdicts and texts of the doctor, by what they are about."""
    done = serving.modelctl("doctor", str(serving.config), "--json", timeout=200)
    found: dict[str, list[tuple[str, str]]] = {}
    for each in json.loads(done.stdout)["findings"]:
        found.setdefault(each["what"], []).append((each["verdict"], each["says"]))
    return found


def test_the_doctor_looks_at_every_machine(serve: Serve, cluster: RayCluster) -> None:
    Box(cluster.directory / "box.json", (24, 48))  # the GPUs of "two"; those of "one" do not exist
    entry = engine() | {"autostart": False}
    serving = serve({"a": entry | {"node": "one"}, "b": entry | {"node": "three"}})
    wait_until(lambda: nodes(serving) == ["head", "one", "two"], 60)
    found = doctored(serving)
    assert found["advertise"] == [("ok", f"the supervisor listens at {cluster.advertise}")]
    assert found["cluster"] == [("ok", f"{cluster.address}, 3 machines; without the token nobody gets in")]
    missing = "its machine three is not in the cluster, which has one, two"
    assert ("bad", missing) in found["model b"]
    no_gpu, one = found["machine one"]
    (two,) = found["machine two"]
    assert no_gpu[1].startswith("Ray leases 1 GPUs there, and none can be used: ")
    for text, gpus in ((one[1], "1 GPUs"), (two[1], r"2 GPUs( \(.+\))?")):
        assert re.fullmatch(rf"modelctl {__version__}, Python 3\.\d+\.\d+, {gpus}, clock [+-]0\.0\d\d s", text), text
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
    lazy = entry | {"model_dir": str(write_model(tmp_path / "lazy", 50 * CHUNK, 2)), "node": "two", "lazy": True}
    serving = serve({"a": entry | {"node": "one"}, "b": entry | {"node": "two"}, "c": lazy}, store=store)
    children = psutil.Process(serving.pid).children()
    (of_store,) = [p for p in children if is_helper(p, "model store", "supervisor.cluster.store")]
    seen: set[str] = set()

    def ready() -> bool:
        for worker in serving.overview()["models"]:
            if worker["progress"] is not None and worker["state"] == "starting":
                assert worker["progress"]["unit"] == "bytes"
                seen.add(worker["progress"]["phase"])
        return all(serving.status(name)["state"] == "ready" for name in ("a", "b"))

    wait_until(ready, 120)
    assert "copying model" in seen
    (copy,) = (tmp_path / "copies").glob("model-*")
    assert content(copy / "files") == content(model)
    for name in "a", "b":
        log = Path(serving.status(name)["log"])
        wait_until(lambda log=log: f"directories {copy}/files" in log.read_text())
    told: list[Progress] = []
    with serving.client() as client:
        assert client.complete("c", "x 1", max_tokens=5, on_progress=told.append).text == answer("x 1", 5)
    copied = [one for one in told if one.part == "copying model"]
    assert copied, f"its client was told nothing of the copying: {told}"
    assert {(one.phase, one.unit) for one in copied} == {("loading", "bytes")}
    assert copied[-1].total == sum(map(len, content(tmp_path / "lazy").values()))
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
