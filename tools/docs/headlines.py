"""Make the README's figures from ``benchmarks/results/*.json``, so that no figure becomes stale."""

from dataclasses import dataclass

from tools.docs.bars import shown
from tools.docs.markdown import table
from tools.docs.performance import ResultFile, result_files

STREAMS = (1, 8, 32)
RATES = {
    "modelctl, EXL2 of 4.1 bits": ("decoding-8b-exl2", "8b-exl2-rounded, {} streams: tokens/s with graphs"),
    "ExLlamaV2's own generator without a server, in the same run": (
        "decoding-8b-exl2", "8b-exl2-rounded, {} streams: tokens/s of the package's generator",
    ),
    "modelctl, fp16": ("decoding-8b", "8b, {} streams: tokens/s with graphs"),
    "ExLlamaV2's own generator, fp16, in the same run": (
        "decoding-8b", "8b, {} streams: tokens/s of the package's generator",
    ),
    "the same on another host": (
        "serving-exllamav2", "8b, {} streams: tokens/s, bare generator in one process",
    ),
}  # fmt: skip
"""Rows of tokens per second: what is measured → the result file, and the name of the figure for a number of streams."""


@dataclass(frozen=True)
class Headline:
    """One further figure.

    says    the meaning of the figure, for a reader who does not know the benchmark
    file    the result file
    result  the name of the figure in the file
    unit    text behind the value
    """

    says: str
    file: str
    result: str
    unit: str = ""


HEADLINES = (
    Headline(
        "how much later an 8B's first token comes than from ExLlamaV2's own generator", "serving-exllamav2",
        "8b, 1 streams: first token later than bare", " ms",
    ),
    Headline(
        "first token of an 8B that sleeps, with another one put to sleep for it, median", "sleeping",
        "8b, in turn: first token after a wake, median", " s",
    ),
    Headline("the same, if it has to be loaded", "sleeping", "8b: first token after a load, median", " s"),
    Headline(
        "first token of a 1B after its worker was killed", "spare-exllamav2",
        "1b: first token after a death, with a spare", " s",
    ),
    Headline(
        "random faults against real processes (kills, cuts, full disks, orders), while requests ran", "chaos",
        "faults inflicted, of supervisors' ends, of clients",
    ),
    Headline("answers that went on in another worker meanwhile", "chaos",
             "answers that went on in another worker and were finished"),
    Headline("broken promises meanwhile", "chaos", "violations of the invariants"),
)  # fmt: skip


def readme_figures() -> str:
    """Return the tables of README.md."""
    return figures(result_files())


def figures(files: dict[str, ResultFile]) -> str:
    """Return the tables, and a sentence that counts the targets. Raises KeyError if a file has lost a figure."""
    rates = [
        (what, *(shown(round(files[file].values[name.format(count)])) for count in STREAMS))
        for what, (file, name) in RATES.items()
    ]
    rows = []
    for each in HEADLINES:
        value = files[each.file].values[each.result]
        text = f"{value:.3g}{each.unit}" if each.unit else shown(value)
        rows.append((each.says, text, machine(files[each.file])))
    verdicts = [result["meets"] for file in files.values() for result in file.results if result["target"]]
    return "\n\n".join(
        (
            table(("8B on one NVIDIA H200, tokens per second", *(f"{n} at once" for n in STREAMS)), rates),
            "Other servers, such as TabbyAPI, vLLM or llama.cpp, were not measured beside it.",
            table(("", "measured", "on"), rows),
            f"[Performance](docs/performance.md) has all figures. {len(verdicts)} of them have a target, and "
            f"{verdicts.count(False)} [miss it](docs/performance.md#missed-targets).",
        )
    )


def machine(file: ResultFile) -> str:
    """Return the name of the machine of a result file, without versions."""
    gpu, _, rest = str(file.content["machine"]).partition(", ")
    return gpu if gpu.startswith("NVIDIA") else f"{gpu}, {rest}".partition(", Python")[0]
