"""Name the formats of weights that no engine loads, with what to do instead."""

from collections.abc import Mapping
from typing import Any

REMEDY = (
    "use the model's EXL2 weights, GPTQ with 4 bits, or its 16-bit weights (`modelctl quantize` makes EXL2 of them)"
)
_NAMES = {
    "awq": "AWQ",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "exl3": "EXL3, the format of ExLlamaV3",
    "fbgemm_fp8": "FP8",
    "fp8": "FP8",
    "mlx": "MLX, which runs on Apple's machines only",
    "modelopt": "ModelOpt (NVFP4 or FP8)",
    "mxfp4": "MXFP4",
    "nvfp4": "NVFP4",
}


def declared_method(config: Mapping[str, Any]) -> Any:
    """Return how config.json says that the weights are quantized, None if it does not. The value may be of any type."""
    declared = config.get("quantization_config")
    if isinstance(declared, dict) and (method := declared.get("quant_method")):
        if method in ("compressed-tensors", "modelopt") and "nvfp4" in f"{declared.get('format')}".lower():
            return "NVFP4"
        return method
    if config.get("compression_config"):  # the key of older versions of compressed-tensors
        return "compressed-tensors"
    mlx = config.get("quantization")
    return "mlx" if isinstance(mlx, dict) and {"bits", "group_size"} <= set(mlx) else None


def refusal(path: object, method: str) -> str:
    """Return the words about weights in a format that no engine loads."""
    return f"{path} is quantized by {_NAMES.get(method, method)}, which no engine here loads: {REMEDY}"
