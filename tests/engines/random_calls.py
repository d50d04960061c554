"""Random tools, and random answers that the worker's constraint of calls allows.

An answer is a walk over the masks of the constraint. The walk closes what is open with a probability, and always after
some tokens, so that each answer ends.
"""

import json
import random
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jsonschema
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from model_worker.engine import Job, Layout
from model_worker.engines.constraints import AnyConstraint, Constraints, Mask
from model_worker.engines.model_dir import ModelDir
from model_worker.engines.tokenizer import Tokenizer
from model_worker.intake import calls_text
from protocol.answer_formats.families import ALL_MARKERS, beginnings_of, markers_of, opening_of
from protocol.answer_formats.parser import AnswerParser
from protocol.answer_formats.source import CallArguments, CallEnd, CallStart, Tool
from protocol.chat import ChatMessage
from protocol.request import GenerateRequest, SamplingParams
from tools.demo_models import directory

PATIENCE_S = 120.0
FREE_TOKENS = 40
"""Tokens after which a walk always closes what is open."""
MOST_TOKENS = 3000
END = "</s>"
_CLOSERS = {
    "hermes": ("\n</tool_call>",),
    "qwen3_coder": ("\n</function>\n</tool_call>", "\n</parameter>"),
    "seed_oss": ("\n</function>\n</seed:tool_call>", "</parameter>"),
    "minimax_m2": ("\n</invoke>\n</minimax:tool_call>", "</parameter>"),
    "minimax_m3": ("]<]minimax[>[</invoke>\n]<]minimax[>[</tool_call>",),
    "minimax_m1": ("\n</tool_calls>",),
    "kimi_k2": ("<|tool_calls_section_end|>", "<|tool_call_end|>"),
    "functionary_v31": ("</function>",),
    "lfm2": (")", "]<|tool_call_end|>"),
    "glm45": ("</tool_call>", "\n</tool_call>", "</arg_value>"),
    "deepseek_v3": ("<｜tool▁calls▁end｜>", "\n```<｜tool▁call▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>"),
    "gemma3": (")", "\n```"),
    "function_gemma": ("<escape>", "<end_function_call>"),
    "gemma4": ('<|"|>', "<tool_call|>"),
}
"""What ends values and calls in each format. The others end JSON, and what an e-mail address lacks."""
_ALL_CLOSERS = ('"', "}", "]", "@a.bc")
_WORDS = ("city", "days", "unit", "path", "query", "limit", "tags", "options", "name", "id", "from_date", "größe")
_PATTERNS = (r"^[a-z]{2,8}$", r"^\d{3}-\d{4}$", r"^(GET|POST)$", r"[0-9]", r"^/[\w/]*$")
_FORMATS = ("date", "date-time", "time", "uuid", "ipv4", "email")


