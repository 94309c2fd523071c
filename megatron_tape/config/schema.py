"""Every setting of a run, as nested, documented dataclasses.

A run reads `--config recipe.yaml` and `--section.key value`; later ones override earlier ones, and an unknown key is an
error. `checks.check` rejects settings that cannot work before a process group or a parameter exists. Nothing here
imports torch.
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
from megatron_tape.config.sections import as_dict, build, chosen_by, merge, nested, validated
from megatron_tape.config.train import TrainConfig
from megatron_tape.config.values import Count, Decay, NotNegative, NotNegativeInt, PathText, Positive
from megatron_tape.errors import UserError
from megatron_tape.io.strict_yaml import dump

TRAINABLE = ("position", "lora", "embeddings", "output", "norms")
"""Kinds of parameters that `extension.trains` may name."""
LORA_TARGETS = ("q", "k", "v", "o")
ATTENTION_BACKENDS = ("auto", "triton", "tiled", "torch", "torch_wide", "flash_attn", "flex", "fla", "naive")


def _known_encoding(name: str) -> str:
    close = difflib.get_close_matches(name.lower(), ENCODINGS, n=1)
    meant = f"did you mean {close[0]}? There are" if close else "choose from"
    if name not in ENCODINGS:
        raise UserError(name, "is no encoding", f"{meant} {', '.join(ENCODINGS)}")
    return name


def _settings_of_encoding(given: Any, info: ValidationInfo) -> Any:
    """Return the settings of the encoding that was chosen, if there is one of that name."""
    encoding = ENCODINGS.get(info.data.get("position_encoding")) if info.data else None
    return given if encoding is None else validated(encoding.Settings, given)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the model; saved with every checkpoint."""

    position_encoding: Annotated[str, AfterValidator(_known_encoding)] = "tape"
    """How attention gets the positions of tokens: tape, rope, nope, or another one of docs/encodings.md."""
    position: Annotated[Any, AfterValidator(_settings_of_encoding), Field(validate_default=True)] = field(
        default_factory=dict, metadata=chosen_by("position_encoding", ENCODINGS)
    )
    """The settings of this encoding."""
    num_layers: Annotated[int, Field(ge=1, le=10_000)]
    """Transformer layers."""
    hidden_size: Annotated[int, Field(ge=1, le=2**20)]
    """Width of the hidden states (C)."""
    ffn_hidden_size: Annotated[int, Field(ge=1, le=2**24)]
    """Inner width of the SwiGLU MLP."""
    num_attention_heads: Annotated[int, Field(ge=1, le=2**16)]
    """Query heads (H)."""
    num_query_groups: Count | None = None
    """Key/value groups (G); null means one per head."""
    kv_channels: Annotated[int, Field(ge=1, le=2**16)] | None = None
    """Width of one head (D); null means hidden_size / num_attention_heads."""
    qkv_bias: bool = False
    """Add biases to the query, key and value projections, as Qwen2 does."""
    qk_norm: bool = False
    """RMSNorm on every head's query and key before they are rotated, as in Qwen3."""
    attention_output_gate: bool = False
    """Multiply the heads' outputs by sigmoid(W x), x being attention's input, before they are projected, as the "Pro"
    models of the Forgetting Transformer and Qwen3-Next do."""
    layers_without_positions: Annotated[int, Field(ge=2, le=10_000)] | None = None
    """Every so many layers, one gets no positions: with 4, the fourth, the eighth and so on, as in SmolLM3. null means
    none."""
    seq_length: Annotated[int, Field(ge=1, le=2**30)]
    """Tokens per training sequence (S)."""
    vocab_size: Annotated[int, Field(ge=1, le=2**28)]
    """Rows of the embedding: the size of the tokenizer, rounded up as tensor parallelism requires."""
    unpadded_vocab_size: Count | None = None
    """Rows that belong to tokens, which an export keeps; null means the size of the tokenizer."""
    attention_backend: Literal[ATTENTION_BACKENDS] = "auto"  # type: ignore[valid-type]
    """What computes attention: triton (our GPU kernels), tiled (plain torch, made for CPUs), torch (SDPA, called once
    for the values and once for the position state), torch_wide (one call of SDPA for both, by cuDNN), flash_attn
    (version 2, 3 or 4), flex (torch's FlexAttention) or fla (flash-linear-attention), which take biases and forget
    gates on GPUs, or naive."""
    norm_epsilon: Positive = 1e-5
    """Added to the mean square in every RMSNorm."""
    tie_embeddings: bool = False
    """Share one matrix between the input and the output embedding."""
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
    """AdamW, or Muon for matrices and AdamW for the rest."""

    kind: Literal["adamw", "muon"] = "adamw"
    """muon updates the matrices of attention and the MLP with orthogonalized momentum (0.95, Nesterov's), scaled so
    that it takes AdamW's learning rates and weight decay; embeddings, the output layer, norms, biases and the
    parameters of the positional encoding get AdamW. Not with ZeRO 3."""
    lr: Positive = 1e-4
    """Peak learning rate."""
    min_lr: NotNegative = 0.0
    """Learning rate at the end of the decay."""
    weight_decay: NotNegative = 0.01
    """Decoupled weight decay of matrices; norms, biases and other vectors do not decay.

    It pulls TAPE's matrices towards zero, at which TAPE equals RoPE, unless weight_decay_of is {position: 0.0}."""
    weight_decay_of: dict[str, NotNegative] = field(default_factory=dict)
    """Weight decay by kind of parameter (embeddings, output, attention, mlp, biases, norms, position, lora) in place of
    weight_decay. A value also applies to vectors of its kind. position stands for the positional encoding's parameters,
    and position.NAME, such as position.increments, for one of them."""
    lr_scale_of: dict[str, NotNegative] = field(default_factory=dict)
    """Factor of the learning rate by kind of parameter, as in weight_decay_of; 1 for kinds that are not given. Weight
    decay, which is proportional to the learning rate, scales with it."""
    beta1: Decay = 0.9
    """Decay of the gradient's mean."""
    beta2: Decay = 0.95
    """Decay of the squared gradient's mean."""
    eps: Positive = 1e-8
    """Added to the denominator."""
    clip_grad: NotNegative = 1.0
    """Gradients with a larger global norm are scaled down to it; 0 turns clipping off."""
    z_loss: NotNegative = 0.0
    """Also minimize so much times the mean of log(sum(exp(logits)))^2, which keeps logits from growing; such as 1e-4.
    It is logged as train/z_loss, and is part of neither train/loss nor validation/loss."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps: a linear warm-up, then one of four shapes."""

    kind: Literal["cosine", "polynomial", "constant", "wsd"] = "cosine"
    """What follows the warm-up; wsd (warm-up, stable, decay) holds the peak and decays linearly at the end."""
    warmup_steps: NotNegativeInt = 0
    """Steps over which the learning rate rises linearly to its peak."""
    decay_steps: Count | None = None
    """Length of wsd's final decay; null means 10 % of the steps."""
    power: Positive = 1.0
    """Exponent of the polynomial decay; 1 is linear."""


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How one copy of the model and its sequences are spread over GPUs; what remains of the GPUs is data parallel."""

    tensor_model_parallel_size: Annotated[int, Field(ge=1, le=2**16)] = 1
    """GPUs that share every layer's matrices."""
    sequence_parallel: bool | None = None
    """Also shard tokens outside attention and the MLP; null means if tensor_model_parallel_size > 1."""
    context_parallel_size: Count = 1
    """Groups of tensor_model_parallel_size GPUs that share the tokens of every sequence, for long ones: each computes
    some tokens outside attention and some heads inside it."""
    pipeline_model_parallel_size: Count = 1
    """Groups of GPUs that hold consecutive layers (stages) and hand micro-batches on; for models too large for tensor
    parallelism and ZeRO 1 alone, on hundreds of GPUs."""
    virtual_pipeline_size: Count = 1
    """Stretches of layers that each pipeline stage holds, far apart in the model. More make GPUs idle less and send
    more; micro-batches of a step must then be a multiple of pipeline_model_parallel_size."""
    pipeline_layers: list[int] | None = None
    """How many layers each stretch has, from the first layer on; null divides them evenly. The first and the last
    stage also compute the embedding and the loss."""

    @property
    def ranks_per_stage(self) -> int:
        """How many GPUs compute the same layers of one sequence together."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    @property
    def ranks_per_sequence(self) -> int:
        """How many GPUs compute one sequence together; what remains of the GPUs is data parallel."""
        return self.ranks_per_stage * self.pipeline_model_parallel_size

    def stretches(self, num_layers: int) -> list[range]:
        """Return the layers (from 0) of each stretch, in order; stage p of P holds stretches p, p + P, and so on."""
        count = self.pipeline_model_parallel_size * self.virtual_pipeline_size
        numbers = self.pipeline_layers or [num_layers // count] * count
        return [range(end - number, end) for number, end in zip(numbers, itertools.accumulate(numbers))]

    def described(self, processes: int) -> str:
        """Return how so many processes share the work, such as `2 tensor parallel x 4 data parallel`."""
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
        """Whether tokens are sharded over the tensor-parallel GPUs."""
        return self.tensor_model_parallel_size > 1 if self.sequence_parallel is None else self.sequence_parallel


@dataclass(frozen=True, kw_only=True)
class DeepSpeedConfig:
    """ZeRO over the data-parallel ranks."""

    zero_stage: Annotated[int, Field(ge=1, le=3)] = 1
    """Shard optimizer state (1), gradients too (2), parameters too (3). Stage 1 is the smallest; on a single rank it
    shards nothing.

    In bf16, every stage adds up micro-batches in fp32."""
    communication_precision: Literal["fp32", "bf16"] = "fp32"
    """Precision in which a bf16 run averages gradients over data-parallel ranks; bf16 halves the bytes that are sent,
    but rounds the sums."""
    overlap_comm: bool = True
    """Average gradients, and gather what stage 3 has cut, beside computation. This changes no result; it has not been
    run on a GPU."""
    reduce_bucket_size: Count = 500_000_000
    """Elements of gradients that are averaged at once; fewer take less memory, but more messages."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the state is saved, and what a run starts from."""

    directory: PathText | None = None
    """Where checkpoints go; null means checkpoints inside logging.directory."""
    interval: Count = 1000
    """Steps between checkpoints; the last step is always saved. After a failed save, the next one is due as usual."""
    keep: Count = 2
    """How many of the newest checkpoints are kept."""
    keep_every: Count | None = None
    """Also keep the checkpoints of steps that this divides; a multiple of interval. null keeps no others. They stay as
    long as the setting does: a continued run without it removes them at its next save."""
    asynchronous: bool = False
    """Train on while threads write a checkpoint from a copy in the host's memory, which every writer needs for its
    share. At most one is on its way; the last one, and one on a signal, are waited for."""
    writers: Count | None = None
    """The most processes that write tensors, a file each, balanced by bytes; null means one per GiB, at most 512. Every
    tensor-parallel rank needs one."""
    frozen: bool = True
    """Also save parameters that are not trained, where only a part of the model is (extension.trains, or a program as
    in docs/extending.md); false saves only the trained ones and the path of the checkpoint with which the run began
    (extension.from or resume), which holds the others and must therefore stay where it is."""
    resume: PathText = "auto"
    """auto continues from the newest complete checkpoint, if there is one; none starts afresh and requires that the
    directory holds no later ones; otherwise the path of a checkpoint. If that is not one of the run's own, the run
    begins with it, at its step and with its Adam state, and later continues from its own checkpoints."""

    def milestones(self, steps: int) -> int:
        """Return how many checkpoints of a run of `steps` steps are kept for good."""
        return 0 if self.keep_every is None else steps // self.keep_every


