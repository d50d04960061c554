"""``modelctl quantize`` with a stand-in for the package's converter, in real child processes, without a GPU."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from model_worker.engines.exllamav2.conversion import needs
from model_worker.engines.model_dir import ModelShape
from modelctl.cli.quantize import check_disk, choose_gpu, stage_of, trouble_of, try_out
from modelctl.cli.root import CommandFailure
from modelctl.cli.waiting import LiveLines
from supervisor.placement.gpus import Gpu
from supervisor.workers.environment import CONVERSION, DEMO_DIR
from tests.cli.programs import MODELCTL, Terminal, environment
from tests.nvml_box import Box
from tests.serving import ROOT, engine, marked_processes, wait_until

GIB = 1 << 30


PACKAGE = {
    "config": "import glob\nclass ExLlamaV2Config:\n    prepare = None\n",
    "architecture": "gpt2_keymap = []\n",
    "model": "class ExLlamaV2: ...\n",
    "rope": "get_rope_params = None\n",
}
"""What the worker changes in the package before it converts. The stand-in computes nothing with it."""


class Place:
    """A machine with a stand-in for the converter, for torch and for NVML, and a copy of a demo model."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.gates = directory, directory / "gates"
        self.gates.mkdir()
        packages = directory / "packages"
        conversion = packages / "exllamav2" / "conversion"
        conversion.mkdir(parents=True)
        (packages / "torch").mkdir()
        for empty in (conversion, conversion.parent, packages / "torch"):
            (empty / "__init__.py").touch()
        for module in ("exllamav2_ext", "pandas", "fastparquet"):
            (packages / f"{module}.py").touch()
        self.torch = packages / "torch" / "version.py"
        self.torch.write_text("__version__ = '2.8.0'\ncuda = '12.8'\n")
        shutil.copyfile(Path(__file__).with_name("stand_in_converter.py"), conversion / "convert_exl2.py")
        (packages / "torch" / "__init__.py").write_text("class Tensor: ...\n")
        for module, content in PACKAGE.items():
            (conversion.parent / f"{module}.py").write_text(content)
        found = importlib.util.find_spec("exllamav2")
        assert found is not None
        assert found.origin is not None
        shutil.copyfile(Path(found.origin).parent / "conversion" / "bot_status.py", conversion / "bot_status.py")
        self.model = directory / "stories"
        shutil.copytree(DEMO_DIR / "stories", self.model)
        self.box = Box(directory / "box.json")
        self.environment = environment(
            PYTHONPATH=f"{packages}:{ROOT / 'tests' / 'stand_in_nvml'}:{ROOT}", STAND_IN=str(self.gates),
            MODELCTL_TEST_BOX=str(directory / "box.json"), CUDA_VISIBLE_DEVICES=None,
        )  # fmt: skip
        self.out = directory / "stories-4.0bpw"
        self.job = directory / "stories-4.0bpw.job"

    def start(self, *arguments: object) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [*MODELCTL, "quantize", *map(str, arguments or (self.model, "--bits", 4, "--no-test"))],
            env=self.environment, cwd=self.directory, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def run(self, *arguments: object) -> tuple[int, str, str]:
        with self.start(*arguments) as process:
            output, errors = process.communicate(timeout=60)
        return process.returncode, output, errors

    def trace(self) -> list[str]:
        """Return what the converters have computed since the last call."""
        file = self.gates / "trace"
        lines = file.read_text().splitlines()
        file.unlink()
        return lines

    def waits_at(self, gate: str) -> None:
        wait_until((self.gates / f"{gate} waits").exists, what=f"the converter at {gate}")

    def nothing_is_left(self) -> None:
        wait_until(lambda: not marked_processes("STAND_IN", str(self.gates)), what="the end of the converter")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    place = Place(tmp_path)
    yield place
    place.nothing_is_left()


def test_a_model_is_measured_quantized_and_written(place: Place) -> None:
    place.box.holds(0, 1, 70 * GIB)
    code, output, errors = place.run()
    assert code == 0, errors
    first, *computed = place.trace()
    assert first == "begins on GPU GPU-1a2b3c4d-0000 with measure_quant", "the GPU with the most free memory"
    assert computed == [f"{stage} {index}" for stage in ("Measuring", "Quantizing") for index in range(12)]
    assert yaml.safe_load(output) == {
        "models": {"stories-4.0bpw": {"model_dir": str(place.out), "engine": "exllamav2", "gpu": "auto"}}
    }
    assert f"{place.out}: written" in errors
    assert {"measurement.json", "output.safetensors", "config.json"} <= {path.name for path in place.out.iterdir()}
    assert not place.job.exists()
    code, _, errors = place.run(place.model, "--bits", 4)
    assert (code, f"{place.out} exists already" in errors) == (78, True)
    other = place.directory / "other"
    measured = ("--measurement", place.out / "measurement.json")
    keys = {"model_dir": "./stories", "engine": "transformers"}
    (place.directory / "models.yaml").write_text(yaml.safe_dump({"models": {"tales": keys}}))
    code, output, _ = place.run("tales", "--bits", 5, "--out", other, "--gpu", 1, "--no-test", "--json", *measured)
    assert (code, json.loads(output)["entry"]["model_dir"]) == (0, str(other))
    assert place.trace()[:2] == ["begins on GPU GPU-1a2b3c4d-0000 with optimize", "Quantizing 0"]


