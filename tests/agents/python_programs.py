"""Python programs and packages of other people ask the gateway: streams, calls, second turns, cancelled answers.

``make test-agents`` runs this file. ``make test`` does not, because the programs are downloaded.
"""

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.agents.harness import Place, real_template
from tests.replaying_engine import CITY
from tests.serving import Serving, wait_until

REPLAYING = {"model_dir": ".", "engine": "tests.replaying_engine:ReplayingEngine"}
EDIT = "I write it.\n\nhello.txt\n```\nŁódź\n```\n"
HELLO = "Hello there."
TOOL = 'def get_weather(city: str, days: int) -> str:\n    "Tell the weather."\n    return "say plain"\n'
LLM_MODELS = "".join(
    f"- {{model_id: {name}, model_name: {name}, api_base: '%s/v1', supports_tools: true}}\n"
    for name in ("replaying", "slow")
)
TASK = """\
task: sums
dataset_path: json
dataset_kwargs: {data_files: {test: sums.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}]
"""


@pytest.fixture(scope="module")
def serving(port: int) -> Iterator[Serving]:
    models: dict[str, Any] = {
        "replaying": {**REPLAYING, "options": {"answers": {"edit": EDIT}, "template": real_template()}},
        "slow": {**REPLAYING, "options": {"step_s": 0.5, "answers": {"long": "And so I say it. " * 40}}},
        "letters": {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu"},
    }
    with Serving(models, gateway={"listen": port, "auth": "none"}, default_model="letters") as serving:
        yield serving


@pytest.mark.parametrize(
    "name", ["openai_sdk", "anthropic_sdk", "langchain_agent", "openai_agents", "pydantic_agent", "litellm_sdk"]
)
def test_a_package(place: Place, serving: Serving, name: str) -> None:
    """Each API of a package gives a stream, a call with the arguments of the model, and an answer after its result."""
    for found in place.program("sdk.txt", f"{name}.py"):
        assert found == {"streamed": HELLO, "called": CITY, "after": HELLO}
    serving.wait_idle("slow")  # its answer takes minutes, and was cancelled


def test_llm(place: Place, serving: Serving) -> None:
    (place.directory / "extra-openai-models.yaml").write_text(LLM_MODELS.replace("%s", place.root))
    home = {"LLM_USER_PATH": str(place.directory)}

    def llm(*arguments: str) -> str:
        return place.run("sdk.txt", ["llm", *arguments], **home).strip()

    assert llm("-m", "replaying", "say plain") == HELLO
    assert llm("-c", "say plain") == HELLO
    assert llm("-m", "replaying", "--functions", TOOL, "say weather").endswith(HELLO)
    interrupt(place, serving, "sdk.txt", ["llm", "-m", "slow", "say long"], **home)


def interrupt(place: Place, serving: Serving, lock: str, command: list[str], **more: str) -> None:
    """Start a program that asks the slow model, and interrupt it as Ctrl-C does when the answer has begun."""
    with place.start(lock, command, **more) as process:
        wait_until(lambda: serving.status("slow")["active"], what="the request")
        os.killpg(process.pid, signal.SIGINT)
        try:
            serving.wait_idle("slow")
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_aider(place: Place, serving: Serving) -> None:
    (place.directory / "hello.txt").write_text("empty\n")
    command = ["aider", "--no-git", "--yes-always", "--no-show-model-warnings", "--no-pretty", "--edit-format", "whole"]
    command += ["--no-show-release-notes", "--no-suggest-shell-commands", "--map-tokens", "0", "--no-detect-urls"]
    asked = [*command, "--model", "openai/replaying", "hello.txt", "--message"]
    place.run("aider.txt", [*asked, "say edit"], OPENAI_API_BASE=f"{place.root}/v1")
    assert (place.directory / "hello.txt").read_text() == "Łódź\n"
    out = place.run("aider.txt", [*asked, "say plain", "--restore-chat-history"], OPENAI_API_BASE=f"{place.root}/v1")
    assert HELLO in out
    slow = [*command, "--model", "openai/slow", "--message", "say long"]
    interrupt(place, serving, "aider.txt", slow, OPENAI_API_BASE=f"{place.root}/v1")


def test_lm_eval(place: Place) -> None:
    """The log-likelihoods of choices, with the gateway's own tokenizer."""
    (place.directory / "sums.yaml").write_text(TASK)
    lines = [
        {"question": f"sort: {' '.join(reversed(right))} ->", "choices": [" ".join(right), "z"], "label": 0}
        for right in ("abc", "bdf", "ceg")
    ]
    (place.directory / "sums.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = f"model=letters,base_url={place.root}/v1/completions,tokenizer_backend=remote,num_concurrent=1"
    command = ["lm_eval", "run", "--model", "local-completions", "--model_args", arguments, "--tasks", "sums"]
    out = place.run("lmeval.txt", [*command, "--include_path", ".", "--output_path", "out"])
    (result,) = place.directory.glob("out/**/results*.json")
    assert json.loads(result.read_text())["results"]["sums"]["acc,none"] == 1.0, out


def test_guidellm(place: Place) -> None:
    lines = [json.dumps({"prompt": "say plain"})] * 4
    (place.directory / "prompts.jsonl").write_text("\n".join(lines) + "\n")
    command = ["guidellm", "run", "--backend", f"kind=openai_http,target={place.root},model=replaying"]
    command += ["--profile", "kind=synchronous", "--constraint", "kind=max_requests,count=3", "--disable-console"]
    command += ["--data", "kind=json_file,path=prompts.jsonl", "--output", "kind=json,path=out.json"]
    place.run("guidellm.txt", command)
    text = (place.directory / "out.json").read_text()
    assert HELLO in text
