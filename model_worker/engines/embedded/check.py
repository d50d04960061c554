"""Checks that engine transformers makes before it loads a model. No torch: the supervisor's commands use them, too."""

import ast
import importlib.metadata
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model_worker.engine import JOB_OPTIONS, LoadError
from model_worker.engines.model_dir import ModelDir, Options, check_counts, check_names_and_shapes
from model_worker.engines.opening import open_tokenizer
from model_worker.engines.vetting import Faults, read_json, refusal, understood
from protocol.process.worker_spec import EngineSpec, not_installed

if TYPE_CHECKING:
    from model_worker.engines.tokenizer import Tokenizer


# The architectures that the transformers library can load as a causal language model.
#
# The library's own table is in the module ``transformers.models.auto.modeling_auto``. Importing it takes torch and
# some seconds. The table is a literal, so it is read from the module's source instead.


_MODULE = "models/auto/modeling_auto.py"
_TABLE = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
NEEDED = frozenset({"position_ids", "attention_mask", "past_key_values"})
"""What the forward pass of a model must take, so that sequences of different lengths are computed together."""


def check_architecture(name: str) -> None:
    """Raise LoadError if the installed library has no causal language model of this name, or if the engine cannot step
    it.

    Without the library no architecture is known, and none is refused: ``engines.not_checked`` reports that.
    """
    if not_installed(("transformers",)):
        return
    known = causal_language_models()
    if name not in known:
        version = importlib.metadata.version("transformers")
        raise LoadError(f"architecture {name} is no causal language model known to transformers {version}")
    taken = _taken_by(name, known[name])
    if taken is not None and (missing := NEEDED - taken):
        raise cannot_step(name, missing)


def cannot_step(name: str, missing: Iterable[str]) -> LoadError:
    return LoadError(
        f"architecture {name} takes no {min(missing)}, so engine transformers cannot compute sequences of different "
        "lengths together: it is not supported"
    )


def causal_language_models() -> dict[str, frozenset[str]]:
    """Return the model types of the installed library by the names of their classes. Raises LoadError if they cannot be
    found."""
    return _classes(_TABLE)


def model_types(table: str) -> frozenset[str] | None:
    """Return the model types in a table of the installed library; None without the library. Raises LoadError."""
    return None if not_installed(("transformers",)) else frozenset[str]().union(*_classes(table).values())


def _classes(table: str) -> dict[str, frozenset[str]]:
    """Return the model types in a table by the names of their classes. Raises LoadError."""
    source = _package() / _MODULE
    try:
        for node in ast.parse(source.read_bytes()).body:
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [table]:
                assert isinstance(node.value, ast.Call)  # OrderedDict([(model type, name of the class), ...])
                types: dict[str, frozenset[str]] = {}
                for kind, name in dict(ast.literal_eval(node.value.args[0])).items():
                    types[name] = types.get(name, frozenset()) | {kind}
                return types
    except (OSError, SyntaxError, ValueError, TypeError, AssertionError, LookupError) as e:
        raise LoadError(
            f"{source} cannot be understood ({type(e).__name__}): install transformers 5", key="engine"
        ) from e
    raise LoadError(f"{source} has no {table}: install transformers 5", key="engine")


def _package() -> Path:
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        raise LoadError("the installed package transformers has no source: install transformers 5", key="engine")
    return Path(found.origin).parent


def _taken_by(name: str, types: Iterable[str]) -> frozenset[str] | None:
    """Return the parameters of a class's forward pass; None if its source is not where it is expected."""
    for kind in types:
        module = kind.replace("-", "_")
        try:
            tree = ast.parse((_package() / "models" / module / f"modeling_{module}.py").read_bytes())
        except (OSError, SyntaxError, ValueError):
            continue
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name == name:
                for method in node.body:
                    if isinstance(method, ast.FunctionDef) and method.name == "forward":
                        return frozenset(each.arg for each in (*method.args.args, *method.args.kwonlyargs))
    return None


DEFAULT_CHUNK_SIZE = 256
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FULL_ATTENTION = "full_attention"
_SLIDING = "sliding_attention"
_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")
OFFERED = JOB_OPTIONS.union(
    {
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "penalty_range",
        "typical_p",
        "temperature_last",
        "logit_bias",
        "banned_tokens",
        "allowed_tokens",
        "ignore_eos",
        "seed",
    }
)
"""Options of a request that the engine offers: the library has a processor for the option, or it needs none."""


@dataclass(frozen=True)
class EmbeddedOptions:
    """The engine's own keys of models.yaml. docs/configuration.md describes them."""

    chunk_size: int = DEFAULT_CHUNK_SIZE
    threads: int = 1
    chat_template: str | None = None


@dataclass(frozen=True)
class CheckedEmbeddedModel:
    """A model that passed every check.

    tokenizer  None if the packages that read it are not installed
    context    tokens of prompt and answer together
    """

    directory: ModelDir
    tokenizer: "Tokenizer | None"
    context: int


