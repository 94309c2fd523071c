"""All settings of a run, as nested dataclasses.

A run reads `--config recipe.yaml` and `--section.key value`; later values override earlier ones, and an unknown key is
an error. `checks.check` rejects invalid settings before process groups and parameters are created. This module does not
import torch.
"""

import difflib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from megatron_tape.config.data import DataConfig
from megatron_tape.config.encodings import ENCODINGS
from megatron_tape.config.evaluation import EvaluationConfig
from megatron_tape.config.sections import as_dict, build, chosen_by, merge, unflatten, validate_as
from megatron_tape.config.train import TrainConfig
from megatron_tape.config.values import Count, Decay, NotNegative, NotNegativeInt, PathText, Positive
from megatron_tape.errors import UserError
from megatron_tape.io.strict_yaml import dump

TRAINABLE = ("position", "lora", "embeddings", "output", "norms")
"""Parameter kinds that `extension.trains` accepts."""
LORA_TARGETS = ("q", "k", "v", "o")
ATTENTION_BACKENDS = ("auto", "triton", "tiled", "torch", "torch_wide", "flash_attn", "flex", "fla", "naive")


def _known_encoding(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), ENCODINGS, n=1)
    meant = f"did you mean {close[0]}? There are" if close else "choose from"
    if name not in ENCODINGS:
        raise UserError(name, "is no encoding", f"{meant} {', '.join(ENCODINGS)}")
    return name


