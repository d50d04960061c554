"""modelctl init --from takes over the configuration of TabbyAPI and llama-swap, and names what has no counterpart."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.programs import modelctl
from tests.nvml_box import Box
from tests.serving import ROOT
from tools.demo_models import directory

LETTERS = directory("letters")
TABBY = """
network: {host: 127.0.0.1, port: 5000, disable_auth: true, send_tracebacks: true, api_servers: ["OAI"]}
logging: {log_prompt: true, log_requests: false}
model:
  model_dir: models
  inline_model_loading: true
  use_dummy_models: true
  dummy_model_names: ["gpt-3.5-turbo"]
  model_name: Main-exl2/4.0bpw
  use_as_default: [cache_mode]
  backend:
  max_seq_len: 1024
  cache_size:
  cache_mode: Q8
  tensor_parallel: false
  gpu_split_auto: true
  autosplit_reserve: [96]
  gpu_split: []
  rope_scale: 1.0
  rope_alpha:
  chunk_size: 2048
  max_batch_size: 6
  prompt_template: chatml
  vision: true
  force_enable_thinking: true
  reasoning: false
draft_model: {draft_model_dir: models, draft_model_name: , draft_rope_scale: 1.0, draft_cache_mode: FP16}
sampling: {override_preset: calm}
lora: {lora_dir: loras, loras: }
embeddings: {embedding_model_dir: models, embeddings_device: cpu, embedding_model_name: bge}
developer: {unsafe_launch: false, disable_request_streaming: true, realtime_process_priority: false}
"""
CALM = """
temperature: {override: 0.7, force: true}
top_k: {override: 40, force: false}
top_p: {override: , force: false}
banned_tokens_of_somebody: {override: [1], force: false}
"""
SWAP = """
healthCheckTimeout: 500
logLevel: info
sendLoadingState: true
globalTTL: 0
macros:
  "server": >
    /opt/llama-server
    --port ${PORT}
  "ctx": 1024
  "args": "--ctx-size ${ctx}"
  "where": "${env.MODELS}/served"
apiKeys: ["${env.SECRET}"]
models:
  "Big Model:70B":
    macros: {"temp": 0.7}
    cmd: |
      # ${server} is a macro; touch RAN must not run
      ${server} ${args}
      --model /models/big.gguf
      --temperature ${temp}
    ttl: 60
    description: "a big one"
    aliases: [{id: gpt-4o, unlisted: true}, "gpt-4o-mini"]
  "chat":
    cmd: |
      $(touch RAN); `touch RAN`; vllm serve ${where} --max-model-len=512 -np 4
      --chat-template ${where}/chat.jinja --chat-template-kwargs '{"enable_thinking": false}'
    name: "Chat"
    env: ["CUDA_VISIBLE_DEVICES=0,1", "OTHER=x"]
    filters:
      stripParams: "temperature"
      setParams: {top_p: 0.9, chat_template_kwargs: {tail: "!"}}
      setParamsByID:
        "${MODEL_ID}:calm": {temperature: 0.1, chat_template_kwargs: {enable_thinking: false}}
  "in-docker":
    cmd: docker run --rm -v /mnt/models:/models ghcr.io/x/y --model '/models/z.gguf' -c 4096 -np 2 -ctk q8_0
    cmdStop: docker stop ${MODEL_ID}
    unlisted: true
    sendLoadingState: false
    concurrencyLimit: 4
groups:
  "g one": {swap: true, exclusive: true, members: [chat, in-docker]}
