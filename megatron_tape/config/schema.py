"""Every setting of a run, as documented dataclasses filled from YAML and the command line.

A run reads `--config recipe.yaml` and `--section.key value`; later ones override earlier ones, and an unknown key is an
error. `validate` rejects settings that cannot work before a process group or a parameter exists, and `check_data_files`
checks the files. Nothing here imports torch.
"""

import dataclasses
import difflib
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_tape.config.values import (
    Count,
    Decay,
    NotNegative,
    NotNegativeInt,
    PathText,
    Positive,
    Weighted,
    paths_at,
    shown,
)
from megatron_tape.errors import ConfigError, refuse

LORA_TARGETS = ("q", "k", "v", "o")
ATTENTION_BACKENDS = ("auto", "triton", "tiled", "torch", "torch_wide", "flash_attn", "flex", "fla", "naive")
SAMPLE_SOURCES = ("generator", "examples")
"""Keys of `data` whose samples `data.samples` makes, with a mask of the tokens that enter the loss."""
DATA_SOURCES = ("prefix", *SAMPLE_SOURCES)
EVALUATIONS = ("validation_loss", "sample", "position_norms", "gradient_norms")
"""What `train.evaluations` names by default."""
ON_VALIDATION_DATA = frozenset({"validation_loss"})
"""Those of `train.evaluations` that read the validation split; without any of them it is not indexed."""


