"""What a model's directory says about itself, read before an engine spends minutes on it. No torch.

Every complaint is a LoadError of one line with the remedy.
"""

import json
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from model_worker.engine import LoadError

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_HEADER_LIMIT = 100 << 20  # the safetensors format's own limit


@dataclass(frozen=True)
class Tensor:
    """What a safetensors header says of a tensor; dtype as there: F16, BF16, F32, I32, ..."""

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    file: str

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


class ModelDir:
    """A checked model directory: config.json, tokenizer.json and complete safetensors files are there.

    Raises LoadError for what is missing, unreadable, or cut off.
    """

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise LoadError(f"model_dir {path} is no directory")
        self.config = self._json("config.json", required=True)
        self.generation_config = self._json("generation_config.json")
        self.tokenizer_config = self._json("tokenizer_config.json")
        self.quantize_config = self._json("quantize_config.json")
        if not self.tokenizer_path.is_file():
            raise LoadError(f"{path} has no tokenizer.json: convert the tokenizer to that format, no other is read")
        self.weights = sorted(self.path.glob("*.safetensors"))
        if not self.weights:
            pickles = sorted(p.name for pattern in _PICKLES for p in self.path.glob(pattern))
            if pickles:
                raise LoadError(
                    f"{path} holds pickled weights only ({pickles[0]}), which are never loaded: convert to safetensors"
                )
            raise LoadError(f"{path} has no weights: no *.safetensors file")
        self.tensors: dict[str, Tensor] = {}
        for file in self.weights:
            for name, tensor in read_header(file).items():
                if name in self.tensors:
                    raise LoadError(
                        f"{path}: {file.name} and {self.tensors[name].file} both hold {name}: they are not of one "
                        "model; remove the files that do not belong to it"
                    )
                self.tensors[name] = tensor
        self._check_index()

    @property
    def tokenizer_path(self) -> Path:
        return self.path / "tokenizer.json"

    @property
    def architecture(self) -> str:
        """The one architecture that config.json names. Raises LoadError if it names none or several."""
        names = self.config.get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise LoadError(f"{self.path}/config.json must name one architecture, it has architectures={names!r}")
        return names[0]

    @property
    def text_config(self) -> dict[str, Any]:
        """The part of config.json that describes the language model."""
        nested = self.config.get("text_config")
        return nested if isinstance(nested, dict) else self.config

    @cached_property
    def quantization(self) -> str | None:
        """ "exl2", "gptq", another quantization's name, or None for plain weights."""
        if any(name.endswith(".q_weight") for name in self.tensors):
            return "exl2"
        declared = self.config.get("quantization_config")
        method = declared.get("quant_method") if isinstance(declared, dict) else None
        if method:
            return str(method).lower()
        return "gptq" if any(name.endswith(".qweight") for name in self.tensors) else None

    @property
    def is_quantized(self) -> bool:
        return self.quantization is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weight files."""
        return sum(file.stat().st_size for file in self.weights)

    def eos_ids(self, token_id: Any) -> frozenset[int]:
        """Every id that ends an answer: of generation_config.json, config.json and the tokenizer's own end token.

        Chat models name their end of turn in one of the three and the end of text in another.
        token_id  callable from a token's text to its id or None
        """
        found: set[int] = set()
        for config in (self.generation_config, self.text_config, self.config):
            ids = config.get("eos_token_id")
            found.update(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))
        token = token_text(self.tokenizer_config.get("eos_token"))
        own = token_id(token) if token else None
        return frozenset(found if own is None else found | {own})

    def context(self, asked: int | None, *, stretched: bool = False) -> int:
        """Tokens of context: ``asked``, or what config.json says. Raises LoadError if the model has less than asked,
        unless its positions are ``stretched`` by an option."""
        keys = ("max_position_embeddings", "max_sequence_length", "model_max_length", "max_seq_len", "n_positions")
        own = next((v for k in keys if isinstance(v := self.text_config.get(k), int)), None)
        if asked is None:
            if own is None:
                raise LoadError(f"{self.path}/config.json does not say how long the context is: set max_seq_len")
            return own
        if asked < 2:
            raise LoadError(f"max_seq_len is {asked}: it must be at least 2")
        if own is not None and asked > max(own, self._scaled_context()) and not stretched:
            raise LoadError(f"max_seq_len is {asked}, but the model's own context is {own}: set at most that")
        return asked

    def _scaled_context(self) -> int:
        """Tokens that config.json's yarn scaling reaches; max_position_embeddings may be what it started from."""
        scaling = self.text_config.get("rope_scaling")
        if not isinstance(scaling, dict) or scaling.get("rope_type", scaling.get("type")) != "yarn":
            return 0
        factor, original = scaling.get("factor"), scaling.get("original_max_position_embeddings")
        if not isinstance(factor, (int, float)) or not isinstance(original, int):
            return 0
        return int(factor * original)

    def _check_index(self) -> None:
        """The index of a sharded model names its files: none may be missing, and no other may lie beside them."""
        weights = self._json("model.safetensors.index.json").get("weight_map")
        if not isinstance(weights, dict):
            return
        here, named = {file.name for file in self.weights}, {str(name) for name in weights.values()}
        # a quantizer may leave the index of the model that it was made from
        if not here & named:
            return
        if missing := sorted(named - here):
            raise LoadError(f"{self.path} lacks {missing[0]} (model.safetensors.index.json names it): download it")
        if stray := sorted(here - named):
            raise LoadError(f"{self.path}: {stray[0]} is not of this model (its index does not name it): remove it")

    def _json(self, name: str, *, required: bool = False) -> dict[str, Any]:
        file = self.path / name
        if not file.is_file():
            if required:
                raise LoadError(f"{self.path} has no {name}: it is no model's directory")
            return {}
        try:
            value = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as e:
            raise LoadError(f"{file} cannot be read: {e}") from None
        if not isinstance(value, dict):
            raise LoadError(f"{file} must hold a JSON object")
        return value


def token_text(token: Any) -> str | None:
    """The text of a token as tokenizer_config.json writes it: a string, or an object with its content."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def read_header(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file. An interrupted download is shorter than its header says: LoadError."""
    size = file.stat().st_size
    try:
        with file.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > min(size, _HEADER_LIMIT):
                raise ValueError("header is longer than the file")
            header = json.loads(f.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        tensors = {
            name: Tensor(
                str(entry["dtype"]),
                tuple(map(int, entry["shape"])),
                int(entry["data_offsets"][1]) - int(entry["data_offsets"][0]),
                file.name,
            )
            for name, entry in header.items()
        }
    except (OSError, ValueError, struct.error, KeyError, IndexError, TypeError, AttributeError) as e:
        raise LoadError(f"{file} is no readable safetensors file ({e}): download it again") from None
    if end > size:
        raise LoadError(f"{file} is cut off: {size} of {end} bytes are there; download it again")
    return tensors
