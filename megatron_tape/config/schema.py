"""All settings of a run, as nested dataclasses.

A run reads `--config recipe.yaml` and `--section.key value`. Later values override earlier ones,
and an unknown key is an error. `checks.check` rejects invalid settings before process groups and
parameters are created. The text after a field is its description in `--help` and in the reference.
This module does not import torch.
"""

import difflib
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationInfo

from megatron_tape.config.data import DataConfig
from megatron_tape.config.encodings import ENCODINGS
from megatron_tape.config.evaluation import EvaluationConfig
from megatron_tape.config.sections import as_dict, build, merge, unflatten, validate_as
from megatron_tape.config.train import TrainConfig
from megatron_tape.config.values import (
    Count,
    Decay,
    NotNegative,
    NotNegativeInt,
    PathText,
    Positive,
    Size,
)
from megatron_tape.errors import UserError
from megatron_tape.io.strict_yaml import dump

TRAINABLE = ("position", "lora", "embeddings", "output", "norms")
"""Kinds of parameters that `extension.trains` can select."""
LORA_TARGETS = ("q", "k", "v", "o")
"""Projections of attention (query, key, value, output) that can have LoRA layers."""
ATTENTION_BACKENDS = (
    "auto",
    "triton",
    "tiled",
    "torch",
    "torch_wide",
    "flash_attn",
    "flex",
    "fla",
    "naive",
)


EveryNth = Annotated[int, Field(ge=2, le=10_000)]
"""n, where a setting applies to every n-th layer."""


def _is_nth(layer: int, n: int | None) -> bool:
    """Return whether layer `layer` (from 0) is one of the layers n, 2n, ..., counted from 1; False
    if n is None.
    """
    return n is not None and (layer + 1) % n == 0


def _known_encoding(name: str) -> str:
    """Return the name of a positional encoding unchanged. Raises UserError if it is unknown."""
    if name not in ENCODINGS:
        names = difflib.get_close_matches(name.lower(), ENCODINGS) or ENCODINGS
        raise UserError(
            name, "is not a positional encoding", f"choose another, such as {', '.join(names)}"
        )
    return name


