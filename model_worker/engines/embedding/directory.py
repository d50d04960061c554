"""What a directory says about its vectors or scores: pooling, layers behind it, prompts, lengths. No torch.

The files are those of sentence-transformers: modules.json, 1_Pooling/config.json, sentence_bert_config.json and
config_sentence_transformers.json, in the forms of all its versions. What no file says is not guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from model_worker.engine import LoadError
from model_worker.engines.embedded.check import check_no_kernels, check_plain_weights, model_types
from model_worker.engines.model_dir import ModelDir, Options, check_counts, check_layers, read_header
from model_worker.engines.opening import open_tokenizer
from model_worker.engines.vetting import JSON_BYTES, Faults, parse_json, read_bytes, read_json, understood
from protocol.process.worker_spec import EngineSpec

if TYPE_CHECKING:
    from model_worker.engines.tokenizer import Tokenizer

Task = Literal["embed", "rerank"]
TASKS: Final = ("embed", "rerank")
POOLINGS: Final = ("cls", "mean", "max", "mean_sqrt_len", "weightedmean", "lasttoken")
_OLD_POOLINGS: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Keys of 1_Pooling/config.json before version 6, in the order in which several vectors are joined."""
ACTIVATIONS: Final = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
"""Names of torch.nn that may stand behind a Dense layer, or behind a score."""
_POSITIONS_BEHIND_PADDING: Final = ("roberta", "camembert", "xlm-roberta", "xlm-roberta-xl", "mpnet", "longformer")
"""Families that count positions from one behind the id of padding, so that they have fewer than their table."""
_NO_LIMIT: Final = 1 << 30
"""A model_max_length from here on means that the tokenizer has no limit."""
GPU_BATCH_TOKENS: Final = 16384
CPU_BATCH_TOKENS: Final = 2048
"""A batch as large as on a GPU would take a large model minutes on a CPU, and others would wait as long."""
WEIGHTS: Final = "model.safetensors"


@dataclass(frozen=True)
class Dense:
    """A layer behind the pooling, with its weights in a file of its own."""

    file: Path
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class Recipe:
    """How a model is used.

    task        what it computes
    form        "pooled": vectors from the last layer. "classifier": scores of a sequence classifier with one label.
                "yes_no": scores of a language model that answers yes or no, as Qwen3-Reranker does
    pooling     how the vectors of a text's tokens become one. Several are joined
    keeps_prompt  whether the tokens of a prompt are part of the mean
    layers      what follows the pooling, in order: a Dense layer, or "normalize"
    size        numbers in a vector; 1 for scores
    prompts     texts that stand before a text, by name
    prompt      name of the one that stands there unless a request names another
    lowers      whether texts are written in lower case first
    most_tokens  tokens of the longest text, or of a query and a document together
    activation  what is computed from the number of a classifier: a name of ACTIVATIONS
    """

    task: Task
    form: Literal["pooled", "classifier", "yes_no"]
    most_tokens: int
    size: int = 1
    pooling: tuple[str, ...] = ()
    keeps_prompt: bool = True
    layers: tuple[Dense | Literal["normalize"], ...] = ()
    prompts: Mapping[str, str] | None = None
    prompt: str | None = None
    lowers: bool = False
    activation: str = "Sigmoid"


@dataclass(frozen=True)
class EmbeddingOptions:
    """The engine's own keys of models.yaml. docs/configuration.md describes them."""

    task: Task | None = None
    pooling: str | None = None
    batch_tokens: int | None = None
    threads: int = 1


@dataclass(frozen=True)
class CheckedEmbeddingModel:
    """A model that passed every check.

    tokenizer  None if the packages that read it are not installed
    """

    directory: ModelDir
    tokenizer: "Tokenizer | None"
    options: EmbeddingOptions
    recipe: Recipe


def read_options(spec: EngineSpec) -> EmbeddingOptions:
    """Return the options of a spec. Raises LoadError for an unknown key or a wrong value."""
    options = Options("embedding", spec.options, ("task", "pooling", "batch_tokens", "threads"))
    task = options.choice("task", "", ("", *TASKS))
    pooling = options.choice("pooling", "", ("", *POOLINGS))
    return EmbeddingOptions(
        next((name for name in TASKS if name == task), None),
        pooling or None,
        options.integer("batch_tokens", 0) or None,
        options.integer("threads", 1),
    )


