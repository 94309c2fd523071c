"""Initialize the weights of a model in place, with the same values for every parallel layout.

Each element depends only on the seed, the parameter's `names.seed_name` and the element's index in
the unsharded tensor (see `ops.philox`). A rank therefore draws only its own shard.

Rows and columns of a parameter are those of a matrix: columns are the last axis, rows all other
axes, flattened.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from megatron_tape.config.schema import ExtensionConfig, ModelConfig
from megatron_tape.model.names import POSITION, kind_of, seed_name, split_layer
from megatron_tape.model.shapes import lora_factors, parameter_shapes
from megatron_tape.ops import philox
from megatron_tape.parallel.partitions import is_sharded, local_storage
from megatron_tape.position import encoding_of

CHUNKS = {"cpu": 2**17, "cuda": 2**22}
"""Elements drawn at once: few enough to fit a CPU core's cache, enough to occupy a GPU."""


@dataclass(frozen=True)
class Initialization:
    """Initial distribution of a parameter: normal, uniform or constant."""

    shape: tuple[int, ...]
    """Shape of the unsharded parameter."""
    std: float = 0.0
    """If not 0, draw from a normal distribution with mean 0 and this standard deviation."""
    bound: float = 0.0
    """If not 0, draw from a uniform distribution between -bound and bound."""
    value: float | tuple = 0.0
    """The constant if `std` and `bound` are 0: one number for all elements, or nested tuples of the
    shape `shape`.
    """

    def block(
        self,
        key: philox.Key,
        rows: range,
        columns: range,
        device: torch.device | str,
    ) -> Tensor:
        """Return the initial values of these rows and columns, float32 (len(rows),
        len(columns)).
        """
        if self.std:
            return philox.normal(key, rows, columns, device).mul_(self.std)
        if self.bound:
            uniform = philox.uniform(key, rows, columns, device)
            return uniform.mul_(2 * self.bound).sub_(self.bound)
        # Rows and columns of a constant are cut from the whole parameter; `expand` takes no memory.
        value = torch.tensor(self.value, dtype=torch.float32, device=device)
        matrix = value.expand(self.shape).view(-1, self.shape[-1])
        return matrix[rows.start : rows.stop, columns.start : columns.stop]


def weight_initializations(
    model_config: ModelConfig, extension: ExtensionConfig | None = None
) -> dict[str, Initialization]:
    """Return the initialization of every parameter by name, with LoRA layers if `extension` adds
    them.

    Matrices and embeddings are normal with standard deviation `model.init_std`, divided by sqrt(2
    L) for matrices that write to the residual stream of L layers. LoRA's A is uniform up to 1 /
    sqrt(input size), as in peft, and LoRA's B is 0. Norms are 1, biases 0. The positional encoding
    declares the values of its own parameters.
    """
    encoding = encoding_of(model_config)
    factors = lora_factors(model_config, extension)
    # Each layer adds two outputs to the residual stream.
    residual_scale = (2 * model_config.num_layers) ** -0.5
    initials = {}
    for name, shape in parameter_shapes(model_config, extension).items():
        layer, suffix = split_layer(name)
        kind = kind_of(name)
        if kind == "position":
            declared = encoding.parameters(layer)[suffix.removeprefix(POSITION)]
            initials[name] = Initialization(shape, std=declared.std, value=declared.value)
        elif kind == "lora" and factors[suffix].side == "A":
            initials[name] = Initialization(shape, bound=shape[1] ** -0.5)
        elif kind in ("lora", "biases"):
            initials[name] = Initialization(shape)
        elif kind == "norms":
            initials[name] = Initialization(shape, value=1.0)
        elif suffix in ("self_attention.linear_proj.weight", "mlp.linear_fc2.weight"):
            initials[name] = Initialization(shape, std=model_config.init_std * residual_scale)
        else:
            initials[name] = Initialization(shape, std=model_config.init_std)
    return initials


def initialized_whole(
    name: str,
    initial: Initialization,
    seed: int,
) -> Tensor:
    """Return the initial value of the unsharded parameter `name`, float32 on the CPU."""
    whole = torch.empty(initial.shape)
    rows, columns = _shard_ranges(initial.shape)
    key = philox.key_of(seed, seed_name(name))
    # `whole` has all elements of the parameter, from index 0 on.
    _fill(whole.view(-1), 0, rows, columns, initial, key)
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
    """Initialize in place the parameters of a `LanguageModel` or `Pipeline`, all of them or those
    in `names`.

    `initials` comes from `weight_initializations`. This process is tensor-parallel rank `rank` of
    `size`. Under ZeRO 3 it draws only its partition of each parameter.
    """
    for name, parameter in model.named_parameters():
        if names is None or name in names:
            initial = initials[name]
            # `memory` holds elements of the flattened shard from index `first` on: all of them, or
            # under ZeRO 3 this rank's part.
            memory, first = local_storage(parameter)
            rows, columns = _shard_ranges(initial.shape, parameter, rank, size)
            key = philox.key_of(seed, seed_name(name))
            _fill(memory, first, rows, columns, initial, key)


def _shard_ranges(
    shape: tuple[int, ...],
    parameter: nn.Parameter | None = None,
    rank: int = 0,
    size: int = 1,
) -> tuple[list[range], range]:
    """Return ranges of rows, and the range of columns, that form the shard of tensor-parallel rank
    `rank` of `size`.

    `shape` is that of the unsharded parameter; Megatron's attributes of `parameter` say how it is
    sharded. With None, the shard is the whole parameter.
    """
    *leading, width = shape
    all_rows = [range(prod(leading))]
    if size == 1 or parameter is None or not is_sharded(parameter):
        return all_rows, range(width)

    # A fused matrix, such as gate and up, is cut into `partition_stride` pieces per rank.
    axis = parameter.partition_dim % len(shape)
    pieces = size * parameter.partition_stride
    length = shape[axis] // pieces
    # The indices along `axis` at which this rank's pieces begin.
    starts = [piece * length for piece in range(rank, pieces, size)]
    if axis == len(leading):
        assert len(starts) == 1, "no parameter is sharded into interleaved columns"
        return all_rows, range(starts[0], starts[0] + length)

    # A row of the matrix is one index of each leading axis; those after `axis` change faster.
    inner = prod(leading[axis + 1 :])
    rows = []
    for outer in range(prod(leading[:axis])):
        for start in starts:
            first = outer * shape[axis] + start
            rows.append(range(first * inner, (first + length) * inner))
    return rows, range(width)


def _fill(
    memory: Tensor,
    first: int,
    rows: list[range],
    columns: range,
    initial: Initialization,
    key: philox.Key,
) -> None:
    """Fill `memory` with the elements of the flattened shard from index `first` on.

    The shard consists of `rows`, in this order, and `columns` of the unsharded matrix.
    """
    width = len(columns)
    rows_at_once = max(1, CHUNKS[memory.device.type] // width)
    # All indices count elements of the flattened shard: `memory` has those from `first` to `last`,
    # a chunk of rows those from `begin` to `end`.
    last = first + len(memory)
    begin = 0
    for row_range in rows:
        for row in range(0, len(row_range), rows_at_once):
            chunk = row_range[row : row + rows_at_once]
            end = begin + len(chunk) * width
            if end > first and begin < last:
                values = initial.block(key, chunk, columns, memory.device).flatten()
                # The first and the last chunk may extend beyond `memory`.
                low = max(first, begin)
                high = min(last, end)
                memory[low - first : high - first] = values[low - begin : high - begin]
            begin = end