@dataclass(frozen=True, kw_only=True)
class ExtensionConfig:
    """What pretrain.extend_context starts from and trains. Its positions are settings of the model (rope_*)."""

    from_: PathText | None = None
    """The model to extend: a run, one of its checkpoints, or a directory in the format of transformers. The run begins
    at step 0 with its weights; settings of the model that are not given are those of this model."""
    trains: Annotated[list[Literal[*TRAINABLE, "all"]], Field(min_length=1)] = field(  # type: ignore[valid-type]
        default_factory=lambda: ["all"]
    )
    """What is trained: any of position (the positional encoding's parameters), lora, embeddings (of the input), output
    (the output layer, where it does not share the embedding's matrix) and norms, or all. With lora, the model gets LoRA
    layers."""
    attention: Literal["full", "shifted_sparse"] = "full"
    """Attention in training steps; evaluation is always full. shifted_sparse is LongLoRA's: tokens attend within
    segments of a quarter of the sequence, which half of the heads shift by half a segment. No token sees a later one.
    With model.attention_backend torch it is slower than full attention."""
    lora_rank: Count = 8
    """Inner width of a LoRA layer."""
    lora_alpha: Positive = 16.0
    """LoRA layers are scaled by lora_alpha / lora_rank."""
    lora_targets: Annotated[list[Literal[LORA_TARGETS]], Field(min_length=1)] = field(  # type: ignore[valid-type]
        default_factory=lambda: list(LORA_TARGETS)
    )
    """Projections that get LoRA layers: any of q, k, v and o."""

    @property
    def adds_lora(self) -> bool:
        """Whether the model has LoRA layers."""
        return "lora" in self.trains

    @property
    def lora_scale(self) -> float:
        """The factor of a LoRA layer's output."""
        return self.lora_alpha / self.lora_rank