def check(spec: EngineSpec) -> CheckedEmbeddingModel:
    """Read the model's directory and check all that can be known before a load. Raises LoadError with every fault."""
    with understood(spec.model_dir):
        directory = ModelDir(spec.model_dir, spec.model_roots)
    faults = Faults(spec.model_dir)
    options = faults.of(lambda: read_options(spec))
    tokenizer = faults.of(lambda: open_tokenizer(directory))
    faults.of(lambda: check_no_kernels(directory.config, f"{directory.path}/config.json"))
    counts_fit = faults.passes(lambda: check_counts(directory))
    if faults.passes(lambda: check_plain_weights(directory, "embedding")) and counts_fit:
        faults.of(lambda: check_layers(directory))
    recipe = None
    if options is not None:
        recipe = faults.of(lambda: read_recipe(directory, options, spec.max_seq_len))
    if recipe is not None:
        faults.of(lambda: _check_known(directory, recipe))
    faults.raise_found()
    assert options is not None
    assert recipe is not None
    return CheckedEmbeddingModel(directory, tokenizer, options, recipe)


def needs(checked: CheckedEmbeddingModel) -> dict[str, int]:
    """Return the estimate of the GPU memory in bytes, by part."""
    directory, most = checked.directory, checked.options.batch_tokens or GPU_BATCH_TOKENS
    longest = checked.recipe.most_tokens
    tokens = max(most, longest)
    config, width = directory.text_config, _width(directory)
    inner = next((v for k in ("intermediate_size", "hidden_dim", "d_ff") if type(v := config.get(k)) is int), 4 * width)
    weights = sum(tensor.elements for tensor in directory.tensors.values()) * 2
    # The activations of one layer in 16 bits, the last layer in 32, and a mask for each pair of tokens of a text.
    workspace = tokens * (8 * width + 3 * inner) * 2 + 3 * tokens * width * 4 + 4 * tokens * min(longest, tokens)
    return {"weights": weights, "cache": 0, "draft": 0, "workspace": workspace, "per_gpu": workspace}


def read_recipe(directory: ModelDir, options: EmbeddingOptions, asked: int | None) -> Recipe:
    """Return how the model of a directory is used. Raises LoadError.

    asked  ``max_seq_len`` of models.yaml
    """
    modules, lowers, limit = _modules(directory), False, None
    settings = _json(directory, "sentence_bert_config.json")
    if settings:
        where = directory.path / "sentence_bert_config.json"
        lowers = _typed(where, settings, "do_lower_case", bool, False)
        limit = _typed(where, settings, "max_seq_length", int, None)
        if limit is not None and limit < 2:
            raise LoadError(f"{where}: max_seq_length is {limit}: must be at least 2, or null")
    most = _most_tokens(directory, limit, asked)
    names = [name for name, _ in modules]
    says: Task | None = "rerank" if _is_classifier(directory) or "LogitScore" in names else None
    if "Pooling" in names or options.pooling is not None:
        says = says or "embed"
    task = options.task or says
    if says is not None and options.task not in (None, says):
        raise LoadError(f"task is {options.task}, and {directory.path} is a model for {says}: remove it", key="task")
    if task == "rerank":
        if options.pooling is not None:
            raise LoadError(f"pooling is {options.pooling}, and scores need none: remove it", key="pooling")
        return _of_reranker(directory, most, lowers)
    if says is None:
        raise LoadError(
            f"{directory.path} does not say how the vectors of a text's tokens become one (no modules.json with a "
            f"Pooling): set pooling to one of {', '.join(POOLINGS)}, as the model's card says; or task: rerank",
            key="pooling",
        )
    _check_no_code(directory)
    return _of_embedder(directory, modules, options, most, lowers)


def _of_reranker(directory: ModelDir, most: int, lowers: bool) -> Recipe:
    where = directory.path / "config.json"
    if not _is_classifier(directory):
        if not directory.architecture.endswith("ForCausalLM"):
            raise LoadError(
                f"{where}: {directory.architecture} gives no scores: rerank needs a model for sequence classification "
                "with one label, or a language model such as Qwen3-Reranker"
            )
        return Recipe("rerank", "yes_no", most, lowers=lowers)
    labels = directory.config.get("id2label")
    count = len(labels) if isinstance(labels, dict) else directory.config.get("num_labels", 2)
    if count != 1:
        raise LoadError(f"{where}: the model has {count!r:.40} labels: rerank needs a model with one (id2label)")
    own = directory.config.get("sentence_transformers")
    name = own.get("activation_fn") if isinstance(own, dict) else None
    name = name or directory.config.get("sbert_ce_default_activation_function")
    return Recipe(
        "rerank", "classifier", most, lowers=lowers, activation=_activation(where, "activation_fn", name, "Sigmoid")
    )