NO_KEY = {"is_key": False}
"""Metadata of a field that is not a key of recipes."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of the model; saved with every checkpoint. Each positional encoding adds its own settings."""

    position_encoding: str = "tape"
    """How attention gets the positions of tokens: tape, rope, nope, or another one of docs/encodings.md."""
    position: Any = field(metadata=NO_KEY)
    """The settings of this encoding, an object of its own dataclass; each of them is a key of `model`."""
    unread: Mapping[str, Any] = field(default_factory=dict, hash=False, metadata=NO_KEY)
    """Settings of other encodings that were given and are not their defaults. They have no effect."""
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
    attention_backend: Literal[ATTENTION_BACKENDS] = "auto"
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
class DataConfig:
    """What to train on: Megatron's indexed datasets (prefix), or samples that are generated or read."""

    prefix: Weighted | list[float | PathText] | PathText | None = None
    """Dataset path without .idx/.bin; or several: a list, a mapping prefix: weight, or [0.3, a, 0.7, b]. A pattern
    such as data/web-* stands for the datasets that match it when the run begins; they share its weight by tokens. A
    dataset that gives a split less than one sequence is left out of that split, with a warning."""
    stages: list[Annotated[dict[str, Any], paths_at("prefix", weighted=True)]] | None = None
    """What to train on after that, such as [{prefix: {data/books: 1, data/math: 2}, share: 0.1}] for the last 10 % of
    the run's tokens; several follow each other. Validation data stays that of prefix."""
    generator: dict[str, int | float | str] | None = None
    """Train on sequences of a synthetic task in place of a dataset: addition, selective_copy, grid_navigation or
    recall, with settings of the task that are not its defaults, such as {task: addition, digits: 20}. Samples never
    repeat, and each depends only on train.seed and its number. Validation data is drawn in the same way."""
    examples: Annotated[dict[str, str | int | bool | None], paths_at("path", "validation")] | None = None
    """Train on examples of inputs and targets in place of a dataset: {path: train.jsonl}. Each of its lines has input,
    and output or target. Other keys: validation, a file like it; template, what is read before the target ({input}
    stands for the input, whose end is left out if it is too long; by default "{input}\\n\\nAnswer:"); target_tokens,
    the most that is kept of a target (200); and bos, whether a sequence begins with the tokenizer's token for that
    (false). Targets end in the end-of-document token. Every epoch has another order."""
    loss_on: Literal["answers", "all"] = "answers"
    """Which tokens of a generator's or of examples' sequences enter the loss, which is their mean over the global
    batch: those that are answers (the targets of examples), or all. Of indexed datasets, all do."""
    split: str = "969,30,1"
    """Shares of the documents for training, validation and test."""
    tokenizer: PathText | None = None
    """The tokenizer with which the data was made; needed to sample text and to find document ends."""
    reset_attention_mask: bool = False
    """Keep packed documents from attending to each other."""
    long_documents: dict[str, int | float] | None = None
    """Draw a share of the training tokens from long documents, as {minimum: 8192, share: 0.6}: 60 % from documents of
    at least 8192 tokens, the rest from the others. Sequences begin where long documents do as far as possible. Needs
    reset_attention_mask; validation data stays the same. Several datasets keep their proportions among the long
    documents and among the others; one without enough of either is left out there. null draws all documents alike."""
    allow_changed: bool = False
    """Continue a run although the files of its data have other contents than when its checkpoint was saved."""
    num_workers: NotNegativeInt = 0
    """Processes that load training data; 0 loads it in the training process, as validation data always is."""
    cache_directory: PathText | None = None
    """Where Megatron's index maps, and which checks the data has passed, are kept between runs; null means index_cache
    beside the first dataset."""

    @property
    def source(self) -> str:
        """The key that says what to train on; raises ConfigError unless exactly one does."""
        given = [key for key in DATA_SOURCES if getattr(self, key) is not None]
        if len(given) != 1:
            keys = tuple(f"data.{key}" for key in given)
            refuse(bool(given), keys, f"and {', '.join(keys[1:])} are set together", "keep one of them")
            instead = " or ".join(f"data.{key}" for key in SAMPLE_SOURCES)
            raise ConfigError("data.prefix", "must be set", f"set it, or {instead} in its place")
        return given[0]

    @property
    def resolved_cache_directory(self) -> str | None:
        """Directory of the index maps; None without indexed datasets."""
        if self.cache_directory is not None or self.prefix is None:
            return self.cache_directory
        return str(Path(blend(self.prefix)[0][0]).parent / "index_cache")


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
    It is logged as z_loss, and is part of neither loss nor validation_loss."""


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

    zero_stage: Literal[1, 2, 3] = 1
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
class TrainConfig:
    """The training loop."""

    steps: Annotated[int, Field(ge=1, le=10**8)]
    """Optimizer steps of the whole run."""
    micro_batch_size: Annotated[int, Field(ge=1, le=10**6)] = 1
    """Sequences per GPU and forward pass."""
    global_batch_size: Annotated[int, Field(ge=1, le=10**6)]
    """Sequences per optimizer step over all GPUs."""
    batch_ramp: dict[str, int] | None = None
    """Begin with smaller steps: {from: 32, over_samples: 100000} grows from 32 sequences to global_batch_size, in
    multiples of 32, over the first 100,000 sequences; null does not. The learning rate does not depend on it."""
    precision: Literal["fp32", "bf16"] = "bf16"
    """Arithmetic of the forward and backward pass."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 1234
    """Seed of the weights and of the order of the data."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where to compute: auto is the GPUs, and the CPU on a machine without any. With auto or cuda, every GPU that a
    process sees on its node must get one."""
    allow_slow_attention: bool = False
    """Train with attention in plain torch on GPUs where the kernels do not work, instead of ending with the reason."""
    deterministic: bool = False
    """Use only kernels that give the same bits every time, at some cost in speed: a run that is repeated on the
    same GPUs then gives the same losses. On a CPU, runs do so in any case. On GPUs torch refuses it with
    position_increments, fox, path_fox and cope, whose cumulative sums have no such kernel."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What the backward pass computes again, so that fewer activations are kept: with full, every layer, a third more
    computation; with selective, all of a layer but attention, whose outputs are kept."""
    eval_interval: Count | None = None
    """Steps between evaluations; null means never."""
    evaluations: list[str] = field(
        default_factory=lambda: ["validation_loss", "sample", "position_norms", "gradient_norms"]
    )
    """What is evaluated: validation_loss on the validation split; sample, text that continues logging.sample_prompt;
    position_norms, TAPE's distance from RoPE by layer, which also adds these norms to every logged step; and for every
    logged step gradient_norms, those of the embeddings, attention, MLPs, the positional encoding and norms."""
    eval_steps: Annotated[int, Field(ge=1, le=10**6)] = 10
    """Global batches per evaluation."""
    max_bad_steps: Count = 5
    """Consecutive steps with a non-finite loss or gradient after which the run stops."""
    spikes: dict[str, int | float | str] | None = None
    """Look for steps whose loss or gradient norm is far above that of the last updates, and do something about them:
    {action: skip, window: 100, threshold: 6, limit: 10}, of which all but action are these by default. action is warn;
    skip, which leaves the update out; or rewind, which ends the process with status 75; started again, the run
    continues from its newest checkpoint and skips the data since then. A spike is threshold standard deviations above
    the median of the last window updates; limit is how many may be skipped, or how often the run may go back, before
    it ends. null does not look."""
    average: dict[str, int | float | str] | None = None
    """Also keep an average of the weights, in fp32 and divided as the optimizer's state is: {kind: ema, decay: 0.999},
    a moving average over the updates, which skipped steps leave as it is, or {kind: last, count: 10, every: 100}, the
    mean of the weights of 10 steps, a hundred apart, the last of which is the last of the run. It is saved, evaluated
    as validation_loss_average, and exported with --average. null keeps none."""
    garbage_interval: Count = 100
    """Steps between two collections of Python's garbage, which all ranks make together."""
    profile: dict[str, list[int] | bool] | None = None
    """Trace steps with torch's profiler: {steps: [10, 12]} writes a trace of steps 10 to 12, for ui.perfetto.dev, to
    logging.directory/profile. Other keys: ranks that write one, [0]; and memory, whether to add allocations and on a
    GPU a memory snapshot, false. SIGUSR2 traces the next two steps, on the same ranks."""
    straggler_factor: Annotated[float, Field(gt=1, allow_inf_nan=False)] | None = 1.3
    """A rank whose own forward and backward passes take more than so many times as long as the median rank's, over ten
    steps or more, is named once, with its node and GPU, in the log and by pretrain.status; null compares none."""
    hang_timeout: Positive | None = 1800.0
    """Seconds without progress (a step, an evaluation batch or a save) after which a process writes its stacks and ends
    the attempt; the start-up may take at least an hour. null means never."""

    def batch_size_keys(self) -> dict[str, int]:
        """Return the sizes of steps that settings give, by key; raises ConfigError if `batch_ramp` cannot work."""
        ramp, size, key = self.batch_ramp, self.global_batch_size, "train.batch_ramp"
        if ramp is None:
            return {"train.global_batch_size": size}
        refuse(ramp.keys() != {"from", "over_samples"}, key, f"is {shown(ramp)}", "give it from and over_samples")
        refuse(min(ramp.values()) < 1, key, f"is {shown(ramp)}", "give it numbers of at least 1")
        problem = f"is {ramp['from']}, which does not divide train.global_batch_size {size}"
        refuse(bool(size % ramp["from"]), (f"{key}.from", "train.global_batch_size"), problem, "change either")
        return {"train.global_batch_size": size, f"{key}.from": ramp["from"]}

    def batch_size(self, samples: int) -> int:
        """Return how many sequences the step takes that follows the first `samples`."""
        if self.batch_ramp is None or samples >= self.batch_ramp["over_samples"]:
            return self.global_batch_size
        first = self.batch_ramp["from"]
        grown = first + (self.global_batch_size - first) * samples // self.batch_ramp["over_samples"]
        return grown - grown % first

    def batch_sizes(self, samples: int, steps: int) -> Iterator[int]:
        """Yield how many sequences each of the `steps` steps takes that follow the first `samples`."""
        for _ in range(steps):
            yield (size := self.batch_size(samples))
            samples += size

    @property
    def validates(self) -> bool:
        """Whether the run computes something on the validation split."""
        return self.eval_interval is not None and bool(ON_VALIDATION_DATA & set(self.evaluations))

    def samples_after(self, steps: int, samples: int = 0) -> int:
        """Return how many sequences the run has seen `steps` steps after the first `samples`."""
        while steps and (size := self.batch_size(samples)) < self.global_batch_size:  # all later ones are that large
            steps, samples = steps - 1, samples + size
        return samples + steps * self.global_batch_size


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
    trains: list[str] = field(default_factory=lambda: ["all"])
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
    lora_targets: list[str] = field(default_factory=lambda: list(LORA_TARGETS))
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
class EvaluationConfig:
    """Tasks of pretrain.evaluate that a run does while it trains, each with the key `every`, the steps between two
    evaluations, and with the task's settings, which python -m pretrain.evaluate --help explains; such as
    perplexity: {every: 500, data: held_out.jsonl, lengths: [512, 1024]}. Each is also done after the last step."""

    perplexity: Annotated[dict[str, Any], paths_at("data")] | None = None
    """Perplexity by context length."""
    context_gain: Annotated[dict[str, Any], paths_at("data", "key_tokens_from")] | None = None
    """What tokens gain from longer contexts."""
    addition: dict[str, Any] | None = None
    """Exact match of sums by the lengths of their operands."""
    selective_copy: dict[str, Any] | None = None
    """Accuracy of copying tokens among noise."""
    grid_navigation: dict[str, Any] | None = None
    """Accuracy of recalling what is where on a grid."""
    recall: dict[str, Any] | None = None
    """Accuracy of recalling the values of keys."""

    def given(self) -> dict[str, dict[str, Any]]:
        """Return the settings of the tasks that are done, by the tasks' names."""
        return {name: value for name, value in vars(self).items() if value is not None}


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
    wandb: dict[str, str | None] | None = None
    """Also show the metrics in Weights & Biases, whose package must be installed: {project: tape}. Other keys: entity,
    name, and mode, online or offline."""


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


