"""Read and check a model's directory before an engine spends minutes on it.

Every fault is a LoadError of one line with the remedy. This module does not import torch.
"""

import difflib
import math
import os
import re
import struct
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from model_worker.engine import LoadError
from model_worker.engines.vetting import (
    READ,
    REMEDY,
    TEMPLATE_BYTES,
    Bounds,
    Faults,
    check_no_pointer,
    check_shard_names,
    declared_method,
    open_file,
    parse_json,
    read_bytes,
    read_json,
    vet,
)

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_NATIVE = "consolidated"
"""How the names of weights in Mistral's own format begin. They stand beside the same weights in the usual format."""
_HEADER_LIMIT = 100 << 20  # bytes; the safetensors format's own limit
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32,
    "U16": 16, "U8": 8, "BOOL": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "C64": 64, "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip
"""The number of bits of an element, by the name that the safetensors format gives to its type."""
_PLAIN = ("F16", "BF16", "F32", "F64")
_MOST_DIMENSIONS = 16
"""The most dimensions of a tensor. Weights have up to five (convolutions over video). The product is computed."""
LONGEST_CONTEXT = 1 << 31
"""Tokens of the longest context that config.json may state. Kernels count positions in 32 bits."""
MOST_TENSORS = 1 << 18
"""The most tensors of a safetensors file. The largest models have some 200,000 in all their files. Each one takes a
kilobyte of memory, and the process that checks directories has 2 GiB."""
MOST_IDS = 1 << 22
"""The most ids of a vocabulary. The largest have some 260,000. Tables are as long as the highest id."""