def _settings_of_encoding(given: Any, info: ValidationInfo) -> Any:
    """Validate `given` as the settings of the chosen encoding; return it unchanged if the encoding is unknown."""
    encoding = ENCODINGS.get(info.data.get("position_encoding")) if info.data else None
    return given if encoding is None else validate_as(encoding.Settings, given)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of the model, saved with every checkpoint."""

    position_encoding: Annotated[str, AfterValidator(_known_encoding)] = "tape"
    """Positional encoding: tape, rope, nope, or another name from docs/encodings.md."""
    position: Annotated[Any, AfterValidator(_settings_of_encoding), Field(validate_default=True)] = field(
        default_factory=dict, metadata=chosen_by("position_encoding", ENCODINGS)
    )
    """Settings of the positional encoding."""
    num_layers: Annotated[int, Field(ge=1, le=10_000)]
    """Number of transformer layers."""
    hidden_size: Annotated[int, Field(ge=1, le=2**20)]
    """Width of the hidden states (C)."""
    ffn_hidden_size: Annotated[int, Field(ge=1, le=2**24)]
    """Inner width of the SwiGLU MLP."""
    num_attention_heads: Annotated[int, Field(ge=1, le=2**16)]
    """Number of query heads (H)."""
    num_query_groups: Count | None = None
    """Number of key/value heads (G) for grouped-query attention. Default: num_attention_heads."""
    kv_channels: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Width of one head (D). Default: hidden_size / num_attention_heads."""
    qkv_bias: bool = False
    """Add biases to the query, key and value projections, as Qwen2 does."""
    qk_norm: bool = False
    """Apply RMSNorm to each head's queries and keys before the rotation, as Qwen3 does."""
    attention_output_gate: bool = False
    """Multiply the heads' outputs by sigmoid(W x), where x is the input of attention, before the output projection.
    Qwen3-Next and the "Pro" models of the Forgetting Transformer do so."""
    layers_without_positions: Annotated[int, Field(ge=2, le=10_000)] | None = None
    """Omit positions in every n-th layer: 4 omits them in layers 4, 8 and so on (counted from 1), as SmolLM3 does.
    Default: all layers have positions."""
    seq_length: Annotated[int, Field(ge=1, le=2**30)]
    """Tokens per training sequence (S)."""
    vocab_size: Annotated[int, Field(ge=1, le=2**28)]
    """Rows of the embedding matrix: the tokenizer's vocabulary size, rounded up to a multiple of
    tensor_model_parallel_size."""
    unpadded_vocab_size: Count | None = None
    """Rows of the embedding matrix that an export keeps. Default: the tokenizer's vocabulary size."""
    attention_backend: Literal[ATTENTION_BACKENDS] = "auto"  # type: ignore[valid-type]
    """Implementation of attention: triton (this project's GPU kernels), tiled (PyTorch, optimized for CPUs), torch
    (SDPA, one call for the values and one for the position state), torch_wide (one call of SDPA for both, with cuDNN),
    flash_attn (version 2, 3 or 4), flex (FlexAttention) and fla (flash-linear-attention), which support biases and
    forget gates on GPUs, or naive. auto chooses by device and model."""
    norm_epsilon: Positive = 1e-5
    """Epsilon of every RMSNorm."""
    tie_embeddings: bool = False
    """Share the input embedding's matrix with the output layer."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights."""

    @property
    def head_dim(self) -> int:
        """Width of one head (D)."""
        return self.hidden_size // self.num_attention_heads if self.kv_channels is None else self.kv_channels

    @property
    def query_groups(self) -> int:
        """Key/value groups (G)."""
        return self.num_attention_heads if self.num_query_groups is None else self.num_query_groups


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer: AdamW, or Muon for matrices and AdamW for all other parameters."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon updates the matrices of attention and the MLP with orthogonalized Nesterov momentum (0.95), scaled so that
    AdamW's learning rate and weight decay can be reused. AdamW updates embeddings, the output layer, norms, biases and
    the positional encoding. muon does not support ZeRO 3."""
    lr: Positive = 1e-4
    """Peak learning rate."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay of matrices. Norms, biases and other vectors do not decay.

    Weight decay pulls TAPE's matrices towards zero, where TAPE equals RoPE. Set weight_decay_of to {position: 0.0} to
    prevent this."""
    weight_decay_of: dict[str, NotNegative] = field(default_factory=dict)
    """Weight decay per parameter kind (embeddings, output, attention, mlp, biases, norms, position, lora), which
    replaces weight_decay and also applies to vectors. position selects all parameters of the positional encoding;
    position.NAME, such as position.increments, selects one."""
    lr_scale_of: dict[str, NotNegative] = field(default_factory=dict)
    """Learning rate multiplier per parameter kind, with the keys of weight_decay_of; 1 for all others. Weight decay is
    proportional to the learning rate and scales with it."""
    beta1: Decay = 0.9
    """Decay rate of the gradient's moving average."""
    beta2: Decay = 0.95
    """Decay rate of the squared gradient's moving average."""
    eps: Positive = 1e-8
    """Term added to the denominator for numerical stability."""
    clip_grad: NotNegative = 1.0
    """Maximum global norm of the gradients; 0 disables clipping."""
    z_loss: NotNegative = 0.0
    """Coefficient of an auxiliary loss, the mean of log(sum(exp(logits)))^2, which keeps logits small; 1e-4 is common.
    It is logged as train/z_loss and is not part of train/loss or validation/loss. 0 disables it."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate schedule: a linear warm-up, then one of four shapes."""

    kind: Literal["cosine", "polynomial", "constant", "wsd"] = "cosine"
    """Shape after the warm-up. wsd (warm-up, stable, decay) keeps the peak and decays linearly at the end."""
    warmup_steps: NotNegativeInt = 0
    """Steps over which the learning rate rises linearly to its peak."""
    decay_steps: Count | None = None
    """Steps of wsd's final decay. Default: 10 % of train.steps."""
    power: Positive = 1.0
    """Exponent of the polynomial decay; 1 is linear."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Model parallelism: how each model replica is divided over GPUs. The remaining GPUs are data parallel."""

    tensor_model_parallel_size: Annotated[int, Field(ge=1, le=2**16)] = 1
    """Number of GPUs over which each layer's matrices are sharded."""
    sequence_parallel: bool | None = None
    """Also shard tokens outside attention and the MLP. Default: true if tensor_model_parallel_size > 1."""
    context_parallel_size: Count = 1
    """Number of groups of tensor_model_parallel_size GPUs over which each sequence is sharded, for long sequences. A
    group computes a part of the tokens outside attention and a part of the heads inside it."""
    pipeline_model_parallel_size: Count = 1
    """Number of pipeline stages, which hold consecutive layers. For models on hundreds of GPUs that are too large for
    tensor parallelism and ZeRO 1 alone."""
    virtual_pipeline_size: Count = 1
    """Number of model chunks (groups of consecutive layers) per pipeline stage. More chunks reduce the pipeline bubble
    and send more data. Above 1, the micro-batches per step must be a multiple of pipeline_model_parallel_size."""
    pipeline_layers: list[int] | None = None
    """Number of layers of each model chunk, from the first layer to the last. Default: equal numbers. The first stage
    also computes the embedding, and the last one the loss."""

    @property
    def ranks_per_stage(self) -> int:
        """Number of GPUs that compute the same layers of one sequence together."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def ranks_per_sequence(self) -> int:
        """Number of GPUs that compute one sequence together, i.e. the size of one model replica."""
        return self.ranks_per_stage * self.pipeline_model_parallel_size

    def model_chunks(self, num_layers: int) -> list[range]:
        """Return the layers (from 0) of each model chunk, in order; stage p of P holds chunks p, p + P, and so on."""
        count = self.pipeline_model_parallel_size * self.virtual_pipeline_size
        numbers = self.pipeline_layers or [num_layers // count] * count
        return [range(end - number, end) for number, end in zip(numbers, itertools.accumulate(numbers))]

    def describe(self, processes: int) -> str:
        """Describe the layout of `processes` processes, such as `2 tensor parallel x 4 data parallel`."""
        sizes = [
            (self.tensor_model_parallel_size, "tensor"),
            (self.context_parallel_size, "context"),
            (self.pipeline_model_parallel_size, "pipeline"),
            (processes // self.ranks_per_sequence, "data"),
        ]
        shown = [f"{size} {kind} parallel" for size, kind in sizes if size > 1 or kind in ("tensor", "data")]
        return " x ".join(shown)

    @property
    def uses_sequence_parallel(self) -> bool:
        """Whether sequence parallelism is enabled, with the default resolved."""
        return self.tensor_model_parallel_size > 1 if self.sequence_parallel is None else self.sequence_parallel


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """ZeRO over the data-parallel ranks."""

    zero_stage: Annotated[int, Field(ge=1, le=3)] = 1
    """ZeRO stage: shard the optimizer state (1), also gradients (2), also parameters (3). With one data-parallel rank,
    nothing is sharded.

    In bf16, all stages accumulate the gradients of micro-batches in fp32."""
    communication_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which a bf16 run averages gradients over data-parallel ranks. bf16 halves the communication volume
    but rounds the sums."""
    overlap_comm: bool = True
    """Overlap the averaging of gradients, and ZeRO 3's all-gathers, with computation. This does not change results. It
    has not been run on a GPU."""
    reduce_bucket_size: Count = 500_000_000
    """Elements of gradients per communication bucket. A smaller bucket takes less memory but sends more messages."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, and which one a run starts from."""

    directory: PathText | None = None
    """Directory of the checkpoints. Default: checkpoints in logging.directory."""
    interval: Count = 1000
    """Steps between checkpoints. The last step is always saved. A failed save is not retried before the next
    interval."""
    keep: Count = 2
    """Number of most recent checkpoints to keep."""
    keep_every: Count | None = None
    """Also keep the checkpoints of steps divisible by this number, which must be a multiple of interval. Disabled by
    default. A continued run without this setting deletes them at its next save."""
    asynchronous: bool = False
    """Write checkpoints in background threads while training continues. Each writer needs host memory for a copy of
    its shard. Only one checkpoint is written at a time. The run waits for the last checkpoint, and for one saved on a
    signal."""
    writers: Count | None = None
    """Maximum number of processes that write tensors, each to a file of its own, balanced by size; at least one per
    tensor-parallel rank. Default: one per GiB, at most 512."""
    frozen: bool = True
    """Also save frozen parameters, if only some parameters are trained (extension.trains, or a program as in
    docs/extending.md). false saves the trained parameters and the path of the checkpoint that the run started from
    (extension.from or resume). That checkpoint holds the others and must not be moved."""
    resume: PathText = "auto"
    """auto continues from the newest complete checkpoint, if there is one. none starts a new run and requires a
    directory without later checkpoints. Otherwise, the path of a checkpoint: that of another run provides the weights,
    the step and the optimizer state to start from; restarts then continue from the run's own checkpoints."""

    def milestones(self, steps: int) -> int:
        """Return the number of checkpoints that `keep_every` keeps in a run of `steps` steps."""
        return 0 if self.keep_every is None else steps // self.keep_every


