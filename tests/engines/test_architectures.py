"""The transformers engine gives the same answers as the library's own ``generate`` on other architectures."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model_worker.engines import build_engine
from protocol.process.worker_spec import EngineSpec
from protocol.request import SamplingParams
from tests.engines.driver import GREEDY, Driver
from tests.engines.random_model import ARCHITECTURES, write_model

PROMPTS = ["the quick", "brown fox jumps over the lazy dog " * 4, "x", "dog the the the lazy"]


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_answers_are_those_of_generate(tmp_path: Path, architecture: str) -> None:
    write_model(tmp_path, architecture)
    engine = build_engine(EngineSpec("m", "transformers", str(tmp_path), max_batch_size=3, options={"chunk_size": 16}))
    engine.load(lambda *_: None)
    reference: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    driver = Driver(engine)
    for penalty in (1.0, 1.3):
        outcomes = []
        for prompt in PROMPTS:
            outcomes.append(driver.submit(prompt, 24, SamplingParams(temperature=0, repetition_penalty=penalty)))
            driver.step()
        driver.run()
        for outcome in outcomes:
            ids = torch.tensor([outcome.job.prompt_ids])
            expected = reference.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=24,
                do_sample=False,
                repetition_penalty=penalty,
                pad_token_id=0,
            )
            assert outcome.ids == expected[0, ids.shape[1] :].tolist()
    driver.assert_idle()


def test_ids_without_text_are_never_drawn(tmp_path: Path) -> None:
    """Models are padded to a round number of rows. A model with random weights would choose the padding rows, too."""
    write_model(tmp_path, vocab_size=1024)
    engine = build_engine(EngineSpec("m", "transformers", str(tmp_path)))
    engine.load(lambda *_: None)
    driver = Driver(engine)
    driver.submit([1000, 1023], 40, GREEDY)  # a prompt may contain these ids
    driver.submit([5], 40, SamplingParams(temperature=10.0, seed=1))
    driver.run()
    assert all(max(outcome.ids) < 320 for outcome in driver.outcomes.values())


def test_one_place_and_a_short_context(tmp_path: Path) -> None:
    write_model(tmp_path)
    for context in (2, 3, 9):
        spec = EngineSpec("m", "transformers", str(tmp_path), max_seq_len=context, max_batch_size=1)
        engine = build_engine(spec)
        engine.load(lambda *_: None)
        driver = Driver(engine)
        outcome = driver.submit([5], context - 1, GREEDY)
        driver.run()
        assert outcome.finished is not None
