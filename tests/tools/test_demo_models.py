"""Both engines can read the files of the shipped demo models, and the models give the right answers by a margin."""

import json
import math
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.demo_models import NAMES, corpus, directory

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

from tools.demo_models import agent_cases, agent_prompts, build, check  # noqa: E402
from tools.demo_models.agent_chat import render_pieces  # noqa: E402
from tools.demo_models.agent_words import HELD_OUT  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

# The keys of config.json that exllamav2 0.3.2 reads for LlamaForCausalLM, found by reading config.py, prepare() and
# architecture.py, since the package cannot be imported without CUDA. The package accepts an int for a float, and a
# whole float for an int. Any other type raises TypeError.
EXLLAMAV2_NEEDS: dict[str, type] = {
    "architectures": list,  # exactly one, else AssertionError; an unknown one is loaded as Llama with a warning
    "num_hidden_layers": int,  # no default
    "hidden_size": int,  # no default
    "intermediate_size": int,  # no default for Llama
    "rms_norm_eps": float,  # the name of the norm's epsilon for Llama; no default
    "vocab_size": int,  # no default for Llama
    "num_attention_heads": int,  # default 0, and then derived
    "num_key_value_heads": int,  # default: as many as attention heads
    "head_dim": int,  # default: hidden_size / heads
    "max_position_embeddings": int,  # first found of five names, else 2048: the length of the RoPE table
    "rope_theta": float,  # default 10000, silently, and it never looks into rope_parameters
    "bos_token_id": int,  # default: guessed from tokenizer_config.json
    "eos_token_id": int,
    "pad_token_id": int,
    "initializer_range": float,  # default 0.02
    "tie_word_embeddings": bool,  # true would take model.embed_tokens for the head
    "attention_bias": bool,  # true would expect .bias tensors
    "mlp_bias": bool,
}

# Keys that would change exllamav2's behaviour, and must be absent.
EXLLAMAV2_STUMBLES_OVER = (
    "rope_parameters",  # not read: theta would be lost
    "rope_scaling",  # AssertionError where both `type` and `rope_type` are in it
    "max_sequence_length",  # these two are read before max_position_embeddings
    "model_max_length",
    "text_config",
    "vision_config",
    "quantization_config",
    "sliding_window",
    "partial_rotary_factor",
    "logit_scale",
    "logits_scaling",
    "residual_multiplier",
    "num_experts",
    "num_local_experts",
)

LAYER_TENSORS = (
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{name}_proj" for name in "qkvo"),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
)

TEXTS = (
    "sort: d b a c ->",
    " two  spaces\tand\n\n lines , like this . don 't",
    "Zoë, Nguyễn, さくら, 민준, Δάφνη 🐻‍❄️🐿️ e\u0301 \u200d\x00\x7f",
    "".join(chr(i) for i in range(1, 0x250)),
)


