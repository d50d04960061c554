"""Engine exllamav2 refuses bad models before it loads anything large, and calls the package correctly. Needs no GPU."""

import json
import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model_worker.engine import LoadError
from model_worker.engines.exllamav2.check import check_cache, check_directory, check_parallel, open_draft
from model_worker.engines.exllamav2.lora import check_adapter, load_adapters
from model_worker.engines.exllamav2.meaning import check_reach, open_directory
from model_worker.engines.exllamav2.options import Adapter, read_options, sizes_of
from model_worker.engines.exllamav2.package_model import only_the_models_weights
from model_worker.engines.model_dir import ModelDir
from protocol.process.worker_spec import EngineSpec
from tests.engines.exllamav2_cpu.package import import_package
from tests.engines.random_model import edit_json
from tests.engines.synthetic_model import Header, write_header, write_llama

GIB = 2**30


def spec(path: Path, batch: int = 8, context: int | None = None, **options: Any) -> EngineSpec:
    return EngineSpec("m", "exllamav2", str(path), "cuda", context, batch, options)


def refused(call: Callable[[], object], *parts: str) -> None:
    with pytest.raises(LoadError) as caught:
        call()
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert part in text, text


# directories


def test_weights_that_the_package_cannot_read(model: Path) -> None:
    def check() -> None:
        check_directory(ModelDir(str(model)))

    check()
    write_header(model / "model.safetensors", {"model.norm.weight": ("F8_E4M3", (256,))})
    refused(check, "model.norm.weight has dtype F8_E4M3", "EXL2")
    write_header(model / "model.safetensors", {"model.layers.0.mlp.up_proj.qweight": ("I32", (8, 8))})
    edit_json(model / "config.json", quantization_config={"quant_method": "gptq", "bits": 8})
    refused(check, "GPTQ to 8 bits", "4 bits only")


def test_shards_of_another_model(model: Path) -> None:
    (model / "second.safetensors").write_bytes((model / "model.safetensors").read_bytes())
    refused(lambda: ModelDir(str(model)), "both hold", "remove the files")
    write_header(model / "second.safetensors", {"another": ("F16", (1,))})
    assert "another" in ModelDir(str(model)).tensors
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    assert [file.name for file in ModelDir(str(model)).weights] == ["model.safetensors"]
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "third.safetensors"}}))
    refused(lambda: ModelDir(str(model)), "lacks third.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "of-the-original.safetensors"}}))
    ModelDir(str(model))
    index.write_text(json.dumps({"weight_map": {"a": "second.safetensors"}}))
    refused(lambda: ModelDir(str(model)), "in model.safetensors, and another one", "second.safetensors", "remove one")


def test_weights_in_mistrals_own_format_are_left_alone(model: Path) -> None:
    """The package would take every safetensors file, and for each tensor the last file that has its name."""
    write_header(model / "consolidated.safetensors", {"layers.0.attention.wq.weight": ("F16", (1,))})
    assert [file.name for file in ModelDir(str(model)).weights] == ["model.safetensors"]
    (model / "model.safetensors").rename(model / "model-00001-of-00001.safetensors")
    names = dict.fromkeys(ModelDir(str(model)).tensors, "model-00001-of-00001.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    shutil.copy(model / "model-00001-of-00001.safetensors", model / "consolidated.safetensors")  # the same names
    directory = ModelDir(str(model))
    assert {tensor.file for tensor in directory.tensors.values()} == {"model-00001-of-00001.safetensors"}
    config = import_package().ExLlamaV2Config()
    config.model_dir = str(model)
    with only_the_models_weights():
        config.prepare()
    assert {Path(file).name for file in config.tensor_file_map.values()} == {"model-00001-of-00001.safetensors"}
    (model / "model-00001-of-00001.safetensors").unlink()
    refused(lambda: ModelDir(str(model)), "Mistral's own format only", "consolidated.safetensors", "download")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "rope_scaling of type ntk"),
        ({"rope_scaling": {"type": "linear"}}, "lacks factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": "4"}}, "factor of rope_scaling is '4'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}}, "beta_fast of rope_scaling is -1"),
        ({"rope_scaling": {"rope_type": "yarn", "type": "linear", "factor": 4.0}}, "two types, linear and yarn"),
        ({"rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0}}, "type dynamic has alpha"),
        ({"rope_scaling": {"type": "su", "long_factor": [1.0]}}, "lacks short_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}, "other": {}}}, "rope_parameters differ by layer"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': ExLlamaV2 computes LlamaForCausalLM with silu only"),
        ({"architectures": ["GPTBigCodeForCausalLM"], "multi_query": False}, "multi_query is False"),
        ({"architectures": ["DbrxForCausalLM"], "attn_config": {"clip_qkv": 8}}, "attn_config.clip_qkv is 8"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ({"architectures": ["InternLM2ForCausalLM"], "bias": True}, "bias is True"),
        ({"architectures": ["LlavaForConditionalGeneration"]}, "the text of Gemma 3, Mistral 3, Qwen2-VL"),
        ({"architectures": ["OddForCausalLM"]}, "would compute it as Llama"),
        (
            {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "mixtral"}},
            "text_config describes a model of type 'mixtral'",
        ),
    ],
)
def test_what_the_package_would_leave_out(model: Path, changes: dict[str, Any], says: str) -> None:
    edit_json(model / "config.json", **changes)
    refused(lambda: check_directory(open_directory(str(model))), says)