@dataclass(frozen=True)
class Tensor:
    """A tensor as a safetensors header describes it. ``dtype`` is the format's name: F16, BF16, F32, I32, ..."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class ModelDir:
    """A checked model directory: config.json, tokenizer.json and complete safetensors files are there.

    roots  directories into which its files may be links (``supervisor.model_roots``)

    Raises LoadError for files that are missing, unreadable, cut off, or do not belong there (``vetting``).
    """

    def __init__(self, path: str, roots: Iterable[str] = ()) -> None:
        self.path = Path(path)
        self.chat_template: str | None = None
        """The template that models.yaml names in place of the directory's: an absolute path, or a name in the list of
        tokenizer_config.json."""
        self.bounds = Bounds.of(self.path, roots)
        if not self.path.is_dir():
            raise LoadError(f"model_dir {path} is no directory")
        vet(self.path, self.bounds)
        faults = Faults(path)
        self.config = faults.of(lambda: self._json("config.json", required=True)) or {}
        self.generation_config = faults.of(lambda: self._json("generation_config.json")) or {}
        self.tokenizer_config = faults.of(lambda: self._json("tokenizer_config.json")) or {}
        self._special_tokens_map = faults.of(lambda: self._json("special_tokens_map.json")) or {}
        self.quantize_config = faults.of(lambda: self._json("quantize_config.json")) or {}
        faults.of(lambda: self._json("added_tokens.json"))  # ExLlamaV2's tokenizer reads this file
        faults.of(self._check_tokenizer)
        if "auto_map" in self.config:
            print(f"{self.path}/config.json names code of its own (auto_map), which is never run", file=sys.stderr)
        self.weights: list[Path] = []
        """The files that hold the model, sorted. The directory may hold others."""
        self.tensors: dict[str, Tensor] = {}
        faults.of(self._read_weights)
        faults.raise_found()

    def _check_tokenizer(self) -> None:
        """Raise LoadError without a tokenizer.json. The package that reads the whole file may not be installed here."""
        if not self.tokenizer_path.is_file():
            others = [name for name in ("tokenizer.model", "tekken.json", "vocab.json") if (self.path / name).exists()]
            only = f", only {others[0]}, which is not read" if others else ""
            raise LoadError(
                f"{self.path} has no tokenizer.json{only}: download the model's tokenizer.json, or convert the "
                "tokenizer with transformers (AutoTokenizer.from_pretrained, then save_pretrained)"
            )
        with open(open_file(self.tokenizer_path, self.bounds), "rb") as f:
            _check_is_there(self.tokenizer_path, f.read(64))

    def _read_weights(self) -> None:
        self.weights = weight_files(self.path, self.bounds)
        for file in self.weights:
            for name, tensor in read_header(file, self.bounds).items():
                if name in self.tensors:
                    raise LoadError(
                        f"{self.path}: {file.name} and {self.tensors[name].file} both hold {name}: they are not of "
                        "one model; remove the files that do not belong to it"
                    )
                self.tensors[name] = tensor

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    def read(self, name: str) -> bytes:
        """Return the content of a file that has a limit in ``READ``. Raises LoadError if it cannot be read."""
        try:
            return read_bytes(self.path / name, READ[name], self.bounds)
        except ValueError as e:
            raise LoadError(f"{self.path / name} cannot be read: {e}") from None

    @property
    def architecture(self) -> str:
        """Return the one architecture that config.json names. Raises LoadError if it names none or several."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise LoadError(f"{self.path}/config.json must name one architecture, it has architectures={names!r}")
        return names[0]

    @property
    def text_config(self) -> dict[str, Any]:
        """Return the part of config.json that describes the language model."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @cached_property
    def quantization(self) -> str | None:
        """Return "exl2", "gptq", the name of another quantization, or None for plain weights."""
        if any(name.endswith(".q_weight") for name in self.tensors):
            return "exl2"
        if any(name.endswith(".trellis") for name in self.tensors):
            return "exl3"
        method = declared_method(self.config)
        # The key stays behind where weights were written again in 16 bits.
        packed = any(name.endswith(".qweight") for name in self.tensors)
        plain = not packed and all(tensor.dtype in _PLAIN for tensor in self.tensors.values())
        if method and not (plain and isinstance(method, str)):
            return str(method).lower()
        return "gptq" if packed else None

    @property
    def is_quantized(self) -> bool:
        return self.quantization is not None

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of all weight files."""
        return sum(file.stat().st_size for file in self.weights)

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Return the texts of the special tokens by name: {"bos_token": "<s>", ...}.

        As in transformers, an entry of special_tokens_map.json replaces that of tokenizer_config.json, unless the
        latter file describes its tokens itself (added_tokens_decoder). Then it comes first.
        """
        files = [self.tokenizer_config, self._special_tokens_map]
        if "added_tokens_decoder" not in self.tokenizer_config:
            files.reverse()
        found: dict[str, str] = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            given = next((file[name] for file in files if name in file), None)
            if (text := token_text(given)) is not None:
                found[name] = text
        return found

    def eos_ids(self, token_id: Any) -> frozenset[int]:
        """Return every id that ends an answer: of generation_config.json, config.json and the tokenizer's own end
        token.

        Chat models name their end of turn in one of the three places and the end of text in another.

        token_id  callable from a token's text to its id or None
        """
        found: set[int] = set()
        for config in (self.generation_config, self.text_config, self.config):
            ids = config.get("eos_token_id")
            found.update(i for i in (ids if isinstance(ids, list) else [ids]) if type(i) is int and 0 <= i < MOST_IDS)
        token = self.special_tokens.get("eos_token")
        own = token_id(token) if token else None
        return frozenset(found if own is None else found | {own})

    def context(self, asked: int | None, *, stretched: bool = False) -> int:
        """Return the tokens of context: ``asked``, or what config.json says.

        Raises LoadError if the model has less than asked, unless its positions are ``stretched`` by an option.
        """
        keys = ("max_position_embeddings", "max_sequence_length", "model_max_length", "max_seq_len", "n_positions")
        stated = next((v for k in keys if type(v := self.text_config.get(k)) in (int, float)), None)
        if stated is not None and not 0 < stated <= LONGEST_CONTEXT:
            raise LoadError(f"{self.path}/config.json: the context is {stated}: it must be from 1 to {LONGEST_CONTEXT}")
        own = None if stated is None else int(stated)
        if asked is None:
            if own is None:
                raise LoadError(
                    f"{self.path}/config.json does not say how long the context is: set max_seq_len", key="max_seq_len"
                )
            return own
        if asked < 2:
            raise LoadError(f"max_seq_len is {asked}: it must be at least 2", key="max_seq_len")
        if own is not None and asked > max(own, self._scaled_context()) and not stretched:
            raise LoadError(
                f"max_seq_len is {asked}, but the model's own context is {own}: set at most that", key="max_seq_len"
            )
        return asked

    def _scaled_context(self) -> int:
        """Return the tokens that config.json's yarn scaling reaches. Its max_position_embeddings may be the length
        before scaling."""
        scaling = self.text_config.get("rope_scaling")
        if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) != "yarn":
            return 0
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
        if isinstance(factor, bool) or not isinstance(factor, (int, float)) or not isinstance(original, int):
            return 0
        if not 0 < factor * original < LONGEST_CONTEXT:
            return 0
        return int(factor * original)

    def _json(self, name: str, *, required: bool = False) -> dict[str, Any]:
        if required and not os.path.lexists(self.path / name):
            if os.path.lexists(self.path / "adapter_config.json"):
                raise LoadError(f"{self.path} holds an adapter, not a model: name it under lora of its model")
            if gguf := sorted(self.path.glob("*.gguf")):
                raise LoadError(
                    f"{self.path} holds GGUF weights ({gguf[0].name}), which no engine here loads: {REMEDY}"
                )
            raise LoadError(f"{self.path} has no {name}: it is no model's directory")
        return _json_of(self.path / name, self.bounds)


def _json_of(file: Path, bounds: Bounds | None) -> dict[str, Any]:
    """Return the object in a JSON file, {} if there is no such file. Raises LoadError."""
    return read_json(file, bounds) if os.path.lexists(file) else {}


def weight_files(directory: Path, bounds: Bounds | None = None) -> list[Path]:
    """Return the safetensors files that hold a directory's model, sorted.

    These are the files that the index names. Without an index, or beside the index of another model, all files count
    but those in Mistral's own format. Raises LoadError if there are none, if one is missing, or if it is not clear
    which files are the model.
    """
    here = {file.name: file for file in sorted(directory.glob("*.safetensors"))}
    listed = _json_of(directory / _INDEX, bounds).get("weight_map")
    named = set() if listed is None else check_shard_names(directory / _INDEX, listed)
    # A quantizer may leave the index of the model that it has quantized. That index names no file that is here.
    if named & set(here):
        if missing := sorted(named - set(here)):
            raise LoadError(f"{directory} lacks {missing[0]} ({_INDEX} names it): download it")
        if _WHOLE in here and _WHOLE not in named:
            raise LoadError(
                f"{directory} holds a model in {_WHOLE}, and another one in {len(named)} files that {_INDEX} names, "
                f"such as {min(named)}: remove one of them with its index"
            )
        return [file for name, file in here.items() if name in named]
    if weights := [file for name, file in here.items() if not name.startswith(_NATIVE)]:
        return weights
    if here:
        raise LoadError(
            f"{directory} holds weights in Mistral's own format only ({min(here)}), which no engine reads: download "
            "the model's other *.safetensors files, too"
        )
    pickles = sorted(p.name for pattern in _PICKLES for p in directory.glob(pattern))
    if pickles:
        raise LoadError(
            f"{directory} holds pickled weights only ({pickles[0]}), which are never loaded: convert to safetensors"
        )
    if gguf := sorted(directory.glob("*.gguf")):
        raise LoadError(f"{directory} holds GGUF weights ({gguf[0].name}), which no engine here loads: {REMEDY}")
    raise LoadError(f"{directory} has no weights: no *.safetensors file")


def token_text(token: Any) -> str | None:
    """Return the text of a token as tokenizer_config.json writes it: a string, or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def read_header(file: Path, bounds: Bounds | None = None) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file.

    bounds  where the file may be; None: in its directory

    Raises LoadError for an interrupted download, which is shorter than its header says, and for a header that
    contradicts itself or the file: the readers of the weights trust the header.
    """
    try:
        with open(open_file(file, bounds or Bounds.of(file.parent)), "rb") as f:
            size = os.fstat(f.fileno()).st_size
            _check_is_there(file, f.read(64))
            f.seek(0)
            (length,) = struct.unpack("<Q", f.read(8))
            if length > min(size - 8, _HEADER_LIMIT):
                raise ValueError("header is longer than the file")
            header = parse_json(f.read(length), _strict)
        _check_metadata(header.pop("__metadata__", None))
        if len(header) > MOST_TENSORS:
            raise ValueError(f"it has {len(header)} tensors, at most {MOST_TENSORS} are read")
        tensors: dict[str, Tensor] = {}
        places: list[tuple[int, int, str]] = []
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            tensors[name] = _tensor(entry, begin, end, file.name)
            places.append((begin, end, name))
    except (OSError, ValueError, struct.error, KeyError, IndexError, TypeError, AttributeError) as e:
        message = f"no {e}" if isinstance(e, KeyError) else str(e)[:200]
        if isinstance(e, UnicodeError):  # its text would show a byte of a file that may be none of the model
            message = "its header is no text"
        raise LoadError(f"{file} is no readable safetensors file ({message}): download it again") from None
    places.sort()
    reached = 0
    for begin, end, name in places:
        if begin != reached:
            raise LoadError(
                f"{file}: {name[:100]!r} begins at byte {begin} of the data, where {reached} would be next: tensors "
                "may not overlap or leave gaps; download it again"
            )
        reached = end
    if 8 + length + reached > size:
        raise LoadError(f"{file} is cut off: {size} of {8 + length + reached} bytes are there; download it again")
    if 8 + length + reached < size:
        raise LoadError(f"{file} has {size} bytes, and its tensors end after {8 + length + reached}: download it again")
    return tensors


def _check_is_there(file: Path, beginning: bytes) -> None:
    """Raise LoadError if a file is empty, or a pointer of Git LFS."""
    if not beginning:
        raise LoadError(f"{file} is empty: download it again")
    check_no_pointer(file, beginning)


def _strict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of a safetensors header. Raises ValueError for what Python reads and the library does not."""
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a name stands twice in one object of its header")
    for name, value in pairs:
        for text in (name, value):
            if isinstance(text, str) and not text.isascii():
                text.encode()  # raises UnicodeEncodeError for half of a surrogate pair
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError("a number of its header is infinite")
    return made


