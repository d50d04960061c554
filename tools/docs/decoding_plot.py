"""Make the plot of tokens per second over streams from ``benchmarks/results/decoding.json``."""

import re

from modelctl.cli.bench import Panel, draw
from tools.docs.performance import result_files

TITLES = {
    "1b": "1B, fp16",
    "8b": "8B, fp16",
    "1b-exl2-rounded": "1B, EXL2 4.0 bpw",
    "8b-exl2-rounded": "8B, EXL2 4.0 bpw",
}


def decoding_plot() -> str:
    """Return the plot as SVG. The limit: a step cannot be faster than the GPU reads the weights once."""
    file = result_files()["decoding"]
    values = file.values
    panels = []
    for model in dict.fromkeys(re.split(r"[,:]", name)[0] for name in values):
        label = re.compile(rf"{re.escape(model)}, (\d+) streams: tokens/s with graphs$")
        streams = [int(found[1]) for name in values if (found := label.match(name))]
        reading_s = values[f"{model}: reading the weights once"] / 1000
        series = {
            "limit of the memory": [count / reading_s for count in streams],
            **{
                shown: [values[f"{model}, {count} streams: tokens/s {what}"] for count in streams]
                for shown, what in (
                    ("modelctl", "with graphs"),
                    ("graphs: false", "with graphs: false"),
                    ("the package alone", "of the package's generator"),
                )
            },
        }
        panels.append(Panel(f"{TITLES.get(model, model)}, {_gpu(file.content['machine'])}", streams, series))
    return draw("Tokens per second over streams, and the limit of the memory", "streams at once", "tokens/s", panels)


def _gpu(machine: str) -> str:
    return machine.partition(",")[0].removeprefix("NVIDIA ")
