"""modelctl init writes a models.yaml that passes modelctl check. It overwrites and omits nothing without saying so."""

import json
import math
import os
import re
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from protocol.limits import MODEL_NAME_PATTERN
from supervisor.config.model_search import MOST_DIRECTORIES, find_models, name_of, original_name
from tests.cli.programs import Terminal, environment, modelctl
from tests.engines.random_model import edit_json
from tests.hanging_files import hanging_file
from tests.hidden_packages import ENGINES, Hidden
from tests.nvml_box import Box
from tests.serving import ROOT
from tools.demo_models import directory

LETTERS = directory("letters")
STORIES = LETTERS.with_name("stories")


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Make a directory with two models and many other files."""
    root = tmp_path / "models"
    shutil.copytree(LETTERS, root / "Llama 3.1 8B: EXL2 #6.0bpw")
    shutil.copytree(STORIES, root / "people" / "ann" / "stories")
    (root / "adapter").mkdir()
    (root / "adapter" / "adapter_model.safetensors").touch()
    shutil.copytree(LETTERS, root / ".hidden" / "letters")
    (root / "linked").symlink_to(root / "people" / "ann" / "stories")
    (root / "loop").symlink_to(root)
    os.mkfifo(root / "pipe")
    return root


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Make the directory in which the command runs."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def written(place: Path) -> Mapping[str, Mapping[str, object]]:
    entries: Mapping[str, Mapping[str, object]] = yaml.safe_load((place / "models.yaml").read_text())["models"]
    return entries


def test_every_model_below_a_directory_gets_an_entry_and_the_file_passes_check(models: Path, place: Path) -> None:
    done = modelctl("init", models, cwd=place)
    assert (done.returncode, done.stderr) == (0, "")
    cpu = {"engine": "transformers", "gpu": "cpu", "lazy": True}
    assert written(place) == {
        "llama-3.1-8b-exl2-6.0bpw": {"model_dir": str(models / "Llama 3.1 8B: EXL2 #6.0bpw"), **cpu},
        "stories": {"model_dir": str(models / "people" / "ann" / "stories"), **cpu},
    }
    assert done.stdout.splitlines() == [
        f"{place}/models.yaml: written; models: llama-3.1-8b-exl2-6.0bpw, stories",
        "llama-3.1-8b-exl2-6.0bpw: no chat template, so there are no conversations: add the model's "
        "chat_template.jinja to its directory",
        "stories: chat template in tokenizer_config.json",
    ]
    done = modelctl("check", cwd=place)
    assert (done.returncode, done.stderr) == (0, "")


def test_with_a_gpu_exllamav2_is_chosen_and_the_context_is_bounded(tmp_path: Path, models: Path, place: Path) -> None:
    Box(tmp_path / "box.json").becomes([24])
    box = {"MODELCTL_TEST_BOX": str(tmp_path / "box.json"), "PYTHONPATH": f"{ROOT / 'tests' / 'stand_in_nvml'}:{ROOT}"}
    edit_json(models / "people" / "ann" / "stories" / "config.json", max_position_embeddings=131072)
    assert modelctl("init", models, cwd=place, **box).returncode == 0
    llama, stories = written(place).values()
    assert {**llama, "model_dir": None} == {"model_dir": None, "engine": "exllamav2", "gpu": "auto", "lazy": True}
    assert (stories["engine"], stories["max_seq_len"]) == ("exllamav2", 16384)
    assert modelctl("check", cwd=place, **box).returncode == 0


def test_the_sampling_that_a_model_recommends_is_copied(models: Path, place: Path) -> None:
    """Only what counts for transformers, and what a request could have."""
    recommended = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": "x", "typical_p": 1.0}
    file = models / "people" / "ann" / "stories" / "generation_config.json"
    file.write_text(json.dumps(recommended | {"repetition_penalty": 1.05, "eos_token_id": 1}))
    greedy = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.0}
    (models / "Llama 3.1 8B: EXL2 #6.0bpw" / "generation_config.json").write_text(json.dumps(greedy))
    assert modelctl("init", models, cwd=place).returncode == 0
    llama, stories = written(place).values()
    assert "sampling" not in llama
    assert stories["sampling"] == {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    assert "# from the model's generation_config.json" in (place / "models.yaml").read_text()
    assert modelctl("check", cwd=place).returncode == 0


def test_a_single_model_starts_with_the_supervisor(models: Path, place: Path) -> None:
    assert modelctl("init", models / "people", cwd=place).returncode == 0
    (entry,) = written(place).values()
    assert "lazy" not in entry
    assert modelctl("init", "--force", models / "linked", cwd=place).returncode == 0, (
        "the directory is itself a model's"
    )
    assert written(place) == {"stories": entry}


def test_the_file_says_why_its_models_are_lazy_or_not(models: Path, place: Path) -> None:
    assert modelctl("init", models, cwd=place).returncode == 0
    several = (place / "models.yaml").read_text()
    assert "# All models are lazy, because together they may not fit into memory" in several
    assert "Remove the line `lazy: true` of a model" in several
    assert modelctl("init", "--force", models / "people", cwd=place).returncode == 0
    one = (place / "models.yaml").read_text()
    assert (
        "# The model is loaded when the supervisor starts, because it is the only one. With the line `lazy: true`"
        in one
    )
    assert "All models are lazy" not in one


def test_names_that_mean_something_else_in_yaml_are_quoted(models: Path, place: Path) -> None:
    for name in ("2026-11-22", "null", "on", "12"):
        shutil.copytree(STORIES, place / "odd" / name)
    assert modelctl("init", place / "odd", cwd=place).returncode == 0
    assert sorted(written(place)) == ["12", "2026-11-22", "null", "on"]
    assert modelctl("check", cwd=place).returncode == 0


def test_a_directory_that_only_says_how_it_is_quantized_gets_the_models_name(tmp_path: Path, place: Path) -> None:
    """Two of them would be called 2.5bpw and 3.0bpw. Clients of TabbyAPI ask for the folder's own name."""
    family = tmp_path / "models" / "turboderp" / "Model-exl2"
    for name in ("2.5bpw", "3.0bpw"):
        shutil.copytree(LETTERS, family / name)
    for above in ("ann", "bob"):
        shutil.copytree(LETTERS, tmp_path / "models" / above / "Same-Name")
    assert modelctl("init", tmp_path / "models", cwd=place).returncode == 0
    assert {name: entry.get("aliases") for name, entry in written(place).items()} == {
        "model-exl2-2.5bpw": ["Model-exl2/2.5bpw"],
        "model-exl2-3.0bpw": ["Model-exl2/3.0bpw"],
        "same-name": None,  # the alias would mean two models
        "same-name-2": None,
    }
    assert modelctl("check", cwd=place).returncode == 0