def read_options(spec: EngineSpec) -> EmbeddedOptions:
    """Return the options of a spec. Raises LoadError for an unknown key or a wrong value."""
    options = Options("transformers", spec.options, ("chunk_size", "threads", "chat_template"))
    unset = EmbeddedOptions()
    return EmbeddedOptions(
        options.integer("chunk_size", unset.chunk_size),
        options.integer("threads", unset.threads),
        options.text("chat_template"),
    )


def check(spec: EngineSpec) -> CheckedEmbeddedModel:
    """Read the model's directory and check all that can be known before a load. Raises LoadError with every fault."""
    with understood(spec.model_dir):
        directory = ModelDir(spec.model_dir, spec.model_roots)
    faults = Faults(spec.model_dir)
    if (options := faults.of(lambda: read_options(spec))) is not None:
        directory.chat_template = options.chat_template
    tokenizer = faults.of(lambda: open_tokenizer(directory))
    context = faults.of(lambda: directory.context(spec.max_seq_len))
    faults.of(lambda: check_architecture(directory.architecture))
    faults.of(lambda: check_no_kernels(directory.config, f"{directory.path}/config.json"))
    faults.of(lambda: _check_attention(directory, context))
    faults.of(lambda: _check_positions(directory))
    counts_fit = faults.passes(lambda: check_counts(directory))
    if faults.passes(lambda: check_plain_weights(directory, "transformers")) and counts_fit:
        faults.of(lambda: check_names_and_shapes(directory))
    faults.raise_found()
    assert context is not None
    return CheckedEmbeddedModel(directory, tokenizer, context)


def check_plain_weights(directory: ModelDir, engine: str) -> None:
    """Raise LoadError for weights that the library would not read unchanged from this directory's safetensors files.

    engine  name of the engine that uses the library
    """
    if directory.quantization:
        if directory.quantization not in ("exl2", "gptq"):
            raise LoadError(refusal(directory.path, directory.quantization))
        raise LoadError(
            f"{directory.path} is quantized ({directory.quantization}), engine {engine} loads none: use engine "
            "exllamav2"
        )
    if (directory.path / "adapter_config.json").exists():
        # The library would load the base model that the adapter names, wherever that model is.
        raise LoadError(f"{directory.path} holds an adapter (adapter_config.json), which engine {engine} does not load")
    names = [file.name for file in directory.weights]
    if names != [_WHOLE] and not (index := directory.path / _INDEX).is_file():
        raise LoadError(
            f"{directory.path} has its weights in {names[0]}: engine {engine} reads {_WHOLE}, or the files that "
            f"{_INDEX} names; rename the file, or use engine exllamav2"
        )
    if names != [_WHOLE] and "metadata" not in read_json(index, directory.bounds):
        raise LoadError(f'{index} has no key metadata, which transformers needs: write "metadata": {{}} into it')
    if "transformers_weights" in directory.config:
        raise LoadError(f"{directory.path}/config.json names its weights (transformers_weights): remove that key")


def _check_attention(directory: ModelDir, context: int | None) -> None:
    """Raise LoadError for layers that the slot cache cannot compute. ``context`` is None if it is unknown because of a
    fault."""
    config = directory.text_config
    if config.get("alibi") is True:
        raise LoadError(
            f"{directory.path}/config.json: alibi is true: its positions are a part of the attention's mask, which "
            "engine transformers makes itself: it is not supported"
        )
    kinds = set(config.get("layer_types") or ())
    window = None if config.get("use_sliding_window") is False else config.get("sliding_window")
    if any("local" in str(config.get(key)) for key in ("attention_types", "attention_layers")):  # GPT-Neo
        kinds, window = kinds | {_SLIDING}, config.get("window_size", 256)
    windowed = isinstance(window, int) and context is not None and window < context
    if windowed and (not kinds or _SLIDING in kinds):
        raise LoadError(
            f"{directory.path} attends over a sliding window of {window} tokens, which engine transformers does not "
            f"support: set max_seq_len to at most {window}",
            key="max_seq_len",
        )
    if odd := sorted(kinds - {_FULL_ATTENTION, _SLIDING}):
        raise LoadError(f"{directory.path} has layers of type {odd[0]}, which engine transformers does not support")


def _check_positions(directory: ModelDir) -> None:
    """Raise LoadError for rotary embeddings that differ among the sequences of a batch."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = directory.text_config.get(key)
        kind = rope.get("rope_type", rope.get("type")) if isinstance(rope, dict) else None
        if kind in _LENGTH_DEPENDENT_ROPE:
            raise LoadError(
                f"{directory.path} has {key} of type {kind}, whose positions depend on the length of a sequence: "
                "engine transformers batches sequences of different lengths and does not support it"
            )


def check_no_kernels(config: Mapping[str, Any], where: str) -> None:
    """Raise LoadError for keys that name code to run.

    The library takes OWNER/NAME for code of the Hugging Face hub that computes attention or experts, and runs it.
    """
    for key, value in config.items():
        values = value.values() if isinstance(value, Mapping) else [value]
        if key.endswith("_implementation") and any("/" in str(each) for each in values):
            raise LoadError(f"{where}: {key} is {value!r:.80}, which names code to run: remove that key")
        if isinstance(value, Mapping):
            check_no_kernels(value, where)