def _of_embedder(
    directory: ModelDir, modules: list[tuple[str, str]], options: EmbeddingOptions, most: int, lowers: bool
) -> Recipe:
    width = _width(directory)
    pooling: tuple[str, ...] = ()
    keeps, size = True, width
    layers: list[Dense | Literal["normalize"]] = []
    for name, part in modules[1:]:
        if name == "Pooling" and not pooling:
            pooling, keeps = _read_pooling(directory, part, width)
            size = width * len(pooling)
        elif name == "Dense" and pooling:
            layers.append(dense := _read_dense(directory, part, size))
            size = dense.outputs
        elif name == "Normalize" and pooling:
            layers.append("normalize")
        else:
            raise LoadError(
                f"{directory.path}/modules.json: type {name!r:.80} at this place is not supported: known are "
                "Transformer, then Pooling, then Dense and Normalize"
            )
    if options.pooling is not None:
        if not pooling:
            layers.append("normalize")
        elif any(isinstance(layer, Dense) for layer in layers) and len(pooling) > 1:
            raise LoadError(
                f"pooling is {options.pooling}, and {directory.path} joins several: remove it", key="pooling"
            )
        pooling = (options.pooling,)
        size = next((layer.outputs for layer in reversed(layers) if isinstance(layer, Dense)), width)
    prompts, prompt = _read_prompts(directory)
    return Recipe("embed", "pooled", most, size, pooling, keeps, tuple(layers), prompts, prompt, lowers)


def _modules(directory: ModelDir) -> list[tuple[str, str]]:
    """Return (class, directory) of each module of modules.json; [] without such a file. Raises LoadError."""
    where = directory.path / "modules.json"
    if not where.exists():
        return []
    try:
        # The reader of JSON takes objects only, and this file has a list.
        listed = parse_json(b'{"modules":' + read_bytes(where, JSON_BYTES, directory.bounds) + b"}")["modules"]
    except ValueError as e:
        reason = "it is no UTF-8 text" if isinstance(e, UnicodeDecodeError) else str(e)
        raise LoadError(f"{where} cannot be read: {reason}: download it again") from None
    if not isinstance(listed, list) or not listed:
        raise LoadError(f"{where} must have a list of modules, not {listed!r:.60}: download it again")
    modules = []
    for number, entry in enumerate(listed):
        kind = entry.get("type") if isinstance(entry, dict) else None
        part = entry.get("path", "") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or not isinstance(part, str):
            raise LoadError(f"{where}: module {number} is {entry!r:.80}: it must have the texts type and path")
        if part in (".", "..") or "/" in part.rstrip("/") or "\0" in part:
            raise LoadError(f"{where}: path is {part!r:.80} for module {number}: must be a directory beside this file")
        modules.append((kind.rpartition(".")[2], part.rstrip("/")))
    if modules[0][0] != "Transformer":
        raise LoadError(f"{where}: the first module is {modules[0][0]!r:.80}: only Transformer is supported there")
    if modules[0][1]:
        raise LoadError(
            f"{where}: path is {modules[0][1]!r:.80} for the Transformer: move the files of that directory to "
            f"{directory.path}, and make path empty"
        )
    return modules


def _read_pooling(directory: ModelDir, part: str, width: int) -> tuple[tuple[str, ...], bool]:
    where = directory.path / part / "config.json"
    config = read_json(where, directory.bounds)
    if "pooling_mode" in config:
        named = config["pooling_mode"]
        names = [named] if isinstance(named, str) else named
        if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
            raise LoadError(f"{where}: pooling_mode is {named!r:.80}: must be one of {', '.join(POOLINGS)}, or a list")
        found = ["mean_sqrt_len" if name == "mean_sqrt_len_tokens" else name for name in names]
    else:
        found = [name for key, name in _OLD_POOLINGS.items() if _typed(where, config, key, bool, False)]
        if not found:
            raise LoadError(f"{where} names no pooling (all pooling_mode_… are false): set pooling in models.yaml")
    if unknown := [name for name in found if name not in POOLINGS]:
        raise LoadError(f"{where}: pooling_mode {unknown[0]!r:.80} is not known: known are {', '.join(POOLINGS)}")
    key = "embedding_dimension" if "embedding_dimension" in config else "word_embedding_dimension"
    stated = _typed(where, config, key, int, width)
    if stated != width:
        raise LoadError(
            f"{where}: {key} is {stated}, and config.json describes vectors of {width}: they are not of one model; "
            "download both again"
        )
    return tuple(found), _typed(where, config, "include_prompt", bool, True)


def _read_dense(directory: ModelDir, part: str, size: int) -> Dense:
    where = directory.path / part / "config.json"
    config = read_json(where, directory.bounds)
    inputs, outputs = (_typed(where, config, key, int, 0) for key in ("in_features", "out_features"))
    if inputs != size or outputs < 1:
        raise LoadError(
            f"{where}: in_features is {inputs} and out_features {outputs}, and the layer gets vectors of {size}: "
            "they are not of one model; download both again"
        )
    for key, usual in (("use_residual", (None, False)), ("module_input_name", (None, "sentence_embedding"))):
        if config.get(key) not in usual:
            raise LoadError(f"{where}: {key} is {config[key]!r:.60}, which is not supported")
    bias = _typed(where, config, "bias", bool, True)
    file = directory.path / part / WEIGHTS
    if not file.exists():
        raise LoadError(f"{file} is missing: pickled weights (*.bin) are never loaded; convert to safetensors")
    tensors = read_header(file, directory.bounds)
    wanted = {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if bias else {})
    for name, shape in wanted.items():
        if name not in tensors or tensors[name].shape != shape:
            has = list(tensors[name].shape) if name in tensors else "missing"
            raise LoadError(f"{file}: {name} is {has}, config.json beside it describes {list(shape)}: download both")
    activation = _activation(where, "activation_function", config.get("activation_function"), "Tanh")
    return Dense(file, inputs, outputs, bias, activation)