def test_a_model_that_needs_several_gpus_gets_their_number(tmp_path: Path, place: Path) -> None:
    Box(tmp_path / "box.json").becomes([24, 24, 24, 24])
    box = {"MODELCTL_TEST_BOX": str(tmp_path / "box.json"), "PYTHONPATH": f"{ROOT / 'tests' / 'stand_in_nvml'}:{ROOT}"}
    large = tmp_path / "models" / "Large"
    shutil.copytree(LETTERS, large)
    shutil.copytree(LETTERS, tmp_path / "models" / "Small")
    _become_large(large)
    assert modelctl("init", tmp_path / "models", cwd=place, **box).returncode == 0
    assert {name: entry.get("gpus") for name, entry in written(place).items()} == {"large": 3, "small": None}
    planned = modelctl("plan", "--json", cwd=place, **box)
    assert {worker["name"]: worker["starts"] for worker in json.loads(planned.stdout)["workers"]} == {
        "large": True,
        "small": True,
    }
    text = (place / "models.yaml").read_text()
    (place / "models.yaml").write_text(re.sub(r"\n +gpus: 3.*", "", text))
    assert "`gpus: 3` would divide it among GPUs " in modelctl("plan", cwd=place, **box).stdout


def _become_large(model: Path) -> None:
    """Give a Llama model the shapes of 48 GiB of weights. Nothing is written for them: the file has a hole."""
    hidden, inner, heads, layers = 8192, 28672, 64, 30
    edit_json(
        model / "config.json",
        hidden_size=hidden,
        intermediate_size=inner,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        num_hidden_layers=layers,
    )
    shapes = {"model.embed_tokens": (448, hidden), "lm_head": (448, hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        within = f"model.layers.{layer}"
        shapes |= {f"{within}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
        shapes |= {f"{within}.self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
        shapes |= {f"{within}.self_attn.{name}_proj": (1024, hidden) for name in "kv"}
        shapes |= {f"{within}.mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
        shapes[f"{within}.mlp.down_proj"] = (hidden, inner)
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * math.prod(shape)
        header[f"{name}.weight"] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
    packed = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed)
        file.truncate(8 + len(packed) + end)


def test_a_folder_of_gguf_is_left_out_with_what_is_served(models: Path, place: Path) -> None:
    gguf = models / "Llama-3.1-8B-GGUF"
    gguf.mkdir()
    (gguf / "llama-Q4_K_M.gguf").write_bytes(b"GGUF")
    done = modelctl("init", models, cwd=place)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"left out: {gguf}: holds GGUF weights (llama-Q4_K_M.gguf), which no engine here loads: use")
    assert "EXL2" in line
    done = modelctl("init", "--force", gguf, cwd=place)
    assert done.returncode == 78
    assert "holds GGUF weights" in done.stderr


@pytest.mark.parametrize(("http", "auth"), [((), "none"), (("--http", "keys"), "keys"), (("--http", "off"), None)])
def test_a_port_is_opened_unless_it_is_off(models: Path, place: Path, http: tuple[str, ...], auth: str | None) -> None:
    assert modelctl("init", models, *http, cwd=place).returncode == 0
    text = (place / "models.yaml").read_text()
    assert yaml.safe_load(text).get("gateway") == (auth and {"listen": "127.0.0.1:8000", "auth": auth})
    assert ("every user and every program" in text) == (auth == "none")
    assert modelctl("check", cwd=place).returncode == 0


def test_on_a_terminal_the_port_is_asked_for(models: Path, place: Path) -> None:
    with Terminal("init", models, environment=environment(), cwd=place) as terminal:
        terminal.wait_for("every user and every program of this machine may use, start and stop the models")
        terminal.wait_for("which (none, keys, off) [none]: ")
        terminal.type("keys\n")
        assert terminal.wait_for_exit() == 0
    assert yaml.safe_load((place / "models.yaml").read_text())["gateway"]["auth"] == "keys"


@pytest.mark.long
def test_models_that_cannot_be_loaded_are_left_out_with_the_reason(models: Path, place: Path) -> None:
    broken = models / "broken"
    shutil.copytree(LETTERS, broken)
    (broken / "config.json").write_text("{")
    foreign = models / "foreign"
    shutil.copytree(LETTERS, foreign)
    edit_json(foreign / "config.json", architectures=["BertModel"])
    done = modelctl("init", models, cwd=place)
    assert done.returncode == 0
    first, second = done.stderr.splitlines()
    assert first.startswith(f"left out: {broken}: {broken}/config.json cannot be read: ")
    assert second.startswith(f"left out: {foreign}: engine transformers: architecture BertModel is no causal")
    assert "; engine exllamav2: architecture BertModel is not served by engine exllamav2" in second
    text = (place / "models.yaml").read_text()
    for line in (first, second):
        assert f"# {line}\n" in text
    assert len(written(place)) == 2
    done = modelctl("init", "--force", models, "--json", cwd=place)
    report = json.loads(done.stdout)
    assert [out["model_dir"] for out in report["left_out"]] == [str(broken), str(foreign)]
    assert [model["name"] for model in report["models"]] == [*written(place)]


def test_a_model_whose_file_system_hangs_is_left_out(
    models: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(LETTERS, models / "slow")
    prelude = "from supervisor.placement import estimates\nestimates.ESTIMATE_S = 5.0"
    with hanging_file(models / "slow" / "model.safetensors"):
        done = modelctl("init", models, cwd=place, prelude=prelude)
    assert done.returncode == 0
    assert done.stderr.startswith(f"left out: {models / 'slow'}: its files could not be read within")
    assert len(written(place)) == 2


def test_a_file_that_exists_is_left_as_it_is(models: Path, place: Path) -> None:
    (place / "models.yaml").write_text("mine")
    for arguments in ([], [models]):
        done = modelctl("init", *arguments, cwd=place)
        assert (done.returncode, (place / "models.yaml").read_text()) == (78, "mine")
        assert done.stderr == (
            f"modelctl: {place}/models.yaml exists already and is left as it is; --force replaces it\n"
        )
    assert modelctl("init", "--force", models, cwd=place).returncode == 0
    assert len(written(place)) == 2


def test_without_a_directory_it_is_the_sample(place: Path) -> None:
    done = modelctl("init", cwd=place)
    assert (done.returncode, done.stdout) == (0, f"{place}/models.yaml: written; models: agent, letters, stories\n")
    (_, *own), (_, *shipped) = ((d / "models.yaml").read_bytes().splitlines(keepends=True) for d in (place, ROOT))
    assert own == shipped, "apart from the first line, which names the schema"
    assert [*written(place)] == ["letters", "stories", "agent"]
    assert modelctl("check", cwd=place).returncode == 0


def test_a_plain_installation_says_what_the_models_need(tmp_path: Path, models: Path, place: Path) -> None:
    plain = {"PYTHONPATH": Hidden(tmp_path, *ENGINES).python_path}
    done = modelctl("init", models, cwd=place, **plain)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1].startswith("before they can be served here: engine transformers needs the pack")
    assert done.stdout.splitlines()[-1].endswith("-m pip install 'modelctl[embedded]'")


def test_directories_without_a_model_are_told(tmp_path: Path, place: Path) -> None:
    done = modelctl("init", tmp_path / "nowhere", cwd=place)
    assert done.returncode == 2
    assert f"Directory '{tmp_path / 'nowhere'}' does not exist" in done.stderr
    done = modelctl("init", place, cwd=place)
    assert done.returncode == 78
    assert done.stderr == (
        f"modelctl: no model found in {place}: a model's directory has config.json and *.safetensors\n"
    )
    shutil.copytree(LETTERS, place / "cut")
    (place / "cut" / "tokenizer.json").unlink()
    done = modelctl("init", place, cwd=place)
    assert done.returncode == 78
    assert done.stderr.splitlines()[0] == f"modelctl: no model found in {place}: none of them can be loaded"
    assert done.stderr.splitlines()[1].startswith(f"modelctl: {place}/cut: has no tokenizer.json: ")
    assert not (place / "models.yaml").exists()


@pytest.mark.parametrize("option", [(), ("--force",)])
def test_a_file_that_cannot_be_written_is_told_and_leaves_nothing(place: Path, option: tuple[str, ...]) -> None:
    if option:
        (place / "models.yaml").write_text("mine")
    prelude = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))"  # acts like a full disk
    done = modelctl("init", *option, cwd=place, prelude=prelude)
    assert done.returncode == 78
    assert done.stderr == f"modelctl: {place}/models.yaml cannot be written: File too large\n"
    assert [path.read_text() for path in place.iterdir()] == (["mine"] if option else [])


def test_names_are_valid_and_no_two_alike() -> None:
    cache = "/c/hub/models--turboderp--Llama-3.1-8B-exl2/snapshots/" + "0123456789" * 4
    taken: set[str] = set()
    named = {
        "/a/Llama": "llama",
        "/b/llama": "llama-2",
        "/c/LLAMA": "llama-3",
        "/a/Ünï çode": "n-ode",
        "/a/...": "model",
        "/a/supervisor": "supervisor-2",
        "/a/" + "x" * 200: "x" * 58,
        "/b/" + "x" * 200: "x" * 58 + "-2",
        cache: "llama-3.1-8b-exl2",
        "/a/Qwen3-8B-exl2/4.0bpw-h6": "qwen3-8b-exl2-4.0bpw-h6",
        "/a/" + "y" * 200 + "/6_5": "y" * 54 + "-6_5",
        "/a/b/12": "12",
        "/a/Phi-4/main": "phi-4-main",
    }
    for path, name in named.items():
        assert name_of(Path(path), taken) == name
        assert re.fullmatch(MODEL_NAME_PATTERN, name)
        taken.add(name)


def test_the_original_name_is_the_id_or_the_folder() -> None:
    cache = "/c/hub/models--turboderp--Llama-3.1-8B-exl2/snapshots/" + "0123456789" * 4
    assert original_name(Path(cache)) == "turboderp/Llama-3.1-8B-exl2"
    assert original_name(Path("/a/Llama-3.1-8B")) == "Llama-3.1-8B"
    assert original_name(Path("/a/Llama-3.1-8B-exl2/6_5")) == "Llama-3.1-8B-exl2/6_5"


def test_a_search_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        (tmp_path / str(number)).mkdir()
    assert find_models(tmp_path).complete
    monkeypatch.setattr("supervisor.config.model_search.MOST_DIRECTORIES", 10)
    assert not find_models(tmp_path).complete
    assert MOST_DIRECTORIES >= 10_000