def test_queries_scaled_by_their_position(model: Path) -> None:
    """transformers changes the scale behind the original context only."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "llama_4_scaling_beta": 0.1}
    edit_json(model / "config.json", rope_parameters=rope | {"rope_theta": 10000.0})
    directory = open_directory(str(model))
    check_reach(directory, 1024)
    refused(lambda: check_reach(directory, 1025), "llama_4_scaling_beta", "max_seq_len to at most 1024")


def test_gemma_3_says_no_context(model: Path) -> None:
    edit_json(model / "config.json", architectures=["Gemma3ForConditionalGeneration"], max_position_embeddings=None)
    assert open_directory(str(model)).context(None) == 131072


def test_heads_that_a_quantized_cache_cannot_hold(tmp_path: Path) -> None:
    write_llama(tmp_path, head_dim=48)
    check_cache(ModelDir(str(tmp_path)), "FP16")
    refused(lambda: check_cache(ModelDir(str(tmp_path)), "Q6"), "cache_mode Q6", "48")


# sizes


def test_contexts_beyond_the_models_own_need_scaling(model: Path) -> None:
    def sizes(context: int | None = None, **options: Any) -> Any:
        asked = spec(model, context=context, **options)
        return sizes_of(asked, read_options(asked), ModelDir(str(model)))

    assert sizes().context == 2048
    refused(lambda: sizes(4096), "max_seq_len is 4096", "2048")
    assert sizes(4096, rope_alpha=2.0).context == 4096
    assert sizes(4096, rope_scale=2.0).cache_size == 4096
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    edit_json(model / "config.json", rope_scaling=yarn)
    assert sizes(8192).context == 8192
    refused(lambda: sizes(8193), "8193")


def test_speculation_takes_room(model: Path) -> None:
    def sizes(batch: int = 8, **options: Any) -> Any:
        asked = spec(model, batch, **options)
        return sizes_of(asked, read_options(asked), ModelDir(str(model)))

    found = sizes(ngram_draft=True, draft_tokens=4)
    assert (found.context, found.cache_size, found.rows, found.positions) == (2048, 2304, 40, 2052)
    refused(lambda: sizes(ngram_draft=True, cache_size=2048), "4 speculated ones", "at most 2044", "at least 2304")
    refused(lambda: sizes(100, ngram_draft=True, chunk_size=256), "500 tokens a step", "chunk_size, 256")
    refused(lambda: sizes(chunk_size=4096), "chunk_size is 4096, more than cache_size")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ngram_draft": True, "draft_model": "x"}, "keep one of them"),
        ({"ngram_draft": "yes"}, "true or false"),
        ({"draft_tokens": 3}, "nothing speculates"),
        ({"ngram_draft": True, "draft_tokens": 17}, "at most 16"),
        ({"draft_cache_mode": "Q4"}, "without draft_model"),
        ({"gpu_split": [1, 0]}, "a list of numbers above 0"),
        ({"gpu_split": [1, 1], "autosplit_reserve": [1, 1]}, "keep one of them"),
        ({"autosplit_reserve": [1.5]}, "whole megabytes"),
        ({"rope_alpha": -1}, "a number above 0"),
        ({"rope_scale": float("nan")}, "a number above 0"),
        ({"lora": ["x"]}, "a list of {dir: DIRECTORY"),
        ({"lora": [{"dir": "x", "scale": 1}]}, "a list of {dir: DIRECTORY"),
        ({"lora": [{"dir": "x", "scaling": "1"}]}, "a list of {dir: DIRECTORY"),
        ({"draft_model": ""}, "a directory"),
        ({"drafft_model": "x"}, "did you mean 'draft_model'"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str) -> None:
    refused(lambda: read_options(spec(Path("/x"), **options)), says)


# draft models


def test_draft_models_that_cannot_speculate_for_this_one(model: Path, tmp_path: Path) -> None:
    def check(context: int | None = None, **options: Any) -> Any:
        asked = spec(model, context=context, draft_model=str(tmp_path / "draft"), **options)
        read, directory = read_options(asked), ModelDir(str(model))
        return open_draft(read, directory, sizes_of(asked, read, directory))

    refused(check, "draft_model: model_dir", "is no directory")
    write_llama(tmp_path / "draft", max_position_embeddings=1024)
    refused(check, "draft_model: the context", "1024, less than the model's 2048")
    assert check(1024) is not None
    assert check(draft_rope_alpha=2.0) is not None
    write_llama(tmp_path / "draft", vocab_size=352)
    refused(check, "can draw 352 ids, the model knows 320")
    write_llama(tmp_path / "draft", head_dim=48)
    assert check() is not None
    refused(lambda: check(draft_cache_mode="Q8"), "draft_cache_mode Q8", "48")
    edit_json(tmp_path / "draft" / "config.json", architectures=["BertModel"])
    refused(check, "draft_model: architecture BertModel")
    write_llama(tmp_path / "draft")
    tokenizer = json.loads((tmp_path / "draft" / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["zebra"] = len(tokenizer["model"]["vocab"])
    (tmp_path / "draft" / "tokenizer.json").write_text(json.dumps(tokenizer))
    refused(check, "has another vocabulary", "they differ from id")


# several GPUs


def test_tensor_parallel_only_where_it_computes_rightly(tmp_path: Path) -> None:
    def check(gpus: int = 2, options: dict[str, Any] | None = None, **changes: Any) -> None:
        write_llama(tmp_path / "m", **({"quantized": True} | changes))
        asked = spec(tmp_path / "m", tensor_parallel=True, **(options or {}))
        read, directory = read_options(asked), ModelDir(str(tmp_path / "m"))
        check_parallel(read, directory, sizes_of(asked, read, directory), gpus)

    check()
    refused(lambda: check(1), "tensor_parallel: the worker has one GPU")
    refused(lambda: check(quantized=False), "only EXL2 weights")
    refused(lambda: check(architectures=["Qwen3ForCausalLM"]), "Qwen3ForCausalLM is not computed rightly")
    refused(lambda: check(architectures=["MistralForCausalLM"], sliding_window=1024), "sliding window of 1024")
    check(architectures=["MistralForCausalLM"], sliding_window=4096)
    refused(lambda: check(num_attention_heads=8), "8 heads of 64 do not make up the hidden size 256")
    refused(lambda: check(4), "2 heads of keys cannot be split over 4 GPUs")
    refused(lambda: check(options={"gpu_split": [1.0]}), "gpu_split has 1 values, the worker has 2 GPUs")
    refused(lambda: check(options={"lora": [{"dir": "/x"}]}), "lora is left out")


# adapters


def write_adapter(path: Path, rank: int = 4, tensors: Header | None = None, **config: Any) -> Adapter:
    path.mkdir(exist_ok=True)
    stem = "base_model.model.model.layers.1.self_attn.q_proj"
    fitting: Header = {f"{stem}.lora_A.weight": ("F32", (rank, 256)), f"{stem}.lora_B.weight": ("F32", (256, rank))}
    write_header(path / "adapter_model.safetensors", fitting | (tensors or {}))
    (path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 8} | config))
    return Adapter(str(path))


def test_adapters_that_do_not_fit(model: Path, tmp_path: Path) -> None:
    directory = ModelDir(str(model))

    def check(**changes: Any) -> Callable[[], object]:
        return lambda: check_adapter(write_adapter(tmp_path / "lora", **changes), directory)

    assert len(check_adapter(write_adapter(tmp_path / "lora"), directory)) == 2
    key = "base_model.model.model.layers.{}.mlp.down_proj.lora_{}.weight"
    refused(check(rank=8), "layer 1.self_attn.q_proj has shapes [8, 256] and [256, 8]", "rank 4 need [4, 256]")
    refused(check(tensors={key.format(7, "A"): ("F16", (4, 512))}), "the model has 2 layers")
    refused(check(tensors={key.format(0, "A"): ("F16", (4, 512))}), "lora_A without the other half")
    refused(check(tensors={key.format(0, "B"): ("I32", (256, 4))}), "dtype I32")
    refused(check(tensors={"base_model.model.lm_head.weight": ("F16", (320, 256))}), "lm_head.weight", "merge")
    refused(check(r="4"), "r='4': it must be the rank")
    refused(check(lora_alpha=None), "lora_alpha=None")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        adapter = write_adapter(tmp_path / "lora")
        (tmp_path / "lora" / name).rename(tmp_path / "lora" / "adapter_model.bin")
        with pytest.raises(LoadError, match=rf"lora {tmp_path}/lora: .*{name}"):
            check_adapter(adapter, directory)
    edit_json(model / "config.json", architectures=["Gemma2ForCausalLM"])
    refused(lambda: check_adapter(write_adapter(tmp_path / "lora"), ModelDir(str(model))), "Gemma2ForCausalLM")


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"use_dora": True}, "use_dora=True, a variant of LoRA that ExLlamaV2 does not compute"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"use_qalora": True, "qalora_group_size": 16}, "use_qalora=True"),
        ({"alora_invocation_tokens": [1, 2]}, "alora_invocation_tokens=[1, 2]"),
        ({"layer_replication": [[0, 2], [1, 2]]}, "layer_replication"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': such an adapter belongs to changed weights"),
        ({"init_lora_weights": "pissa_niter_16"}, "pissa_niter_16"),
        ({"init_lora_weights": "olora"}, "olora"),
        ({"modules_to_save": ["lm_head"]}, "replace whole parts of a model"),
        ({"peft_type": "IA3"}, "peft_type='IA3': only LoRA adapters are served"),
    ],
)
def test_variants_of_lora(model: Path, tmp_path: Path, config: dict[str, Any], says: str) -> None:
    adapter = write_adapter(tmp_path / "lora", **config)
    refused(lambda: check_adapter(adapter, ModelDir(str(model))), says, "merge_and_unload")


def test_adapters_that_are_plain(model: Path, tmp_path: Path) -> None:
    for start in (True, False, "gaussian", "eva"):
        adapter = write_adapter(
            tmp_path / "lora", init_lora_weights=start, peft_type="LORA", use_dora=False, layer_replication=None,
            alora_invocation_tokens=None, modules_to_save=None, bias="none", use_rslora=True,
        )  # fmt: skip
        assert len(check_adapter(adapter, ModelDir(str(model)))) == 2


def test_adapters_follow_the_order_of_exl2_mlps(tmp_path: Path) -> None:
    """The package computes an MLP's neurons in another order, so an adapter's values must be put into that order."""
    write_llama(tmp_path, quantized=True, num_hidden_layers=1, hidden_size=32, intermediate_size=64)
    seed = 7
    print(f"seed {seed}")
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(64, generator=random)
    name = "model.layers.0.mlp."
    stored = {f"{name}down_proj.q_invperm": order.argsort().int(), f"{name}down_proj.q_weight": torch.zeros(1).int()}
    save_file(stored, tmp_path / "model.safetensors")
    x, gate, down = (torch.randn(*shape, generator=random) for shape in ((3, 32), (32, 64), (64, 32)))
    a, b = torch.randn(32, 4, generator=random), torch.randn(4, 64, generator=random)
    down_a, down_b = torch.randn(64, 4, generator=random), torch.randn(4, 32, generator=random)
    inner = x @ gate + x @ a @ b
    expected = inner @ down + inner @ down_a @ down_b
    modules = {
        name + projection: types.SimpleNamespace(lora_a_tensors={}, lora_b_tensors={})
        for projection in ("gate_proj", "up_proj", "down_proj")
    }
    adapter: list[torch.Tensor] = []

    def lora(model: Any, config: str, weights: str, scaling: float) -> str:
        modules[f"{name}gate_proj"].lora_b_tensors["adapter"] = b
        modules[f"{name}down_proj"].lora_a_tensors["adapter"] = down_a
        adapter.extend((b, down_a))
        return "adapter"

    core, model = types.SimpleNamespace(ExLlamaV2Lora=lora), types.SimpleNamespace(modules_dict=modules)
    assert load_adapters(core, model, [Adapter("/x")], ModelDir(str(tmp_path))) == ["adapter"]
    inner = x @ gate[:, order] + x @ a @ adapter[0]  # the package's order of gate and down
    found = inner @ down[order] + inner @ adapter[1] @ down_b
    assert torch.allclose(found, expected, atol=1e-4)