def _check_metadata(metadata: Any) -> None:
    """Raise ValueError for metadata with which the library does not open the file."""
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("__metadata__ must be an object of texts")


def _tensor(entry: dict[str, Any], begin: Any, end: Any, file: str) -> Tensor:
    """Return the entry of a tensor. Raises ValueError, KeyError or TypeError unless type, shape and place agree."""
    dtype, shape = entry["dtype"], entry["shape"]
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise ValueError(f"data_offsets are {begin!r:.40} and {end!r:.40}")
    if type(shape) is not list or len(shape) > _MOST_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
        raise ValueError(f"a shape is {shape!r:.80}")
    if type(dtype) is not str or dtype not in _BITS:
        raise ValueError(f"a dtype is {dtype!r:.40}")
    if math.prod(shape) * _BITS[dtype] != 8 * (end - begin):
        raise ValueError(f"{end - begin} bytes hold no {dtype} of shape {shape!r:.80}")
    return Tensor(dtype, tuple(shape), end - begin, file)


# Find the chat template in the files of a model's directory. transformers looks in the same places.
#
# models.yaml may name another file, or one of several templates that the directory has.


JINJA, JSON, CONFIG = "chat_template.jinja", "chat_template.json", "tokenizer_config.json"
TOOLS = "additional_chat_templates/tool_use.jinja"


