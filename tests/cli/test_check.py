"""modelctl check and plan report models that cannot be loaded, with their lines, before anything is started."""

import json
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from model_worker.engine import LoadError
from model_worker.engines import build_engine
from model_worker.engines.embedded.check import causal_language_models
from model_worker.engines.exllamav2.check import check as check_exllamav2
from protocol.process.worker_spec import EngineSpec
from tests.cli.programs import modelctl
from tests.engines.random_model import edit_json
from tests.hidden_packages import ENGINES, Hidden
from tests.nvml_box import Box
from tests.serving import ROOT, engine
from tools.demo_models import directory

DEMO = directory("letters")
NO_TORCH = """
import importlib.abc, sys
class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, *_):
        if name.partition(".")[0] in ("torch", "transformers", "exllamav2", "tokenizers"):
            raise AssertionError(f"a command imports {name}")
sys.meta_path.insert(0, Refuse())
"""


def json_edited(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda model: edit_json(model / name, **changes)


def removed(name: str) -> Callable[[Path], None]:
    return lambda model: (model / name).unlink()


def cut_off(model: Path) -> None:
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-100])


def rewritten(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    """Return a function that changes the header of a model's weights and keeps the data."""

    def make(model: Path) -> None:
        content = (model / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + content[8 + length :])

    return make


def overlapping(header: dict[str, Any]) -> None:
    first, second = [name for name in header if name != "__metadata__"][:2]
    header[second] = dict(header[first])


def quantized(suffix: str) -> Callable[[Path], None]:
    def rename(header: dict[str, Any]) -> None:
        name = next(name for name in header if name.endswith("q_proj.weight"))
        header[name.removesuffix("weight") + suffix] = header.pop(name)

    return rewritten(rename)


def awq(model: Path) -> None:
    json_edited("config.json", quantization_config={"quant_method": "awq"})(model)
    quantized("qweight")(model)


def pickled(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def written(name: str, text: str) -> Callable[[Path], None]:
    def make(model: Path) -> None:
        (model / name).write_text(text)

    return make


def indexed(model: Path) -> None:
    weights = {"a": "model.safetensors", "b": "model-00002-of-00002.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))


FOR_BOTH: dict[str, tuple[Callable[[Path], None], str]] = {
    "no-config": (removed("config.json"), "has no config.json"),
    "no-tokenizer": (removed("tokenizer.json"), "has no tokenizer.json"),
    "wrong-tokenizer": (written("tokenizer.json", "{}]"), "tokenizer.json cannot be read"),
    "no-weights": (removed("model.safetensors"), "has no weights"),
    "pickled": (pickled, "holds pickled weights only"),
    "cut-off": (cut_off, "is cut off"),
    "overlapping": (rewritten(overlapping), "tensors may not overlap"),
    "lost-shard": (indexed, "lacks model-00002-of-00002.safetensors"),
    "foreign": (json_edited("config.json", architectures=["BertModel"]), "architecture BertModel is"),
    "more-layers": (json_edited("config.json", num_hidden_layers=99), "describes 99 layers, and the weights have none"),
    "awq": (awq, "is quantized by AWQ"),
    "bad-template": (written("chat_template.jinja", "{% for %}"), "chat template"),
}
"""name → a function that breaks a good directory, and the words of the report by either engine."""
FOR_TRANSFORMERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "exl2": (quantized("q_weight"), "is quantized (exl2), engine transformers loads none: use engine exllamav2"),
    "gptq": (quantized("qweight"), "is quantized (gptq), engine transformers loads none: use engine exllamav2"),
    "narrower": (json_edited("config.json", intermediate_size=64), "config.json describes [64, "),
    "mamba": (json_edited("config.json", layer_types=["mamba"]), "has layers of type mamba"),
    "dynamic": (
        json_edited("config.json", rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}), "of type dynamic"
    ),
}  # fmt: skip
CASES = {
    **{(name, "transformers"): case for name, case in (FOR_BOTH | FOR_TRANSFORMERS).items()},
    **{(name, "exllamav2"): case for name, case in FOR_BOTH.items()},
}


def make(directory: Path, change: Callable[[Path], None]) -> Path:
    shutil.copytree(DEMO, directory)
    change(directory)
    return directory


def broken_models(place: Path) -> dict[str, dict[str, Any]]:
    """Return an entry of models.yaml for each broken directory and engine."""
    return {
        f"{name}-{kind}": {
            "model_dir": str(make(place / f"{name}-{kind}", change)),
            "engine": kind,
            **({"gpu": 0} if kind == "exllamav2" else {}),
        }
        for (name, kind), (change, _) in CASES.items()
    }


def write(directory: Path, models: dict[str, dict[str, Any]]) -> Path:
    file = directory / "models.yaml"
    file.write_text(yaml.safe_dump({"models": models}, sort_keys=False))
    return file


def line_of(file: Path, text: str, after: str = "") -> int:
    """Return the number of the first line that begins with ``text`` after a line that begins with ``after``."""
    lines = [line.strip() for line in file.read_text().splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith(after))
    return next(i for i, line in enumerate(lines, 1) if i > start and line.startswith(text))


def test_every_directory_that_cannot_be_loaded_is_told_with_its_line(tmp_path: Path) -> None:
    file = write(tmp_path, broken_models(tmp_path))
    done = modelctl("check", file, "--elsewhere", prelude=NO_TORCH)
    assert done.returncode == 78, done.stderr
    output = done.stderr.splitlines()
    for (name, kind), (_, says) in CASES.items():
        model = f"{name}-{kind}"
        head = f"{file}:{line_of(file, 'model_dir:', f'{model}:')}: models.{model}.model_dir: "
        assert [line for line in output if line.startswith(head) and says in line], (model, output)
    assert len(output) == len(CASES), output


@pytest.mark.long
@pytest.mark.parametrize("name", [*(FOR_BOTH | FOR_TRANSFORMERS)])
def test_a_worker_says_the_same(tmp_path: Path, name: str) -> None:
    """The commands and the worker make the same checks, so both find the same faults."""
    change, says = (FOR_BOTH | FOR_TRANSFORMERS)[name]
    model = make(tmp_path / "m", change)
    entries = {"t": {"model_dir": str(model), "engine": "transformers"}}
    specs = [EngineSpec("t", "transformers", str(model))]
    if name in FOR_BOTH:
        entries["x"] = {"model_dir": str(model), "gpu": 0}
        specs.append(EngineSpec("x", "exllamav2", str(model), device="cuda"))
    done = modelctl("check", write(tmp_path, entries), "--elsewhere", "--json")
    report = {problem["path"].split(".")[1]: problem["message"] for problem in json.loads(done.stdout)["problems"]}
    for spec in specs:
        with pytest.raises(LoadError) as caught:
            begin_to_load(spec)
        assert " ".join(str(caught.value).split()) == report[spec.model]
        assert says in report[spec.model]


def begin_to_load(spec: EngineSpec) -> None:
    """Begin a load as the engine's worker does."""
    if spec.engine == "transformers":
        build_engine(spec).load(lambda *_: None)
    else:
        check_exllamav2(spec)  # the rest of its load needs a GPU


def test_all_faults_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    make(tmp_path / "broken", removed("tokenizer.json"))
    make(tmp_path / "two", cut_off)
    (tmp_path / "two" / "tokenizer.json").unlink()
    file = tmp_path / "models.yaml"
    file.write_text(
        f"""models:
  a: {{model_dir: '{DEMO}', engine: transformers}}
  a: {{model_dir: '{DEMO}', engine: transformers, max_seq_len: 999999}}
  misspelt:
    model_dir: broken
    engine: transformers
    max_seqlen: 5
  alone:
    model_dir: '{DEMO}'
    engine: transformers
    ttl: 5m
  nowhere: {{model_dir: nowhere, engine: transformers}}
  two: {{model_dir: two, engine: transformers, max_seq_len: 999999}}
  long:
    model_dir: '{DEMO}'
    gpu: 0
    cache_size: 256
    lora:
    - dir: broken
  sampled:
    model_dir: '{DEMO}'
    engine: transformers
    sampling: {{mirostat_mode: 2}}
  stretched: {{model_dir: '{DEMO}', gpu: 0, max_seq_len: 4096, rope_alpha: 2.0, cache_mode: Q8}}
  unpinned: {{model_dir: '{DEMO}'}}
  foreign: {{model_dir: '{DEMO}', engine: transformers, rope_alpha: 2.0}}
  dated: {{model_dir: '{DEMO}', engine: transformers, sampling: {{temperature: 2026-01-01}}}}
supervisor:
  stop: {{drian: 5s}}
"""
    )
    done = modelctl("check", file, "--elsewhere", "--json")
    assert done.returncode == 78
    output = [(p["line"], p["path"], p["message"], p["machine"]) for p in json.loads(done.stdout)["problems"]]
    expected = [
        (3, "models.a", "stands here and in line 2"),
        (3, "models.a.max_seq_len", "max_seq_len is 999999, but the model's own context is 2048"),
        (5, "models.misspelt.model_dir", "has no tokenizer.json"),
        (7, "models.misspelt.max_seqlen", "did you mean 'max_seq_len'?"),
        (11, "models.alone.ttl", "is for a model that a request can start"),
        (12, "models.nowhere.model_dir", "is no directory"),
        (13, "models.two.model_dir", "is cut off"),
        (13, "models.two.model_dir", "has no tokenizer.json"),
        (17, "models.long.cache_size", "cache_size is 256, less than the context"),
        (19, "models.long.lora.0.dir", "adapter_config.json"),
        (23, "models.sampled.sampling.mirostat_mode", "is not offered by this model's engine"),
        (25, "models.unpinned.gpu", "needs a GPU: add gpu"),
        (26, "models.foreign.rope_alpha", "is not a key of engine 'transformers'"),
        (27, "models.dated.sampling.temperature", ""),
        (29, "supervisor.stop.drian", "did you mean 'drain'?"),
    ]
    for line, path, says in expected:
        assert [t for t in output if t[:2] == (line, path) and says in t[2] and not t[3]], (path, output)
    assert len(output) == len(expected), output
    planned = modelctl("plan", file, "--gpus", "24G")
    assert planned.returncode == 78
    assert len(planned.stderr.splitlines()) == len(expected)


def test_what_only_this_machine_lacks_is_told_apart(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("raise ImportError('hidden')\n")
    hide = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    file = write(
        tmp_path, {"x": {"model_dir": str(DEMO), "gpu": 0}, "t": {"model_dir": str(DEMO), "engine": "transformers"}}
    )
    done = modelctl("check", file, **hide)
    assert done.returncode == 78
    gpu, last = done.stderr.splitlines()
    assert gpu.startswith(f"{file}:{line_of(file, 'gpu:')}: models.x.gpu: no GPU of this machine can be seen (NVML: ")
    assert last.startswith("modelctl: all of that is about this machine, not the file; --elsewhere checks a file that")
    (problem,) = json.loads(modelctl("check", file, "--json", **hide).stdout)["problems"]
    assert problem["machine"] is True
    done = modelctl("check", file, "--elsewhere", **hide)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.long
def test_a_package_that_is_missing_is_told(tmp_path: Path) -> None:
    hidden = Hidden(tmp_path, "exllamav2")
    Box(tmp_path / "box.json").becomes([24])
    path = f"{ROOT / 'tests' / 'stand_in_nvml'}:{hidden.python_path}"
    here = {"MODELCTL_TEST_BOX": str(tmp_path / "box.json"), "PYTHONPATH": path}
    file = write(tmp_path, {"x": {"model_dir": str(DEMO), "gpu": 0}})
    done = modelctl("check", file, **here)
    assert done.returncode == 78
    says = f"engine exllamav2 needs the package exllamav2: run {sys.executable} -m pip install 'modelctl[exllamav2]'"
    assert done.stderr.splitlines()[0] == f"{file}:2: models.x.engine: {says}"
    assert says in modelctl("plan", file, "--runtime-dir", tmp_path / "r", **here).stdout
    assert modelctl("plan", file, "--gpus", "24G", **here).returncode == 0, "for another box"
    assert modelctl("check", file, "--elsewhere", **here).returncode == 0


@pytest.mark.long
def test_a_plain_installation_names_the_extra_and_checks_what_it_can(tmp_path: Path) -> None:
    """Without the engines' packages, the command checks everything that needs none of them, and names the rest."""
    plain = {"PYTHONPATH": Hidden(tmp_path, *ENGINES).python_path}
    file = write(tmp_path, {"t": {"model_dir": str(DEMO), "engine": "transformers"}})
    done = modelctl("check", file, **plain)
    assert done.returncode == 78
    install = f"run {sys.executable} -m pip install"
    assert done.stderr.splitlines()[0] == (
        f"{file}:4: models.t.engine: engine transformers needs the packages transformers, torch, tokenizers, "
        f"safetensors, llguidance, numpy: {install} 'modelctl[embedded]'"
    )
    (problem,) = json.loads(modelctl("check", file, "--json", **plain).stdout)["problems"]
    assert (problem["path"], problem["machine"]) == ("models.t.engine", True)

    make(tmp_path / "broken", cut_off)
    draft = {"model_dir": str(DEMO), "gpu": 0, "draft_model": str(DEMO)}
    good = {
        "t": {"model_dir": str(DEMO), "engine": "transformers"},
        "x": draft,
        "y": {"model_dir": str(DEMO), "gpu": 0},
    }
    done = modelctl("check", write(tmp_path, good), "--elsewhere", **plain)
    assert (done.returncode, done.stderr) == (0, "")
    tokenizer = "tokenizer and chat template (without tokenizers)"
    assert [line for line in done.stdout.splitlines()[1:] if "no chat template" not in line] == [
        f"not checked of t: {tokenizer}, architecture (without transformers): {install} 'modelctl[embedded]'",
        f"not checked of x, y: {tokenizer}: {install} 'modelctl[embedded]'",
    ]
    report = json.loads(modelctl("check", tmp_path / "models.yaml", "--elsewhere", "--json", **plain).stdout)
    assert set(report["unchecked"]) == {"t", "x", "y"}
    assert modelctl("plan", tmp_path / "models.yaml", "--gpus", "24G", **plain).returncode == 0
    file = write(
        tmp_path, {"t": {"model_dir": "broken", "engine": "transformers"}, "x": {"model_dir": "broken", "gpu": 0}}
    )
    done = modelctl("check", file, "--elsewhere", **plain)
    assert done.returncode == 78
    assert [line.partition(": ")[2].partition(".safe")[0] for line in done.stderr.splitlines()] == [
        f"models.{name}.model_dir: {tmp_path / 'broken' / 'model'}" for name in "tx"
    ]


def test_a_file_that_is_fine_is_told_so_with_what_an_installation_lost(tmp_path: Path) -> None:
    file = write(tmp_path, {"t": {"model_dir": str(DEMO), "engine": "transformers"}})
    done = modelctl("check", file, MODELCTL_COMPILED="0")
    assert done.returncode == 0
    template, line = done.stdout.splitlines()[1:]
    assert template.startswith(
        "t: no chat template, so there are no conversations: add the model's chat_template.jinja"
    )
    assert line.startswith("compiled modules are not in use (switched off by MODELCTL_COMPILED=0): every token takes")
    assert line.endswith("; unset MODELCTL_COMPILED")
    assert len(modelctl("check", file, "--elsewhere", MODELCTL_COMPILED="0").stdout.splitlines()) == 2
    assert line in modelctl("--version", MODELCTL_COMPILED="0").stdout


def test_pins_are_held_against_this_machines_gpus(tmp_path: Path) -> None:
    Box(tmp_path / "box.json").becomes([24, 24])
    box = {"MODELCTL_TEST_BOX": str(tmp_path / "box.json"), "PYTHONPATH": f"{ROOT / 'tests' / 'stand_in_nvml'}:{ROOT}"}
    there = {"model_dir": str(DEMO), "engine": "transformers", "gpu": 1}
    done = modelctl(
        "check", write(tmp_path, {"here": there, "away": {**there, "gpu": 5}, "any": {**there, "gpu": "auto"}}), **box
    )
    assert done.returncode == 78
    assert "models.away.gpu: GPU 5 does not exist: there is 0, 1" in done.stderr.splitlines()[0]
    assert len(done.stderr.splitlines()) == 2


def test_a_plan_does_not_count_what_cannot_be_loaded(tmp_path: Path) -> None:
    make(tmp_path / "broken", cut_off)
    models = {
        "good": {"model_dir": str(DEMO), "gpu": 0},
        "declared": {"model_dir": "broken", "gpu": 0, "vram": "20GiB"},
        "processor": {"model_dir": "broken", "engine": "transformers"},
        "long": {"model_dir": str(DEMO), "engine": "transformers", "gpu": 0, "vram": "20GiB", "max_seq_len": 999999},
    }
    file = write(tmp_path, models)
    done = modelctl("plan", file, "--gpus", "24G")
    assert done.returncode == 1, done.stdout + done.stderr
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.startswith("  ")]
    assert rows == ["MODEL", "good", "in"]
    for name, key in (("declared", "model_dir"), ("processor", "model_dir"), ("long", "max_seq_len")):
        line = line_of(file, f"{key}:", f"{name}:")
        assert f"{name}: would not start: {file}:{line}: models.{name}.{key}: " in done.stdout
    assert "3 of 4 workers would not start; 3 cannot be loaded, and the tables do not count them" in done.stdout


def test_engines_of_ones_own_are_not_looked_into(tmp_path: Path) -> None:
    done = modelctl("check", write(tmp_path, {"a": engine(), "b": {"model_dir": str(DEMO), "engine": "transformers"}}))
    assert done.returncode == 0
    assert done.stdout.splitlines()[2:] == ["not looked into, because only their own engine can: a"]


def test_the_known_architectures_are_the_librarys() -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert causal_language_models().keys() == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())


