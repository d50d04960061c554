"""Import the real exllamav2 on the CPU, with its compiled module replaced."""

import importlib
import importlib.util
import sys
import types
import warnings
from functools import cache
from typing import Any

import pytest
import torch

from tests.engines.exllamav2_cpu import extension
from tests.engines.exllamav2_cpu.oracle import OracleLogits, OracleModel, make_cache
from tools.demo_models import directory


@cache
def import_package() -> Any:
    """Import the package once and return it. Skip the test if it is not installed, or if a CUDA device is visible."""
    if importlib.util.find_spec("exllamav2") is None:
        pytest.skip("exllamav2 is not installed: make test installs it, without what it would compile")
    if torch.cuda.is_available():
        pytest.skip("a CUDA device is visible: this process must import exllamav2's own compiled module")
    if "exllamav2_ext" not in sys.modules:
        stand_in = types.ModuleType("exllamav2_ext")
        vars(stand_in).update({name: value for name, value in vars(extension).items() if callable(value)})
        sys.modules["exllamav2_ext"] = stand_in
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = importlib.import_module("exllamav2")
        importlib.import_module("exllamav2.generator")
    torch.set_num_threads(threads)  # the package's import sets one thread
    # pretend that flash attention is there: the oracle computes no attention
    importlib.import_module("exllamav2.attn").has_flash_attn_with_paged = True  # type: ignore[attr-defined]
    return package


def read_config(model: str, context: int, chunk: int) -> Any:
    """Return a demo model's configuration as the package reads it."""
    config = import_package().ExLlamaV2Config()
    config.model_dir = str(directory(model))
    config.prepare()
    config.max_seq_len, config.max_input_len, config.num_hidden_layers = context, chunk, 1
    return config


def read_tokenizer(config: Any) -> Any:
    return import_package().ExLlamaV2Tokenizer(config)


def oracle(model: str, logits: OracleLogits, *, context: int, chunk: int, cache_size: int) -> tuple[Any, Any]:
    """Build an oracle for a demo model. Return (model, cache)."""
    built = OracleModel(read_config(model, context, chunk), logits)
    return built, make_cache(import_package(), built, cache_size)


def logprob_of(raw: torch.Tensor, token: int, top: int) -> Any:
    """Return the DrawnToken of a token that was drawn from raw logits."""
    return importlib.import_module("model_worker.engines.exllamav2.job")._logprob(raw, token, top)
