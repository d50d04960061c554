"""Model directories that try to harm the process that loads them, each with the words that its refusal must contain.

    python -m tests.engines.hostile_directories PLACE

loads each of them in PLACE on both engines, under an audit hook and a watch on files outside, and prints JSON:
{"ENGINE/CASE": {"error": text or null, "kind": type, "refused": boolean, "seen": [...], "seconds": number}}.
"""

import contextlib
import ctypes
import json
import os
import pickle
import shutil
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors

from model_worker.engine import LoadError
from model_worker.engines import build_engine
from protocol.process.worker_spec import EngineSpec
from tests.engines.random_model import edit_json
from tools.demo_models import directory

DEMO = directory("letters")
MIB, TIB = 1 << 20, 1 << 40
Made = Callable[[Path, Path], object]
"""A function that changes a model's directory (first). Outside files are in the second: secret.safetensors, ..."""
LOADS = None
"""The model must load: its hostile files are neither read nor run."""


def write_header(file: Path, header: Any, data: int = 64, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.unlink()  # the file is a hard link to the good one
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + bytes(data))


def tensor(begin: Any = 0, end: Any = 64, shape: Any = (32,), dtype: Any = "F16") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


class Trap:
    """An object that creates a file when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(self._canary),)


def header(value: Any, **more: Any) -> Made:
    return lambda model, _: write_header(model / "model.safetensors", value, **more)


def text(name: str, content: str | bytes) -> Made:
    raw = content if isinstance(content, bytes) else content.encode()

    def make(model: Path, _: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).write_bytes(raw)

    return make


def config(**changes: Any) -> Made:
    return lambda model, _: edit_json(model / "config.json", **changes)


def link(name: str, target: str) -> Made:
    def make(model: Path, outside: Path) -> None:
        (model / name).unlink(missing_ok=True)
        (model / name).symlink_to(outside / target)

    return make


def pipe(name: str) -> Made:
    def make(model: Path, _: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return make


def sparse(name: str, start: bytes = b"{") -> Made:
    def make(model: Path, _: Path) -> None:
        (model / name).unlink(missing_ok=True)
        with open(model / name, "wb") as f:
            f.write(start)
            f.truncate(TIB)

    return make


def index(*names: str, keep: bool = True) -> Made:
    def make(model: Path, outside: Path) -> None:
        shown = [name.replace("OUTSIDE", str(outside)) for name in names]
        weights = {f"model.{number}": name for number, name in enumerate(shown)}
        (model / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weights}))
        if not keep:
            (model / "model.safetensors").rename(model / "other.safetensors")

    return make


def traps(model: Path, outside: Path) -> None:
    """Add code, and pickles under every name that loaders look for."""
    for name in ("pytorch_model.bin", "model.pt", "adapter_model.bin", "training_args.bin", "consolidated.00.pth"):
        (model / name).write_bytes(pickle.dumps(Trap(outside / "canary")))
    (model / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": "pytorch_model.bin"}}))
    code = f"import os\nos.mknod({str(outside / 'canary')!r})\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "generate.py", "__init__.py"):
        (model / name).write_text(code)
    (model / "custom_generate").mkdir()
    (model / "custom_generate" / "generate.py").write_text(code)
    classes = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    edit_json(
        model / "config.json", auto_map=classes, custom_pipelines={"text-generation": {"impl": "modeling_evil.E"}}
    )
    edit_json(
        model / "tokenizer_config.json",
        auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]},
        tokenizer_class="Evil",
    )


def traps_only(model: Path, outside: Path) -> None:
    traps(model, outside)
    (model / "model.safetensors").unlink()


def foreign_type(model: Path, outside: Path) -> None:
    traps(model, outside)
    edit_json(model / "config.json", model_type="evil", architectures=["EvilForCausalLM"])


def unix_socket(model: Path, _: Path) -> None:
    here = os.getcwd()
    os.chdir(model)  # the path of a socket may have at most 107 bytes
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind("x.safetensors")
    os.chdir(here)


def directory_for_config(model: Path, _: Path) -> None:
    (model / "config.json").unlink()
    (model / "config.json").mkdir()


def loop_of_links(model: Path, _: Path) -> None:
    (model / "a.json").symlink_to("b.json")
    (model / "b.json").symlink_to("a.json")


def huge_id(model: Path, _: Path) -> None:
    value = json.loads((model / "tokenizer.json").read_text())
    value["model"]["vocab"]["zz"] = 4_000_000_000
    (model / "tokenizer.json").write_text(json.dumps(value))


def step_of_tokenizer(part: str, **step: Any) -> Made:
    def make(model: Path, _: Path) -> None:
        value = json.loads((model / "tokenizer.json").read_text())
        (model / "tokenizer.json").write_text(json.dumps({**value, part: step}))

    return make


def adapter_elsewhere(model: Path, outside: Path) -> None:
    (model / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": str(outside)})
    )


def linked_templates(model: Path, outside: Path) -> None:
    (outside / "templates").mkdir(exist_ok=True)
    (outside / "templates" / "tool_use.jinja").write_text("secret")
    (model / "additional_chat_templates").symlink_to(outside / "templates")


LONGER = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
DEEP = '{"a":' * 200_000
WIDE = "[" + "[]," * 3_000_000 + "[]]"
CASES: dict[str, tuple[Made, list[str] | None]] = {
    # names that lead out
    "index out of the directory": (index("../outside/secret.safetensors"), ["weight_map", "../outside"]),
    "index out, besides its own": (index("model.safetensors", "../outside/secret.safetensors"), ["weight_map"]),
    "index with an absolute name": (index("OUTSIDE/secret.safetensors", keep=False), ["weight_map"]),
    "index of no safetensors": (index("../../../../etc/passwd", keep=False), ["weight_map", "etc/passwd"]),
    "index with a NUL": (index("a\0.safetensors"), ["weight_map"]),
    "index of a pickle": (index("pytorch_model.bin", keep=False), ["weight_map"]),
    "weights named elsewhere": (config(transformers_weights="../outside/secret.safetensors"), ["transformers_weights"]),
    "an adapter of a model elsewhere": (adapter_elsewhere, ["adapter_config.json"]),
    # links
    "weights linked": (link("model.safetensors", "secret.safetensors"), ["model.safetensors", "link", "out of"]),
    "more weights linked": (link("z.safetensors", "secret.safetensors"), ["z.safetensors", "link"]),
    "config linked": (link("config.json", "secret.json"), ["config.json", "link"]),
    "tokenizer linked": (link("tokenizer.json", "secret.json"), ["tokenizer.json", "link"]),
    "added tokens linked": (link("added_tokens.json", "secret.json"), ["added_tokens.json", "link"]),
    "template linked": (link("chat_template.jinja", "secret.json"), ["chat_template.jinja", "link"]),
    "templates linked": (linked_templates, ["additional_chat_templates", "link"]),
    "a link to a device": (link("generation_config.json", "/dev/zero"), ["generation_config.json", "/dev/zero"]),
    "a link to nothing": (link("x.json", "nothing"), ["x.json"]),
    "links in a loop": (loop_of_links, [".json"]),
    # no files
    "a pipe for config": (pipe("config.json"), ["config.json is a pipe", "remove it"]),
    "a pipe for weights": (pipe("model.safetensors"), ["model.safetensors is a pipe"]),
    "a pipe for more weights": (pipe("z.safetensors"), ["z.safetensors is a pipe"]),
    "a pipe for added tokens": (pipe("added_tokens.json"), ["added_tokens.json is a pipe"]),
    "a pipe for a template": (pipe("chat_template.jinja"), ["chat_template.jinja is a pipe"]),
    "a socket for weights": (unix_socket, ["x.safetensors is a socket"]),
    "a directory for config": (directory_for_config, ["config.json"]),
    "a directory for weights": (lambda m, _: (m / "z.safetensors").mkdir(), ["z.safetensors"]),
    # sizes
    "a tokenizer of a terabyte": (sparse("tokenizer.json"), ["tokenizer.json has 1099511627776 bytes"]),
    "a config of a terabyte": (sparse("config.json"), ["config.json has 1099511627776 bytes"]),
    "weights of a terabyte": (sparse("model.safetensors", struct.pack("<Q", TIB - 8)), ["model.safetensors", "header"]),
    "a template of two megabytes": (text("chat_template.jinja", "a" * (2 << 20)), ["chat_template.jinja has 2097152"]),
    # headers
    "header of 2**63 bytes": (header({}, length=1 << 63), ["header is longer"]),
    "header of the file's size": (header({}, length=74), ["header is longer"]),
    "header of nothing": (text("model.safetensors", bytes(8)), ["no readable safetensors"]),
    "no header": (text("model.safetensors", b""), ["model.safetensors is empty"]),
    "metadata that is no text": (header({"__metadata__": {"a": 1}, "a": tensor()}), ["__metadata__ must be"]),
    "header that nests": (header(DEEP.encode()), ["nested too deeply"]),
    "header of a list": (header([]), ["object"]),
    "overlapping tensors": (header({"a": tensor(), "b": tensor(32, 96)}, data=96), ["may not overlap"]),
    "twice the same place": (header({"a": tensor(), "b": tensor()}), ["may not overlap"]),
    "a gap": (header({"a": tensor(), "b": tensor(128, 192)}, data=192), ["gaps"]),
    "negative offsets": (header({"a": tensor(-64, 0)}), ["data_offsets"]),
    "offsets backwards": (header({"a": tensor(64, 0)}), ["data_offsets"]),
    "offsets of floats": (header({"a": tensor(0.0, 64.0)}), ["data_offsets"]),
    "a shape larger than its bytes": (header({"a": tensor(shape=(1 << 40,))}), ["64 bytes hold no F16"]),
    "a shape that overflows": (header({"a": tensor(shape=(1 << 62, 1 << 62))}), ["hold no F16"]),
    "a negative shape": (header({"a": tensor(shape=(-32,))}), ["a shape is"]),
    "a shape of booleans": (header({"a": tensor(0, 2, [True])}), ["a shape is"]),
    "ten thousand dimensions": (header({"a": tensor(0, 2, [1] * 10_000)}), ["a shape is"]),
    "an unknown dtype": (header({"a": tensor(dtype="EVIL")}), ["dtype"]),
    "a dtype that is a list": (header({"a": tensor(dtype=[])}), ["dtype"]),
    "more data than there is": (header({"a": tensor(0, 1 << 40, (1 << 39,))}), ["cut off"]),
    "a million tensors": (
        lambda model, _: write_header(model / "model.safetensors", dict.fromkeys(map(str, range(MIB)), 0)),
        ["tensors, at most"],
    ),
    "a number without end": (header(b'{"a":' + b"9" * 100_000 + b"}"), ["digits"]),
    # JSON
    "a config that nests": (text("config.json", DEEP), ["config.json", "nested too deeply"]),
    "a tokenizer config that nests": (text("tokenizer_config.json", DEEP), ["nested too deeply"]),
    "added tokens that nest": (text("added_tokens.json", DEEP), ["added_tokens.json", "nested too deeply"]),
    "an index that nests": (text("model.safetensors.index.json", DEEP), ["nested too deeply"]),
    "a tokenizer that nests": (text("tokenizer.json", DEEP), ["tokenizer.json"]),
    "a generation config of lists": (text("generation_config.json", WIDE), ["generation_config.json"]),
    "a config that is a list": (text("config.json", "[]"), ["must hold a JSON object"]),
    "a config that is no text": (text("config.json", b"\xff\xfe\x00{"), ["config.json cannot be read"]),
    "a base that is no number": (
        text("config.json", (DEMO / "config.json").read_text().replace("{", '{"rope_theta": NaN, ', 1)), ["NaN"]
    ),
    "a config with a number without end": (text("config.json", '{"a": ' + "9" * 5000 + "}"), ["5000 digits"]),
    "an index that is a list": (text("model.safetensors.index.json", '{"weight_map": []}'), ["weight_map"]),
    # values
    "no heads": (config(num_attention_heads=0), ["num_attention_heads is 0"]),
    "negative heads": (config(num_attention_heads=-4, num_key_value_heads=-2), ["num_attention_heads is -4"]),
    "hidden size of zero": (config(hidden_size=0), ["hidden_size is 0"]),
    "layers without end": (config(num_hidden_layers=10**20), ["num_hidden_layers is 1", "1024"]),
    "a vocabulary without end": (config(vocab_size=10**15), ["vocab_size is 1000000000000000"]),
    "a context without end": (config(max_position_embeddings=10**22), ["context is", "2147483648"]),
    "a context below zero": (config(max_position_embeddings=-1), ["context is -1"]),
    "an architecture that is a list": (config(architectures=[["LlamaForCausalLM"]]), ["architectures"]),
    "a quantization of lists": (config(quantization_config={"quant_method": [[]]}), ["quantized"]),
    "rope of lists": (config(rope_scaling={"rope_type": [], "factor": "x"}, rope_parameters=None), ["rope_type []"]),
    "rope without bounds": (
        text("config.json", (DEMO / "config.json").read_text().rstrip().removesuffix("}")
             + ', "rope_scaling": {"rope_type": "yarn", "factor": 1e999, "original_max_position_embeddings": 5}}'),
        ["factor inf"],
    ),
    "layers of text": (config(num_hidden_layers="4"), ["num_hidden_layers is '4'"]),
    "a model much larger than its weights": (config(vocab_size=1 << 22, hidden_size=4096), []),
    "layer types of maps": (config(layer_types=[{}, {}], rope_scaling={"type": "yarn"}), []),
    "a token with the id 4,000,000,000": (huge_id, ["tokenizer.json has a token with the id 4000000000"]),
    # steps of the tokenizer
    "a text a million times as long": (
        step_of_tokenizer("normalizer", type="Sequence", normalizers=[LONGER] * 6),
        ["normalizer makes a text 1e+06 times as long"],
    ),
    "a text behind a megabyte": (
        step_of_tokenizer("normalizer", type="Prepend", prepend="x" * MIB), ["longer by 1048576 characters"]
    ),
    "a step that panics": (
        step_of_tokenizer("normalizer", type="Precompiled", precompiled_charsmap="AAAA"), ["PanicException"]
    ),
    # code
    "code of the hub": (config(_attn_implementation="evil/kernel"), ["_attn_implementation", "remove that key"]),
    "code of the hub, deeper": (config(x={"experts_implementation": {"": "evil/kernel"}}), ["experts_implementation"]),
    "code and pickles beside the weights": (traps, LOADS),
    "code and pickles only": (traps_only, ["pickled weights only", "never loaded"]),
    "code for a type of its own": (foreign_type, ["EvilForCausalLM"]),
    # templates
    "a template that nests": (text("chat_template.jinja", "{{ " + "(" * 50_000), ["chat template"]),
    "a template that is no text": (text("chat_template.jinja", b"\xff\xfe"), ["chat_template.jinja cannot be read"]),
    "half a character in a template": (
        text("chat_template.json", '{"chat_template": "x\\ud800"}'),
        ["the chat template has \\ud800"],
    ),
    "a template with a number": (text("chat_template.jinja", "{{ " + "9" * 5000 + " }}"), ["chat template"]),
    "a template that would loop": (text("chat_template.jinja", "{% for i in range(10**12) %}{% endfor %}"), LOADS),
}  # fmt: skip


def prepare(place: Path, case: str) -> tuple[Path, Path]:
    """Make the directories of one case. Return (model's directory, directory outside)."""
    model, outside = place / "model", place / "outside"
    for made in (model, outside):
        shutil.rmtree(made, ignore_errors=True)
    good = place / "good"
    model.mkdir()
    for file in good.iterdir():
        if file.suffix == ".safetensors":
            os.link(file, model / file.name)
        elif file.is_file():
            shutil.copy(file, model / file.name)
    outside.mkdir()
    outside.chmod(0o777)  # weights may be links into a directory that nobody else can write to
    os.link(good / "model.safetensors", outside / "secret.safetensors")
    shutil.copy(good / "tokenizer.json", outside / "secret.json")
    CASES[case][0](model, outside)
    return model, outside


class Watch:
    """A record of suspicious audit events and of opened files in a directory (by inotify, so C code is seen too)."""

    _OPEN = 0x20
    _RUNS = (
        "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect",
        "socket.getaddrinfo", "urllib.Request", "os.mknod",
    )  # fmt: skip

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._model = self._outside = None
        self._libc = ctypes.CDLL(None, use_errno=True)
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._model is None:
            return
        if event.startswith(self._RUNS):
            self.seen.append(f"{event} {arguments!r}"[:300])
        elif event == "exec" and str(self._model) in getattr(arguments[0], "co_filename", ""):
            self.seen.append(f"ran {arguments[0].co_filename}")
        elif event == "open" and isinstance(arguments[0], str) and not arguments[2] & os.O_PATH:  # else nothing is read
            path = os.path.realpath(arguments[0])
            own = path.startswith(
                (f"{self._model}/", sys.base_prefix, *filter(None, sys.path), "/proc/", "/sys/", "/dev/null")
            )
            if (not own and arguments[0][:1] in "/.") or path.startswith(f"{self._outside}/"):
                self.seen.append(f"opened {path}")

    @contextlib.contextmanager
    def over(self, model: Path, outside: Path) -> Any:
        """Record in ``seen`` what happens inside the context."""
        self.seen = []
        descriptor = self._libc.inotify_init1(os.O_NONBLOCK)
        watched = self._libc.inotify_add_watch(descriptor, str(outside).encode(), self._OPEN)
        assert watched >= 0, os.strerror(ctypes.get_errno())
        self._model, self._outside = model, outside
        try:
            yield
        finally:
            self._model = self._outside = None
            with contextlib.suppress(BlockingIOError):
                self.seen.append(f"files outside were opened: {os.read(descriptor, 4096)!r}")
            os.close(descriptor)
            if (outside / "canary").exists():
                self.seen.append("a trap has sprung")


def embedded(model: Path) -> None:
    """Load everything that the transformers engine loads."""
    build_engine(EngineSpec("m", "transformers", str(model), max_batch_size=1)).load(lambda *_: None)


def exllamav2(model: Path) -> None:
    """Load as engine exllamav2 does, up to the point where it needs a GPU."""
    from model_worker.engines.exllamav2.check import check
    from model_worker.engines.exllamav2.vram import estimate_of
    from model_worker.engines.vetting import understood
    from tests.engines.exllamav2_cpu.package import import_package

    spec = EngineSpec("m", "exllamav2", str(model), device="cuda")
    checked = check(spec)
    directory = checked.directory
    with understood(model):  # as in ExLlamaV2Engine.load and load.load
        _ = checked.tokenizer.pieces
        estimate_of(checked.options, checked.sizes, directory, checked.draft)
        package = import_package()
        config = package.ExLlamaV2Config()
        config.model_dir = str(directory.path)
        config.prepare()
        config.arch_compat_overrides(quiet=True)
        package.ExLlamaV2Tokenizer(config)


ENGINES: dict[str, Callable[[Path], None]] = {"embedded": embedded, "exllamav2": exllamav2}


def main(place: Path) -> None:
    report: dict[str, dict[str, Any]] = {}
    for load in ENGINES.values():  # load a good directory first, so that everything is imported
        shutil.copytree(DEMO, place / "good", dirs_exist_ok=True)
        load(place / "good")
    watch = Watch()
    model, outside = prepare(place, "code and pickles only")
    with watch.over(model, outside):  # check that the watch works
        safetensors.safe_open(str(outside / "secret.safetensors"), framework="np")
        pickle.loads((model / "pytorch_model.bin").read_bytes())
    assert len(watch.seen) >= 3, watch.seen  # opened, unpickled, sprung
    for case in CASES:
        model, outside = prepare(place, case)
        for name, load in ENGINES.items():
            begun = time.monotonic()
            error: BaseException | None = None
            with watch.over(model, outside):
                try:
                    load(model)
                except Exception as e:
                    error = e
            print(f"{name}/{case}: {time.monotonic() - begun:.2f} s, {error!r:.200}", file=sys.stderr)
            report[f"{name}/{case}"] = {
                "error": None if error is None else str(error),
                "kind": type(error).__name__,
                "refused": isinstance(error, LoadError),
                "seen": watch.seen,
                "seconds": round(time.monotonic() - begun, 2),
            }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
