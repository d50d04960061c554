"""How ExLlamaV2 is loaded: what is refused before anything heavy, and what the package is asked for. No GPU."""

import json
import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model_worker.engine import LoadError
from model_worker.engines.exllamav2 import attention_choice as exllamav2_attention_choice
from model_worker.engines.exllamav2 import load as exllamav2_load
from model_worker.engines.exllamav2.attention_choice import Package
from model_worker.engines.exllamav2.check import check, check_cache, check_directory, check_parallel, open_draft
from model_worker.engines.exllamav2.load import Loaded, load, make_generator
from model_worker.engines.exllamav2.lora import check_adapter, load_adapters
from model_worker.engines.exllamav2.options import Adapter, read_options, sizes_of
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.paged import attention as paged_attention
from protocol.process.worker_spec import EngineSpec
from tests.engines.exllamav2_cpu.package import import_package
from tests.engines.random_model import edit_json
from tests.engines.synthetic_model import Header, exl2, plain, write_header, write_llama

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


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_llama(tmp_path / "model")
    return tmp_path / "model"


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
    ModelDir(str(model))
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors"}}))
    refused(lambda: ModelDir(str(model)), "second.safetensors is not of this model")
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "third.safetensors"}}))
    refused(lambda: ModelDir(str(model)), "lacks third.safetensors")
    index.write_text(json.dumps({"weight_map": {"a": "of-the-original.safetensors"}}))
    ModelDir(str(model))


@pytest.mark.parametrize(
    ("scaling", "says"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_scaling of type dynamic"),
        ({"type": "linear"}, "lacks factor"),
        ({"rope_type": "yarn", "factor": 4.0}, "lacks original_max_position_embeddings"),
    ],
)
def test_rope_that_would_be_left_out(model: Path, scaling: dict[str, Any], says: str) -> None:
    edit_json(model / "config.json", rope_scaling=scaling)
    refused(lambda: check_directory(ModelDir(str(model))), says)


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
    refused(check(tensors={"base_model.model.lm_head.weight": ("F16", (320, 256))}), "lm_head.weight is not supported")
    refused(check(use_dora=True), "use_dora=True, which ExLlamaV2 does not compute")
    refused(check(rank_pattern={"q_proj": 2}), "rank_pattern")
    refused(check(r="4"), "r='4': it must be the rank")
    refused(check(lora_alpha=None), "lora_alpha=None")
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        adapter = write_adapter(tmp_path / "lora")
        (tmp_path / "lora" / name).rename(tmp_path / "lora" / "adapter_model.bin")
        with pytest.raises(LoadError, match=rf"lora {tmp_path}/lora: .*{name}"):
            check_adapter(adapter, directory)
    edit_json(model / "config.json", architectures=["Gemma2ForCausalLM"])
    refused(lambda: check_adapter(write_adapter(tmp_path / "lora"), ModelDir(str(model))), "Gemma2ForCausalLM")


def test_adapters_follow_the_order_of_exl2_mlps(tmp_path: Path) -> None:
    """What adapters add inside of an MLP belongs to neurons that the package computes in another order."""
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
    inner = x @ gate[:, order] + x @ a @ adapter[0]  # as the package has gate and down
    found = inner @ down[order] + inner @ adapter[1] @ down_b
    assert torch.allclose(found, expected, atol=1e-4)


# loading, around a stand-in for the package


