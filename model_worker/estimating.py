"""Check models' directories and estimate their memory, in a process of its own.

    python -P -m model_worker.estimating PARENT

PARENT is the process that asked. A directory may be hostile, huge, or on a file system that hangs. So neither the
supervisor nor a command reads any of it itself. This process makes the checks that the model's worker makes before it
loads, and reports every fault. It also reports how much GPU memory the model will need.

It reads a JSON list of questions from stdin: {"spec": fields of EngineSpec, "sampling": the model's defaults, "forced":
its forced values, "counts": [numbers of GPUs], "installed": whether to check that the engine's packages are installed
here}. It writes one line of JSON for each question, in the order of the questions:

    {"faults": [{"key", "message", "machine"}, ...]} for a model that cannot be loaded as configured: the key of the
        model in models.yaml, a line for people, and whether only this machine lacks something. With "away": true the
        model's files cannot be read now, and may be there later
    {"needs": {count: {"weights", "cache", "draft", "workspace", "per_gpu"}}} in bytes, by number of GPUs
    {"unknown": text} for a model without a fault, whose needs cannot be estimated

Each line may also hold
    {"sampling": {name: value}}, what generation_config.json recommends
    {"sleep_bytes": bytes}, the host memory that the model takes while it sleeps; 0 if it cannot sleep on so many GPUs
    {"template": file}, the file of the directory that holds the chat template; "" without one
    {"understood": text}, for people: how the model calls tools, and what its chat template makes of conversations. Only
        if the question has "template": true, and there is a chat template
    {"unchecked": text}, the parts that cannot be checked here because a package is not installed
"""

import json
import os
import resource
import sys
from dataclasses import asdict
from typing import Any

from protocol.process.birth import die_with, set_title

FLOAT32 = 4
"""Bytes of a weight in the engine transformers, whatever its type in the file."""
SAMPLED = "temperature", "top_k", "top_p", "min_p", "typical_p"
"""Keys of generation_config.json that count where tokens are drawn at random."""
MEMORY_LIMIT = 2 << 30
"""Bytes of address space. A safetensors header as long as the format allows, 100 MiB, takes 1 GiB as Python objects."""