@dataclass(frozen=True, kw_only=True)
class WandbSettings:
    """Also show the metrics in Weights & Biases, whose package must be installed."""

    project: str
    """The project that the run belongs to."""
    entity: str | None = None
    """The user or team that has the project; null means the default of whoever is logged in."""
    name: str | None = None
    """The run's name; null means the name of logging.directory."""
    mode: Literal["online", "offline"] = "online"
    """With offline, files that `wandb sync` sends later."""


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    """What a run reports, and where."""

    directory: PathText | None = None
    """Where metrics, TensorBoard files and the configuration go; null means runs/<name of the recipe>."""
    interval: Count = 10
    """Steps between logged steps."""
    sample_tokens: NotNegativeInt = 64
    """Length of the text sampled at every evaluation; 0 means none."""
    sample_prompt: str = "The"
    """What the sampled text continues."""
    tensorboard: bool = True
    """Write TensorBoard files."""
    wandb: WandbSettings | None = None
    """Also show the metrics in Weights & Biases, whose package must be installed."""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Train one model."""

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
        """Where checkpoints go unless `checkpoint.directory` says otherwise."""
        return f"{self.logging.directory}/checkpoints"


def config_dict(config: RunConfig) -> dict[str, Any]:
    """Return every setting as nested plain dictionaries, by the keys that recipes use.

    A `checkpoint.directory` in its default place is null, so that it follows a changed `logging.directory`.
    """
    sections = as_dict(config)
    if config.checkpoint.directory == config.default_checkpoint_directory:
        sections["checkpoint"]["directory"] = None
    return sections


def to_yaml(config: RunConfig) -> str:
    """Return every setting as YAML that `--config` can read."""
    return dump(config_dict(config))


def replaced(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """Return `config` with other values of these settings, by dotted keys. Raises ConfigError."""
    return build(RunConfig, merge(RunConfig, as_dict(config), nested(values)))
