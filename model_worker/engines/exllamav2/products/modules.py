"""Let captured steps compute the quantised matrices of a model with the kernels of ``products.cu``.

The package's attention stays what it is: a copy of its module finds our projections in the places of its own. A norm
leaves its result in the order of the weights behind it, where the projections read it.

A row's results have the same bits whatever rows are computed beside it, and whatever their number.
"""

import contextlib
import copy
import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from model_worker.engines.exllamav2.nvrtc import Module, NoKernelsError
from model_worker.engines.exllamav2.products import layout

_SOURCE = Path(__file__).with_name("products.cu")
_ROW_TILES = 1, 2, 4, 8
_SILU, _GELU = 0, 1


def _most_shared(tiles: int) -> int:
    return layout.STAGES * layout.THREADS * 16 * (max(layout.WIDTHS) + tiles)


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class _Matrix:
    """A quantised matrix of the package, as it lies in memory. Raises UnsuitedError."""

    def __init__(self, linear: Any) -> None:
        tensors = linear.q_tensors
        if not isinstance(tensors, dict):
            raise layout.UnsuitedError("it is not quantised")
        self.inputs, self.device = linear.in_features, linear.device_idx
        self.gptq = "qweight" in tensors
        if self.gptq:
            self.words, self.steps, self.scale = tensors["qweight"], tensors["qzeros"], tensors["scales"]
            self.runs = layout.gptq_runs(self.inputs, self.scale.shape[0])
        else:
            self.words, self.steps, self.scale = tensors["q_weight"], tensors["q_scale"], tensors["q_scale_max"]
            self.runs = layout.exl2_runs(tensors["q_groups"].tolist(), self.words.shape[0])
        self.outputs = self.words.shape[1]
        if self.outputs % 8:
            raise layout.UnsuitedError(f"it has {self.outputs} outputs")
        if sum(run.blocks for run in self.runs) * layout.BLOCK != self.inputs:
            raise layout.UnsuitedError(f"its groups do not make {self.inputs} inputs")
        self.bias = tensors.get("bias")
        self.perm: Any = tensors.get("q_perm")
        if self.perm is not None:
            order = self.perm.long() & 0xFFFF
            if torch.equal(order, torch.arange(self.inputs, device=order.device)):
                self.perm = None


def _one_order(matrices: Sequence[_Matrix]) -> torch.Tensor | None:
    """Return the order of inputs that matrices share. Raises UnsuitedError."""
    first: torch.Tensor | None = matrices[0].perm
    for other in matrices[1:]:
        if (first is None) != (other.perm is None) or (first is not None and not torch.equal(first, other.perm)):
            raise layout.UnsuitedError("matrices of the same input have other orders")
    return first