def answer(question: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to one question."""
    from model_worker.engines import not_checked
    from protocol.process.worker_spec import EngineSpec, missing_for

    spec = EngineSpec(**question["spec"])
    report = _of_directory(spec, question)
    if question["installed"] and (missing := missing_for(spec.engine)) is not None:
        return {"faults": [_fault(missing, "engine", machine=True), *report.get("faults", ())]}
    if (unchecked := not_checked(spec.engine)) is not None:
        report["unchecked"] = unchecked
    return report


def _of_directory(spec: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Return the facts from the model's directory: the faults, the needs, or the reason why the needs are unknown."""
    from model_worker.engine import LoadError
    from model_worker.engines.vetting import is_away

    try:
        if spec.engine == "exllamav2":
            return _of_exllamav2(spec, question)
        if spec.engine == "transformers":
            return _of_transformers(spec, question)
        if spec.engine == "embedding":
            return _of_embedding(spec)
        return {"unknown": f"there is no estimate for engine {spec.engine}"}
    except LoadError as e:
        faults = [_fault(str(fault), fault.key) for fault in (e, *e.also)]
        return {"faults": faults, "away": is_away(e, spec)}
    except OSError as e:
        if not is_away(e, spec):
            raise
        return {"faults": [_fault(str(e))], "away": True}
    except MemoryError:
        message = f"{spec.model_dir}: reading it takes more than {MEMORY_LIMIT >> 30} GiB of memory"
        return {"faults": [_fault(message)]}


def _of_transformers(spec: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of a model. Raises LoadError for a model that cannot be loaded."""
    from model_worker.engines.embedded.check import OFFERED, check
    from model_worker.engines.vetting import Faults
    from model_worker.intake import check_defaults

    faults = Faults(spec.model_dir)
    checked = faults.of(lambda: check(spec))
    faults.of(lambda: check_defaults(question["sampling"], question["forced"], OFFERED))
    faults.raise_found()
    assert checked is not None
    unknown = f"there is no estimate for engine {spec.engine}"
    sleeping = sum(tensor.elements * FLOAT32 for tensor in checked.directory.tensors.values())
    facts = {"unknown": unknown, "sleep_bytes": sleeping}
    return facts | _template(checked, question) | _sampling(checked.directory)


def _of_embedding(spec: Any) -> dict[str, Any]:
    """Return the needs of a model for vectors or scores. Raises LoadError for a model that cannot be loaded."""
    from model_worker.engines.embedding.directory import check, needs

    checked = check(spec)
    parts = needs(checked)
    return {"needs": {1: parts}, "sleep_bytes": parts["weights"]}


def _template(checked: Any, question: dict[str, Any]) -> dict[str, str]:
    """Return what the answer says about the chat template of a model that can be loaded.

    The template runs in the process that renders chats, not in this one.
    """
    from model_worker.engines.model_dir import find_template
    from model_worker.intake import ModelTraits
    from model_worker.rendering import probe_template

    found = find_template(checked.directory)
    told = {"template": found.file if found is not None else ""}
    if not question.get("template") or checked.tokenizer is None or checked.tokenizer.chat_template is None:
        return told
    template = checked.tokenizer.chat_template
    try:
        format = ModelTraits.of(template, None, probe_template(template))
    except OSError as e:
        return {**told, "understood": f"not tried: {_one_line(str(e))}"}
    calls = "" if format.tools is None else f"calls in the format {format.tools}"
    return {**told, "understood": _one_line("; ".join(filter(None, (calls, format.template_changes))))}


def _of_exllamav2(spec: Any, question: dict[str, Any]) -> dict[str, Any]:
    """Return the model's needs by number of GPUs, and its host memory while it sleeps.

    Raises LoadError for a model that cannot be loaded.
    """
    from model_worker.engines.exllamav2.check import check, check_parallel
    from model_worker.engines.exllamav2.options import offered
    from model_worker.engines.exllamav2.vram import estimate_of, weight_bytes
    from model_worker.engines.vetting import Faults
    from model_worker.intake import check_defaults

    faults = Faults(spec.model_dir)
    needs = {}
    if (checked := faults.of(lambda: check(spec))) is not None:
        options, directory, sizes, draft = checked.options, checked.directory, checked.sizes, checked.draft
        known = offered(speculates=options.speculates, tensor_parallel=options.tensor_parallel)
        faults.of(lambda: check_defaults(question["sampling"], question["forced"], known))
        # Further counts serve only to name a remedy if the model does not fit on the first count.
        faults.of(lambda: check_parallel(options, directory, sizes, question["counts"][0]))
        for count in question["counts"]:
            needs[count] = faults.of(lambda count=count: asdict(estimate_of(options, sizes, directory, draft, count)))  # type: ignore[misc]
    faults.raise_found()
    assert checked is not None
    sleeping = 0
    if question["counts"][0] == 1:  # the memory of one GPU only can be given back
        models = [checked.directory] if checked.draft is None else [checked.directory, checked.draft]
        sleeping = sum(map(weight_bytes, models)) + checked.options.sleep_cache
    facts = {"needs": needs, "sleep_bytes": sleeping}
    return facts | _template(checked, question) | _sampling(checked.directory)


def _sampling(directory: Any) -> dict[str, Any]:
    return {"sampling": recommended_sampling(directory.generation_config)}


def recommended_sampling(generation_config: dict[str, Any]) -> dict[str, Any]:
    """Return what a generation_config.json recommends, as keys of ``sampling`` in models.yaml.

    Neutral values are left out, and so are values that no request could have. Without ``do_sample`` transformers draws
    the likeliest token whatever the other keys say, so that only the penalty counts.
    """
    from protocol.sampling_params import SamplingParams

    keys = SAMPLED if generation_config.get("do_sample") is True else ()
    found: dict[str, Any] = {}
    for key in (*keys, "repetition_penalty"):
        value = generation_config.get(key)
        if value is None or isinstance(value, bool) or value == getattr(SamplingParams, key):
            continue
        try:
            SamplingParams(**{key: value})
        except ValueError:
            continue
        found[key] = value
    return found


def _fault(message: str, key: str | None = None, machine: bool = False) -> dict[str, Any]:
    return {"key": key or "model_dir", "message": _one_line(message), "machine": machine}


def _one_line(text: str) -> str:
    """Return a text as one printable line, since names of files may hold anything and this line ends on terminals."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:2000]


def main() -> None:
    if not die_with(int(sys.argv[1])):
        return
    set_title("model-directory reader")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the threads of the tokenizers package would take address space
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT, MEMORY_LIMIT))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for question in json.load(sys.stdin):
        print(json.dumps(answer(question)), flush=True)


if __name__ == "__main__":
    main()