@dataclass(frozen=True)
class TemplateFiles:
    """A chat template, as text.

    file         the file that holds it: its name in the directory, with the template's name if models.yaml chooses it,
                 or the path that models.yaml has
    tool_source  the template for conversations with tools, if there is another one for them
    """

    file: str
    source: str
    tool_source: str | None


def find_template(directory: ModelDir) -> TemplateFiles | None:
    """Return the chat template of chat_template.jinja, of chat_template.json, or of tokenizer_config.json: the first
    that exists. None if there is none. Raises LoadError for a file that cannot be read.

    The template that models.yaml names comes before all of these. It is for conversations with tools, too. Raises
    LoadError (key "chat_template") if there is no such template."""
    wanted = directory.chat_template
    if wanted is not None and wanted.startswith("/"):
        return TemplateFiles(wanted, _read(Path(wanted), directory.bounds.roots), None)
    if wanted is not None:
        return _named(directory, wanted)
    file, named = CONFIG, _by_name(directory.tokenizer_config.get("chat_template"))
    legacy = directory.path / JSON
    if legacy.is_file() and (found := _by_name(read_json(legacy, directory.bounds).get("chat_template"))):
        file, named = JSON, found
    for name, place in (("default", JINJA), ("tool_use", TOOLS)):
        if (path := directory.path / place).is_file():
            try:
                named[name] = directory.read(place).decode()
            except UnicodeDecodeError:
                raise LoadError(f"{path} cannot be read: it is no UTF-8 text") from None
            file = place if name == "default" else file
    source = named.get("default")
    return TemplateFiles(file, source, named.get("tool_use") or None) if source else None


