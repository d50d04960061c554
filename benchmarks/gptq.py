"""Make GPTQ models by rounding to nearest, each with a twin that has exactly the same weights in fp16.

    python -m benchmarks.models letters-gptq 1b-gptq-act-order ...

The file format is the one that AutoGPTQ writes and ExLlamaV2 reads. A matrix of ``in`` inputs and ``out`` outputs, in 4
bits, is stored as

    qweight  int32 [in / 8, out]      input 8 r + i in bits 4 i to 4 i + 3 of row r
    qzeros   int32 [groups, out / 8]  zero - 1 of output 8 c + i in bits 4 i to 4 i + 3 of column c
    scales   fp16  [groups, out]
    g_idx    int32 [in]               the group of each input

Its weight [o, i] is scales[g_idx[i], o] * (level[i, o] - zero[g_idx[i], o]), rounded to fp16. Zeros are stored minus
one: that is format "gptq", the older of two. In "gptq_v2" they are stored unchanged. Sources: ``pack`` of AutoGPTQ 0.7
(nn_modules/qlinear/qlinear_cuda_old.py); linear.py, ext.py, ext_qmatrix.cpp and cuda/q_matrix.cu of ExLlamaV2 0.3.2.

GPTQ itself chooses levels by the effect of errors on calibration data. The storage format does not depend on that
choice. Embedding, head and norms stay in fp16, as with AutoGPTQ.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

BITS, GROUP = 4, 128
"""Bits of a level, and inputs of a group."""
LEVELS = 1 << BITS
PACKED = 32 // BITS
"""Levels in an int32."""
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The quantized matrices of a Llama's layer."""


@dataclass(frozen=True)
class Scheme:
    """The layout of levels.

    symmetric  every zero is 8; otherwise each group's levels reach from its smallest weight to its largest
    act_order  inputs are put into groups by size, largest first, so g_idx is not ascending. GPTQ uses the size of the
               activations; here it is the size of the weights, the sum of their squares
    """

    symmetric: bool = True
    act_order: bool = False


SCHEMES = {"gptq": Scheme(), "gptq-act-order": Scheme(symmetric=False, act_order=True)}
"""Schemes by the suffix of a model's name."""


@dataclass(frozen=True)
class Rounded:
    """A matrix in levels, before packing: levels int32 [in, out], 0 to 15; zeros int32 [groups, out], 1 to 15; scales
    fp16 [groups, out]; groups int32 [in]."""

    levels: "torch.Tensor"
    zeros: "torch.Tensor"
    scales: "torch.Tensor"
    groups: "torch.Tensor"

    def weight(self) -> "torch.Tensor":
        """Return the weight as fp16 [out, in], rounded once, as ExLlamaV2's unpacking kernel rounds it."""
        index = self.groups.long()
        return (self.scales[index] * (self.levels - self.zeros[index]).half()).T.contiguous()

    def packed(self) -> dict[str, "torch.Tensor"]:
        return {
            "qweight": pack_rows(self.levels),
            "qzeros": pack_rows((self.zeros - 1).T.contiguous()).T.contiguous(),
            "scales": self.scales,
            "g_idx": self.groups,
        }


def pack_rows(values: "torch.Tensor") -> "torch.Tensor":
    """Pack int32 [rows, columns] of 0 to 15 into int32 [rows / 8, columns]: eight rows in one, the first in the lowest
    bits."""
    import torch

    rows, columns = values.shape
    places = torch.arange(0, 32, BITS, device=values.device)[None, :, None]
    joined = (values.reshape(rows // PACKED, PACKED, columns).long() << places).sum(1)
    return torch.where(joined >= 1 << 31, joined - (1 << 32), joined).int()


def round_to_nearest(weight: "torch.Tensor", scheme: Scheme) -> Rounded:
    """Return ``weight`` [out, in] in 4 bits. Raises ValueError for a size that the kernels cannot compute."""
    import torch

    outputs, inputs = weight.shape
    if inputs % 32 or outputs % 32:
        raise ValueError(f"a matrix of {inputs} inputs and {outputs} outputs: ExLlamaV2 needs multiples of 32")
    full = weight.float()
    order = torch.arange(inputs, device=weight.device)
    if scheme.act_order:
        order = full.square().sum(0).argsort(descending=True, stable=True)
    groups = torch.empty_like(order)
    groups[order] = torch.arange(inputs, device=weight.device) // GROUP
    levels = torch.empty((inputs, outputs), dtype=torch.int32, device=weight.device)
    zeros, scales = [], []
    for begin in range(0, inputs, GROUP):
        own = order[begin : begin + GROUP]
        values = full[:, own].T
        least, most = values.amin(0).clamp(max=0), values.amax(0).clamp(min=0)
        width = 2 * torch.maximum(-least, most) if scheme.symmetric else most - least
        scale = (width / (LEVELS - 1)).clamp(min=torch.finfo(torch.half).tiny).half()
        if scheme.symmetric:
            zero = torch.full_like(scale, LEVELS // 2).int()
        else:
            # A zero of 0 would be stored as -1, and the kernels would read it as 16.
            zero = (-least / scale.float()).round().clamp(1, LEVELS - 1).int()
        levels[own] = ((values / scale.float()).round().int() + zero).clamp(0, LEVELS - 1)
        zeros.append(zero)
        scales.append(scale)
    return Rounded(levels, torch.stack(zeros), torch.stack(scales), groups.int())


def write_both(source: Path, target: Path, twin: Path, scheme: Scheme) -> None:
    """Make a GPTQ model in ``target``, and its twin in ``twin``, of the fp16 Llama in ``source``.

    config.json comes last: a directory that has it is complete. Raises ValueError as ``round_to_nearest`` does.
    """
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    device = "cuda" if torch.cuda.is_available() else "cpu"
    quantized: dict[str, torch.Tensor] = {}
    plain: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                tensor = tensors.get_tensor(name)
                stem = name.removesuffix(".weight")
                if not stem.endswith(MATRICES):
                    quantized[name] = plain[name] = tensor
                    continue
                rounded = round_to_nearest(tensor.to(device), scheme)
                quantized |= {f"{stem}.{part}": packed.cpu() for part, packed in rounded.packed().items()}
                plain[name] = rounded.weight().cpu()
    config: dict[str, Any] = json.loads((source / "config.json").read_text())
    asked = {
        "bits": BITS,
        "group_size": GROUP,
        "damp_percent": 0.01,
        "desc_act": scheme.act_order,
        "static_groups": False,
        "sym": scheme.symmetric,
        "true_sequential": True,
        "checkpoint_format": "gptq",
    }
    for directory, weights in ((target, quantized), (twin, plain)):
        directory.mkdir(parents=True, exist_ok=True)
        for file in source.glob("*.json"):
            if file.name not in ("config.json", "model.safetensors.index.json"):
                shutil.copy(file, directory)
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(target / "quantize_config.json", asked)
    _write_json(twin / "config.json", config)
    _write_json(target / "config.json", config | {"quantization_config": {"quant_method": "gptq"} | asked})


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n")
