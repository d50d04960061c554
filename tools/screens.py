"""Make the pictures of the page docs/operate.md: what commands show on a real terminal, with two models under load.

    make screens

A supervisor with the demo models serves streams of a few clients. Each command runs in a pseudo-terminal. The terminal
emulator pyte reads its output, and what is then on the screen is drawn as SVG. One model cannot be loaded, so that
there is a failure to see. This takes a minute and needs no GPU. The pictures show paths below /tmp/demo, a directory
that exists meanwhile.
"""

import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pyte

from modelctl import Client
from protocol.errors import WireError
from tools.demo_models import directory
from tools.docs.terminal_svg import Cell, Style, draw

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "images" / "screens"
HOME = Path("/tmp/demo")
WIDTHS = (80, 200)
LINES = {"top": 22}
USUAL_LINES = 60
LOOK_S = {"top": 12.0}
"""Seconds after which a screen that goes on is drawn."""
PATIENCE_S = 120.0
"""Seconds for a command that ends by itself."""
COMMANDS: dict[str, tuple[str, ...]] = {
    "ps": ("ps",),
    "status": ("status",),
    "top": ("top", "--interval", "0.5"),
    "events": ("events", "-n", "12"),
    "plan": ("plan", "planned.yaml", "--gpus", "24G,24G"),
    "requests": ("requests",),
}
STREAMS = (
    ("letters", "interactive"), ("letters", "normal"), ("letters", "batch"), ("stories", "normal"),
    ("stories", "normal"), ("stories", "batch"), ("stories", "interactive"), ("stories", "batch"),
)  # fmt: skip
STORY = "Tell me a story about Mia the fox and a lantern."


def main() -> int:
    """Make all pictures. Returns the exit code."""
    HOME.mkdir()  # nobody else's
    try:
        _write_files()
        environment = os.environ | {
            "MODELCTL_RUNTIME_DIR": str(HOME / "run"), "XDG_STATE_HOME": str(HOME / "state"), "PYTHONPATH": str(ROOT),
            "TERM": "xterm-256color",
        }  # fmt: skip
        for name in ("NO_COLOR", "CLICOLOR_FORCE", "COLUMNS", "LINES", "MODELCTL_CONNECT", "MODELCTL_CONFIG"):
            environment.pop(name, None)
        modelctl = [sys.executable, "-m", "supervisor"]
        subprocess.run([*modelctl, "serve", "--detach", "models.yaml"], cwd=HOME, env=environment, check=False)
        try:
            subprocess.run([*modelctl, "restart", "stories"], cwd=HOME, env=environment, check=True)
            with _load(HOME / "run"):
                for name, arguments in COMMANDS.items():
                    for columns in WIDTHS:
                        lines = _screen(
                            [*modelctl, *arguments],
                            environment,
                            columns,
                            LINES.get(name, USUAL_LINES),
                            LOOK_S.get(name),
                        )
                        command = f"modelctl {' '.join(arguments)}"
                        prompt: list[Cell] = [(character, Style(bold=True)) for character in f"$ {command}"]
                        file = OUT / f"{name}-{columns}.svg"
                        file.parent.mkdir(exist_ok=True)
                        file.write_text(draw(f"{command} in {columns} columns", [prompt, *lines], columns))
                        print(file.relative_to(ROOT))
        finally:
            subprocess.run([*modelctl, "shutdown", "--now"], cwd=HOME, env=environment, check=True)
    finally:
        shutil.rmtree(HOME)
    return 0


def _write_files() -> None:
    """Write a file with the demo models and a model whose weights are cut off, and one to plan for two GPUs."""
    cut_off = HOME / "models" / "Llama-3.1-8B-exl2"
    shutil.copytree(directory("letters"), cut_off)
    weights = cut_off / "model.safetensors"
    os.truncate(weights, 4_000_000)
    models: dict[str, dict[str, Any]] = {
        "letters": {"model_dir": "demo:letters", "engine": "transformers", "gpu": "cpu", "max_batch_size": 4},
        "stories": {"model_dir": "demo:stories", "engine": "transformers", "gpu": "cpu", "max_batch_size": 2},
        "llama-8b": {"model_dir": str(cut_off), "engine": "transformers", "gpu": "cpu"},
    }
    (HOME / "models.yaml").write_text(json.dumps({"models": models}))  # YAML that people need not read
    large = {"model_dir": "demo:letters", "engine": "exllamav2", "max_seq_len": 2048}
    planned = {
        "llama-8b": {**large, "gpu": 0, "cache_size": 2 << 20, "draft_model": "demo:letters"},
        "qwen-14b": {**large, "gpu": 0, "cache_size": 3 << 20},
        "mistral-24b": {**large, "gpu": 1, "cache_size": 4 << 20},
        "llama-70b": {**large, "gpu": "auto", "vram": "40GiB"},
    }
    (HOME / "planned.yaml").write_text(json.dumps({"models": planned}))


@contextmanager
def _load(runtime_dir: Path) -> Iterator[None]:
    """Keep streams going, more than the models compute at once."""
    over = threading.Event()

    def ask(model: str, priority: str) -> None:
        prompt = STORY if model == "stories" else "sort: d b a c ->"
        with suppress(WireError), Client(runtime_dir=runtime_dir) as client:
            while not over.is_set():
                for _ in client.generate(
                    model, prompt, min_tokens=1500, max_tokens=1500, priority=priority, temperature=1.0
                ):
                    if over.is_set():
                        break

    threads = [threading.Thread(target=ask, args=stream) for stream in STREAMS]
    for thread in threads:
        thread.start()
        time.sleep(0.7)  # requests of different ages
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join()


def _screen(
    command: Sequence[str], environment: dict[str, str], columns: int, rows: int, look_s: float | None
) -> list[list[Cell]]:
    """Run a command in a terminal. Return the lines of its screen when it ends.

    look_s  seconds after which it is ended; None: it ends by itself
    """
    shown = pyte.Screen(columns, rows)
    stream = pyte.ByteStream(shown)
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (rows, columns))
    running = subprocess.Popen(
        command, cwd=HOME, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    )
    os.close(slave)
    deadline = time.monotonic() + (look_s or PATIENCE_S)
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            try:
                stream.feed(os.read(master, 65536))
            except OSError:  # the command has ended
                break
    else:
        if look_s is None:
            raise TimeoutError(f"{command} did not end within {PATIENCE_S} s")
    running.send_signal(signal.SIGINT)
    lines = [_cells(shown, row) for row in range(rows)]
    running.wait(20)
    os.close(master)
    while lines and not "".join(character for character, _ in lines[-1]).strip():
        lines.pop()
    return lines


def _cells(shown: pyte.Screen, row: int) -> list[Cell]:
    line = shown.buffer[row]
    return [
        (line[column].data, Style(line[column].fg, bool(line[column].bold), reverse=bool(line[column].reverse)))
        for column in range(shown.columns)
    ]


if __name__ == "__main__":
    sys.exit(main())
