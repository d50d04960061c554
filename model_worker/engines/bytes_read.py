"""The bytes of weights that each part of a model takes, for the progress of a load. Pure."""

from collections import Counter
from collections.abc import Mapping, Sequence

from model_worker.engines.model_dir import Tensor

_KNOWN_SHARE = 0.9
"""The share of the weights that the parts must take together. Below it their names are not those of the files."""


def bytes_of_modules(tensors: Mapping[str, Tensor], keys: Sequence[str]) -> list[int] | None:
    """Return the bytes of each module's tensors; None if the names of most tensors begin with no module's key.

    keys  names of the modules, such as "model.layers.0". Modules with the same name (the attention and the MLP of a
          layer) share its tensors evenly
    """
    sizes = dict.fromkeys(keys, 0)
    for name, tensor in tensors.items():
        place = name
        while place and place not in sizes:
            place = place.rpartition(".")[0]
        if place:
            sizes[place] += tensor.bytes
    whole = sum(tensor.bytes for tensor in tensors.values())
    if not sum(sizes.values()) >= _KNOWN_SHARE * whole > 0:
        return None
    modules = Counter(keys)
    return [sizes[key] // modules[key] for key in keys]


def bytes_of_parameters(tensors: Mapping[str, Tensor], names: Sequence[str]) -> list[int]:
    """Return the bytes of each parameter. Parameters that are joined from several tensors, and so have names that no
    file has, share evenly what is left."""
    whole = sum(tensor.bytes for tensor in tensors.values())
    known = [tensors[name].bytes if name in tensors else None for name in names]
    others = known.count(None)
    rest = max(0, whole - sum(size or 0 for size in known)) // others if others else 0
    return [rest if size is None else size for size in known]