def _read_prompts(directory: ModelDir) -> tuple[dict[str, str], str | None]:
    where = directory.path / "config_sentence_transformers.json"
    config = _json(directory, where.name)
    prompts = _typed(where, config, "prompts", dict, None) or {}
    for name, text in prompts.items():
        if not isinstance(text, str):
            raise LoadError(f"{where}: prompts has {name!r:.60}: {text!r:.60}: must be a text")
    default = _typed(where, config, "default_prompt_name", str, None)
    if default is not None and default not in prompts:
        raise LoadError(f"{where}: default_prompt_name is {default!r:.60}, which is none of prompts: remove it")
    return {name: text for name, text in prompts.items() if text}, default if default and prompts[default] else None


def _most_tokens(directory: ModelDir, limit: int | None, asked: int | None) -> int:
    """Return the tokens of the longest text. Raises LoadError if more are asked for than the model has positions."""
    config = directory.text_config
    positions = directory.context(None) if "max_position_embeddings" in config or "n_positions" in config else None
    if positions is not None and config.get("model_type") in _POSITIONS_BEHIND_PADDING:
        padding = config.get("pad_token_id")
        positions -= 1 + (padding if isinstance(padding, int) else 1)
    if asked is not None:
        if positions is not None and asked > positions:
            message = f"max_seq_len is {asked}, but the model has {positions} positions: set at most that"
            raise LoadError(message, key="max_seq_len")
        return asked
    stated = directory.tokenizer_config.get("model_max_length")
    longest = stated if type(stated) is int and 1 < stated < _NO_LIMIT else None
    known = [length for length in (limit or longest, positions) if length is not None]
    if not known:
        raise LoadError(f"{directory.path} does not say how long texts may be: set max_seq_len", key="max_seq_len")
    return min(known)


def _width(directory: ModelDir) -> int:
    for key in ("hidden_size", "d_model", "dim", "n_embd"):
        if type(width := directory.text_config.get(key)) is int and width > 0:
            return width
    raise LoadError(f"{directory.path}/config.json does not say hidden_size")


def _is_classifier(directory: ModelDir) -> bool:
    return directory.architecture.endswith("ForSequenceClassification")


def _check_no_code(directory: ModelDir) -> None:
    """Raise LoadError for a model with code of its own. The library's class of that name would give other vectors: some
    families look at both sides of a token in their own code only."""
    named = directory.config.get("auto_map")
    if isinstance(named, Mapping) and "AutoModel" in named:
        raise LoadError(
            f"{directory.path}/config.json: auto_map names code of its own for AutoModel ({named['AutoModel']!r:.80}), "
            "which is never run, and without which vectors may differ: remove auto_map if the model's card says that "
            "transformers needs none"
        )


def _check_known(directory: ModelDir, recipe: Recipe) -> None:
    """Raise LoadError for a model that the installed library has no class for."""
    table = {
        "pooled": "MODEL_MAPPING_NAMES",
        "classifier": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
        "yes_no": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    }[recipe.form]
    kind, known = directory.config.get("model_type"), model_types(table)
    if known is not None and kind not in known:
        raise LoadError(
            f"{directory.path}/config.json: model_type is {kind!r:.60}, which the installed transformers does not know "
            f"for this use: update transformers, or choose another model"
        )


def _activation(where: Path, key: str, named: Any, default: str) -> str:
    name = default if named is None else str(named).rpartition(".")[2]
    if name not in ACTIVATIONS:
        raise LoadError(f"{where}: {key} is {named!r:.80}: known are {', '.join(ACTIVATIONS)}")
    return name


def _json(directory: ModelDir, name: str) -> dict[str, Any]:
    file = directory.path / name
    return read_json(file, directory.bounds) if file.exists() else {}


def _typed(where: Path, config: Mapping[str, Any], key: str, kind: type, default: Any) -> Any:
    """Return a value of a file, or ``default`` if it is missing or null. Raises LoadError for another type."""
    value = config.get(key)
    if value is None:
        return default
    if type(value) is not kind:
        words = {bool: "true or false", int: "a whole number", str: "a text", dict: "an object of texts"}
        raise LoadError(f"{where}: {key} is {value!r:.60}: must be {words[kind]}")
    return value
