"""A run on a number of GPUs: what everything in this package is calculated from. Imports no torch."""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron_tape.config.schema import ExtensionConfig, ModelConfig, RunConfig
from megatron_tape.model.names import MATRICES
from megatron_tape.ops.backends import BACKENDS, unsupported_heads
from megatron_tape.ops.backends.table import HOPPER, Case, Row, rows
from megatron_tape.planning.parameters import Held, parameter_count, trained_kinds, trains_matrices, trains_output
from megatron_tape.position import Costs, MicroBatch, PositionEncoding, encoding_of

NOT_ASSUMED = frozenset({"flash_attn", "fla"})
"""Backends of packages that torch does not bring along."""
CALLED_TWICE = frozenset({"torch", "flash_attn"})
"""Backends that are called once for the values and once for the position state. FlashAttention-4 may be called once for
both, but is not assumed."""


@dataclass(frozen=True)
class Plan:
    """The settings of a run and its GPUs, with what follows from both for one GPU.

    The settings must have been accepted for so many processes. Tensors of one rank are those of every rank of its
    pipeline stage.
    """

    config: RunConfig
    processes: int
    """One for each GPU."""
    stage: int = 0
    """The pipeline stage of this GPU."""
    generation: str = HOPPER
    """The generation of the GPUs, which decides how `auto` computes attention."""

    @property
    def model(self) -> ModelConfig:
        return self.config.model

    @property
    def extension(self) -> ExtensionConfig:
        """What is trained, and which LoRA layers there are."""
        return self.config.extension

    @cached_property
    def encoding(self) -> PositionEncoding:
        return encoding_of(self.model)

    @cached_property
    def costs(self) -> tuple[Costs, ...]:
        """What the encoding takes in each layer of the model."""
        return _costs(self.model, self.batch)

    @cached_property
    def attention(self) -> Row:
        """The backend that computes attention, and why: for `auto`, the first row that runs without other packages."""
        model, train = self.model, self.config.train
        case = Case(
            self.generation,
            self.encoding.needs,
            model.head_dim,
            half_precision=train.precision != "fp32",
            packed=self.config.data.reset_attention_mask,
            segments=self.extension.attention == "shifted_sparse",
            deterministic=train.deterministic,
            grouped=model.query_groups < model.num_attention_heads,
        )
        if model.attention_backend != "auto":
            named = frozenset({self.generation})
            return Row(case.kind, named, model.attention_backend, "as model.attention_backend says")
        return next(row for row in rows(case) if self._runs(row.backend))

    def _runs(self, backend: str) -> bool:
        """Return whether a backend has kernels for the run's precision and head dimension."""
        precisions = BACKENDS[backend].precisions
        if backend in NOT_ASSUMED or (precisions is not None and self.config.train.precision not in precisions):
            return False
        return unsupported_heads(backend, self.model.head_dim) is None

    @property
    def tensor_size(self) -> int:
        """GPUs that share every layer's matrices."""
        return self.config.parallel.tensor_model_parallel_size

    @property
    def context_size(self) -> int:
        """Groups of such GPUs that share the tokens of every sequence."""
        return self.config.parallel.context_parallel_size

    @property
    def stages(self) -> int:
        """Groups of such GPUs that hold different layers."""
        return self.config.parallel.pipeline_model_parallel_size

    @property
    def pipeline(self) -> str:
        """The number of stages and, if there are several, of model chunks per stage, such as 4 or 4x2."""
        virtual = self.config.parallel.virtual_pipeline_size
        return f"{self.stages}x{virtual}" if virtual > 1 else str(self.stages)

    @cached_property
    def model_chunks(self) -> list[range]:
        """The layers of each model chunk of this stage: one chunk, or several with virtual stages."""
        return self.config.parallel.model_chunks(self.model.num_layers)[self.stage :: self.stages]

    @cached_property
    def held(self) -> Held:
        """What this stage holds of the model."""
        layers = tuple(layer for chunk in self.model_chunks for layer in chunk)
        return Held(layers, self.stage == 0, self.stage == self.stages - 1)

    @property
    def in_flight(self) -> float:
        """How many micro-batches this stage has run forward, and not yet backward, at the most.

        With virtual stages, one model chunk is only a part of it.
        """
        if self.stages == 1:
            return 1
        behind, virtual = self.stages - 1 - self.stage, len(self.model_chunks)
        if virtual == 1:
            return min(behind + 1, self.micro_batches)
        return min(2 * behind + (virtual - 1) * self.stages + 1, virtual * self.micro_batches) / virtual

    @property
    def sent_bytes(self) -> int:
        """The bytes that a stage sends the next one of each micro-batch: hidden states and, if need be, the state."""
        if self.stages == 1:
            return 0
        state = self.costs[1].state_bytes(self.width) if self.encoding.sends_state(1) else 0
        return self.batch.local_tokens * (self.model.hidden_size * self.width + state)

    @property
    def copies_embedding(self) -> bool:
        """Whether this is the last of several stages, with a copy of the embedding's matrix as its output layer's."""
        return self.stages > 1 and self.held.last and self.model.tie_embeddings

    def of_stages(self) -> "list[Plan]":
        """Return this plan for a GPU of each stage."""
        return [replace(self, stage=stage) for stage in range(self.stages)]

    @property
    def replicas(self) -> int:
        """Ranks that hold the same weights, over which ZeRO partitions, those of other context ranks included."""
        return self.processes // (self.tensor_size * self.stages)

    @property
    def zero_stage(self) -> int:
        return self.config.deepspeed.zero_stage

    @property
    def width(self) -> int:
        """Bytes of an element in the precision of the run."""
        return 4 if self.config.train.precision == "fp32" else 2

    @property
    def gradient_width(self) -> int:
        """Bytes of an element of a gradient that is averaged over data-parallel ranks."""
        return 2 if self.config.deepspeed.communication_precision == "bf16" else 4

    @property
    def recomputes(self) -> bool:
        return self.config.train.recompute != "none"

    @property
    def forward_passes(self) -> int:
        """How often a layer runs forward in a step, for one micro-batch."""
        return 1 + self.recomputes

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a step on each GPU."""
        ranks = self.processes // self.config.parallel.ranks_per_sequence
        return self.config.train.global_batch_size // (self.config.train.micro_batch_size * ranks)

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch_size * self.model.seq_length

    @property
    def tokens(self) -> int:
        return self.config.train.samples_after(self.config.train.steps) * self.model.seq_length

    @cached_property
    def batch(self) -> MicroBatch:
        whole = self.config.train.micro_batch_size * self.model.seq_length
        parallel = self.config.parallel
        shards = parallel.ranks_per_stage if parallel.uses_sequence_parallel else self.context_size
        return MicroBatch(whole, whole // shards, self.width, self.tensor_size, self.context_size)

    @property
    def matrix_tokens(self) -> int:
        """Tokens of a micro-batch that a rank multiplies by its part of the matrices: those of its context rank."""
        return self.batch.tokens // self.context_size

    @cached_property
    def trained_kinds(self) -> frozenset[str]:
        return frozenset(trained_kinds(self.extension))

    @property
    def trains_matrices(self) -> bool:
        return trains_matrices(self.extension)

    @property
    def trains_output(self) -> bool:
        return trains_output(self.model, self.extension)

    @property
    def lora_targets(self) -> frozenset[str]:
        """The projections that have LoRA layers."""
        return frozenset(self.extension.lora_targets if self.extension.adds_lora else ())

    @cached_property
    def elements(self) -> int:
        """Elements of the parameters that a tensor-parallel rank of this stage has, before ZeRO 3 shards them."""
        return parameter_count(self.model, self.extension, tensor_size=self.tensor_size, held=self.held)

    @cached_property
    def trained_elements(self) -> int:
        """Elements of those that are trained."""
        return parameter_count(self.model, self.extension, self.trained_kinds, self.tensor_size, self.held)

    @cached_property
    def muon_elements(self) -> int:
        """Elements of those that Muon updates, which have one moment."""
        kinds = MATRICES if self.config.optimizer.kind == "muon" else ()
        return parameter_count(self.model, self.extension, kinds, self.tensor_size, self.held)


@lru_cache(maxsize=256)
def _costs(model: ModelConfig, batch: MicroBatch) -> tuple[Costs, ...]:
    """Return the costs of each layer's encoding, once for all layouts of a search with this part of a micro-batch."""
    encoding = encoding_of(model)
    return tuple(encoding.costs(layer, batch) for layer in range(model.num_layers))