hooks: {on_startup: {preload: [chat]}}
"""


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Make the directory in which the command runs."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def read(place: Path) -> Mapping[str, Any]:
    content: Mapping[str, Any] = yaml.safe_load((place / "models.yaml").read_text())
    return content


def box(tmp_path: Path) -> dict[str, str]:
    Box(tmp_path / "box.json").becomes([24, 24])
    return {"MODELCTL_TEST_BOX": str(tmp_path / "box.json"), "PYTHONPATH": f"{ROOT / 'tests' / 'stand_in_nvml'}:{ROOT}"}


def test_tabbyapis_folder_and_its_first_model_are_taken_over(tmp_path: Path, place: Path) -> None:
    tabby = tmp_path / "tabbyAPI"
    for name in ("Main-exl2/4.0bpw", "Other"):
        shutil.copytree(LETTERS, tabby / "models" / name)
    (tabby / "templates").mkdir()
    (tabby / "templates" / "chatml.jinja").write_text("{{ messages[0].content }}")
    (tabby / "sampler_overrides").mkdir()
    (tabby / "sampler_overrides" / "calm.yml").write_text(CALM)
    (tabby / "config.yml").write_text(TABBY)
    done = modelctl("init", "--from", tabby / "config.yml", cwd=place, **box(tmp_path))
    assert done.returncode == 0, done.stderr
    written = read(place)
    assert written["gateway"] == {"listen": "127.0.0.1:5000", "auth": "none"}
    calm = {"sampling": {"top_k": 40}, "forced": {"temperature": 0.7}}
    assert written["models"]["main-exl2-4.0bpw"] == {
        "model_dir": str(tabby / "models" / "Main-exl2" / "4.0bpw"), "engine": "exllamav2", "gpu": "auto",
        "cache_mode": "Q8", "max_seq_len": 1024, "max_batch_size": 6, **calm,
        "chat_template": str(tabby / "templates" / "chatml.jinja"),
        "template_kwargs": {"enable_thinking": True}, "aliases": ["Main-exl2/4.0bpw", "gpt-3.5-turbo"],
    }, "it starts with the supervisor, as it did there"  # fmt: skip
    assert list(written["models"]) == ["main-exl2-4.0bpw"]
    assert written["folders"] == [{"path": str(tabby / "models"), "defaults": {"cache_mode": "Q8", **calm}}], (
        "any directory of it was served, also one that came later"
    )
    assert f"each model below {tabby / 'models'} is served, too: `modelctl check` lists them\n" in done.stdout
    for said in (
        "network.send_tracebacks: errors never hold tracebacks",
        "logging.log_prompt: ",
        "model.vision: images are not served",
        "embeddings.embedding_model_name: add an entry with engine: embedding for it",
        "developer.disable_request_streaming: has no counterpart",
        "main-exl2-4.0bpw: sampling.banned_tokens_of_somebody is left out",
    ):
        assert f"no counterpart: {said}" in done.stderr
        assert f"# no counterpart: {said}" in (place / "models.yaml").read_text()
    assert "api_servers" not in done.stderr, "what says nothing is not mentioned"
    done = modelctl("check", cwd=place, **box(tmp_path))
    assert done.returncode == 0, done.stderr
    assert f"not served yet: {tabby / 'models' / 'Other'}: its files changed less than 30 s ago" in done.stdout


def test_without_a_gpu_tabbyapis_folder_is_served_on_the_cpu(tmp_path: Path, place: Path) -> None:
    shutil.copytree(LETTERS, tmp_path / "models" / "Main")
    (tmp_path / "config.yml").write_text("model: {model_name: Main, cache_mode: Q8}\n")
    done = modelctl("init", "--from", tmp_path / "config.yml", cwd=place)
    assert done.returncode == 0, done.stderr
    done = modelctl("check", cwd=place)
    assert done.returncode == 0, done.stderr


def test_a_tabbyapi_that_is_open_to_others_gets_keys(tmp_path: Path, place: Path) -> None:
    """Without a token only programs of this machine are served. The folder of the file is not on this machine."""
    config = tmp_path / "config.yml"
    config.write_text("network: {host: 0.0.0.0, port: 5001, disable_auth: true}\nmodel: {model_name: Far}\n")
    done = modelctl("init", "--from", config, cwd=place)
    assert done.returncode == 0, done.stderr
    assert read(place)["gateway"] == {"listen": "0.0.0.0:5001", "auth": "keys"}
    assert "the page http://127.0.0.1:5001/" in (place / "models.yaml").read_text()
    assert "no counterpart: network.host: other machines may use the address; add names" in done.stderr
    assert read(place)["models"]["far"]["model_dir"] == str(tmp_path / "models" / "Far")
    on_cpu = {"engine": "transformers", "gpu": "cpu"}
    assert read(place)["folders"] == [{"path": str(tmp_path / "models"), "defaults": on_cpu}], "no GPU is here"
    assert f"there is no directory {tmp_path}/models here" in done.stderr
    assert "`modelctl keys new NAME --token-file FILE`" in done.stderr


def test_llama_swaps_models_are_taken_over_and_nothing_is_run(tmp_path: Path, place: Path) -> None:
    models = tmp_path / "models"
    shutil.copytree(LETTERS, models / "served")
    config = tmp_path / "config.yaml"
    config.write_text(SWAP)
    done = modelctl("init", "--from", config, cwd=place, MODELS=str(models), SECRET="sk-do-not-show", **box(tmp_path))
    assert done.returncode == 0, done.stderr
    assert not [*tmp_path.rglob("RAN")]
    text = (place / "models.yaml").read_text()
    assert "sk-do-not-show" not in text + done.stdout + done.stderr
    written = read(place)
    assert written["gateway"] == {"listen": "127.0.0.1:8080", "auth": "keys", "progress": "reasoning"}
    assert written["groups"] == {"g-one": {"models": ["chat"], "loaded": 1}}
    assert written["models"] == {
        "chat": {
            "model_dir": str(models / "served"), "engine": "exllamav2", "lazy": True, "max_batch_size": 4,
            "max_seq_len": 512, "gpu": [0, 1], "forced": {"top_p": 0.9}, "autostart": True,
            "chat_template": str(models / "served" / "chat.jinja"),
            "template_kwargs": {"enable_thinking": False, "tail": "!"},
            "variants": {"calm": {"forced": {"temperature": 0.1}, "template_kwargs": {"enable_thinking": False}}},
        }
    }  # fmt: skip
    commented = yaml.safe_load(re.sub(r"^  # (?!.* is left out: )", "  ", text, flags=re.MULTILINE))["models"]
    assert commented["Big Model:70B"] == {
        "model_dir": "DIRECTORY", "lazy": True, "max_seq_len": 1024, "sampling": {"temperature": 0.7}, "ttl": "60s",
        "description": "a big one", "aliases": ["gpt-4o", "gpt-4o-mini"],
    }  # fmt: skip
    assert commented["in-docker"] == {
        "model_dir": "DIRECTORY", "lazy": True, "max_batch_size": 2, "max_seq_len": 2048, "cache_size": 4096,
        "cache_mode": "Q8", "listed": False,
    }  # fmt: skip
    for said in (
        "left out: Big Model:70B: /models/big.gguf is GGUF, which no engine here loads: get the model's EXL2 weights",
        "left out: in-docker: /mnt/models/z.gguf is GGUF",
        "no counterpart: sendLoadingState of single models: `gateway.progress` holds for all models",
        "no counterpart: apiKeys: admit each token with `modelctl keys new NAME --token-file FILE`",
        "no counterpart: filters.stripParams of chat: ",
        "no counterpart: groups.g one.exclusive: ",
        "no counterpart: aliases.unlisted of Big Model:70B: ",
    ):
        assert said in done.stderr


def test_a_command_that_starts_a_module_of_python_names_its_model_and_what_is_not_taken_over(
    tmp_path: Path, place: Path
) -> None:
    shutil.copytree(LETTERS, tmp_path / "letters")
    module = "python3 -m vllm.entrypoints.openai.api_server"
    cmd = f"{module} --port 1 --model {tmp_path / 'letters'} --tensor-parallel-size=2"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"models": {"letters": {"cmd": cmd}}}))
    done = modelctl("init", "--from", config, cwd=place)
    assert read(place)["models"]["letters"]["model_dir"] == str(tmp_path / "letters")
    assert "no counterpart: --tensor-parallel-size of letters: an option of cmd; " in done.stderr
    assert "--model" not in done.stderr
    assert "--port" not in done.stderr


def test_what_looks_like_a_variable_stays_text(tmp_path: Path, place: Path) -> None:
    shutil.copytree(LETTERS, tmp_path / "${HERE}" / "letters")
    cmd = f"vllm serve '{tmp_path}/${{HERE}}/letters' --max-model-len 64"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"models": {"letters": {"cmd": cmd, "description": "costs ${PRICE}"}}}))
    assert modelctl("init", "--from", config, cwd=place).returncode == 0
    done = modelctl("check", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "costs $${PRICE}" in (place / "models.yaml").read_text()


def test_the_written_groups_name_only_models_of_the_file(tmp_path: Path, place: Path) -> None:
    shutil.copytree(LETTERS, tmp_path / "models" / "served")
    (tmp_path / "models" / "served" / "chat.jinja").write_text("{{ messages[0].content }}")
    config = tmp_path / "config.yaml"
    config.write_text(SWAP)
    here = box(tmp_path)
    assert modelctl("init", "--from", config, cwd=place, MODELS=str(tmp_path / "models"), **here).returncode == 0
    done = modelctl("check", cwd=place, **here)
    assert done.returncode == 0, done.stderr


def test_two_names_of_one_directory_are_two_models(tmp_path: Path, place: Path) -> None:
    shutil.copytree(LETTERS, tmp_path / "letters")
    cmd = f"vllm serve {tmp_path / 'letters'} --max-model-len"
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump({"models": {"short": {"cmd": f"{cmd} 64"}, "long": {"cmd": f"{cmd} 512"}}}))
    assert modelctl("init", "--from", config, cwd=place).returncode == 0
    sizes = {name: entry["max_seq_len"] for name, entry in read(place)["models"].items()}
    assert sizes == {"short": 64, "long": 512}


def test_check_and_serve_recognise_the_files(tmp_path: Path, place: Path) -> None:
    for name, text, program in (("config.yml", TABBY, "TabbyAPI"), ("config.yaml", SWAP, "llama-swap")):
        file = place / name
        file.write_text(text)
        for command in (("check",), ("serve", "-c")):
            done = modelctl(*command, file, cwd=place)
            assert done.returncode == 78
            assert done.stderr == (
                f"{file}: is the configuration of {program}: "
                f"`modelctl init --from {file}` writes a models.yaml from it\n"
            )


def test_other_files_are_refused(tmp_path: Path, place: Path) -> None:
    for text, why in (
        ("models: {a: {model_dir: x}}\n", "is neither TabbyAPI's config.yml nor llama-swap's config.yaml"),
        ("a: [\n", "config.yml:"),
        ("- 1\n", "is neither"),
    ):
        (place / "config.yml").write_text(text)
        done = modelctl("init", "--from", "config.yml", cwd=place)
        assert (done.returncode, why in done.stderr, (place / "models.yaml").exists()) == (78, True, False), done.stderr
    done = modelctl("init", "--from", "config.yml", place, cwd=place)
    assert (done.returncode, "not both" in done.stderr) == (2, True)


def test_json_has_the_notes(tmp_path: Path, place: Path) -> None:
    (tmp_path / "config.yml").write_text("model: {model_name: Far}\nlogging: {log_prompt: true}\n")
    report = json.loads(modelctl("init", "--json", "--from", tmp_path / "config.yml", cwd=place).stdout)
    assert any(note.startswith("logging.log_prompt: ") for note in report["notes"])
    assert report["missing"] == {}
