"""EXL2 models made by rounding to nearest, in the file format that ExLlamaV2's own converter writes.

    python -m benchmarks.models mixture-exl2-rounded ...

The converter measures every matrix with several numbers of bits, which takes minutes for a layer of 128 experts. Here
every matrix gets 4 bits. The package reads and computes both kinds of file by the same code.

A matrix of ``in`` inputs and ``out`` outputs is stored as

    q_weight     int32 [in / 8, out]      level of input 8 r + i in bits 4 i to 4 i + 3 of row r
    q_scale      int32 [groups, out / 8]  step - 1 of output 8 c + i in bits 4 i to 4 i + 3 of column c
    q_scale_max  fp16  [groups]           the scale that a step of 16 stands for
    q_groups     int16 [2 groups]         bits of each group, and its first row in q_weight
    q_invperm    int32 [in]               place of each input in q_weight; here the inputs keep their order

and its weight [o, i] is (level - 8) * step² * (q_scale_max / 256), each product rounded to fp16. Sources: conversion/
adaptivegptq.py, ext.py, cuda/q_matrix.cu and cuda/quant/qdq_4.cuh of ExLlamaV2 0.3.2.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.gptq import MATRICES, pack_rows

if TYPE_CHECKING:
    import torch

BITS, GROUP = 4, 64
"""Bits of a level, and inputs of a group."""
LEVELS = 1 << BITS
STEPS = 16
QUANTIZED = (*MATRICES, "lm_head")


@dataclass(frozen=True)
class Rounded:
    """A matrix in levels, before packing: levels int32 [in, out], 0 to 15; steps int32 [groups, out], 1 to 16; largest
    fp16 [groups]."""

    levels: "torch.Tensor"
    steps: "torch.Tensor"
    largest: "torch.Tensor"

    def weight(self) -> "torch.Tensor":
        """Return the fp16 weight [out, in], rounded where ExLlamaV2's kernels round."""
        scales = self.steps.square().half() * (self.largest / 256)[:, None]
        return ((self.levels - LEVELS // 2).half() * scales.repeat_interleave(GROUP, 0)).T.contiguous()

    def packed(self) -> dict[str, "torch.Tensor"]:
        import torch

        groups, inputs = len(self.largest), len(self.levels)
        first_rows = torch.arange(groups) * (GROUP * BITS // 32)
        return {
            "q_weight": pack_rows(self.levels),
            "q_scale": pack_rows((self.steps - 1).T.contiguous()).T.contiguous(),
            "q_scale_max": self.largest,
            "q_groups": torch.stack([torch.full((groups,), BITS), first_rows], 1).flatten().short(),
            "q_invperm": torch.arange(inputs).int(),
        }


def round_to_nearest(weight: "torch.Tensor") -> Rounded:
    """Return ``weight`` [out, in] in 4 bits. Raises ValueError for inputs that do not make up whole groups."""
    outputs, inputs = weight.shape
    if inputs % GROUP or outputs % 32:
        raise ValueError(
            f"a matrix of {inputs} inputs and {outputs} outputs: inputs must be a multiple of {GROUP}, outputs of 32"
        )
    grouped = weight.float().T.reshape(-1, GROUP, outputs)
    wanted = grouped.abs().amax(1).clamp(min=1e-4) / ((LEVELS - 1) / 2)
    largest = wanted.amax(1).half()
    steps = ((wanted / largest.float()[:, None]).sqrt() * STEPS).ceil().clamp(1, STEPS).int()
    scales = (steps.square().half() * (largest / 256)[:, None]).float()
    levels = (grouped / scales[:, None]).round().int() + LEVELS // 2
    return Rounded(levels.clamp(0, LEVELS - 1).reshape(inputs, outputs), steps, largest)


def write(source: Path, target: Path) -> None:
    """Make an EXL2 model in ``target`` of the fp16 model in ``source``.

    config.json comes last: a directory that has it is complete. Raises ValueError as ``round_to_nearest`` does.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    written: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                stem, tensor = name.removesuffix(".weight"), tensors.get_tensor(name)
                if not stem.endswith(QUANTIZED):
                    written[name] = tensor
                    continue
                packed = round_to_nearest(tensor.to(device)).packed()
                written |= {f"{stem}.{part}": stored.cpu() for part, stored in packed.items()}
    target.mkdir(parents=True, exist_ok=True)
    for file in source.glob("*.json"):
        if file.name not in ("config.json", "model.safetensors.index.json"):
            shutil.copy(file, target)
    save_file(written, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "exl2", "version": "0.3.2", "bits": BITS}
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