def _read(file: Path, roots: tuple[Path, ...]) -> str:
    try:
        text = read_bytes(file, TEMPLATE_BYTES, Bounds.of(file.parent, map(str, roots))).decode()
        if not text.strip():
            raise ValueError("it is empty")
    except (LoadError, ValueError) as e:
        why = "it is no UTF-8 text" if isinstance(e, UnicodeDecodeError) else str(e)
        raise LoadError(f"{file} cannot be read: {why}", key="chat_template") from None
    return text


def _named(directory: ModelDir, wanted: str) -> TemplateFiles:
    named = _by_name(directory.tokenizer_config.get("chat_template"))
    if wanted not in named:
        there = f"there is {', '.join(sorted(named))[:200]}" if named else "it has none"
        message = f"{directory.path}/{CONFIG} has no chat template {wanted[:64]!r}: {there}; or name a file (*.jinja)"
        raise LoadError(message, key="chat_template")
    return TemplateFiles(f"{CONFIG}, {wanted}", named[wanted], None)


def _by_name(given: Any) -> dict[str, str]:
    """Return templates by name. A file holds one text, a list of {name, template}, or an object."""
    if isinstance(given, list):
        given = {str(t.get("name")): t.get("template") for t in given if isinstance(t, dict)}
    elif not isinstance(given, dict):
        given = {"default": given}
    return {name: text for name, text in given.items() if isinstance(text, str) and text}


# An engine's own keys from models.yaml, checked by name and type before anything heavy happens.


