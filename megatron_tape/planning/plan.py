"""The input of all estimates: a run's settings and its number of GPUs. Imports no torch."""

from collections.abc import Collection
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from megatron_tape.config.schema import ExtensionConfig, ModelConfig, RunConfig
from megatron_tape.errors import ConfigError
from megatron_tape.model.names import KINDS, MATRICES
from megatron_tape.ops.backends import BACKENDS, REFLECTIONS, SCORES, unsupported_heads
from megatron_tape.ops.backends.table import HOPPER, Case, Row, rows
from megatron_tape.planning.parameters import (
    PipelineStageContents,
    parameter_count,
    trained_kinds,
    trains_matrices,
    trains_output,
)
from megatron_tape.position import (
    Costs,
    MicroBatchSizes,
    PositionEncoding,
    attention_needs,
    encoding_of,
)

NOT_ASSUMED = frozenset({"flash_attn", "fla"})
"""Backends that need packages other than torch and Triton. Estimates assume that these are not
installed.
"""
MASKING = frozenset({"torch", "torch_wide", "naive"})
"""Backends that compute the scores of hidden keys and mask them, if a layer hides any."""
CALLED_TWICE = frozenset({"torch", "flash_attn"})
"""Backends that are called once for the values and once for the position state. FlashAttention-4
can take both at once, but is not assumed to be installed."""


