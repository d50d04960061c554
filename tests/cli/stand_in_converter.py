"""A stand-in for exllamav2.conversion.convert_exl2: it has the package's options, output, job file and checkpoints, and
computes nothing. A checkpoint comes after each fourth module, where the package waits three minutes.

STAND_IN is a directory. The stand-in appends to ``trace`` there what it computes, and waits at a place, such as
"Quantizing 6" or "window", while a file of that name exists. It says so by the file "window waits". While the
file ``fault`` is there, the disk is full.
"""

import argparse
import json
import os
import shutil
import sys
import time
from pathlib import Path

from exllamav2.conversion.bot_status import print_stage  # type: ignore[import-not-found]

MODULES = 12
PLACE = Path(os.environ["STAND_IN"])

parser = argparse.ArgumentParser()
for name in ("-i", "-o", "-cf", "-m"):
    parser.add_argument(name)
parser.add_argument("-b", type=float)
parser.add_argument("-hb", type=int)
parser.add_argument("-so", action="store_true")
args = parser.parse_args()
job_file = Path(args.o, "job_new.json")
job = {"in_dir": args.i, "out_dir": args.o, "bits": args.b, "head_bits": args.hb, "compile_full": args.cf,
       "progress": "optimize" if args.m else "measure_quant"}  # fmt: skip
if job_file.exists():
    print(" -- Resuming job")
    job.update(json.loads(job_file.read_text()))
    if "invalid" in job:
        print(" ** Error: Corrupted job")
        sys.exit()
job["status_output"] = args.so


def trace(text: str) -> None:
    with (PLACE / "trace").open("a") as file:
        file.write(f"{text}\n")


def save_job() -> None:
    job_file.write_text(json.dumps(job))


def wait_at(place: str) -> None:
    while (PLACE / place).exists():
        (PLACE / f"{place} waits").touch()
        time.sleep(0.01)


def modules(stage: str, key: str) -> None:
    for index in range(job.get(key, 0), MODULES):
        print_stage(job, stage, index, MODULES)
        print(f" -- Layer: model.layers.{index // 2} ({'MLP' if index % 2 else 'Attention'})")
        trace(f"{stage} {index}")
        wait_at(f"{stage} {index}")
        time.sleep(float(os.environ.get("STAND_IN_S", "0")))
        if index % 4 == 3:
            print(" -- Saving checkpoint...")
            job["invalid"] = True
            save_job()
            wait_at("window")
            job[key] = index + 1
            del job["invalid"]
            save_job()
    print_stage(job, stage, MODULES, MODULES)


save_job()
trace(f"begins on GPU {os.environ['CUDA_VISIBLE_DEVICES']} with {job['progress']}")
if job["progress"] == "measure_quant":
    print_stage(job, "Tokenizing (1)", 0, 1)
    modules("Measuring", "last_module_idx")
    Path(args.o, "measurement.json").write_text("{}")
    job["progress"] = "optimize"
    save_job()
if job["progress"] == "optimize":
    print_stage(job, "Optimizing", 1, 1)
    job["progress"] = "quant"
    save_job()
if (PLACE / "fault").exists():
    with open("/dev/full", "w") as file:
        file.write("hidden states")
if job["progress"] == "quant":
    modules("Quantizing", "q_last_module_idx")
    job["progress"] = "compile"
    save_job()
out = Path(args.cf)
assert not out.exists(), "what a killed converter has left is removed"
out.mkdir()
print_stage(job, "Compiling", MODULES - 1, MODULES)
shutil.copyfile(Path(args.i, "model.safetensors"), out / "output.safetensors")
for name in ("config.json", "tokenizer.json"):
    shutil.copyfile(Path(args.i, name), out / name)
wait_at("compiling")
print_stage(job, "Compiling", MODULES, MODULES)
job["progress"] = "finished"
save_job()
print(" -- Finished")