def write_vocabulary(at: Path, size: int = 3000) -> Tokenizer:
    """Make a model directory whose tokenizer has the markers of all formats as special tokens. Return the tokenizer.

    Its tokens are pieces of this repository's JSON and documentation. So some of them reach over quotes, brackets and
    the ends of lines.
    """
    shutil.copytree(directory("letters"), at)
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", END, *sorted(ALL_MARKERS)],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    root = Path(__file__).parents[2]
    files = [*root.glob("docs/*.md"), *root.glob("protocol/vectors/*.json"), *root.glob("protocol/answer_formats/*.py")]
    lines = [line for path in sorted(files) for line in path.read_text().splitlines(keepends=True)]
    tokenizer.train_from_iterator([line for line in lines if len(line) < 300], trainer)
    tokenizer.save(str(at / "tokenizer.json"))
    (at / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": END}))
    return Tokenizer(ModelDir(str(at)))


# --- random schemas


class Schemas:
    """Draws schemas of tools."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def tool(self, number: int) -> dict[str, Any]:
        """Return a tool in OpenAI's shape."""
        rng = self._rng
        parameters = self._object(2, root=True)
        tree = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/tree"}}}
        definitions = {"level": {"enum": ["low", "high"]}, "point": self._object(0), "tree": tree}
        if rng.random() < 0.3:
            parameters["properties"]["tree"] = {"allOf": [{"$ref": "#/$defs/tree"}], "title": "Tree"}
            parameters["$defs"] = definitions
            parameters["properties"]["level"] = {"$ref": "#/$defs/level"}
            parameters["properties"]["point"] = {"$ref": "#/$defs/point", "description": "a place"}
        function = {"name": f"{rng.choice(_WORDS[:8])}_{number}", "strict": rng.random() < 0.5}
        if rng.random() > 0.05:
            function["parameters"] = parameters
        return {"type": "function", "function": function}

    def _object(self, depth: int, *, root: bool = False) -> dict[str, Any]:
        rng = self._rng
        names = rng.sample(_WORDS, rng.randint(0 if root else 1, 4))
        made: dict[str, Any] = {"type": "object", "properties": {name: self._value(depth) for name in names}}
        if rng.random() < 0.8:
            made["required"] = [name for name in names if rng.random() < 0.6]
        if rng.random() < 0.5 or not root:
            made["additionalProperties"] = False
        return made

    def _value(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        kinds = [self._string, self._string, self._number, self._choice, self._union, self._boolean]
        if depth:
            kinds += [lambda: self._array(depth - 1), lambda: self._object(depth - 1), self._map]
        made = rng.choice(kinds)()
        return made | {"description": "what it is", "title": "X"} if rng.random() < 0.2 else made

    def _string(self) -> dict[str, Any]:
        rng = self._rng
        match rng.randrange(5):
            case 0:
                return {"type": "string", "pattern": rng.choice(_PATTERNS)}
            case 1:
                return {"type": "string", "format": rng.choice(_FORMATS)}
            case 2:
                least = rng.randint(0, 5)
                return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 20)}
            case _:
                return {"type": "string"}

    def _number(self) -> dict[str, Any]:
        rng = self._rng
        made: dict[str, Any] = {"type": rng.choice(("integer", "number"))}
        if rng.random() < 0.5:
            made["minimum"] = rng.randint(-10, 10)
            made["maximum"] = made["minimum"] + rng.randint(1, 1000)
        return made

    def _boolean(self) -> dict[str, Any]:
        return {"type": "boolean"}

    def _choice(self) -> dict[str, Any]:
        rng = self._rng
        values = rng.sample(["red", "", "a b", 'say "x"', "l1\nl2", "Łódź", "7", 1, 2.5, True, None, "null"], 3)
        return {"enum": values} if rng.random() < 0.7 else {"const": values[0]}

    def _union(self) -> dict[str, Any]:
        rng = self._rng
        if rng.random() < 0.5:
            return {"type": rng.sample(["string", "integer", "null", "boolean", "number"], 2)}
        return {"anyOf": [self._string(), rng.choice((self._number, self._boolean, self._choice))()]}

    def _map(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": self._value(0)}

    def _array(self, depth: int) -> dict[str, Any]:
        rng = self._rng
        made: dict[str, Any] = {"type": "array", "items": self._value(depth)}
        if rng.random() < 0.5:
            made["minItems"] = rng.randint(0, 2)
            made["maxItems"] = made["minItems"] + rng.randint(0, 3)
        return made


# --- random answers


class Walker:
    """Draws answers under the constraints of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.pieces is not None
        self.tokenizer = tokenizer
        self._vocab = tokenizer.vocab_size
        self._constraints = Constraints(tokenizer.pieces, self._vocab, tokenizer.eos_ids, tokenizer)
        marked = tokenizer.special_ids(ALL_MARKERS)
        self._texts = [
            marked[token].encode() if token in marked else tokenizer.token_bytes(token) for token in range(self._vocab)
        ]
        self._ids: dict[bytes, int] = {text: token for token, text in enumerate(self._texts)}
        self.seconds: list[float] = []
        """Seconds until each constraint that was asked for was compiled."""

    def close(self) -> None:
        self._constraints.close()

    def constraint(self, format: str, request: GenerateRequest) -> AnyConstraint:
        """Return the constraint of a request, as a worker makes it. Raises RequestError."""
        visible = frozenset(markers_of(format))
        layout = Layout(visible=visible, calls=beginnings_of(format), opening=opening_of(format))
        lazy = request.tool_choice == "auto"
        made = ("tools", calls_text(request, format))
        return self.made(Job(1, (1,), MOST_TOKENS, SamplingParams(), constraint=made, lazy=lazy, layout=layout))

    def made(self, job: Job) -> AnyConstraint:
        """Return the constraint of a job. Raises RequestError."""
        begun = time.monotonic()
        self._constraints.add(job)
        while not (ready := self._constraints.ready(0.1)):
            assert time.monotonic() < begun + PATIENCE_S, "no constraint, and no refusal"
        self.seconds.append(time.monotonic() - begun)
        return ready[0][1]()

    def answer(
        self, constraint: AnyConstraint, format: str, rng: random.Random, begin: str = ""
    ) -> tuple[list[str], bool]:
        """Return (the pieces of a random answer, whether it has ended). It begins with the text ``begin``."""
        stream = self.tokenizer.stream((), layout=Layout(visible=frozenset(markers_of(format))))
        closers = [closer.encode() for closer in (*_CLOSERS.get(format, ()), *_ALL_CLOSERS)]
        pieces: list[str] = []
        tail = b""
        given = self.tokenizer.encode_rendered(begin) if begin else []
        for number in range(MOST_TOKENS):
            if constraint.finished:
                break
            if given:
                token = given.pop(0)
                assert constraint.allowed[token]
            else:
                if constraint.accepting and (number > FREE_TOKENS or rng.random() < 0.3):
                    break
                allowed = constraint.allowed
                token = -1
                if rng.random() < (0.7 if number > FREE_TOKENS else 0.3):
                    token = self._closing(allowed, tail, closers, rng)
                if token < 0:
                    token = int(rng.choice(np.flatnonzero(allowed)))
                if token in self.tokenizer.eos_ids:
                    break
            constraint.push(token)
            tail = (tail + self._texts[token])[-64:]
            pieces.append(stream.push(token)[0])
        else:
            return pieces, False
        pieces.append(stream.finish())
        return pieces, True

    def _closing(self, allowed: Mask, tail: bytes, closers: Sequence[bytes], rng: random.Random) -> int:
        """Return an allowed token that goes on with what closes something; -1 if there is none."""
        fresh: list[int] = []
        begun: list[int] = []
        for closer in closers:
            at = next(size for size in range(len(closer) - 1, -1, -1) if tail.endswith(closer[:size]))
            for size in range(len(closer), at, -1):
                token = self._ids.get(closer[at:size])
                if token is not None and allowed[token]:
                    (begun if at else fresh).append(token)
                    break
        return rng.choice(begun or fresh) if begun or fresh else -1


def request_of(rng: random.Random, tool_choice: Literal["auto", "required"] = "required") -> GenerateRequest:
    """Return a request with random tools."""
    schemas = Schemas(rng)
    return GenerateRequest(
        messages=(ChatMessage(role="user", content="x"),),
        tools=tuple(schemas.tool(number) for number in range(rng.randint(1, 3))),
        tool_choice=tool_choice,
        parallel_tool_calls=rng.random() < 0.5,
    )


def calls_of(request: GenerateRequest, format: str, pieces: Sequence[str]) -> list[tuple[str, Any]]:
    """Return (name, arguments) of the calls of an answer. Raises an exception for what is no valid call, or text."""
    functions = {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in request.tools or ()}
    parser = AnswerParser(tool_format=format, tools=[Tool(*item) for item in functions.items()])
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    calls: list[tuple[str, Any]] = []
    text = ""
    for part in parts:
        if isinstance(part, CallStart):
            calls.append((part.name, ""))
            text = ""
        elif isinstance(part, CallArguments):
            text += part.json
        elif isinstance(part, CallEnd):
            arguments = json.loads(text)
            checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
            jsonschema.Draft202012Validator(functions[calls[-1][0]], format_checker=checker).validate(arguments)
            calls[-1] = (calls[-1][0], arguments)
        elif request.tool_choice == "required":
            raise ValueError(f"text beside the calls: {part}")
    assert request.parallel_tool_calls or len(calls) <= 1
    return calls
