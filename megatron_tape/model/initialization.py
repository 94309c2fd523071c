"""Weight initialization.

Every number is drawn from the seed, the parameter's name and its own place in the whole tensor (see `ops.philox`). So a
rank draws only what it keeps, and neither the parallel layout nor the other parameters change it.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.model.names import MATRICES, POSITION, WRAPPED, kind_of, split_layer
from megatron_tape.model.shapes import lora_factors, parameter_shapes
from megatron_tape.ops import philox
from megatron_tape.parallel.partitions import own_memory
from megatron_tape.position import encoding_of

CHUNKS = {"cpu": 2**17, "cuda": 2**22}
"""How many numbers are drawn at once: few enough for a core's cache, or enough to occupy a GPU."""


@dataclass(frozen=True)
class Initialization:
    """How a parameter is initialized: normal, uniform or constant."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    std: float = 0.0
    """Standard deviation of the normal distribution around 0, unless it is 0."""
    bound: float = 0.0
    """Bound of the uniform distribution around 0, unless it is 0."""
    value: float | tuple = 0.0
    """Otherwise the value: one number for all elements, or nested tuples of its shape."""

    def part(self, key: philox.Key, rows: range, columns: range, device: torch.device | str) -> Tensor:
        """Return rows and columns of the whole parameter, float32, seen as a matrix of its last axis and the others."""
        if self.std:
            return philox.normal(key, rows, columns, device).mul_(self.std)
        if self.bound:
            return philox.uniform(key, rows, columns, device).mul_(2 * self.bound).sub_(self.bound)
        value = torch.tensor(self.value, dtype=torch.float32, device=device).expand(self.shape)
        return value.view(-1, self.shape[-1])[rows.start : rows.stop, columns.start : columns.stop]


def weight_initializations(model: ModelConfig, extension: ExtensionConfig | None = None) -> dict[str, Initialization]:
    """Return how every `GPTModel` parameter is initialized, by name; those of LoRA layers if `extension` adds them.

    Matrices and embeddings are normal with `model.init_std`, divided by sqrt(2 L) in L layers where they add to the
    residual stream. LoRA's A are uniform up to 1 / sqrt(width of the input), as in peft, and its B zero.
    """
    encoding, factors = encoding_of(model), {} if extension is None else lora_factors(model, extension)
    residual = ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight")
    found = {}
    for name, shape in parameter_shapes(model, extension).items():
        prefix, _, rest = split_layer(name)
        kind = kind_of(name)
        if kind == "position":
            declared = encoding.parameters(int(prefix.split(".")[2]))[rest.removeprefix(POSITION)]
            found[name] = Initialization(shape, std=declared.std, value=declared.value)
        elif kind == "lora":
            found[name] = Initialization(shape, bound=shape[1] ** -0.5 if factors[rest].side == "A" else 0.0)
        elif kind in (*MATRICES, "embeddings", "output"):
            scale = (2 * model.num_layers) ** -0.5 if rest in residual else 1.0
            found[name] = Initialization(shape, std=model.init_std * scale)
        else:
            found[name] = Initialization(shape, value=1.0 if kind == "norms" else 0.0)
    return found


def initialized_whole(name: str, initial: Initialization, seed: int) -> Tensor:
    """Return the whole `GPTModel` parameter `name` as it is initialized, float32 on the CPU."""
    whole = torch.empty(initial.shape)
    _fill(whole.view(-1), 0, *_share(initial.shape, None, 0, 1), initial, philox.key_of(seed, name))
    return whole


@torch.no_grad()
def initialize_weights(
    model: nn.Module,
    initials: Mapping[str, Initialization],
    seed: int,
    rank: int,
    size: int,
    names: Collection[str] | None = None,
) -> None:
    """Initialize the parameters of a `LanguageModel`, or those with these `names`, where their memory is.

    This is tensor-parallel rank `rank` of `size`; under ZeRO 3 it draws its partitions only.
    """
    for name, parameter in model.named_parameters():
        if names is None or name in names:
            own_name = name.removeprefix(WRAPPED)
            initial = initials[own_name]
            memory, first = own_memory(parameter)
            rows, columns = _share(initial.shape, parameter, rank, size)
            _fill(memory, first, rows, columns, initial, philox.key_of(seed, own_name))


def _share(shape: tuple[int, ...], parameter: nn.Parameter | None, rank: int, size: int) -> tuple[list[range], range]:
    """Return which rows and columns of a whole parameter a tensor-parallel rank holds: those of `model.weights.shard`.

    The columns are those of the last axis; the others, flattened, are the rows.
    """
    *leading, width = shape
    if size == 1 or not getattr(parameter, "tensor_model_parallel", False):
        return [range(prod(leading))], range(width)
    axis, pieces = parameter.partition_dim % len(shape), size * parameter.partition_stride
    length = shape[axis] // pieces
    own = [range(piece * length, (piece + 1) * length) for piece in range(rank, pieces, size)]
    if axis == len(leading):
        assert len(own) == 1, "no parameter is cut into interleaved columns"
        return [range(prod(leading))], own[0]
    outer, inner = prod(leading[:axis]), prod(leading[axis + 1 :])
    starts = range(0, outer * shape[axis], shape[axis])
    return [range((start + x.start) * inner, (start + x.stop) * inner) for start in starts for x in own], range(width)


def _fill(
    memory: Tensor, first: int, rows: list[range], columns: range, initial: Initialization, key: philox.Key
) -> None:
    """Fill `memory` with the numbers from the `first` on of a share that consists of these rows and columns."""
    for chunk, place in chunks_of(rows, len(columns), first, len(memory), CHUNKS[memory.device.type]):
        part = initial.part(key, chunk, columns, memory.device).flatten()[max(-place, 0) : len(memory) - place]
        memory[max(place, 0) :][: len(part)].copy_(part)


def chunks_of(rows: list[range], width: int, first: int, count: int, size: int) -> Iterator[tuple[range, int]]:
    """Yield the rows that hold `count` numbers from the `first` on, about `size` numbers at once.

    With them comes where their first number belongs, counted from `first`; it is negative for what comes before.
    """
    step, passed = max(1, size // width), -first
    for stretch in rows:
        low = max(-passed, 0) // width
        high = min(len(stretch), -((passed - count) // width))
        for top in range(low, high, step):
            yield stretch[top : min(top + step, high)], passed + top * width
        passed += len(stretch) * width