class Options:
    """Reads the options of an engine one by one. Raises LoadError for an unknown key, naming the nearest known one."""

    def __init__(self, engine: str, given: Mapping[str, Any], known: Iterable[str]) -> None:
        self._engine, self._given = engine, given
        for key in given:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}"
                raise LoadError(f"engine {engine} knows no option {key!r}: {hint}", key=key)

    def integer(self, key: str, default: int, *, minimum: int = 1, multiple_of: int = 1) -> int:
        """Return an integer option, or ``default`` unchanged if it is not given.

        Raises LoadError for another type, a value below ``minimum``, or a value that is no multiple of ``multiple_of``.
        """
        if key not in self._given:
            return default
        value = self._given[key]
        # In Python bool is an int, and YAML reads `threads: yes` as a bool.
        if isinstance(value, bool) or not isinstance(value, int):
            raise LoadError(f"option {key} of engine {self._engine} is {value!r}: it must be an integer", key=key)
        if value < minimum:
            message = f"option {key} of engine {self._engine} is {value}: it must be at least {minimum}"
            raise LoadError(message, key=key)
        if value % multiple_of:
            raise LoadError(
                f"option {key} of engine {self._engine} is {value}: it must be a multiple of {multiple_of}, "
                f"such as {-(-value // multiple_of) * multiple_of}",
                key=key,
            )
        return value

    def text(self, key: str) -> str | None:
        """Return an option that is a text, or None if it is not given. Raises LoadError for another type."""
        value = self._given.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise LoadError(f"option {key} of engine {self._engine} is {value!r}: it must be text", key=key)
        return value

    def choice(self, key: str, default: str, choices: Iterable[str]) -> str:
        """Return an option that is one of several words. Raises LoadError for any other value."""
        value = self._given.get(key, default)
        if value not in choices:
            raise LoadError(
                f"option {key} of engine {self._engine} is {value!r}: it must be one of {', '.join(choices)}", key=key
            )
        return str(value)


# The shape of a language model, from the keys of config.json that ExLlamaV2 0.3.2 looks for.


MOST_LAYERS = 1024
MOST_EXPERTS = 4096
MOST_WIDE = 1 << 22
"""The largest size of vectors, and the largest number of heads and of ids."""
_WIDTHS = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "d_model", "n_embd", "n_head", "n_heads", "moe_intermediate_size",
)  # fmt: skip
_LAYERS = "num_hidden_layers", "n_layers", "n_layer", "num_layers"
_EXPERTS = "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"


def check_counts(directory: ModelDir) -> None:
    """Raise LoadError for counts that no model has. Engines make something for each layer, expert and id."""
    where = f"{directory.path}/config.json"
    for config in (directory.config, directory.text_config, directory.config.get("ffn_config")):
        if not isinstance(config, Mapping):
            continue
        for keys, least, most in ((_LAYERS, 1, MOST_LAYERS), (_EXPERTS, 0, MOST_EXPERTS), (_WIDTHS, 1, MOST_WIDE)):
            for key in keys:
                count = config.get(key)
                if count is not None and (not isinstance(count, (int, float)) or not least <= count <= most):
                    raise LoadError(f"{where}: {key} is {count!r:.60}: must be a number from {least} to {most}")
        for key in ("rope_scaling", "rope_parameters"):
            rope = config.get(key)
            for name, value in rope.items() if isinstance(rope, Mapping) else ():
                if isinstance(value, float) and not math.isfinite(value):
                    raise LoadError(f"{where}: {key} has {name} {value}: must be a finite number")
                if name in ("type", "rope_type") and not isinstance(value, str):
                    raise LoadError(f"{where}: {key} has {name} {value!r:.60}: must be a string")


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, as counts of elements.

    intermediate   width of the MLP; of one expert's MLP if there are experts
    experts        0 for none
    rotary_dim     size of each head's table of positions; 0 without rotary embedding
    rotary_tables  2 if layers with and without a sliding window have different positions
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    experts: int = 0
    rotary_dim: int = 0
    rotary_tables: int = 1