class Fake:
    """The package, noting what it is asked for. ``gpus`` of 24 GiB, ``free`` of it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, gpus: int = 1, free: float = 23.0) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.fail: BaseException | None = None
        real = import_package()
        fake = self

        class Model:
            def __init__(self, config: Any) -> None:
                self.config = config
                self.modules = [types.SimpleNamespace(device_idx=index) for index in (-1, None, 0)]

            def load(self, split: Any = None, *, callback: Callable[[int, int], None]) -> None:
                fake.called("load", split)
                for done in range(3):
                    callback(done, 2)

            def load_autosplit(self, cache: Any, reserve_vram: list[int], callback: Any) -> None:
                fake.called("autosplit", (reserve_vram, self.config.no_flash_attn, cache.lazy))

            def load_tp(self, split: Any, callback: Any, expect_cache_tokens: int, expect_cache_base: Any) -> None:
                fake.called("tp", (split, expect_cache_tokens, expect_cache_base.__name__))

        def cache_class(name: str) -> Any:
            def init(
                self: Any, model: Any, base: Any = None, max_seq_len: int = 0, lazy: bool = False, **_: Any
            ) -> None:
                fake.called("cache", (name, max_seq_len))
                self.lazy = lazy

            def all_tensors(self: Any) -> list[Any]:
                return [types.SimpleNamespace(device=torch.device("cuda", index)) for index in range(gpus)]

            return type(name, (), {"__init__": init, "all_tensors": all_tensors})

        names = ("", "_Q8", "_Q6", "_Q4", "_TP")
        core = types.SimpleNamespace(
            ExLlamaV2Config=real.ExLlamaV2Config,
            ExLlamaV2Tokenizer=real.ExLlamaV2Tokenizer,
            ExLlamaV2=Model,
            **{f"ExLlamaV2Cache{name}": cache_class(f"ExLlamaV2Cache{name}") for name in names},
        )
        package = Package(core, types.SimpleNamespace(ExLlamaV2DynamicGenerator=self.generator), "stand-in")
        monkeypatch.setattr(exllamav2_load, "import_package", lambda progress: package)
        monkeypatch.setattr(exllamav2_load, "expand_segments", lambda: None)
        monkeypatch.setattr(exllamav2_load, "check_attention", lambda package, *_: package.attention)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        memory = int(free * GIB), 24 * GIB
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index=0: memory)

    def called(self, name: str, what: Any) -> None:
        self.calls.append((name, what))
        if self.fail is not None and name != "cache":
            raise self.fail

    def generator(self, **kwargs: Any) -> Any:
        return types.SimpleNamespace(**kwargs)


def run(asked: EngineSpec, phases: dict[str, list[tuple[int, int]]] | None = None) -> Loaded:
    def progress(phase: str, done: int, total: int) -> None:
        if phases is not None:
            phases.setdefault(phase, []).append((done, total))

    return load(check(asked), progress)


def test_one_gpu_is_loaded_plainly(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, phases = Fake(monkeypatch), dict[str, list[tuple[int, int]]]()
    options: dict[str, Any] = {
        "cache_mode": "Q6",
        "ngram_draft": True,
        "draft_tokens": 3,
        "rope_alpha": 2.5,
        "rope_scale": 1.5,
    }
    loaded = run(spec(model, context=300, **options), phases)
    assert fake.calls == [("load", None), ("cache", ("ExLlamaV2Cache_Q6", 2048))]
    assert phases == {"loading": [(0, 2), (1, 2), (2, 2)]}
    config = loaded.model.config
    assert (config.scale_alpha_value, config.scale_pos_emb) == (2.5, 1.5)
    assert (config.max_input_len, config.max_seq_len, config.max_output_len) == (512, 512, 32)
    assert (loaded.context, loaded.chunk_size, loaded.draft_tokens, loaded.ngram) == (300, 512, 3, True)
    generator = make_generator(loaded, 8)
    assert (generator.max_q_size, generator.max_batch_size, generator.max_chunk_size) == (4, 8, 512)
    assert (generator.paged, generator.use_ngram_draft, generator.num_draft_tokens) == (True, True, 3)


def test_rows_of_mixtures_are_kept_apart_before_anything_is_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake(monkeypatch)
    monkeypatch.setattr(exllamav2_load, "keep_rows_apart", lambda: fake.called("rows kept apart", None))
    run(spec(model, draft_model=str(model)))
    assert fake.calls[0] == ("rows kept apart", None)


def test_draft_models_are_loaded_beside(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, phases = Fake(monkeypatch), dict[str, list[tuple[int, int]]]()
    loaded = run(spec(model, cache_mode="Q8", draft_model=str(model), draft_rope_alpha=3.0), phases)
    assert [what for name, what in fake.calls if name == "cache"] == [("ExLlamaV2Cache_Q8", 2304)] * 2
    assert list(phases) == ["loading draft", "loading"]
    assert loaded.draft_model.config.scale_alpha_value == 3.0
    assert loaded.draft_model.config.max_seq_len >= loaded.model.config.max_seq_len


def test_several_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path, quantized=True)
    fake = Fake(monkeypatch, gpus=2)
    loaded = run(spec(tmp_path))
    assert ("autosplit", ([256 << 20] * 2, True, True)) in fake.calls
    assert loaded.model.config.no_flash_attn is False
    assert loaded.devices == [0, 1]
    run(spec(tmp_path, autosplit_reserve=[100, 0]))
    assert ("autosplit", ([100 << 20, 0], True, True)) in fake.calls
    run(spec(tmp_path, gpu_split=[1, 2.5]))
    assert ("load", [1.0, 2.5]) in fake.calls
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8d9f7a11,GPU-8d9f7a12")  # which the package would take for numbers
    run(spec(tmp_path, tensor_parallel=True, cache_mode="Q4"))
    assert ("tp", ([23.0, 23.0], 2048, "ExLlamaV2Cache_Q4")) in fake.calls
    assert ("cache", ("ExLlamaV2Cache_TP", 2048)) in fake.calls


def test_what_kernels_compute_wrongly_is_refused_before_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_llama(tmp_path, quantized=True, intermediate_size=96)
    fake = Fake(monkeypatch)
    refused(lambda: run(spec(tmp_path)), "the MLP's size is 96")
    assert fake.calls == []


def test_too_little_vram_is_known_before_loading(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch, free=0.1)
    refused(lambda: run(spec(model)), "not enough VRAM: needs 0.", "has 0.1 free of 24.0")
    assert fake.calls == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("x"),
        RuntimeError("CUDA out of memory"),
        RuntimeError("Insufficient VRAM for model and cache"),
    ],
)
def test_vram_that_runs_out_while_loading(model: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    Fake(monkeypatch).fail = error
    refused(lambda: run(spec(model)), "not enough VRAM: needs ")


def test_what_the_package_asserts_is_a_line(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = Fake(monkeypatch)
    fake.fail = AssertionError("Insufficient space in device allocation")
    refused(lambda: run(spec(model)), "gpu_split leaves no room")
    fake.fail = AssertionError("model.layers.0 has no bias but bias expected\nmore")
    refused(lambda: run(spec(model)), f"{model} cannot be loaded: model.layers.0 has no bias")
    fake.fail = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        run(spec(model))
    write_header(model / "model.safetensors", plain("model.embed_tokens", 320, 256) | exl2("lm_head", 320, 256))
    refused(lambda: run(spec(model)), "cannot be loaded: ## Could not find ")


# what the package makes of positions


def test_frequencies_follow_the_context_and_not_the_table(model: Path) -> None:
    import_package()
    exllamav2_load._keep_rope_to_context()
    exllamav2_load._keep_rope_to_context()
    rope: Any = sys.modules["exllamav2.rope"]
    config = import_package().ExLlamaV2Config()
    config.model_dir = str(model)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048}
    edit_json(model / "config.json", rope_scaling=yarn)
    config.prepare()
    plain_frequencies = 1 / 10000 ** (torch.arange(0, 64, 2) / 64)

    def frequencies(context: int, table: int) -> tuple[torch.Tensor, float]:
        config.max_seq_len, config.modelctl_context = table, context
        found: tuple[torch.Tensor, float] = rope.get_rope_params("cpu", config, 10000.0)
        return found

    assert torch.allclose(frequencies(2048, 2052)[0], plain_frequencies), "what is speculated beyond does not stretch"
    stretched, attention = frequencies(8192, 8196)
    assert attention == pytest.approx(0.1 * math.log(4) + 1)
    # transformers, modeling_rope_utils._compute_yarn_parameters: the ramp lies where 32 and 1 turns take the
    # original length
    low, high = (64 * math.log(2048 / (turns * 2 * math.pi)) / (2 * math.log(10000)) for turns in (32, 1))
    ramp = ((torch.arange(32) - math.floor(low)) / (math.ceil(high) - math.floor(low))).clamp(0, 1)
    assert torch.allclose(stretched, plain_frequencies / 4 * ramp + plain_frequencies * (1 - ramp))


# which attention


def test_a_flash_attn_that_does_not_load_is_replaced_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flash_attn").mkdir()
    broken = 'raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEa\\nmore")'
    (tmp_path / "flash_attn" / "__init__.py").write_text(broken)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(paged_attention, "is_installed", lambda: False)
    installed: list[bool] = []
    monkeypatch.setattr(paged_attention, "install", lambda: installed.append(True))
    for name in ("flash_attn", "flash_attn_2_cuda"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn_2_cuda", types.ModuleType("flash_attn_2_cuda"))
    text = exllamav2_attention_choice._choose_attention()
    assert installed == [True]
    assert "flash-attn does not load: flash_attn_2_cuda.so: undefined symbol" in text
    assert "\n" not in text


def test_attention_is_tried_for_the_models_shape_on_every_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path, sliding_window=128, attn_logit_softcapping=50.0)
    tried: list[tuple[Any, ...]] = []

    def check(device: torch.device, **shape: Any) -> str:
        tried.append((device.index, *shape.values()))
        return "kernels"

    monkeypatch.setattr(paged_attention, "check", check)
    package, directory = Package(None, None, f"{paged_attention.NAME}; flash-attn is missing"), ModelDir(str(tmp_path))
    monkeypatch.setattr(paged_attention, "is_installed", lambda: False)
    assert exllamav2_attention_choice.check_attention(package, directory, 2, lambda *_: None) == package.attention
    monkeypatch.setattr(paged_attention, "is_installed", lambda: True)
    text = exllamav2_attention_choice.check_attention(package, directory, 2, lambda *_: None)
    assert text == "kernels; flash-attn is missing"
    assert tried == [(gpu, 4, 2, 64, window, 50.0) for gpu in (0, 1) for window in (128, -1)]


def test_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(exllamav2_attention_choice.import_package, "no CUDA device is visible", "nvidia-smi", torch.__version__)