def test_a_chat_template_of_models_yaml_is_named_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "models.yaml"
    file.write_text(
        "models:\n  a:\n    model_dir: demo:letters\n    engine: transformers\n    chat_template: my.jinja\n"
    )
    template = tmp_path / "my.jinja"
    template.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    done = modelctl("check", file)
    assert done.returncode == 0, done.stderr
    assert f"a: chat template in {template}\n" in done.stdout
    template.write_text("{% for %}")
    done = modelctl("check", file)
    assert done.returncode == 78
    assert f"{file}:5: models.a.chat_template: the chat template {template} cannot be read: " in done.stderr


def test_check_says_how_the_chat_templates_were_understood() -> None:
    found = json.loads(modelctl("check", "--json", str(ROOT / "models.yaml")).stdout)["understood"]
    assert found["agent"] == "calls in the format hermes"
    assert found["stories"].startswith("calls in the format json; one system message, ")
    assert "letters" not in found  # it has no chat template


def test_check_lists_what_a_folder_gives_and_why_a_directory_is_not_served(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    shutil.copytree(DEMO, folder / "New")
    shutil.copytree(DEMO, folder / "weak")
    (folder / "weak").chmod(0o777)
    (folder / "ggufs").mkdir()
    (folder / "ggufs" / "x.gguf").touch()
    file = tmp_path / "models.yaml"
    file.write_text("folders: [{path: models, defaults: {engine: transformers}}]\n")
    done = modelctl("check", file)
    assert (done.returncode, done.stderr) == (0, "")
    weak = f"others can write to {folder}/weak (mode 777): let only this user and root change it, or give the model an"
    lines = done.stdout.splitlines()
    assert lines[0] == f"{file}: fine; models: none"
    assert f"not served: {folder}/ggufs: it has GGUF weights, which no engine here loads" in lines
    assert f"not served: {folder}/weak: {weak} entry in models.yaml" in lines
    assert f"not served yet: {folder}/New: its files changed less than 30 s ago: a download may go on" in lines
    told = json.loads(modelctl("check", "--json", file).stdout)["folders"]
    assert {how: [Path(place).name for place in places] for how, places in told.items()} == {
        "unread": [], "refused": ["weak", "ggufs"], "waiting": ["New"],
    }  # fmt: skip
    file.write_text("folders: mdoels\n")
    done = modelctl("check", file)
    says = f"{file}:1: folders.0.path: {tmp_path}/mdoels is no directory; give one with models below\n"
    assert (done.returncode, done.stderr) == (78, says)
