"""Faults of models.yaml are refused in clear words."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from model_worker.engines.exllamav2.options import read_options
from protocol.process.worker_spec import Leases
from supervisor.config.file import Config, load_config
from supervisor.config.models import ModelConfig
from supervisor.config.reading import parse_gpu
from supervisor.config.server import GatewayConfig, SupervisorConfig
from supervisor.config.spelling import parse_duration
from supervisor.config.yaml_source import ConfigError
from supervisor.requests.credit import SendBufferLimits
from tests.serving import ROOT

CUSTOM = "tests.deterministic_engine:DeterministicEngine"


def load(directory: Path, text: str) -> Config:
    (directory / "models.yaml").write_text(text)
    return load_config(directory / "models.yaml")


def problems(directory: Path, text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(directory, text)
    return [str(p).removeprefix(f"{directory}/") for p in caught.value.problems]


def model(**keys: Any) -> str:
    return yaml.safe_dump({"models": {"a": {"model_dir": ".", "engine": CUSTOM, **keys}}})


def test_the_shipped_file_loads() -> None:
    config = load_config(ROOT / "models.yaml")
    assert set(config.models) == {"letters", "stories", "agent"}
    assert config.gateway is not None
    assert (str(config.gateway.listen), config.gateway.auth) == ("127.0.0.1:8000", "none")
    for spec in config.models.values():
        assert (spec.model_dir / "config.json").is_file()
        assert spec.visible_devices == ""


def test_the_examples_in_the_comments_of_the_shipped_file_load_too(tmp_path: Path) -> None:
    lines = (ROOT / "models.yaml").read_text().splitlines()
    plain = [line.replace("# ", "", 1) if "#" in line.split(":")[0] else line for line in lines]
    start = next(i for i, line in enumerate(plain) if line.strip().startswith("llama-8b:"))
    section = next(i for i, line in enumerate(plain) if line.startswith("supervisor:"))
    (tmp_path / "weights").mkdir()
    example = [line for line in plain[start:section] if re.match(r" +(- )?[{\w-]+:", line)]
    example = [re.sub(r"~/(models|loras)/[\w.-]+", "weights", line) for line in example]
    sections = [line for line in plain[section:] if re.match(r" *\w+:", line)]
    config = load(tmp_path, "\n".join(["models:", *example, *sections]))
    assert config.models["llama-8b"].visible_devices == "1"
    assert config.models["mistral-large"].engine_spec.options["gpu_split"] == [20, 22.5]
    assert config.supervisor.stop.drain == 30.0
    assert config.gateway is not None
    assert config.gateway.allowed_hosts == ["models.example.org"]


def test_defaults(tmp_path: Path) -> None:
    config = load(tmp_path, model())
    spec = config.models["a"]
    assert spec.model_dir == tmp_path.resolve()
    assert (spec.config.max_queue, spec.autostart, spec.visible_devices) == (256, True, "")
    assert spec.engine_spec.options == {}
    assert config.supervisor.restart_policy.limit == 5
    assert config.supervisor.ladder.shutdown_s == 5.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "models:\n  a:\n    model_dir: .\n    engine: transformers\n    max_seqlen: 5\n",
            "models.yaml:5: models.a.max_seqlen: unknown key; did you mean 'max_seq_len'?",
        ),
        (
            "models:\n  a: {model_dir: ., zzz: 1}",
            "models.yaml:2: models.a.zzz: unknown key; known are aliases, autosplit_reserve, ",
        ),
        ("model:\n  a: {}\n", "models.yaml:1: model: unknown key; did you mean 'models'?"),
        (
            "models: {a: {model_dir: ., engine: transformers}}\nsupervisor:\n  stop:\n    drian: 5s\n",
            "models.yaml:4: supervisor.stop.drian: unknown key; did you mean 'drain'?",
        ),
        (
            "supervisor: {restart: {limits: 5}}\nmodels: {}",
            "supervisor.restart.limits: unknown key; did you mean 'limit'?",
        ),
        (
            "supervisor: {watch: {steps: 5s}}\nmodels: {}",
            "supervisor.watch.steps: unknown key; did you mean 'step'?",
        ),
        (
            "supervisor: {poison: {limits: 5}}\nmodels: {}",
            "supervisor.poison.limits: unknown key; did you mean 'limit'?",
        ),
        (
            "supervisor: {watch: {idle: 0s}}\nmodels: {}",
            "supervisor.watch.idle: is '0s': must be from 1s to 24h",
        ),
        ("supervisor: {stopp: {}}\nmodels: {}", "supervisor.stopp: unknown key; did you mean 'stop'?"),
        ("", "models.yaml: models: is missing; add it"),
        ("models: {}", "models: names no model; add at least one"),
        ("models:\n  a: 5\n", "models.yaml:2: models.a: is 5: must be a mapping"),
        ("models: [a]", "models: is ['a']: must be a mapping"),
        ("[]", "must be a mapping"),
        ("just words", "must be a mapping"),
        ("models:\n  a:\n    engine: transformers\n", "models.yaml:2: models.a.model_dir: is missing; add it"),
        ("models:\n  A b: {model_dir: ., engine: transformers}", "models.yaml:2: models.A b: is no model name"),
        ('models: {"a\\n": {model_dir: ., engine: transformers}}', "is no model name"),
        ("models:\n  ../a: {model_dir: ., engine: transformers}", "is no model name"),
        ("models:\n  a: {model_dir: .}\n  a: {model_dir: .}", "models.yaml:3: models.a: stands here and in line 2"),
        (
            f"models:\n  a:\n    model_dir: .\n    engine: {CUSTOM}\n    sampling:\n      temprature: 1\n",
            "models.yaml:6: models.a.sampling.temprature: unknown key; did you mean 'temperature'?",
        ),
        (
            f"models:\n  a: {{model_dir: ., engine: '{CUSTOM}', sampling: {{preset: wild}}}}",
            "models.a.sampling.preset: must be one of none, steady",
        ),
        (
            f"models:\n  a: {{model_dir: ., engine: '{CUSTOM}', limits: {{max_tokens: 0}}}}",
            "models.a.limits.max_tokens: must be a whole number, at least 1",
        ),
        (
            f"models: {{a: {{model_dir: ., engine: '{CUSTOM}', "
            "sampling: {cfg_scale: 2.0}, limits: {cfg_scale: 1}}}",
            "models.a.limits.cfg_scale: ",
        ),
        (
            f"models: {{a: {{model_dir: ., engine: '{CUSTOM}', forced: {{preset: steady}}}}}}",
            "models.a.forced.preset: unknown key; known are ",
        ),
        (
            f"models: {{a: {{model_dir: ., engine: '{CUSTOM}', "
            "forced: {temperature: 2}, limits: {temperature: 1}}}",
            "models.a.limits.temperature: temperature is 2: this model allows at most 1: a request that leaves it out",
        ),
        (
            f"models: {{a: {{model_dir: ., engine: '{CUSTOM}', "
            "sampling: {min_temp: 0.5, max_temp: 2}, forced: {max_temp: 0.4}}}",
            "models.a.forced.min_temp: min_temp is 0.5: must be less than max_temp",
        ),
        (
            f"models: {{a: {{model_dir: ., engine: '{CUSTOM}', variants: {{v: {{forced: {{top_p: 7}}}}}}}}}}",
            "models.a.variants.v.forced.top_p: top_p is 7: must be",
        ),
        (f"models:\n  a: {{model_dir: ., engine: '{CUSTOM}', replicas: 0}}", "models.a.replicas: is 0: "),
        (
            f"default_model: no\nmodels: {{no: {{model_dir: ., engine: '{CUSTOM}'}}}}",
            "default_model: is false: must be text; without quotes, no, off and false are false in YAML: put the word",
        ),
        (
            f"models: {{a: {{model_dir: ., engine: '{CUSTOM}', aliases: [3.1]}}}}",
            "models.a.aliases.0: is 3.1: must be text; put it into quotes",
        ),
        ("gateway: {keepalive: off}", "gateway.keepalive: is false: must be one of 'comment', 'chunk', 'off'; without"),
        (
            f"models: {{Qwen/Qwen3: {{model_dir: ., engine: '{CUSTOM}'}}}}",
            "clients may use 'Qwen/Qwen3', too, if it is one of the model's aliases",
        ),
        (
            f"default_model: Qwen/Qwen3\nmodels: {{a: {{model_dir: ., engine: '{CUSTOM}'}}}}",
            "default_model: is 'Qwen/Qwen3': must be a model, an alias, or a variant of this file; name one, or ",
        ),
        (f"models: {{a: {{model_dir: ., engine: '{CUSTOM}', x-note: 1}}}}", "models.a.x-note: unknown key; "),
    ],
)
def test_refusals_name_file_line_path_and_remedy(tmp_path: Path, text: str, says: str) -> None:
    reported = problems(tmp_path, text)
    assert any(says in line for line in reported), reported


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("max_batch_size", 0, "is 0: "),
        ("max_batch_size", "8", "is '8': "),
        ("max_batch_size", True, "is true: "),
        ("max_batch_size", 1.5, "is 1.5: "),
        ("max_seq_len", -1, "is -1: "),
        ("max_queue", 0, "is 0: "),
        ("autostart", "yes please", "is 'yes please': "),
        ("autostart", 1, "is 1: "),
        ("model_dir", 5, "is 5: "),
        ("model_dir", "absent", "is no directory (looked for "),
        ("model_dir", "demo:absent", "is no demo model; shipped are agent, letters, stories"),
        ("model_dir", "demo:../..", "is no demo model"),
        ("engine", "transfomers", "did you mean 'transformers'?"),
        ("engine", "nonsense", "is no engine: known are "),
        ("options", [1], "must be a mapping"),
        ("gpu", -1, "is no GPU"),
        ("gpu", "gpu0", "is no GPU"),
        ("gpu", True, "is no GPU"),
        ("gpu", [], "must name at least one GPU"),
        ("gpu", [0, 0], "none twice"),
        ("gpu", [0, "cpu"], "is no GPU"),
        ("cache_mode", "Q5", "'FP16'"),
        ("cache_size", 4096, "is not a key of engine"),
        ("threads", 2, "is not a key of engine"),
        ("step_timeout", "500ms", "must be from 1s to 24h"),
        ("load_timeout", "2d", "must be a duration"),
    ],
)
def test_values(tmp_path: Path, key: str, value: object, says: str) -> None:
    report = problems(tmp_path, model(**{key: value}))
    assert len(report) == 1
    assert f"models.a.{key}: " in report[0]
    assert says in report[0]


def test_a_path_in_a_home_that_does_not_exist_is_named_wherever_it_stands(tmp_path: Path) -> None:
    text = f"""\
