"""Engine exllamav2 gives the package the right settings and positions, and chooses the right attention."""

import math
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from model_worker.engines.exllamav2 import load as exllamav2_attention_choice
from model_worker.engines.exllamav2 import load as exllamav2_load
from model_worker.engines.exllamav2.check import check
from model_worker.engines.exllamav2.load import Loaded, Package, load, make_generator
from model_worker.engines.exllamav2.package_model import compute_as_transformers
from model_worker.engines.model_dir import ModelDir, bytes_of_modules, bytes_of_parameters
from model_worker.engines.paged import attention as paged_attention
from protocol.process.worker_spec import EngineSpec
from tests.engines.exllamav2_cpu.package import import_package
from tests.engines.random_model import edit_json
from tests.engines.synthetic_model import exl2, plain, write_header, write_llama
from tests.engines.test_exllamav2_load import GIB, refused, spec

# loading, around a stand-in for the package


class Fake:
    """A stand-in for the package that records calls. ``gpus`` of 24 GiB each, of which ``free`` GiB are free."""

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
    def progress(phase: str, done: int, total: int, unit: str = "", /) -> None:
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


def test_the_modules_of_the_package_have_bytes(model: Path) -> None:
    """A load counts bytes of weights, which needs the names of the package's modules to be those of the files."""
    core, directory = import_package(), ModelDir(str(model))
    config = core.ExLlamaV2Config()
    config.model_dir = str(model)
    config.prepare()
    sizes = bytes_of_modules(directory.tensors, [module.key for module in core.ExLlamaV2(config).modules])
    assert sizes is not None
    assert sum(sizes) <= sum(tensor.bytes for tensor in directory.tensors.values())
    assert sum(size > 0 for size in sizes) == 2 * directory.config["num_hidden_layers"] + 3
    assert bytes_of_modules(directory.tensors, ["transformer.h.0"]) is None


def test_a_parameter_that_no_file_names_gets_a_share_of_what_is_left(model: Path) -> None:
    tensors = ModelDir(str(model)).tensors
    first, *others = tensors
    sizes = bytes_of_parameters(tensors, [first, "joined.a", "joined.b"])
    assert sizes == [tensors[first].bytes, *[sum(tensors[name].bytes for name in others) // 2] * 2]


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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8d9f7a11,GPU-8d9f7a12")  # the package would parse these as numbers
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
    refused(lambda: run(spec(model)), "cannot be loaded: Could not find ")


# positions


def test_longrope_follows_the_context_and_not_the_table(model: Path) -> None:
    """The tables of positions are longer than the context where something speculates beyond it."""
    import_package()
    compute_as_transformers()
    rope: Any = sys.modules["exllamav2.rope"]
    scaling = {"type": "longrope", "long_factor": [2.0] * 32, "short_factor": [1.5] * 32}
    edit_json(model / "config.json", rope_scaling=scaling, original_max_position_embeddings=512)
    config = import_package().ExLlamaV2Config()
    config.model_dir = str(model)
    config.prepare()
    plain_frequencies = 1 / 10000 ** (torch.arange(0, 64, 2) / 64)
    for context, table, divisor in ((512, 516, 1.5), (513, 516, 2.0)):
        config.max_seq_len, config.modelctl_context = table, context
        frequencies, attention = rope.get_rope_params("cpu", config, 10000.0)
        assert torch.allclose(frequencies, plain_frequencies / divisor)
        # transformers scales by the model's own lengths, for short texts, too
        assert attention == pytest.approx(math.sqrt(1 + math.log(2048 / 512) / math.log(512)))


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
    write_llama(tmp_path, architectures=["MistralForCausalLM"], sliding_window=128, attn_logit_softcapping=50.0)
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
    assert tried == [(gpu, 4, 2, 64, window, 50.0) for gpu in (0, 1) for window in (127, -1)]


def test_no_cuda_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused(exllamav2_attention_choice.import_package, "no CUDA device is visible", "nvidia-smi", torch.__version__)