def _settings_of_encoding(value: Any, info: ValidationInfo) -> Any:
    """Validate `model.position` as settings of the encoding `model.position_encoding`, and return
    them as its dataclass `Settings`. Do nothing if the encoding is unknown, since that is an error
    of its own.
    """
    # pydantic validates fields in their order, and `info.data` has the valid ones before this one.
    encoding = ENCODINGS.get((info.data or {}).get("position_encoding"))
    if encoding is None:
        return value
    return validate_as(encoding.Settings, value)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of the model. It is saved with every checkpoint."""

    position_encoding: Annotated[str, AfterValidator(_known_encoding)] = "tape"
    """Name of the positional encoding: tape, rope, nope, or another name from docs/encodings.md."""
    position: Annotated[
        Any, AfterValidator(_settings_of_encoding), Field(validate_default=True)
    ] = field(default_factory=dict, metadata={"chosen_by": "position_encoding", "among": ENCODINGS})
    """Settings of the positional encoding. Each encoding has its own."""
    num_layers: Annotated[int, Field(ge=1, le=10_000)]
    """Number of transformer layers."""
    hidden_size: Size
    """Width of the hidden states (C)."""
    ffn_hidden_size: Size
    """Inner width of the SwiGLU MLP."""
    num_attention_heads: Size
    """Number of query heads (H)."""
    num_query_groups: Count | None = None
    """Number of key/value heads (G) of grouped-query attention. Default: num_attention_heads."""
    kv_channels: Size | None = None
    """Width of one head (D). Default: hidden_size / num_attention_heads."""
    qkv_bias: bool = False
    """Add biases to the query, key and value projections, as Qwen2 does."""
    qk_norm: bool = False
    """Apply RMSNorm to each head's queries and keys before the rotation, as Qwen3 does."""
    attention_output_gate: bool = False
    """Multiply the output of the heads by sigmoid(W x) before the output projection, where x is the
    input of attention and W is learned. Qwen3-Next and the "Pro" models of the Forgetting
    Transformer do so."""
    layers_without_positions: EveryNth | None = None
    """Use no positional encoding in every n-th layer, as SmolLM3 does: 4 selects layers 4, 8, 12,
    ..., counted from 1. Default: all layers use the positional encoding."""
    temperature_scale: NotNegative = 0.0
    """In layers without positions, multiply the queries at position p by 1 + temperature_scale x
    log(floor((p + 1) / temperature_floor_scale) + 1), as Llama 4 does with 0.1. Positions restart
    in each packed document. 0 disables it."""
    temperature_floor_scale: Count = 8192
    """Number of tokens after which the factor of temperature_scale changes for the first time."""
    sliding_window: Size | None = None
    """Number of tokens to which a token attends: itself and those before it (W). Default: all
    earlier tokens."""
    full_attention_every: EveryNth | None = None
    """Attend to all earlier tokens in every n-th layer in spite of sliding_window: 4 selects layers
    4, 8, 12, ..., counted from 1. Default: all layers have the window."""
    seq_length: Size
    """Tokens per training sequence (S)."""
    vocab_size: Size
    """Number of rows of the embedding matrix: the tokenizer's vocabulary size, padded to a multiple
    of tensor_model_parallel_size."""
    unpadded_vocab_size: Count | None = None
    """Vocabulary size of exports, which drop the padding. Default: the tokenizer's vocabulary size.
    """
    attention_backend: Literal[ATTENTION_BACKENDS] = "auto"  # type: ignore[valid-type]
    """Implementation of attention. auto chooses by device and model. triton: this project's GPU
    kernels. tiled: PyTorch code optimized for CPUs. torch: SDPA, one call for the values and one
    for the position state. torch_wide: one call of SDPA for both, with cuDNN. flash_attn:
    FlashAttention 2 or 4. flex (FlexAttention) and fla (flash-linear-attention): biases and
    forget gates on GPUs. naive: the definition in plain PyTorch."""
    norm_epsilon: Positive = 1e-5
    """Epsilon of every RMSNorm."""
    tie_embeddings: bool = False
    """Share the input embedding's matrix with the output layer."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights."""

    @property
    def head_dim(self) -> int:
        """Width of one head (D)."""
        if self.kv_channels is None:
            return self.hidden_size // self.num_attention_heads
        return self.kv_channels

    @property
    def query_groups(self) -> int:
        """Key/value groups (G)."""
        if self.num_query_groups is None:
            return self.num_attention_heads
        return self.num_query_groups

    def has_positions(self, layer: int) -> bool:
        """Return whether layer `layer` (from 0) uses the positional encoding."""
        return not _is_nth(layer, self.layers_without_positions)

    def window_of(self, layer: int) -> int | None:
        """Return the size W of the window of layer `layer` (from 0), or None if it attends to all
        earlier tokens.
        """
        if _is_nth(layer, self.full_attention_every):
            return None
        return self.sliding_window

    def keys_per_query(self, layer: int) -> Fraction:
        """Return how many tokens a token attends to in layer `layer` (from 0), on average over a
        sequence. Estimates of costs use it.

        Without a window, it is S / 2 by convention. With a window of W < S tokens, it is the mean
        of min(i + 1, W) over the tokens i from 0 to S - 1, but no more than S / 2.
        """
        S = self.seq_length
        W = self.window_of(layer)
        half = Fraction(S, 2)
        if W is None or W >= S:
            return half
        # The first W tokens attend to 1, 2, ..., W tokens.
        pairs = W * (W + 1) // 2 + (S - W) * W
        return min(Fraction(pairs, S), half)

    @property
    def rotated_length(self) -> int:
        """Number of tokens over which positions differ within attention: the longest window, or
        the whole sequence, of the layers with positions. 0 without such layers.
        """
        lengths = [0]
        for layer in range(self.num_layers):
            if self.has_positions(layer):
                window = self.window_of(layer) or self.seq_length
                lengths.append(min(window, self.seq_length))
        return max(lengths)

    @property
    def needs_window(self) -> bool:
        """Whether a window hides tokens in sequences of the trained length."""
        return self.sliding_window is not None and self.sliding_window < self.seq_length


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer: AdamW, or Muon for matrices and AdamW for all other parameters."""

    kind: Literal["adamw", "muon"] = "adamw"
    """Optimizer. muon updates the matrices of attention and the MLP with orthogonalized Nesterov
    momentum (0.95), and uses AdamW for embeddings, the output layer, norms, biases and the
    positional encoding. It stores one moment per matrix, AdamW two. Its updates are scaled so that
    the learning rate and weight decay of AdamW can be reused. It does not support ZeRO 3."""
    lr: Positive = 1e-4
    """Peak learning rate."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay of matrices. Norms, biases and other vectors do not decay.

    Weight decay pulls TAPE's matrices towards zero, where TAPE equals RoPE. Set weight_decay_of to
    {position: 0.0} to prevent this."""
    weight_decay_of: dict[str, NotNegative] = field(default_factory=dict)
    """Weight decay by kind of parameter, such as {embeddings: 0.0}. It replaces weight_decay and
    also applies to vectors. Kinds: embeddings, output, attention, mlp, biases, norms, position and
    lora. position selects all parameters of the positional encoding; position.NAME, such as
    position.increments, selects one of them."""
    lr_scale_of: dict[str, NotNegative] = field(default_factory=dict)
    """Learning rate multiplier by kind of parameter, with the kinds of weight_decay_of. All other
    parameters have a multiplier of 1. The multiplier also scales weight decay, which is
    proportional to the learning rate."""
    beta1: Decay = 0.9
    """Decay rate of the moving average of gradients (AdamW)."""
    beta2: Decay = 0.95
    """Decay rate of the moving average of squared gradients (AdamW)."""
    eps: Positive = 1e-8
    """Term added to the denominator of AdamW's update for numerical stability."""
    clip_grad: NotNegative = 1.0
    """Maximum global norm of the gradients. Larger gradients are scaled down to it. 0 disables
    clipping.
    """
    z_loss: NotNegative = 0.0
    """Coefficient of an auxiliary loss, the mean of log(sum(exp(logits)))^2, which keeps logits
    small. 1e-4 is common; 0 disables it. The auxiliary loss is logged as train/z_loss and is not
    part of train/loss or validation/loss."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate schedule: a linear warm-up, then one of four shapes."""

    kind: Literal["cosine", "polynomial", "constant", "wsd"] = "cosine"
    """Shape after the warm-up. cosine and polynomial decay until the last step. constant keeps the
    peak. wsd (warm-up, stable, decay) keeps the peak and decays linearly at the end."""
    warmup_steps: NotNegativeInt = 0
    """Number of steps over which the learning rate rises linearly to its peak. 0 disables the
    warm-up.
    """
    decay_steps: Count | None = None
    """Number of steps of the final decay of kind wsd. Default: 10 % of train.steps."""
    power: Positive = 1.0
    """Exponent of the decay of kind polynomial. 1 is a linear decay."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """Model parallelism: how each model replica is divided over GPUs. The data-parallel size is the
    number of GPUs divided by the number of GPUs of one replica."""

    tensor_model_parallel_size: Size = 1
    """Number of GPUs over which each layer's matrices are sharded."""
    sequence_parallel: bool | None = None
    """Shard the activations outside attention and the MLP by token over the tensor-parallel GPUs.
    Default: true if tensor_model_parallel_size > 1."""
    context_parallel_size: Count = 1
    """Number of groups of tensor_model_parallel_size GPUs over which each sequence is sharded, for
    long sequences. Each group computes some of the tokens outside attention, and some of the heads
    inside attention."""
    pipeline_model_parallel_size: Count = 1
    """Number of pipeline stages, each of which computes consecutive layers. Use it for models on
    hundreds of GPUs that are too large for tensor parallelism and ZeRO 1 alone."""
    virtual_pipeline_size: Count = 1
    """Number of model chunks (groups of consecutive layers) per pipeline stage. More chunks shorten
    the pipeline bubble but require more communication. Above 1, the number of micro-batches per
    step must be a multiple of pipeline_model_parallel_size."""
    pipeline_layers: list[int] | None = None
    """Number of layers of each model chunk, from the first layer to the last. Default: equal
    numbers. The first stage also computes the embedding, and the last stage the loss."""

    @property
    def ranks_per_pipeline_stage(self) -> int:
        """Number of GPUs that compute the same layers of one sequence together."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def ranks_per_sequence(self) -> int:
        """Number of GPUs of one model replica, which compute a sequence together."""
        return self.ranks_per_pipeline_stage * self.pipeline_model_parallel_size

    def model_chunks(self, num_layers: int) -> list[range]:
        """Return the layers (from 0) of each model chunk, in order. Pipeline stage p of P holds the
        chunks p, p + P, p + 2 P, ...
        """
        chunks = self.pipeline_model_parallel_size * self.virtual_pipeline_size
        sizes = self.pipeline_layers or [num_layers // chunks] * chunks
        return [range(end - size, end) for size, end in zip(sizes, itertools.accumulate(sizes))]

    def describe(self, processes: int) -> str:
        """Describe the layout of a run on `processes` ranks, such as `2 tensor parallel x 4 data
        parallel`.
        """
        # Most runs have no context or pipeline parallelism, so a size of 1 is left out.
        sizes = [f"{self.tensor_model_parallel_size} tensor parallel"]
        if self.context_parallel_size > 1:
            sizes.append(f"{self.context_parallel_size} context parallel")
        if self.pipeline_model_parallel_size > 1:
            sizes.append(f"{self.pipeline_model_parallel_size} pipeline parallel")
        sizes.append(f"{processes // self.ranks_per_sequence} data parallel")
        return " x ".join(sizes)

    @property
    def uses_sequence_parallel(self) -> bool:
        """Whether sequence parallelism is enabled, with the default resolved."""
        if self.sequence_parallel is None:
            return self.tensor_model_parallel_size > 1
        return self.sequence_parallel


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """DeepSpeed's ZeRO, which shards the training state over the data-parallel and context-parallel
    ranks.
    """

    zero_stage: Annotated[int, Field(ge=1, le=3)] = 1
    """ZeRO stage. 1 shards the optimizer state, 2 also the gradients, 3 also the parameters. In
    bf16, all stages accumulate the gradients of micro-batches in fp32."""
    communication_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which gradients are averaged over ranks. bf16 halves the communication volume
    but rounds the sums; it requires train.precision bf16."""
    overlap_comm: bool = True
    """Overlap gradient averaging and ZeRO 3's all-gathers with computation. Results do not change.
    Not tested on GPUs."""
    reduce_bucket_size: Count = 500_000_000
    """Number of gradient elements per communication bucket. Smaller buckets take less memory but
    need more messages.
    """


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When and how checkpoints are saved, and from which checkpoint a run starts."""

    directory: PathText | None = None
    """Directory of the checkpoints. Default: checkpoints in logging.directory."""
    interval: Count = 1000
    """Steps between checkpoints; the last step is also saved. A failed save is only retried after
    the next interval.
    """
    keep: Count = 2
    """Number of most recent checkpoints to keep. Older ones are deleted."""
    keep_every: Count | None = None
    """Also keep the checkpoints of steps divisible by this number, which must be a multiple of
    interval. Disabled by default. If the run continues without this setting, its next save deletes
    them."""
    asynchronous: bool = False
    """Write checkpoints in background threads while training continues. Each writer needs host
    memory for a copy of the tensors that it writes. Only one checkpoint is written at a time. A run
    that finishes or is stopped by a signal waits until its last checkpoint is written."""
    writers: Count | None = None
    """Maximum number of processes that write tensors, each to its own file of about equal size.
    Must be at least tensor_model_parallel_size * pipeline_model_parallel_size. Default: one per
    GiB, at most 512."""
    frozen: bool = True
    """Also save frozen parameters if only some parameters are trained (extension.trains, or a
    program as in docs/extending.md). false saves only the trained parameters and the path of the
    checkpoint that the run started from (extension.from or resume). Frozen parameters are then
    loaded from that path, so it must stay available."""
    resume: PathText = "auto"
    """auto continues from the newest complete checkpoint, or starts a new run if there is none.
    none always starts a new run; it requires a directory without later checkpoints. A path of a
    checkpoint starts from its weights, step and optimizer state. If it belongs to another run,
    restarts continue from this run's own checkpoints."""

    def milestones(self, steps: int) -> int:
        """Return the number of checkpoints of a run of `steps` steps that `keep_every` protects
        from deletion.
        """
        if self.keep_every is None:
            return 0
        return steps // self.keep_every