@dataclass(frozen=True, kw_only=True)
class ExtensionConfig:
    """Context extension: the base model and the parameters to train. Set its positions with model.position.rope_*."""

    from_: PathText | None = None
    """The model to extend: a run, one of its checkpoints, or a model directory of transformers. The run starts at step
    0 with its weights. Model settings that are not given are taken from this model."""
    trains: Annotated[list[Literal[*TRAINABLE, "all"]], Field(min_length=1)] = field(  # type: ignore[valid-type]
        default_factory=lambda: ["all"]
    )
    """Parameters to train: all, or any of position (the positional encoding), lora (adds LoRA layers), embeddings
    (input), output (the output layer, unless it shares the embedding's matrix) and norms."""
    attention: Literal["full", "shifted_sparse"] = "full"
    """Attention pattern in training steps; evaluation always uses full attention. shifted_sparse is that of LongLoRA:
    tokens attend within segments of a quarter of the sequence, and half of the heads shift the segments by half their
    length. Attention stays causal. With model.attention_backend torch, it is slower than full attention."""
    lora_rank: Count = 8
    """Rank of the LoRA layers."""
    lora_alpha: Positive = 16.0
    """Scaling of LoRA layers: their output is multiplied by lora_alpha / lora_rank."""
    lora_targets: Annotated[list[Literal[LORA_TARGETS]], Field(min_length=1)] = field(  # type: ignore[valid-type]
        default_factory=lambda: list(LORA_TARGETS)
    )
    """Projections with LoRA layers: any of q, k, v and o."""

    @property
    def adds_lora(self) -> bool:
        """Whether the model has LoRA layers."""
        return "lora" in self.trains

    @property
    def lora_scale(self) -> float:
        """Factor applied to the output of LoRA layers."""
        return self.lora_alpha / self.lora_rank


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """Log metrics to Weights & Biases. Requires the package wandb."""

    project: str
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project. Default: that of the logged-in user."""
    name: str | None = None
    """Name of the run. Default: the name of logging.directory."""
    mode: Literal["online", "offline"] = "online"
    """offline writes files that `wandb sync` uploads later."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Logging of metrics and samples."""

    directory: PathText | None = None
    """Directory of metrics, TensorBoard files and the configuration. Default: runs/<name of the recipe>."""
    interval: Count = 10
    """Steps between log entries."""
    sample_tokens: NotNegativeInt = 64
    """Tokens of text to sample at every evaluation; 0 disables sampling."""
    sample_prompt: str = "The"
    """Prompt of the sampled text."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb: WandbSettings | None = None
    """Log metrics to Weights & Biases. Disabled by default."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a training run."""

    model: ModelConfig
    data: DataConfig
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    train: TrainConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    extension: ExtensionConfig = field(default_factory=ExtensionConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    @property
    def default_checkpoint_directory(self) -> str:
        """The default of `checkpoint.directory`."""
        return f"{self.logging.directory}/checkpoints"


def config_dict(config: RunConfig) -> dict[str, Any]:
    """Return all settings as nested dictionaries, with the keys of recipes.

    `checkpoint.directory` is None if it has its default value, so that it follows a changed `logging.directory`.
    """
    sections = as_dict(config)
    if config.checkpoint.directory == config.default_checkpoint_directory:
        sections["checkpoint"]["directory"] = None
    return sections


def to_yaml(config: RunConfig) -> str:
    """Return all settings as YAML that `--config` can read."""
    return dump(config_dict(config))


def replace_settings(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a copy of `config` with new values for the settings with these dotted keys. Raises ConfigError."""
    return build(RunConfig, merge(RunConfig, as_dict(config), unflatten(values)))