@pytest.mark.long
def test_it_goes_on_after_ctrl_c_and_after_a_kill(place: Place) -> None:
    gate = place.gates / "Measuring 6"
    gate.touch()
    with place.start() as process:
        place.waits_at("Measuring 6")
        code, _, errors = place.run()
        assert (code, "another `modelctl quantize` works in" in errors) == (75, True)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert (process.returncode, "goes on from what is saved in" in errors) == (130, True), errors
    place.nothing_is_left()
    gate.rename(place.gates / "compiling")
    place.trace()
    with place.start() as process:
        place.waits_at("compiling")
        process.kill()
        process.communicate()
    place.nothing_is_left()
    assert place.trace()[1] == "Measuring 4", "from the last checkpoint"
    code, _, errors = place.run(place.model, "--bits", 5, "--out", place.out)
    assert (code, "holds a job with bits 4.0, and not 5.0" in errors) == (78, True), errors
    (place.gates / "compiling").unlink()
    code, _, errors = place.run()
    assert (code, len(place.trace())) == (0, 1), "only compiled"


def test_sigterm_waits_until_the_file_of_the_job_is_sound(place: Place) -> None:
    (place.gates / "window").touch()
    place.job.mkdir()
    options = ("-i", place.model, "-o", place.job, "-cf", place.job / "compiled", "-b", 4.0, "-hb", 6, "-so")
    with subprocess.Popen(
        [*CONVERSION, "run", str(os.getpid()), *map(str, options)],
        env=place.environment | {"CUDA_VISIBLE_DEVICES": "0", "STAND_IN_S": "0.1"}, stdout=subprocess.DEVNULL,
    ) as converter:  # fmt: skip
        place.waits_at("window")
        assert "invalid" in json.loads((place.job / "job_new.json").read_text())
        converter.terminate()
        (place.gates / "window").unlink()
        assert converter.wait(60) == 143
    assert json.loads((place.job / "job_new.json").read_text())["last_module_idx"] == 4
    assert place.trace()[-1] in ("Measuring 3", "Measuring 4", "Measuring 5")


def test_a_job_that_was_cut_off_while_it_was_written_begins_again_with_its_measurement(place: Place) -> None:
    (place.gates / "Quantizing 3").touch()
    with place.start() as process:
        place.waits_at("Quantizing 3")
        (place.gates / "window").touch()
        (place.gates / "Quantizing 3").unlink()
        place.waits_at("window")
        (converter,) = psutil.Process(process.pid).children()
        converter.kill()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "the conversion failed: the converter ended with signal 9" in errors
    (place.gates / "window").unlink()
    place.trace()
    assert place.run()[0] == 0
    assert place.trace()[:2] == ["begins on GPU GPU-0a2b3c4d-0000 with optimize", "Quantizing 0"]


def test_a_full_disk_is_named_and_the_job_can_go_on(place: Place) -> None:
    (place.gates / "fault").touch()
    code, output, errors = place.run()
    assert (code, output) == (1, "")
    why = f"OSError: [Errno 28] No space left on device; its output is in {place.job / 'quantize.log'}"
    assert f"the conversion failed: {why}" in errors
    assert " -- Layer: model.layers.0 (Attention)" in (place.job / "quantize.log").read_text()
    (place.gates / "fault").unlink()
    place.trace()
    assert place.run()[0] == 0
    assert "Measuring 0" not in place.trace()


def test_a_terminal_shows_modules_their_rate_and_the_time_left(place: Place) -> None:
    arguments = ("quantize", place.model, "--bits", 4, "--no-test")
    with Terminal(*arguments, environment=place.environment | {"STAND_IN_S": "0.15"}, columns=110) as terminal:
        tail = r"\d+ of 12 modules, \d\S* modules/s, \d s left\n"
        terminal.wait_for_match(rf"4.0bpw  measuring  \[#+-+\] +\d+%  {tail}")
        terminal.type("\x03")
        assert terminal.wait_for_exit() == 130