@dataclass(frozen=True, kw_only=True)
class ExtensionConfig:
    """Extension of a trained model to a longer context, by context_factor or by the settings
    model.position.rope_*.
    """

    from_: PathText | None = None
    """The model to extend: the directory of a run, of a checkpoint or of a Hugging Face model. The
    run starts at step 0 with the weights of this model. Model settings that are not given are taken
    from it. Disabled by default."""
    context_factor: Annotated[float, Field(ge=1)] | None = None
    """New context length divided by the model's own. It sets model.seq_length, and multiplies the
    model's rope_scaling_factor; the type of the scaling and its other settings stay. A model
    without scaling gets rope_scaling_type, linear by default. If all layers with positions have a
    sliding window, rope_scaling_factor stays, too, unless the window grows. Default:
    model.seq_length and model.position are used as given. In the settings of a started run this is
    null, since the resulting values are stored."""
    allow_shorter_context: bool = False
    """Allow a model.seq_length below that of the model to extend. By default, this is an error."""
    allow_other_scaling: bool = False
    """Allow settings that replace the scaling of the model to extend: another rope_scaling_type or
    rope_share, a smaller rope_scaling_factor or rope_theta, or other bounds. By default, this is an
    error."""
    trains: Annotated[list[Literal[*TRAINABLE, "all"]], Field(min_length=1)] = field(  # type: ignore[valid-type]
        default_factory=lambda: ["all"]
    )
    """Parameters to train; all others are frozen. all, or a list of position (the positional
    encoding), lora (adds LoRA layers), embeddings (input), output (the output layer, unless it
    shares the embedding's matrix) and norms."""
    attention: Literal["full", "shifted_sparse"] = "full"
    """Attention pattern in training steps; evaluation always uses full attention. shifted_sparse is
    LongLoRA's pattern: tokens attend causally within segments of a quarter of the sequence. For
    half of the heads, segments are shifted by half their length. A sliding window applies, too.
    With model.attention_backend torch, it is slower than full attention."""
    lora_rank: Count = 8
    """Rank of the LoRA layers."""
    lora_alpha: Positive = 16.0
    """Scale of the LoRA layers. Their output is multiplied by lora_alpha / lora_rank."""
    lora_targets: Annotated[list[Literal[LORA_TARGETS]], Field(min_length=1)] = field(  # type: ignore[valid-type]
        default_factory=lambda: list(LORA_TARGETS)
    )
    """Projections of attention with LoRA layers: any of q (query), k (key), v (value) and o
    (output).
    """

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
    """Name of the project in W&B."""
    entity: str | None = None
    """User or team that owns the project. Default: the default entity of the logged-in user."""
    name: str | None = None
    """Name of the run in W&B. Default: the last part of logging.directory."""
    mode: Literal["online", "offline"] = "online"
    """online uploads metrics during the run. offline writes files for `wandb sync`, which uploads
    them later.
    """


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """Where and how often metrics and sampled text are logged."""

    directory: PathText | None = None
    """Directory of the run's metrics, settings and, by default, checkpoints. Default: runs/<name of
    the recipe>.
    """
    interval: Count = 10
    """Steps between rows of metrics."""
    sample_tokens: NotNegativeInt = 64
    """Number of tokens of text to sample at every evaluation (train.eval_interval). 0 disables
    sampling.
    """
    sample_prompt: str = "The"
    """Prompt that the sampled text continues."""
    tensorboard: bool = True
    """Write TensorBoard files to the subdirectory tensorboard of logging.directory."""
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
        """Default of `checkpoint.directory`: `checkpoints` in `logging.directory`."""
        return f"{self.logging.directory}/checkpoints"

    @property
    def to_start_another_run(self) -> str:
        """The options with which a user starts another run, as part of an error message."""
        options = "--logging.directory NEW"
        if self.checkpoint.directory != self.default_checkpoint_directory:
            options += " --checkpoint.directory NEW"
        return f"start another run with {options}"


def config_dict(config: RunConfig) -> dict[str, Any]:
    """Return all settings as nested dictionaries, with the keys of recipes.

    `checkpoint.directory` is None if it has its default value, so that a copy of these settings
    with another `logging.directory` also has another checkpoint directory.
    """
    sections = as_dict(config)
    if config.checkpoint.directory == config.default_checkpoint_directory:
        sections["checkpoint"]["directory"] = None
    return sections


def to_yaml(config: RunConfig) -> str:
    """Return all settings as YAML, which `--config` can read."""
    return dump(config_dict(config))


def replace_settings(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return a copy of `config` with new `values` by dotted key, such as `optimizer.lr`. Raises
    ConfigError if a key is unknown or a value is invalid.
    """
    return build(RunConfig, merge(RunConfig, as_dict(config), unflatten(values)))