@pytest.fixture(scope="module", params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def config(name: str) -> dict[str, Any]:
    return read_json(name, "config.json")


@pytest.fixture(scope="module")
def tokenizer(name: str) -> Any:
    return transformers.AutoTokenizer.from_pretrained(directory(name))


@pytest.fixture(scope="module")
def model(name: str) -> Any:
    return check.load(directory(name))


def read_json(name: str, file: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((directory(name) / file).read_text(encoding="utf-8"))
    return content


def test_a_directory_is_small_and_holds_nothing_but_json_and_safetensors(name: str) -> None:
    files = {path.name: path.stat().st_size for path in directory(name).iterdir()}
    assert set(files) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(files.values()) <= 8 * 1024**2


def test_there_is_no_other_model() -> None:
    with pytest.raises(ValueError, match="no demo model"):
        directory("../letters")


def test_config_has_what_exllamav2_reads(config: dict[str, Any]) -> None:
    assert {key: type(config.get(key)) for key in EXLLAMAV2_NEEDS} == EXLLAMAV2_NEEDS
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["torch_dtype"] == "float16"
    assert not any(config[key] for key in ("tie_word_embeddings", "attention_bias", "mlp_bias"))
    assert not set(EXLLAMAV2_STUMBLES_OVER) & set(config)


def test_sizes_are_what_exllamav2_pads_and_views_without_error(config: dict[str, Any]) -> None:
    heads, kv_heads, head_dim = config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]
    widths = (config["hidden_size"], config["intermediate_size"], heads * head_dim, kv_heads * head_dim)
    assert [width % 32 for width in (*widths, config["vocab_size"])] == [0] * 5
    assert (head_dim % 32, heads % kv_heads) == (0, 0)
    assert config["max_position_embeddings"] % 256 == 0


def test_tensors_are_those_of_a_plain_llama_in_float16(name: str, config: dict[str, Any]) -> None:
    with open(directory(name) / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__")
    expected = {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"}
    for layer in range(config["num_hidden_layers"]):
        expected |= {f"model.layers.{layer}.{tensor}.weight" for tensor in LAYER_TENSORS}
    assert set(header) == expected
    assert {tensor["dtype"] for tensor in header.values()} == {"F16"}
    assert all(size % 32 == 0 for tensor in header.values() for size in tensor["shape"])
    parameters = sum(math.prod(tensor["shape"]) for tensor in header.values())
    assert 3_000_000 < parameters < 4_000_000


def test_transformers_reads_the_same_config(name: str, config: dict[str, Any]) -> None:
    read = transformers.AutoConfig.from_pretrained(directory(name))
    assert read.rope_parameters["rope_theta"] == config["rope_theta"] != 10000.0
    assert (read.head_dim, read.eos_token_id) == (config["head_dim"], config["eos_token_id"])
    assert transformers.GenerationConfig.from_pretrained(directory(name)).eos_token_id == config["eos_token_id"]


def test_special_tokens_agree_everywhere(name: str, config: dict[str, Any], tokenizer: Any) -> None:
    added = {token["content"]: token for token in read_json(name, "tokenizer.json")["added_tokens"]}
    settings = read_json(name, "tokenizer_config.json")
    for kind in ("bos", "eos", "pad"):
        token = added[settings[f"{kind}_token"]]
        assert token["special"]
        assert not any(token[key] for key in ("normalized", "lstrip", "rstrip"))
        assert token["id"] == config[f"{kind}_token_id"] == getattr(tokenizer, f"{kind}_token_id")
    assert len(tokenizer) == config["vocab_size"]
    assert settings["model_max_length"] == config["max_position_embeddings"]


def test_bos_is_added_where_tokenizer_config_says_so(name: str, config: dict[str, Any], tokenizer: Any) -> None:
    adds_bos = read_json(name, "tokenizer_config.json")["add_bos_token"]
    assert adds_bos == build.ADDS_BOS[name] == (name == "letters")
    plain = tokenizers.Tokenizer.from_file(str(directory(name) / "tokenizer.json"))
    bare = plain.encode("sort: a b ->", add_special_tokens=False).ids
    expected = [config["bos_token_id"], *bare] if adds_bos else bare
    assert plain.encode("sort: a b ->").ids == tokenizer("sort: a b ->")["input_ids"] == expected


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_survives_a_round_trip(name: str, tokenizer: Any, text: str) -> None:
    plain = tokenizers.Tokenizer.from_file(str(directory(name) / "tokenizer.json"))
    ids = plain.encode(text, add_special_tokens=False).ids
    assert plain.decode(ids) == tokenizer.decode(ids) == text
    # exllamav2 detects the handling of spaces and newlines in this way (tokenizer/hf.py).
    assert plain.id_to_token(plain.encode("\n", add_special_tokens=False).ids[-1]) == "Ċ"
    assert plain.id_to_token(plain.encode(" ", add_special_tokens=False).ids[-1]) == "Ġ"


@pytest.mark.parametrize("name", ["stories"], indirect=True)
def test_a_character_outside_ascii_is_several_tokens(tokenizer: Any) -> None:
    for text in ("ë", "さ", "🦊"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert len(ids) == len(text.encode())
        assert tokenizer.decode(ids[:-1]) != text


@pytest.mark.parametrize("name", ["stories"], indirect=True)
def test_the_chat_template_renders_conversations(tokenizer: Any) -> None:
    system = [{"role": "system", "content": " You are Luna, a storyteller.\n"}]
    for messages, _ in corpus.STORIES_TEST_CONVERSATIONS:
        for conversation in (messages, system + [m for m in messages if m["role"] != "system"]):
            rendered = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
            assert rendered == corpus.render_chat(conversation)
            ids = tokenizer.apply_chat_template(conversation, add_generation_prompt=True)["input_ids"]
            assert ids == tokenizer.encode(rendered)
            assert ids.count(tokenizer.bos_token_id) == 1
    closed = tokenizer.apply_chat_template(system, tokenize=False)
    assert closed == corpus.render_chat(system, add_generation_prompt=False)
    for bad in ([{"role": "tool", "content": "1"}], [{"role": "user", "content": "Hi"}, *system]):
        with pytest.raises(Exception, match=r"role|message"):
            tokenizer.apply_chat_template(bad, tokenize=False)


@pytest.mark.parametrize("name", ["agent"], indirect=True)
def test_the_markers_of_reasoning_and_calls_are_one_token_each_and_not_special(name: str, tokenizer: Any) -> None:
    """Most models that have these markers have them in this way, so that decoding shows them."""
    added = {token["content"]: token for token in read_json(name, "tokenizer.json")["added_tokens"]}
    for marker in build.MARKERS[name]:
        ids = tokenizer.encode(f"a{marker}b", add_special_tokens=False)
        assert tokenizer.convert_ids_to_tokens(ids) == ["a", marker, "b"]
        assert not any(added[marker][key] for key in ("special", "normalized", "lstrip", "rstrip"))


@pytest.mark.parametrize("name", ["agent"], indirect=True)
def test_a_word_has_the_same_tokens_wherever_it_stands(tokenizer: Any) -> None:
    """So the model copies it token by token: from a question or a schema to a call, and from a result to an answer."""
    for word in ("Paris", "get_weather", "12.5", "Zürich", "さくら"):
        ids = tokenizer.encode(word, add_special_tokens=False)
        for text in (f"What is the weather in {word}?", f'{{"name": "{word}"}}', f"a={word}, b", f"\n{word}\n"):
            found = tokenizer.encode(text, add_special_tokens=False)
            assert any(found[i : i + len(ids)] == ids for i in range(len(found))), text


@pytest.mark.parametrize("name", ["agent"], indirect=True)
def test_the_chat_template_renders_tools_calls_results_and_reasoning(tokenizer: Any) -> None:
    cases = [*corpus.AGENT_TEST_CASES, *corpus.different_cases(100, 4)]
    assert {"reasoning_content"} <= {key for case in cases for message in case.messages for key in message}
    for case in cases:
        rendered = tokenizer.apply_chat_template(
            case.messages,
            tools=case.tools or None,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=case.thinking,
        )
        assert rendered == corpus.render_agent(case.messages, case.tools, case.thinking)
    parsed = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": "ü"}}}]}
    later = [parsed, {"role": "tool", "content": "1"}, {"role": "system", "content": "Be brief."}]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}, *later], tokenize=False)
    assert '<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call><|im_end|>\n' in rendered
    assert rendered.endswith("</tool_response><|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n")
    with pytest.raises(Exception, match="unknown role function"):
        tokenizer.apply_chat_template([{"role": "function", "content": "Hi"}], tokenize=False)


def some_cases(name: str) -> list[tuple[str, str]]:
    """Return a few of every kind of test prompt. The training script checks all of them."""
    if name == "letters":
        longest = corpus.LETTERS_TEST_LONG_ANSWERS[0]
        return [*corpus.LETTERS_TEST_PROMPTS[:48], longest, *corpus.LETTERS_TEST_LONG_PROMPTS[6:10]]
    if name == "agent":
        return corpus.TEST_PROMPTS["agent"][::4]
    stories = corpus.TEST_PROMPTS["stories"]
    return stories[:24] + stories[-len(corpus.STORIES_TEST_CONVERSATIONS) :]


@pytest.mark.long
def test_answers_are_right_by_a_margin_of_one(name: str) -> None:
    report = check.measure_directory(name, directory(name), some_cases(name))
    assert report.exact == report.cases, report
    assert report.margin >= 1.0, report


def test_decoding_step_by_step_arrives_at_the_answer(name: str, model: Any, tokenizer: Any) -> None:
    for prompt, answer in some_cases(name)[:3]:
        ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
        said = model.generate(ids, do_sample=False, max_new_tokens=250)[0, ids.shape[1] :].tolist()
        assert said[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(said[:-1]) == answer


def test_history_is_what_makes_the_difference() -> None:
    (report, name_known), (untold, name_unknown) = corpus.STORIES_TEST_CONVERSATIONS[:2]
    assert report[-1] == untold[-1]
    assert len(report) == 3
    assert (name_known, name_unknown) == ("The fox's name was Mia.", "I have not told you that story yet.")


def test_the_training_text_of_agent_has_no_word_of_the_prompts_that_people_read() -> None:
    shown = " ".join(
        text for case in agent_prompts.READABLE_CASES for text, _ in render_pieces(case.messages, case.tools)
    )
    assert (
        {"weather", "paris", "multiply", "acme"} & HELD_OUT
        == {"weather", "paris", "multiply"}
        <= set(re.findall(r"[a-z]+", shown.lower()))
    )
    rng = random.Random(5)
    for _ in range(2000):
        pieces = agent_cases.training_example(rng, agent_cases.draw_case(rng))
        words = set(re.findall(r"[^\W_]+", "".join(text for text, _ in pieces).lower()))
        assert not words & HELD_OUT


def test_what_agent_answers_follows_from_the_tools_and_the_results() -> None:
    one = agent_prompts.conversation(("What is the weather in Paris and Rome?",)).answer
    assert one.reasoning == "The user wants the weather in Paris and Rome. The tool get_weather gives it."
    assert one.calls == (("get_weather", {"city": "Paris"}), ("get_weather", {"city": "Rome"}))
    again = agent_prompts.conversation(("What is the weather in Paris and Rome?", "sunny", "rain")).answer
    assert (again.content, again.calls) == ("The weather in Paris is sunny. The weather in Rome is rain.", ())
    typed = agent_prompts.conversation(("Call multiply with a=3, b=12. Call get_stock_price with symbol=12.",)).answer
    assert typed.calls == (("multiply", {"a": 3, "b": 12}), ("get_stock_price", {"symbol": "12"}))
    nothing = agent_prompts.conversation(("What is the weather in Paris?",), tools=[]).answer
    assert (nothing.content, nothing.calls) == ("I have no tool for the weather in Paris.", ())


def test_there_are_enough_prompts_and_no_two_share_an_answer() -> None:
    for pairs in (corpus.LETTERS_TEST_PROMPTS, corpus.STORIES_TEST_REQUESTS, corpus.letters_prompts(500, 3)):
        assert len(pairs) >= 64
        assert len({prompt for prompt, _ in pairs}) == len({answer for _, answer in pairs}) == len(pairs)
    assert all(len(answer) > 200 for _, answer in corpus.STORIES_TEST_REQUESTS + corpus.LETTERS_TEST_LONG_ANSWERS)
    shared = [prompt.splitlines()[0] for prompt, _ in corpus.letters_long_prompts(5, 1, shared=True)]
    assert len(set(shared)) == 1 < len({prompt.splitlines()[0] for prompt, _ in corpus.letters_long_prompts(5, 1)})


def test_right_answers_are_computed_from_the_prompt() -> None:
    assert corpus.letters_answer("sort: d b a c ->") == " a b c d"
    assert corpus.letters_answer("note: red\ncount: 7 8 9 ->") == " 10 11 12 13 14 15 16 17"
    assert corpus.letters_answer("count to 101: 97 98 99 ->") == " 100 101"
    assert corpus.story_answer("Tell me a story about Zoë the fox and a key.").count("Zoë") == 5
    with pytest.raises(ValueError, match="not a prompt"):
        corpus.letters_answer("sort: d b a c")
    assert corpus.letters_prompts(20, 7) == corpus.letters_prompts(20, 7) != corpus.letters_prompts(20, 8)


def test_the_corpus_imports_neither_torch_nor_transformers() -> None:
    code = "import sys, tools.demo_models.corpus; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True).stdout == "[]\n"