class Products:
    """The kernels, and the memory that the products of one GPU share. All launches of a GPU are on one stream.

    This memory is no part of what a sleep takes away, since counters and the ends of ``placed`` must stay zero.

    device  the GPU's index
    widths  the widths of weights in the model

    Raises NoKernelsError.
    """

    def __init__(self, device: int, widths: Sequence[int], *, gptq: bool) -> None:
        source = _SOURCE.read_text()
        cases = " ".join(f"CASE({bits})" for bits in widths)
        self.device = device
        self._placing = Module(source, [], device)
        self._kernels = Module(source, [f"WIDTHS={cases}", *(["GPTQ4"] if gptq else [])], device)
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count
        self._sums = torch.empty(0)
        self._counters = torch.empty(0)
        self._placed: dict[tuple[str, int], torch.Tensor] = {}

    def reserve(self, sums: int, counters: int) -> None:
        """Have room for as many fp32 numbers, and for as many counters."""
        if sums > self._sums.numel():
            self._sums = torch.empty(sums, dtype=torch.float, device=f"cuda:{self.device}")
        if counters > self._counters.numel():
            self._counters = torch.zeros(counters, dtype=torch.int32, device=f"cuda:{self.device}")

    def placed(self, what: str, inputs: int) -> torch.Tensor:
        """Return memory for rows of ``inputs`` values in the order of weights.

        Products read up to three blocks behind the last. These must stay zero, so each number of inputs has its own.
        """
        blocks = inputs // layout.BLOCK + layout.TILE_BLOCKS - 1
        size = blocks * layout.BLOCK * layout.MOST_ROWS
        made = self._placed.get((what, inputs))
        if made is None:
            made = torch.zeros(size, dtype=torch.half, device=f"cuda:{self.device}")
            self._placed[what, inputs] = made
        return made

    def place(self, x: torch.Tensor, perm: torch.Tensor | None, placed: torch.Tensor) -> None:
        """Put the rows of x, fp16 [rows, inputs], in the order of weights."""
        rows, inputs = x.shape
        self._placing.launch(
            self._placing.function("place"), (-(-inputs // 1024), rows, 1), 128, 0, ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(_address(perm)), ctypes.c_void_p(placed.data_ptr()), ctypes.c_int(inputs),
        )  # fmt: skip

    def norm(self, x: torch.Tensor, norm: Any, perm: torch.Tensor | None, placed: torch.Tensor) -> None:
        """Place the RMS norm of the rows of x, fp16 or fp32 [rows, inputs]. ``norm``: the package's module."""
        rows, inputs = x.shape
        self._placing.launch(
            self._placing.function("rms_norm", 64 << 10), (rows, 1, 1), 512, 2 * inputs, ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(norm.weight.data_ptr()), ctypes.c_void_p(_address(perm)),
            ctypes.c_void_p(placed.data_ptr()), ctypes.c_int(inputs), ctypes.c_float(norm.variance_epsilon),
            ctypes.c_int(x.dtype == torch.float),
        )  # fmt: skip

    def launch(self, name: str, strips: int, launch: layout.Launch) -> None:
        """Queue a product."""
        launch.sums, launch.counters = self._sums.data_ptr(), self._counters.data_ptr()
        tiles = next(tiles for tiles in _ROW_TILES if launch.rows <= 8 * tiles)
        shared = layout.STAGES * layout.THREADS * 16 * (launch.bits + tiles)
        function = self._kernels.function(f"{name}_{tiles}", _most_shared(tiles))
        self._kernels.launch(function, (strips, launch.parts, 1), layout.THREADS, shared, launch)


class _Product:
    """One launch: one to three matrices with the same inputs.

    end  "store", "add" or "gated", as in products.cu
    """

    def __init__(self, products: Products, matrices: Sequence[_Matrix], end: str, kind: int = 0) -> None:
        self._products, self.matrices, self._end = products, matrices, end
        self.perm = _one_order(matrices)
        self.outputs = [matrix.outputs for matrix in matrices]
        self._strips = sum(-(-outputs // layout.STRIP) for outputs in self.outputs)
        tiles = min(matrix.runs[-1].tile + matrix.runs[-1].tiles for matrix in matrices)
        parts = layout.count_of_parts(self._strips, tiles, products.processors)
        self._launch = launch = layout.Launch()
        for number, matrix in enumerate(matrices):
            described = launch.matrix[number]
            layout.fill(described, matrix.runs, matrix.outputs, parts)
            described.words, described.steps = matrix.words.data_ptr(), matrix.steps.data_ptr()
            described.scale, described.bias = matrix.scale.data_ptr(), _address(matrix.bias)
            described.pitch = matrix.outputs
        launch.matrices, launch.parts, launch.kind = len(matrices), parts, kind
        launch.width = self._strips * layout.STRIP
        launch.bits = max(run.bits for matrix in matrices for run in matrix.runs)
        products.reserve(parts * layout.MOST_ROWS * launch.width if parts > 1 or end != "store" else 0, self._strips)

    def __call__(self, x: torch.Tensor, out: Sequence[torch.Tensor], rows: int) -> None:
        """Queue the product of the placed ``x``. ``out``: [rows, outputs] of each matrix, or what "gated" places."""
        launch = self._launch
        launch.x, launch.rows = x.data_ptr(), rows
        if self._end == "gated":
            launch.placed = out[0].data_ptr()
        else:
            for number, tensor in enumerate(out):
                launch.matrix[number].out = tensor.data_ptr()
        self._products.launch(self._end, self._strips, launch)


class _Norm:
    """The norm in front of projections: places its result, and remembers what it was given."""

    def __init__(self, products: Products, norm: Any, perm: torch.Tensor | None, what: str, inputs: int) -> None:
        self._products, self._norm, self._perm = products, norm, perm
        self.placed = products.placed(what, inputs)
        self.given = torch.empty(0)

    def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
        self.given = hidden
        self._products.norm(hidden.view(-1, hidden.shape[-1]), self._norm, self._perm, self.placed)
        return hidden


class _Queries:
    """Computes queries, keys and values in one launch. Stands in the place of ``q_proj``."""

    def __init__(self, product: _Product, norm: _Norm) -> None:
        self._product, self._norm = product, norm
        self.results: list[torch.Tensor] = []

    def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
        shape = hidden.shape[:-1]
        self.results = [
            torch.empty((*shape, outputs), dtype=torch.half, device=hidden.device) for outputs in self._product.outputs
        ]
        self._product(self._norm.placed, self.results, shape.numel())
        return self.results[0]


class _Other:
    """The keys, or the values, that ``_Queries`` has computed."""

    def __init__(self, queries: _Queries, number: int) -> None:
        self._queries, self._number = queries, number

    def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
        return self._queries.results[self._number]


class _Output:
    """Projects what attention has found. Without a norm behind it, the result is added to the residual stream."""

    def __init__(self, products: Products, product: _Product, norm: _Norm | None) -> None:
        self._products, self._product, self._norm = products, product, norm
        self._placed = products.placed("attention", product.matrices[0].inputs)

    def forward(self, found: torch.Tensor, **_: Any) -> torch.Tensor:
        rows = found.shape[:-1].numel()
        self._products.place(found.view(rows, -1), self._product.perm, self._placed)
        if self._norm is not None:
            out = self._norm.given
        else:
            out = torch.empty((*found.shape[:-1], self._product.outputs[0]), dtype=torch.half, device=found.device)
        self._product(self._placed, [out], rows)
        return out


def _attention(products: Products, module: Any) -> Any:
    """Return a copy of the package's attention with our projections. Raises UnsuitedError."""
    _plain(module)
    matrices = [_Matrix(linear) for linear in (module.q_proj, module.k_proj, module.v_proj)]
    own = copy.copy(module)
    queries = _Product(products, matrices, "store")
    norm = _Norm(products, module.pre_layernorm, queries.perm, "hidden", matrices[0].inputs)
    added = module.post_layernorm is None
    wide = bool(module.archparams.residual_stream_fp32)
    output = _Product(products, [_Matrix(module.o_proj)], "add" if added else "store", int(wide))
    own.q_handle, own.pre_layernorm = None, norm
    own.q_proj = _Queries(queries, norm)
    own.k_proj, own.v_proj = _Other(own.q_proj, 1), _Other(own.q_proj, 2)
    own.o_proj = _Output(products, output, norm if added else None)
    own.has_residual = not added
    return own


class _Mlp:
    """Takes the place of the package's MLP. Raises UnsuitedError."""

    def __init__(self, products: Products, module: Any) -> None:
        _plain(module)
        if module.gate_proj is None or module.archparams.clamp_hidden_states:
            raise layout.UnsuitedError("its MLP is of another kind")
        kinds = {"silu": _SILU, "gelu": _GELU}
        if module.archparams.mlp_act_func not in kinds:
            raise layout.UnsuitedError(f"its activation is {module.archparams.mlp_act_func}")
        self._module, self._added = module, module.post_layernorm is None
        self._wide = bool(module.archparams.residual_stream_fp32)
        gated = [_Matrix(module.gate_proj), _Matrix(module.up_proj)]
        self._gated = _Product(products, gated, "gated", kinds[module.archparams.mlp_act_func])
        self._norm = _Norm(products, module.pre_layernorm, self._gated.perm, "hidden", gated[0].inputs)
        down = _Matrix(module.down_proj)
        if down.perm is not None:
            raise layout.UnsuitedError("its second matrix has an order of its own")
        self._down = _Product(products, [down], "add" if self._added else "store", int(self._wide))
        self._inner = products.placed("inner", down.inputs)

    def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
        rows = hidden.shape[:-1].numel()
        self._norm.forward(hidden)
        self._gated(self._norm.placed, [self._inner], rows)
        if self._added:
            self._down(self._inner, [hidden], rows)
            return hidden
        out = torch.empty(hidden.shape, dtype=torch.half, device=hidden.device)
        self._down(self._inner, [out], rows)
        hidden += self._module.post_layernorm.forward(out, output_fp32=self._wide)
        return hidden


class _Head:
    """Takes the place of the last norm and the head. Raises UnsuitedError."""

    def __init__(self, products: Products, norm: Any, head: Any) -> None:
        if type(norm).__name__ != "ExLlamaV2RMSNorm":
            raise layout.UnsuitedError("its last norm is of another kind")
        self._product = _Product(products, [_Matrix(head)], "store")
        self._norm = _Norm(products, norm, self._product.perm, "hidden", head.in_features)

    def forward(self, hidden: torch.Tensor, **_: Any) -> torch.Tensor:
        self._norm.forward(hidden)
        shape = (*hidden.shape[:-1], self._product.outputs[0])
        out = torch.empty(shape, dtype=torch.half, device=hidden.device)
        self._product(self._norm.placed, [out], hidden.shape[:-1].numel())
        return out


def _plain(module: Any) -> None:
    """Raise UnsuitedError unless an attention or MLP begins with an RMS norm, and is on one GPU."""
    if module.is_tp or not module.has_norm or not module.has_residual:
        raise layout.UnsuitedError("it has parts of another kind")
    if type(module.pre_layernorm).__name__ != "ExLlamaV2RMSNorm":
        raise layout.UnsuitedError("its norms are of another kind")


def _made(products: Products, module: Any) -> Any:
    """Return what computes a layer's attention or MLP. Raises UnsuitedError."""
    match type(module).__name__:
        case "ExLlamaV2Attention":
            return _attention(products, module)
        case "ExLlamaV2MLP":
            return _Mlp(products, module)
        case "ExLlamaV2MoEMLP":
            raise layout.UnsuitedError("it is a mixture of experts")
    raise layout.UnsuitedError("it has parts of another kind")


def _quantised(module: Any) -> list[Any]:
    return [each for each in (module, *module.submodules) if isinstance(getattr(each, "q_tensors", None), dict)]


def _of_gpus(linears: Sequence[Any]) -> dict[int, Products]:
    """Return the kernels for the widths that occur, by GPU. Raises NoKernelsError."""
    widths, gptq = set(), False
    for linear in linears:
        with contextlib.suppress(layout.UnsuitedError):
            matrix = _Matrix(linear)
            widths |= {run.bits for run in matrix.runs}
            gptq = gptq or matrix.gptq
    ordered = sorted(widths, reverse=True)
    return {index: Products(index, ordered, gptq=gptq) for index in sorted({linear.device_idx for linear in linears})}


class OwnModules:
    """The modules of a model that have products of ours.

    model  the package's. It has no adapters: these are added between two products of the package

    ``complete`` says whether they are all that is quantised. ``why`` says for people why the package's kernels compute
    the rest; "" if there is no rest, or nothing is quantised.
    """

    def __init__(self, model: Any) -> None:
        self.why, self.complete = "", False
        self._own: dict[int, Any] = {}
        self._skipped: set[int] = set()
        quantised = {id(module): linears for module in model.modules if (linears := _quantised(module))}
        if not quantised:
            return
        try:
            products = _of_gpus([linear for linears in quantised.values() for linear in linears])
        except NoKernelsError as e:
            self.why = str(e)
            return
        norm, head = model.modules[-2:]
        for module in model.modules:
            if id(module) not in quantised:
                continue
            try:
                gpu = products[module.device_idx]
                self._own[id(module)] = _Head(gpu, norm, head) if module is head else _made(gpu, module)
            except layout.UnsuitedError as e:
                self.why = self.why or f"{module.key}: {e}"
        if id(head) in self._own:
            self._skipped.add(id(norm))
        self.complete = not self.why

    def of(self, modules: Sequence[Any], rows: int) -> list[Any]:
        """Return what computes ``modules`` for as many rows: ours in the places of theirs."""
        if rows > layout.MOST_ROWS:
            return list(modules)
        return [self._own.get(id(module), module) for module in modules if id(module) not in self._skipped]