def build_model(encodings: Mapping[str, type], values: Mapping[str, Any]) -> ModelConfig:
    """Return the settings of a model from the values of its keys, those of positional encodings among them.

    `encodings` has the settings of each encoding, a dataclass, by the encoding's name. Raises ConfigError for an
    encoding that is not among them, and TypeError for a key that does not exist or must be given and is not.
    """
    name = values.get("position_encoding", ModelConfig.position_encoding)
    if name not in encodings:
        close = difflib.get_close_matches(str(name).lower(), encodings, n=1)
        fix = f"did you mean {close[0]}? There are" if close else "choose one of"
        fix += f" {', '.join(encodings)}"
        if str(name).lower() == "yarn":
            fix = "YaRN is rope with model.rope_scaling_type yarn and model.rope_scaling_factor"
        raise ConfigError("model.position_encoding", f"is {name!r}", fix)
    of_encodings = {item.name: item for settings in encodings.values() for item in dataclasses.fields(settings)}
    names = {item.name for item in dataclasses.fields(encodings[name])}
    own = {key: value for key, value in values.items() if key in names}
    unread = {key: value for key, value in values.items() if key in of_encodings.keys() - names}
    return ModelConfig(
        position=encodings[name](**own),
        unread={key: value for key, value in unread.items() if value != default_of(of_encodings[key])},
        **{key: value for key, value in values.items() if key not in of_encodings},
    )