def read_shape(directory: ModelDir) -> ModelShape:
    """Return the shape of the model in ``directory``. Raises LoadError if config.json does not state it."""
    config, name = directory.text_config, directory.architecture
    where = f"{directory.path}/config.json"

    def find(*keys: str, default: int | None = None) -> int:
        for source in (config, directory.config):
            for key in keys:
                value = _inside(source, key)
                if isinstance(value, float) and value.is_integer():
                    value = int(value)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        if default is None:
            raise LoadError(f"{where} does not say {keys[0]}")
        return default

    hidden = find("hidden_size", "d_model", "n_embd")
    gemma3 = name == "Gemma3ForConditionalGeneration"
    heads = find("num_attention_heads", "n_heads", "n_head", default=8 if gemma3 else 0)
    head_dim = find("head_dim", default=256 if gemma3 else (hidden // heads if heads else None))
    heads = heads or hidden // head_dim
    own = 4 if gemma3 else heads
    kv_heads = find("num_key_value_heads", "attn_config.kv_n_heads", default=own)
    if name == "GPTBigCodeForCausalLM":
        kv_heads = 1
    if kv_heads > heads or heads % kv_heads:
        raise LoadError(f"{where}: {heads} attention heads cannot share {kv_heads} heads of keys")
    inner = 4 * hidden if name in ("GPT2LMHeadModel", "GPTBigCodeForCausalLM") else None
    experts = 0
    intermediate = find("intermediate_size", "ffn_config.ffn_hidden_size", "n_inner", default=inner)
    if name in ("MixtralForCausalLM", "Qwen3MoeForCausalLM", "DbrxForCausalLM", "GemmoeForCausalLM"):
        experts = find("num_local_experts", "ffn_config.moe_num_experts", "num_experts")
        intermediate = find("moe_intermediate_size", default=intermediate)
    return ModelShape(
        layers=find("num_hidden_layers", "n_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=intermediate,
        vocab=find("vocab_size", default=262208 if gemma3 else None),
        experts=experts,
        rotary_dim=0 if name in ("GPT2LMHeadModel", "GPTBigCodeForCausalLM") else _rotary_dim(config, head_dim),
        rotary_tables=2 if gemma3 or name == "Cohere2ForCausalLM" else 1,
    )


def _rotary_dim(config: Mapping[str, Any], head_dim: int) -> int:
    part = config.get("partial_rotary_factor")
    return int(head_dim * part) if isinstance(part, (int, float)) and 0 < part <= 1 else head_dim


def _inside(config: Mapping[str, Any], key: str) -> Any:
    """Return the value of a dotted key."""
    value: Any = config
    for part in key.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# Check by names and shapes whether the weights are those of the model that config.json describes.
#
# Engines would notice only in the middle of a load, and the transformers library fills missing weights with random
# numbers.


_LAYER = re.compile(r"(.*?)\b(?:layers|h|blocks)\.(\d+)\.")
_EMBEDDING = "embed_tokens.weight"
_LLAMA_LIKE = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "GemmaForCausalLM"}
)
"""Architectures whose tensors have Llama's names and shapes."""


def check_names_and_shapes(directory: ModelDir) -> None:
    """Raise LoadError if names or shapes show that the weights are not those of the model in config.json."""
    check_layers(directory)
    check_shapes(directory)


def check_layers(directory: ModelDir) -> None:
    """Raise LoadError for weights without a layer that config.json describes.

    Tensors whose names do not contain the number of their layer are left to the engine.
    """
    count = next((c for k in ("num_hidden_layers", "n_layer", "n_layers") if (c := directory.text_config.get(k))), None)
    if not isinstance(count, int):
        return
    found: dict[str, set[int]] = defaultdict(set)  # a model may have further stacks of layers, for images
    for name in directory.tensors:
        if match := _LAYER.match(name):
            found[match[1]].add(int(match[2]))
    missing = min((sorted(set(range(count)) - numbers) for numbers in found.values()), key=len, default=[])
    if missing:
        raise LoadError(
            f"{directory.path}: config.json describes {count} layers, and the weights have none with number "
            f"{missing[0]}: they are not of one model, or a part of the weights is missing"
        )


def check_shapes(directory: ModelDir) -> None:
    """Raise LoadError for plain weights of another shape than config.json says, and for layers that lack a tensor.

    Only architectures with Llama's names are checked, and only sizes that config.json itself states.
    """
    if directory.architecture not in _LLAMA_LIKE or directory.is_quantized:
        return
    expected = _llama_shapes(directory)
    prefix = "model." if any(name.startswith("model.") for name in directory.tensors) else ""
    for name, shape in expected.items():
        tensor = directory.tensors.get(prefix + name)
        if tensor is None and name == _EMBEDDING and "lm_head.weight" in directory.tensors:
            continue  # tied weights: one of the two is enough
        if tensor is None:
            raise LoadError(f"{directory.path}: the weights lack {prefix}{name}: download them again")
        if shape is not None and tensor.shape != shape:
            raise LoadError(
                f"{directory.path}: {prefix}{name} has shape {list(tensor.shape)}, config.json describes "
                f"{list(shape)}: they are not of one model"
            )


def _llama_shapes(directory: ModelDir) -> dict[str, tuple[int, ...] | None]:
    """Return the shape of each required tensor by its name without the prefix; None where config.json lacks a size."""

    def size(key: str) -> int | None:
        value = directory.text_config.get(key)
        return value if type(value) is int else None

    def shape(*sizes: int | None) -> tuple[int, ...] | None:
        known = tuple(one for one in sizes if one is not None)
        return known if len(known) == len(sizes) else None

    def rows(heads: int | None) -> int | None:
        return heads * head_dim if heads is not None and head_dim is not None else None

    hidden, inner, vocab = size("hidden_size"), size("intermediate_size"), size("vocab_size")
    heads, kv_heads, head_dim = size("num_attention_heads"), size("num_key_value_heads"), size("head_dim")
    if head_dim is None and directory.architecture in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM"):
        head_dim = hidden // heads if hidden is not None and heads is not None else None
    layer = {
        "input_layernorm": shape(hidden),
        "post_attention_layernorm": shape(hidden),
        "self_attn.q_proj": shape(rows(heads), hidden),
        "self_attn.k_proj": shape(rows(kv_heads), hidden),
        "self_attn.v_proj": shape(rows(kv_heads), hidden),
        "self_attn.o_proj": shape(hidden, rows(heads)),
        "mlp.gate_proj": shape(inner, hidden),
        "mlp.up_proj": shape(inner, hidden),
        "mlp.down_proj": shape(hidden, inner),
    }
    layers = size("num_hidden_layers") or 0
    return {
        _EMBEDDING: shape(vocab, hidden),
        "norm.weight": shape(hidden),
        **{f"layers.{number}.{name}.weight": wanted for number in range(layers) for name, wanted in layer.items()},
    }


# The bytes of weights that each part of a model takes, for the progress of a load. Pure.


_KNOWN_SHARE = 0.9
"""The share of the weights that the parts must take together. Below it their names are not those of the files."""


def bytes_of_modules(tensors: Mapping[str, Tensor], keys: Sequence[str]) -> list[int] | None:
    """Return the bytes of each module's tensors; None if the names of most tensors begin with no module's key.

    keys  names of the modules, such as "model.layers.0". Modules with the same name (the attention and the MLP of a
          layer) share its tensors evenly
    """
    sizes = dict.fromkeys(keys, 0)
    for name, tensor in tensors.items():
        place = name
        while place and place not in sizes:
            place = place.rpartition(".")[0]
        if place:
            sizes[place] += tensor.bytes
    whole = sum(tensor.bytes for tensor in tensors.values())
    if not sum(sizes.values()) >= _KNOWN_SHARE * whole > 0:
        return None
    modules = Counter(keys)
    return [sizes[key] // modules[key] for key in keys]


def bytes_of_parameters(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[int]:
    """Return the bytes of each parameter. Parameters that are joined from several tensors, and so have names that no
    file has, share evenly what is left."""
    whole = sum(tensor.bytes for tensor in tensors.values())
    known = [tensors[name].bytes if name in tensors else None for name in names]
    others = known.count(None)
    rest = max(0, whole - sum(size or 0 for size in known)) // others if others else 0
    return [rest if size is None else size for size in known]