models: {{a: {{model_dir: ~nosuch/m, engine: '{CUSTOM}'}}}}
supervisor: {{keys: ~nosuch/k, request_log: ~nosuch/r, usage: {{file: ~nosuch/u}}, model_roots: [~nosuch/w]}}
gateway: {{certificate: ~nosuch/c, private_key: ~nosuch/p}}
"""
    says = "there is no user 'nosuch' on this machine; write the whole path"
    keys = {
        "models.a.model_dir": "m", "supervisor.keys": "k", "supervisor.request_log": "r", "supervisor.usage.file": "u",
        "supervisor.model_roots.0": "w", "gateway.certificate": "c", "gateway.private_key": "p",
    }  # fmt: skip
    wanted = {f"{key}: is '~nosuch/{name}': {says}" for key, name in keys.items()}
    assert {line.split(": ", 1)[1] for line in problems(tmp_path, text)} == wanted


def test_a_directory_on_a_file_system_that_is_not_mounted_is_no_fault_of_the_file(tmp_path: Path) -> None:
    share = tmp_path / "share"
    share.mkdir()
    text = model(model_dir=str(share / "models" / "m"))
    assert load(tmp_path, text).models["a"].model_dir == (share / "models" / "m").resolve()
    (share / "other").mkdir()
    (problem,) = problems(tmp_path, text)
    assert "is no directory (looked for " in problem


def test_keys_that_begin_with_x_hold_what_models_share(tmp_path: Path) -> None:
    text = f"x-common: &common {{model_dir: ., engine: '{CUSTOM}', max_queue: 7}}\nx-2: 1\nmodels: {{a: *common, b: "
    found = load(tmp_path, text + "{<<: *common, max_queue: 8}}\n").models
    assert [spec.config.max_queue for spec in found.values()] == [7, 8]


def test_wrong_combinations(tmp_path: Path) -> None:
    text = "models:\n  a: {model_dir: .}\n  b: {model_dir: ., engine: transformers, cache_mode: Q8, options: {x: 1}}\n"
    report = problems(tmp_path, text)
    assert [line.split(": ")[1] for line in report] == ["models.a.gpu", "models.b.cache_mode", "models.b.options"]
    assert "exllamav2 needs a GPU" in report[0]


def test_all_problems_are_told_at_once(tmp_path: Path) -> None:
    text = "models:\n  a: {model_dir: 1, max_queue: 0, modle: 1}\n  b: {}\nsupervisor: {stop: {drain: soon}}\n"
    assert len(problems(tmp_path, text)) == 5


@pytest.mark.parametrize(
    ("value", "seconds"), [("250ms", 0.25), ("30s", 30), ("5m", 300), ("1.5h", 5400), (7, 7), (0.5, 0.5), ("0s", 0)]
)
def test_durations(value: object, seconds: float) -> None:
    assert parse_duration(value) == seconds


@pytest.mark.parametrize(
    "value",
    [
        "5",
        "5 m",
        "-5s",
        "5d",
        "s",
        "",
        "1e3s",
        "1_0s",
        True,
        None,
        -1,
        [5],
        float("nan"),
        float("inf"),
        "9" * 400 + "h",
    ],
)
def test_bad_durations(tmp_path: Path, value: object) -> None:
    with pytest.raises(ValueError, match="must be a duration"):
        parse_duration(value)
    text = yaml.safe_dump(
        {"models": {"a": {"model_dir": ".", "engine": CUSTOM}}, "supervisor": {"stop": {"drain": value}}}
    )
    (reported,) = problems(tmp_path, text)
    assert "supervisor.stop.drain" in reported


@pytest.mark.parametrize(
    ("value", "visible"),
    [
        ("cpu", ""),
        (0, "0"),
        (3, "3"),
        ([0, 1], "0,1"),
        ("GPU-8d9f7a11", "GPU-8d9f7a11"),
        ([1, "GPU-8d9f7a11"], "1,GPU-8d9f7a11"),
    ],
)
def test_gpus(tmp_path: Path, value: Any, visible: str) -> None:
    assert parse_gpu(value) == (tuple(value) if isinstance(value, list) else value)
    spec = load(tmp_path, model(gpu=value)).models["a"]
    assert spec.visible_devices == visible
    assert spec.engine_spec.device == ("cuda" if visible else "cpu")


def test_only_what_was_set_reaches_the_engine(tmp_path: Path) -> None:
    keys = {"engine": "exllamav2", "gpu": 0, "cache_mode": "Q8", "cache_size": 8192}
    assert load(tmp_path, model(**keys)).models["a"].engine_spec.options == {"cache_mode": "Q8", "cache_size": 8192}
    assert load(tmp_path, model(options={"step_s": 1})).models["a"].engine_spec.options == {"step_s": 1}


def exllamav2(**keys: Any) -> str:
    return model(**({"engine": "exllamav2", "gpu": 0} | keys))


def test_links_to_the_file_are_followed_at_each_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted, project = tmp_path / "mounted", tmp_path / "project"
    for version, name in (("..v1", "a"), ("..v2", "b")):
        (mounted / version).mkdir(parents=True)
        (mounted / version / "models.yaml").write_text(model(model_dir="weights").replace("a:", f"{name}:", 1))
    (mounted / "..data").symlink_to("..v1")
    (mounted / "models.yaml").symlink_to("..data/models.yaml")
    (mounted / "weights").mkdir()
    first = load_config(mounted / "models.yaml")
    assert (first.file, list(first.models)) == (mounted / "models.yaml", ["a"])
    assert first.models["a"].model_dir == (mounted / "weights").resolve(), "it is beside the link, not its target"
    (mounted / "..next").symlink_to("..v2")
    (mounted / "..next").replace(mounted / "..data")
    second = load_config(first.file)
    assert (second.file, list(second.models)) == (first.file, ["b"])
    assert first.read not in (None, second.read)
    (project / "below").mkdir(parents=True)
    (project / "models.yaml").symlink_to(mounted / "models.yaml")
    (project / "weights").mkdir()
    monkeypatch.chdir(project / "below")
    assert load_config(Path("../models.yaml")).file == project.resolve() / "models.yaml"


def test_directories_of_draft_model_and_adapters_are_found_like_model_dir(tmp_path: Path) -> None:
    (tmp_path / "pirate").mkdir()
    text = exllamav2(draft_model="demo:letters", lora=[{"dir": "pirate"}, {"dir": "./pirate", "scaling": 0.5}])
    options = load(tmp_path, text).models["a"].engine_spec.options
    assert Path(options["draft_model"]).parts[-2:] == ("demo_models", "letters")
    pirate = str(tmp_path.resolve() / "pirate")
    assert options["lora"] == [{"dir": pirate, "scaling": 1.0}, {"dir": pirate, "scaling": 0.5}]
    report = problems(tmp_path, exllamav2(draft_model="absent", lora=[{"dir": "pirate"}, {"dir": "gone"}]))
    assert len(report) == 2
    assert "models.a.draft_model: 'absent' is no directory" in report[0]
    assert "models.a.lora.1.dir: 'gone' is no directory" in report[1]
    (told_of_key,) = problems(tmp_path, exllamav2(lora=[{"dir": "pirate", "scale": 1}]))
    assert "models.a.lora.0.scale: unknown key; did you mean 'scaling'?" in told_of_key


def test_a_chat_template_is_a_file_or_a_name(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_text("x")
    for given, read in (("t.jinja", f"{tmp_path}/t.jinja"), ("./t.jinja", f"{tmp_path}/t.jinja"), ("rag", "rag")):
        spec = load(tmp_path, exllamav2(chat_template=given)).models["a"].engine_spec
        assert read_options(spec).chat_template == read
    (problem,) = problems(tmp_path, exllamav2(chat_template="none/t.jinja"))
    assert f"models.a.chat_template: 'none/t.jinja' is no file (looked for {tmp_path}/none/t.jinja)" in problem


def test_the_options_of_the_configuration_are_those_the_engine_reads(tmp_path: Path) -> None:
    text = exllamav2(
        gpu=[0, 1], cache_mode="Q6", cache_size=4096, chunk_size=512, rope_scale=2, rope_alpha=1.5, gpu_split=[1, 2.5],
        draft_model="demo:letters", draft_cache_mode="Q4", draft_rope_scale=1.5, draft_rope_alpha=2.0, draft_tokens=3,
        lora=[{"dir": "."}],
    )  # fmt: skip
    options = read_options(load(tmp_path, text).models["a"].engine_spec)
    assert (options.cache_mode, options.cache_size, options.chunk_size) == ("Q6", 4096, 512)
    assert (options.rope_scale, options.rope_alpha, options.gpu_split) == (2.0, 1.5, (1.0, 2.5))
    assert (options.draft_cache_mode, options.draft_rope_scale, options.draft_rope_alpha) == ("Q4", 1.5, 2.0)
    assert (options.draft_tokens, options.speculates, options.loras[0].scaling) == (3, True, 1.0)
    text = exllamav2(gpu=[0, 1], autosplit_reserve=[64, 0], ngram_draft=True, tensor_parallel=False)
    options = read_options(load(tmp_path, text).models["a"].engine_spec)
    assert (options.autosplit_reserve, options.ngram_draft, options.tensor_parallel) == ((64, 0), True, False)
    text = exllamav2(gpu=[0, 1], tensor_parallel=True)
    assert read_options(load(tmp_path, text).models["a"].engine_spec).tensor_parallel


@pytest.mark.parametrize(
    ("keys", "key", "says"),
    [
        ({"cache_size": 1000}, "cache_size", "must be a multiple of 256, such as 1024"),
        ({"chunk_size": 100}, "chunk_size", "must be a multiple of 256, such as 256"),
        ({"draft_model": "demo:letters", "ngram_draft": True}, "ngram_draft", "keep one of them"),
        ({"draft_cache_mode": "Q4"}, "draft_cache_mode", "is for a draft_model"),
        ({"draft_rope_alpha": 2.0, "ngram_draft": True}, "draft_rope_alpha", "is for a draft_model"),
        ({"draft_tokens": 4}, "draft_tokens", "add draft_model or ngram_draft"),
        ({"draft_tokens": 17, "ngram_draft": True}, "draft_tokens", "is 17: "),
        ({"gpu_split": [10]}, "gpu_split", "is for several GPUs"),
        ({"gpu": [0], "autosplit_reserve": [10]}, "autosplit_reserve", "is for several GPUs"),
        ({"gpu": [0, 1], "gpu_split": [10]}, "gpu_split", "has 1 values for 2 GPUs"),
        ({"gpu": [0, 1], "gpu_split": [10, -1]}, "gpu_split.1", "is -1: "),
        ({"gpu": [0, 1], "gpu_split": [9, 9], "autosplit_reserve": [9, 9]}, "autosplit_reserve", "gpu_split turns off"),
        ({"tensor_parallel": True}, "tensor_parallel", "needs several GPUs"),
        (
            {"gpu": [0, 1], "tensor_parallel": True, "lora": [{"dir": "."}]},
            "lora",
            "does not work with tensor_parallel",
        ),
        ({"rope_alpha": 0}, "rope_alpha", "is 0: "),
        ({"rope_scale": "2"}, "rope_scale", "is '2': "),
        ({"lora": "pirate"}, "lora", "is 'pirate': "),
        ({"ngram_draft": 1}, "ngram_draft", "is 1: "),
        ({"engine": "transformers", "draft_model": "."}, "draft_model", "is not a key of engine 'transformers'"),
    ],
)
def test_what_exllamav2_cannot_do_together(tmp_path: Path, keys: dict[str, Any], key: str, says: str) -> None:
    report = problems(tmp_path, exllamav2(**keys))
    assert len(report) == 1, report
    assert f"models.a.{key}: " in report[0]
    assert says in report[0]


def test_every_key_is_documented() -> None:
    """The shipped models.yaml shows or mentions every key of a model and of the sections beside ``models``."""
    text = (ROOT / "models.yaml").read_text()
    classes = (ModelConfig, SupervisorConfig, GatewayConfig)
    keys = [key for each in classes for key in each.__dataclass_fields__]
    assert not [key for key in keys if f"{key}:" not in text]


def test_leases_are_the_supervisors_or_the_models_own(tmp_path: Path) -> None:
    text = (
        f"models:\n  a: {{model_dir: ., engine: '{CUSTOM}', step_timeout: 2m, load_timeout: 10m}}\n"
        f"  b: {{model_dir: ., engine: '{CUSTOM}'}}\nsupervisor: {{watch: {{step: 20s, idle: 3s, start: 40s}}}}\n"
    )
    config = load(tmp_path, text)
    leases = {name: config.supervisor.leases(spec.config) for name, spec in config.models.items()}
    assert leases["a"] == Leases(start_s=40, load_s=600, idle_s=3, step_s=120)
    assert leases["b"] == Leases(start_s=40, load_s=300, idle_s=3, step_s=20)


def test_what_may_wait_for_slow_readers(tmp_path: Path) -> None:
    assert load(tmp_path, model()).supervisor.hold_limits == SendBufferLimits()
    held = "supervisor: {held: {stream: 4MiB, client: 64MiB, all: 1GiB}, stall: 2m}\n"
    found = load(tmp_path, model() + held).supervisor.hold_limits
    assert found == SendBufferLimits(of_stream=4 << 20, of_party=64 << 20, of_all=1 << 30, stall_s=120)
    for wrong, says in (
        ("{stream: 32MiB}", "supervisor.held.stream: is 33554432 bytes, and supervisor.held.client is 16777216"),
        ("{client: 65MiB}", "supervisor.held.client: is 68157440 bytes, and supervisor.held.all is 67108864"),
        ("{stream: 1KiB}", "must be a size such as 1MiB, from 64KiB to 64GiB"),
        ("{streams: 1MiB}", "did you mean 'stream'?"),
    ):
        (problem,) = problems(tmp_path, f"{model()}supervisor: {{held: {wrong}}}\n")
        assert says in problem


def test_what_is_for_lazy_models_only(tmp_path: Path) -> None:
    config = load(tmp_path, model(lazy=True, ttl="10m", priority=3))
    spec = config.models["a"]
    assert (spec.autostart, spec.config.ttl, spec.config.priority) == (False, 600.0, 3)
    assert load(tmp_path, model(lazy=True, autostart=True, ttl="never")).models["a"].autostart
    reported: list[tuple[dict[str, Any], str]] = [
        ({"ttl": "10m"}, "models.a.ttl: is for a model that a request can start: add lazy: true"),
        ({"pinned": True}, "models.a.pinned: is for a model that a request can start"),
        ({"priority": 1}, "models.a.priority: is for a model that a request can start"),
        ({"lazy": True, "pinned": True, "ttl": "1h"}, "models.a.ttl: unloads what pinned keeps loaded"),
        ({"lazy": True, "pinned": True, "priority": 1}, "models.a.priority: orders which models are unloaded first"),
        ({"lazy": True, "ttl": 0}, "must be never, or a duration above zero"),
        ({"lazy": True, "ttl": "soon"}, "must be never, or a duration above zero"),
    ]
    for keys, problem in reported:
        with pytest.raises(ConfigError, match=re.escape(problem)):
            load(tmp_path, model(**keys))


def test_a_model_store_needs_a_port_and_a_place_of_its_own(tmp_path: Path) -> None:
    def cluster(**store: Any) -> str:
        return model() + yaml.safe_dump({"cluster": {"advertise": "tcp://192.168.1.5:5571", "model_store": store}})

    store = load(tmp_path, cluster(listen="tcp://192.168.1.5:5572", size="1TiB")).cluster
    assert store is not None
    assert (store.model_store.size, store.model_store.directory) == (1 << 40, "~/.cache/modelctl/models")
    assert load(tmp_path, cluster()).cluster.model_store.listen is None  # type: ignore[union-attr]
    (taken,) = problems(tmp_path, cluster(listen="tcp://192.168.1.5:5571"))
    assert taken.endswith("cluster.model_store.listen: is tcp://192.168.1.5:5571, as advertise is; choose another port")
    (relative,) = problems(tmp_path, cluster(listen="tcp://192.168.1.5:5572", directory="copies"))
    assert "cluster.model_store.directory: is 'copies': must be an absolute path, or begin with ~/" in relative
    (size,) = problems(tmp_path, cluster(listen="tcp://192.168.1.5:5572", size="much"))
    assert "cluster.model_store.size" in size