def model_dict(model: ModelConfig, unread: bool = True) -> dict[str, Any]:
    """Return the values of the keys of `model`, those of its positional encoding among them.

    Settings of other encodings that were given are among them unless `unread` is false.
    """
    own = {item.name: getattr(model, item.name) for item in keys_of(ModelConfig)}
    return own | dataclasses.asdict(model.position) | (dict(model.unread) if unread else {})


def config_dict(config: RunConfig) -> dict[str, Any]:
    """Return every setting as nested plain dictionaries, by the keys that recipes use.

    A `checkpoint.directory` in its default place is null, so that it follows a changed `logging.directory`.
    """
    sections = dataclasses.asdict(config) | {"model": model_dict(config.model)}
    if config.checkpoint.directory == config.default_checkpoint_directory:
        sections["checkpoint"]["directory"] = None
    return {name: {key_of(field): value for field, value in section.items()} for name, section in sections.items()}


def keys_of(section: type) -> list[dataclasses.Field]:
    """Return the fields of a section that are keys of recipes."""
    return [item for item in dataclasses.fields(section) if item.metadata.get("is_key", True)]


def default_of(item: dataclasses.Field) -> Any:
    """Return the default of a field, or MISSING."""
    return item.default if item.default_factory is dataclasses.MISSING else item.default_factory()


def key_of(field_name: str) -> str:
    """Return the key of a field in recipes: Python's keywords have an underscore as fields."""
    return field_name.removesuffix("_")


def to_yaml(config: RunConfig) -> str:
    """Return every setting as YAML that `--config` can read."""
    from megatron_tape.io.strict_yaml import dump

    return dump(config_dict(config))


def blend(prefix: dict[str, float] | list[float | str] | str | None) -> tuple[list[str], list[float] | None]:
    """Normalise the four spellings of `data.prefix` to prefixes and their weights (None: by size); none for null."""
    if prefix is None:
        return [], None
    if isinstance(prefix, str):
        prefixes, weights = [prefix], None
    elif isinstance(prefix, dict):
        prefixes, weights = list(prefix), list(prefix.values())
    elif all(isinstance(item, str) for item in prefix):
        prefixes, weights = list(prefix), None
    else:
        weights, prefixes = list(prefix[0::2]), list(prefix[1::2])
    well_formed = bool(prefixes) and all(isinstance(item, str) and item for item in prefixes)
    if weights is not None:
        well_formed &= len(weights) == len(prefixes) and all(is_positive(weight) for weight in weights)
    if not well_formed:
        raise ConfigError(
            "data.prefix",
            f"is {prefix!r}",
            "give a path, a list of paths, a mapping path: weight, or a list that alternates weights and paths, with "
            "positive weights",
        )
    return prefixes, None if weights is None else [float(weight) for weight in weights]


def split_shares(split: str) -> tuple[float, float, float]:
    """Read `"969,30,1"` as the shares of training, validation and test, summing to 1."""
    try:
        numbers = [float(part) for part in str(split).split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(n) and n >= 0 for n in numbers) or numbers[0] == 0:
        raise ConfigError(
            "data.split",
            f"is {split!r}",
            "give three shares like 969,30,1 for training, validation and test, none negative and the first above 0",
        )
    train, validation, test = (number / sum(numbers) for number in numbers)
    return train, validation, test


def is_positive(value: Any) -> bool:
    """Return whether a setting is a finite number above 0."""
    finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return finite and not isinstance(value, bool) and value > 0