@pytest.mark.long
def test_what_is_missing_is_said_in_one_line(place: Place) -> None:
    def refused(*arguments: object) -> tuple[int, str]:
        code, output, errors = place.run(*(arguments or (place.model, "--bits", 4)))
        assert output == ""
        assert len(errors.splitlines()) == 1 or code == 2
        return code, errors

    assert refused("nowhere", "--bits", 4) == (
        78, "modelctl: nowhere: neither a directory nor a model of models.yaml; name that file with --config\n",
    )  # fmt: skip
    assert refused(place.model, "--bits", 9)[0] == 2
    place.box.becomes((80, 1))
    code, errors = refused(place.model, "--bits", 4, "--gpu", 7)
    assert (code, "there is no GPU 7 that may be used" in errors) == (3, True)
    place.box.holds(0, 1, 80 * GIB)
    place.box.holds(1, 1, 7 * GIB // 8)
    code, errors = refused()
    assert code == 3
    assert "GPU 0 has 0 bytes of 80.0 GiB free; GPU 1 has 128 MiB of 1.0 GiB free: free some" in errors
    assert "context 512 MiB" in errors
    place.box.fails("Driver Not Loaded", at_init=True)
    assert refused() == (
        78, "modelctl: quantize needs a CUDA GPU, and none can be used here: NVML: Driver Not Loaded\n"
    )  # fmt: skip
    place.torch.write_text("__version__ = '2.8.0+cpu'\ncuda = None\n")
    assert "torch 2.8.0+cpu is built for the CPU" in refused()[1]
    config = json.loads((place.model / "config.json").read_text())
    (place.model / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "awq"}}))
    header = json.dumps({"model.layers.0.mlp.up_proj.qweight": {"dtype": "I32", "shape": [1], "data_offsets": [0, 4]}})
    (place.model / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode() + bytes(4))
    assert "is quantized already (awq)" in refused()[1]
    assert not place.job.exists()


def test_a_result_that_does_not_load_is_kept_and_said(place: Place) -> None:
    code, output, errors = place.run(place.model, "--bits", 4)
    assert (code, output) == (1, "")
    assert f"{place.out} is written, but stories-4.0bpw does not load" in errors
    assert (place.out / "output.safetensors").is_file()


def test_the_test_generation_is_that_of_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MODELCTL_GATEWAY__LISTEN", "keys of the file that is served are not those of a trial")
    tested = try_out("m", engine(), LiveLines())
    assert tested["tokens"] == 4
    with pytest.raises(CommandFailure, match="m does not load: "):
        try_out("m", engine("CannotLoad"), LiveLines())


def test_lines_of_the_package_are_understood() -> None:
    assert stage_of('[STATUS]{"stage": "Measuring", "completion": 0.0746}[/STATUS]') == (
        "measuring", {"done": 746, "total": 10_000},
    )  # fmt: skip
    assert stage_of('[STATUS]{"stage": "Quantizing", "completion": 0.5, "done": 33, "total": 67}[/STATUS]') == (
        "quantizing", {"done": 33, "total": 67, "unit": "modules"},
    )  # fmt: skip
    assert stage_of('[STATUS]{"stage": "Tokenizing (1)", "completion": 0.0}[/STATUS]') == ("measuring", None)
    assert stage_of("[STATUS]{broken[/STATUS]") is None
    assert stage_of(" -- Layer: model.layers.0 (Attention)") is None
    assert trouble_of(" ## Error: Unable to fit output tensor in single shard.") == (
        "Unable to fit output tensor in single shard."
    )
    assert trouble_of(" ** Error: Corrupted job") == "Corrupted job"
    assert trouble_of("torch.OutOfMemoryError: CUDA out of memory.") == "torch.OutOfMemoryError: CUDA out of memory."
    assert trouble_of(" -- Saving checkpoint...") is None


def test_the_needs_of_known_models_are_near_what_the_package_says() -> None:
    """The package's documentation says that 8 GB are enough for 7B, and 24 GB for 70B."""
    small = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=32, head_dim=128, intermediate=11008, vocab=32000)
    large = ModelShape(layers=80, hidden=8192, heads=64, kv_heads=8, head_dim=128, intermediate=28672, vocab=32000)
    assert 3 * GIB < sum(needs(small).values()) < 7 * GIB
    assert 14 * GIB < sum(needs(large).values()) < 22 * GIB


def test_the_arithmetic_of_gpus_and_disks() -> None:
    box = [
        Gpu(0, "GPU-a", 24 * GIB, 0, 6 * GIB),
        Gpu(1, "GPU-b", 24 * GIB, 0, 20 * GIB),
        Gpu(2, "GPU-c", 80 * GIB, 0, 80 * GIB, mig=True),
    ]
    parts = {"weights": GIB, "hessians": 4 * GIB}
    assert choose_gpu(box, None, parts, None).index == 1
    assert choose_gpu(box, None, parts, "0").index == 0
    assert choose_gpu(box, 0, parts, None).index == 0
    with pytest.raises(
        CommandFailure, match=r"needs 7.0 GiB \(weights 7.0 GiB\); GPU 0 has 6.0 GiB of 24.0 GiB free: "
    ):
        choose_gpu(box, 0, {"weights": 7 * GIB}, None)
    check_disk(Path("/models/x"), GIB, GIB)
    with pytest.raises(CommandFailure, match=r"need 2.0 GiB on the disk of /models/x, and 1.0 GiB are free"):
        check_disk(Path("/models/x"), 2 * GIB, GIB)