@dataclass(frozen=True)
class Plan:
    """The settings of a run and the quantities that follow from them for one GPU of a pipeline
    stage.

    The settings must be valid for `processes`. All ranks of a stage have tensors of the same sizes.
    """

    config: RunConfig
    processes: int
    """The number of processes, one per GPU."""
    pipeline_stage: int = 0
    """The pipeline stage of this GPU."""
    generation: str = HOPPER
    """The generation of the GPUs, which decides the attention backend that `auto` selects and the
    size of the loss's chunks."""

    @property
    def model(self) -> ModelConfig:
        """The settings of the section `model`."""
        return self.config.model

    @property
    def extension(self) -> ExtensionConfig:
        """The settings of the section `extension`, such as trained parameters and LoRA layers."""
        return self.config.extension

    @cached_property
    def encoding(self) -> PositionEncoding:
        """The positional encoding, without weights."""
        return encoding_of(self.model)

    @cached_property
    def costs(self) -> tuple[Costs, ...]:
        """The costs of the positional encoding, one per layer."""
        return _costs(self.model, self.batch)

    @cached_property
    def attention(self) -> Row:
        """The attention backend and the reason for it; with `auto`, the first that needs only torch
        and Triton.
        """
        model = self.model
        train = self.config.train
        case = Case(
            self.generation,
            attention_needs(model),
            model.head_dim,
            half_precision=train.precision != "fp32",
            packed=self.config.data.reset_attention_mask,
            segments=self.extension.attention == "shifted_sparse",
            deterministic=train.deterministic,
            grouped=model.query_groups < model.num_attention_heads,
        )
        if model.attention_backend != "auto":
            generations = frozenset({self.generation})
            reason = "as set by model.attention_backend"
            return Row(case.kind, generations, model.attention_backend, reason)
        # As at run time: the first row of the table whose backend can run.
        for row in rows(case):
            if self._can_run(row.backend):
                return row

        raise ConfigError(
            ("model.num_attention_heads", "model.kv_channels"),
            f"gives heads of {model.head_dim} elements, which no attention backend supports",
            "raise it, or lower model.kv_channels",
        )

    def _can_run(self, backend: str) -> bool:
        """Return whether a backend is assumed to be installed, and has kernels for the run's
        precision and head dimension.
        """
        if backend in NOT_ASSUMED:
            return False
        precisions = BACKENDS[backend].precisions
        if precisions is not None and self.config.train.precision not in precisions:
            return False
        return unsupported_heads(backend, self.model.head_dim) is None

    @property
    def tensor_size(self) -> int:
        """The tensor-parallel size."""
        return self.config.parallel.tensor_model_parallel_size

    @property
    def context_size(self) -> int:
        """The context-parallel size."""
        return self.config.parallel.context_parallel_size

    @property
    def pipeline_size(self) -> int:
        """The pipeline-parallel size."""
        return self.config.parallel.pipeline_model_parallel_size

    @property
    def pipeline(self) -> str:
        """The layout of the pipeline as text: the number of stages, such as `4`, or stages x model
        chunks per stage, such as `4x2`.
        """
        virtual = self.config.parallel.virtual_pipeline_size
        if virtual > 1:
            return f"{self.pipeline_size}x{virtual}"
        return str(self.pipeline_size)

    @cached_property
    def model_chunks(self) -> list[range]:
        """The layers of each model chunk of this stage. There are several chunks with virtual
        stages.
        """
        chunks = self.config.parallel.model_chunks(self.model.num_layers)
        # Consecutive chunks are on consecutive stages.
        return chunks[self.pipeline_stage :: self.pipeline_size]

    @cached_property
    def contents(self) -> PipelineStageContents:
        """The layers of this stage, and whether it has the embedding and the output layer."""
        layers = tuple(layer for chunk in self.model_chunks for layer in chunk)
        return PipelineStageContents(
            layers,
            is_first=self.pipeline_stage == 0,
            is_last=self.pipeline_stage == self.pipeline_size - 1,
        )

    @property
    def in_flight(self) -> float:
        """The largest number of micro-batches that this stage has computed forward but not yet
        backward, and whose activations it keeps.

        With V virtual stages, a micro-batch in one of this stage's V model chunks counts as 1/V.
        """
        later_pipeline_stages = self.pipeline_size - 1 - self.pipeline_stage
        chunks = len(self.model_chunks)
        if chunks == 1:
            # The first backward pass comes after this many forward passes: one for each later
            # pipeline stage, while the first micro-batch goes through it, and one more.
            return min(later_pipeline_stages + 1, self.micro_batches)
        # In Megatron's interleaved schedule, the first backward pass comes after this many forward
        # passes of single chunks: those of the warmup, and one more.
        chunk_passes = 2 * later_pipeline_stages + (chunks - 1) * self.pipeline_size + 1
        return min(chunk_passes, chunks * self.micro_batches) / chunks

    @property
    def sent_bytes(self) -> int:
        """Bytes sent to the next stage per micro-batch: hidden states and, for some encodings, the
        position state.
        """
        if self.pipeline_size == 1:
            return 0
        token_bytes = self.model.hidden_size * self.width
        # Layer 1 stands for all layers that a later stage may begin with.
        if self.encoding.sends_state(1):
            token_bytes += self.costs[1].state_bytes(self.width)
        return self.batch.local_tokens * token_bytes

    @property
    def copies_embedding(self) -> bool:
        """Whether this is the last of several stages and holds a copy of the tied embedding for its
        output layer.
        """
        return self.pipeline_size > 1 and self.contents.is_last and self.model.tie_embeddings

    def pipeline_stages(self) -> "list[Plan]":
        """Return a copy of this plan for each pipeline stage."""
        return [replace(self, pipeline_stage=rank) for rank in range(self.pipeline_size)]

    @property
    def data_context_size(self) -> int:
        """Ranks with the same weights, over which ZeRO partitions: all data-parallel and
        context-parallel ranks.
        """
        return self.processes // (self.tensor_size * self.pipeline_size)

    @property
    def zero_stage(self) -> int:
        """DeepSpeed's ZeRO stage."""
        return self.config.deepspeed.zero_stage

    @property
    def width(self) -> int:
        """Bytes of an element in the precision of the run."""
        if self.config.train.precision == "fp32":
            return 4
        return 2

    @property
    def gradient_width(self) -> int:
        """Bytes per element of the gradients that data-parallel ranks exchange."""
        if self.config.deepspeed.communication_precision == "bf16":
            return 2
        return 4

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass recomputes activations, all or selected ones."""
        return self.config.train.recompute != "none"

    @property
    def keeps_attention(self) -> bool:
        """Whether selective recomputation keeps the outputs of attention instead of recomputing
        them.
        """
        selective = self.config.train.recompute == "selective"
        fused = not self.computes_whole_rows and self.model.attention_backend != "naive"
        return selective and fused

    @property
    def computes_whole_rows(self) -> bool:
        """Whether attention computes blocks of whole rows of scores, recomputed in the backward
        pass.
        """
        return bool({SCORES, REFLECTIONS} & self.encoding.needs)

    def is_masked(self, layer: int) -> bool:
        """Return whether layer `layer` (from 0) hides earlier tokens: those of other packed
        documents, or those outside a sliding window.
        """
        return self.config.data.reset_attention_mask or self.window_hides_tokens(layer)

    def window_hides_tokens(self, layer: int) -> bool:
        """Return whether a sliding window hides tokens in layer `layer` (from 0)."""
        return self.model.needs_window and self.model.window_of(layer) is not None

    @property
    def forward_passes(self) -> int:
        """Forward passes of a layer per micro-batch, recomputation included."""
        return 1 + self.recomputes

    @property
    def micro_batches(self) -> int:
        """Micro-batches per step on each GPU."""
        train = self.config.train
        data_parallel_size = self.processes // self.config.parallel.ranks_per_sequence
        return train.global_batch_size // (train.micro_batch_size * data_parallel_size)

    @property
    def tokens_per_step(self) -> int:
        """Tokens of the global batch."""
        return self.config.train.global_batch_size * self.model.seq_length

    @property
    def tokens(self) -> int:
        """Tokens of the whole training."""
        return self.config.train.samples_after(self.config.train.steps) * self.model.seq_length

    @cached_property
    def batch(self) -> MicroBatchSizes:
        """The part of a micro-batch that one GPU computes."""
        parallel = self.config.parallel
        tokens = self.config.train.micro_batch_size * self.model.seq_length
        local_tokens = tokens // self.context_size
        # With sequence parallelism, tensor-parallel ranks share the tokens outside attention.
        if parallel.uses_sequence_parallel:
            local_tokens = tokens // parallel.ranks_per_pipeline_stage
        return MicroBatchSizes(
            tokens, local_tokens, self.width, self.tensor_size, self.context_size
        )

    @property
    def matrix_tokens(self) -> int:
        """Tokens of a micro-batch that a rank multiplies by its shard of the matrices."""
        return self.batch.tokens // self.context_size

    @property
    def mlp_width(self) -> int:
        """Inner width of a tensor-parallel rank's shard of the MLP."""
        return self.model.ffn_hidden_size // self.tensor_size

    @property
    def vocabulary(self) -> int:
        """Rows of a tensor-parallel rank's shard of the embedding and the output layer."""
        return self.model.vocab_size // self.tensor_size

    @cached_property
    def trained_kinds(self) -> frozenset[str]:
        """The kinds of trained parameters, of `model.names.KINDS`."""
        return frozenset(trained_kinds(self.extension))

    @property
    def trains_matrices(self) -> bool:
        """Whether the matrices of attention and the MLP are trained."""
        return trains_matrices(self.extension)

    @property
    def trains_output(self) -> bool:
        """Whether the output layer's matrix is trained."""
        return trains_output(self.model, self.extension)

    @property
    def lora_targets(self) -> frozenset[str]:
        """The projections with LoRA layers."""
        if self.extension.adds_lora:
            return frozenset(self.extension.lora_targets)
        return frozenset()

    @cached_property
    def elements(self) -> int:
        """Elements of a tensor-parallel rank's parameters on this pipeline stage, before ZeRO 3
        partitions them.
        """
        return self.elements_of(KINDS)

    @cached_property
    def trained_elements(self) -> int:
        """Elements of a tensor-parallel rank's trained parameters on this pipeline stage, before
        ZeRO partitions them.
        """
        return self.elements_of(self.trained_kinds)

    @cached_property
    def muon_elements(self) -> int:
        """Elements of a tensor-parallel rank's matrices on this pipeline stage that Muon updates,
        with one moment, not two.
        """
        if self.config.optimizer.kind == "muon":
            return self.elements_of(MATRICES)
        return 0

    def elements_of(self, kinds: Collection[str]) -> int:
        """Return the elements of a tensor-parallel rank's parameters of these kinds on this
        pipeline stage.
        """
        return parameter_count(self.model, self.extension, kinds, self.tensor_size, self.contents)


@lru_cache(maxsize=256)
def _costs(model: ModelConfig, batch: MicroBatchSizes) -> tuple[Costs, ...]:
    """Return the encoding's costs in each layer. Cached, because many layouts of a search have the
    same costs.
    """
    encoding = encoding_of(model)
    return tuple(encoding.costs(layer, batch) for layer in range(model.num_layers))
