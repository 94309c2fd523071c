"""One pipeline stage of the model, run by Megatron-core's schedules.

Each stage sends one tensor to the next: the hidden states and, if the next stage cannot recompute
it, the position state (see `ops.stage_boundary` and `PositionEncoding.sends_state`). Parameters
have the same names as in the whole model.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.enums import ModelType
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn

from megatron_tape.model.language_model import LanguageModel
from megatron_tape.model.layers import LayerEncoding
from megatron_tape.model.names import EMBEDDING


class Pipeline(nn.Module):
    """The model chunks of one pipeline stage, each a `LanguageModel`. All stages call its methods
    together.

    Stage p of P has chunk p and, with virtual stages, every P-th chunk after it.
    """

    def __init__(
        self,
        model_chunks: list[LanguageModel],
        config: TransformerConfig,
        groups: ProcessGroupCollection,
    ):
        super().__init__()
        self.model_chunks = nn.ModuleList(model_chunks)
        self.groups = groups

        first = model_chunks[0]
        self.token_layout = first.token_layout
        self.model_config = first.model_config
        self.encoding = first.encoding
        self.dtype = first.dtype
        self.attention_backend = first.attention_backend

        # Megatron derives the shape of sent tensors from `hidden_size`. All model chunks except the
        # first receive tensors of the same width, that of the input of layer 1.
        self._config = copy.copy(config)
        self._config.hidden_size = first.sent_width(1)
        self._config.pipeline_model_parallel_size = groups.pp.size()
        self._config.microbatch_group_size_per_vp_stage = groups.pp.size()

        is_virtual = len(model_chunks) > 1
        virtual_size = len(model_chunks) if is_virtual else None
        self._config.virtual_pipeline_model_parallel_size = virtual_size
        # With virtual stages, outputs go from the last rank back to the first one, too. With two
        # ranks, each then sends to the other, and batched sends would mix up their tensors.
        self._config.overlap_p2p_comm = is_virtual
        self._config.batch_p2p_comm = not is_virtual
        # The synchronization is only a workaround for a bug of old versions of torch.
        self._config.batch_p2p_sync = False
        # With virtual stages, sends overlap with computation: an output might be freed too early.
        self._config.deallocate_pipeline_outputs = not is_virtual
        # Megatron's schedules read these attributes of a chunk.
        for chunk in model_chunks:
            chunk.config = self._config
            chunk.model_type = ModelType.encoder_or_decoder
        self._communicator = P2PCommunicator(groups.pp, self._config)
        self._run = get_forward_backward_func(groups.pp.size(), virtual_size)
        self.tied = TiedWeight(self) if self.model_config.tie_embeddings else None
        """The tied embedding weight; None if the output layer has a weight of its own."""

    def named_parameters(self, *args, **kwargs) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the names and parameters of this stage, including those that `add_empty` added."""
        # The names lack the prefix of `model_chunks`, since layers are numbered in the whole model.
        yield from self._parameters.items()
        for chunk in self.model_chunks:
            yield from chunk.named_parameters(*args, **kwargs)

    def add_empty(self) -> nn.Parameter:
        """Add an unused parameter for an optimizer parameter group that would otherwise be empty,
        and return it.
        """
        like = next(self.model_chunks.parameters())
        empty = nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))
        self.register_parameter(f"empty_{len(self._parameters)}", empty)
        return empty

    @property
    def is_first(self) -> bool:
        """Whether this stage begins with the embedding."""
        return self.model_chunks[0].is_first

    @property
    def is_last(self) -> bool:
        """Whether this stage ends with the output layer."""
        return self.model_chunks[-1].is_last

    def train_micro_batches(
        self,
        batches: list[dict[str, Tensor]],
        positions: Tensor,
        scale_loss: Callable[[Tensor], Tensor],
        without_gradient_sync: Callable[[], AbstractContextManager],
    ) -> Tensor:
        """Run the forward and backward passes of one training step, and return the sum of the
        micro-batches' losses.

        The sum is 0 in all stages except the last. `batches` are the keyword arguments of
        `LanguageModel.forward` for each micro-batch, apart from the `positions` (S,) that all
        share. The gradients are those of the mean of `scale_loss(loss)`. `without_gradient_sync` is
        Megatron's `no_sync_func`: its context covers all backward passes of a model chunk except
        the last one.
        """
        tokens = batches[0]["tokens"]
        self._config.no_sync_func = without_gradient_sync

        # Megatron calls this for each micro-batch and chunk. It returns the chunk's output, and the
        # function that Megatron calls with the output of the last chunk, which is the loss.
        def forward_step(
            batches: Iterator[dict[str, Tensor]], chunk: LanguageModel
        ) -> tuple[Tensor, Callable]:
            return chunk(**next(batches), positions=positions), loss_of

        # Returns the loss to differentiate, its number of tokens, and what `self._run` returns.
        def loss_of(loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            # Without a number of tokens, the schedule would multiply the loss by the number of
            # context-parallel ranks.
            one_token = torch.ones((), dtype=torch.int, device=loss.device)
            return scale_loss(loss), one_token, loss.detach()

        losses = self._run(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.model_chunks],  # each chunk has its own
            model=list(self.model_chunks),
            num_microbatches=len(batches),
            seq_length=tokens.shape[1],
            micro_batch_size=len(tokens),
            p2p_communicator=self._communicator,
            pg_collection=self.groups,
        )
        return sum(losses, torch.zeros((), device=tokens.device))

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        **settings,
    ) -> Tensor:
        """Return the result of `LanguageModel.forward` in the last stage; elsewhere, an
        uninitialized tensor of the same shape and dtype.

        `settings` are further keyword arguments of `LanguageModel.forward`.
        """
        # The shape of the tensors between chunks, (s, B, `LanguageModel.sent_width`).
        shape = [
            tokens.shape[1] // self.token_layout.sequence_shards,
            len(tokens),
            self._config.hidden_size,
        ]
        # The first chunk receives None, and the last chunk sends nothing.
        for chunk in self.model_chunks:
            chunk.set_input_tensor([self._communicator.recv_forward(shape, chunk.is_first)])
            result = chunk(tokens, labels, **settings)
            self._communicator.send_forward(result, chunk.is_last)
        if self.is_last:
            return result

        # The caller can broadcast the result of the last stage into this tensor.
        result_shape: tuple[int, ...] = ()
        dtype = torch.float32
        if labels is None:
            dtype = self.dtype
            result_shape = *tokens.shape, self.model_config.vocab_size
        elif settings.get("by_token"):
            result_shape = tokens.shape
        return torch.empty(result_shape, dtype=dtype, device=tokens.device)

    def token_positions(self, tokens: Tensor, random: np.random.Generator | None = None) -> Tensor:
        """Return the positions (S,) of token ids (B, S), on the same device.

        `random` is the generator of a training step; None outside training.
        """
        return self.model_chunks[0].token_positions(tokens, random)

    def take_z_loss(self) -> Tensor | float:
        """Return the sum of the z-losses of all training forward passes since the last call; 0
        except in the last stage.
        """
        return self.model_chunks[-1].take_z_loss()

    def updating_encodings(self) -> list[LayerEncoding]:
        """Return the modules of this stage that update the position state, in layer order."""
        return [update for chunk in self.model_chunks for update in chunk.updating_encodings()]


class TiedWeight:
    """A tied embedding weight: the first pipeline stage has the parameter, the last one a copy for
    its output layer.

    The copy has no optimizer state. In every step, its gradient is sent to the first stage
    (`send_gradient`), and the updated weight is sent back (`send_weight`). Set `trained` to whether
    the parameter is trained before calling `start`.
    """

    def __init__(self, pipeline: Pipeline):
        self._pipeline = pipeline
        self._group = pipeline.groups.embd
        """The first and the last pipeline stage."""
        self.trained = False
        self.weight: Tensor | None = None
        """The parameter in the first stage, its copy in the last one, and None in other stages."""
        self._gradient: Tensor | None = None
        """Sum of the copy's gradients over the micro-batches of a step, in fp32; None before the
        first micro-batch.
        """

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of this tensor-parallel rank's shard."""
        model_config = self._pipeline.model_config
        return model_config.vocab_size // self._pipeline.groups.tp.size(), model_config.hidden_size

    def start(self, device: torch.device) -> None:
        """Create the copy on `device`. Call this after the first stage has loaded or initialized
        the weight.
        """
        pipeline = self._pipeline
        if pipeline.is_first:
            self.weight = dict(pipeline.named_parameters())[EMBEDDING]
        elif pipeline.is_last:
            self.weight = torch.empty(self.shape, dtype=pipeline.dtype, device=device)
            pipeline.model_chunks[-1].received_embedding = self.weight
            if self.trained:
                # The copy is not a parameter, so ZeRO does not accumulate its gradient.
                self.weight.requires_grad_().register_post_accumulate_grad_hook(self._accumulate)
        self.send_weight()

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        """Broadcast from the first stage if `source` is 0, from the last one if it is 1."""
        dist.broadcast(tensor, dist.get_global_rank(self._group, source), self._group)

    def _accumulate(self, weight: Tensor) -> None:
        """Add a micro-batch's gradient of the copy to their sum in fp32, as ZeRO does for
        parameters.
        """
        gradient = weight.grad.float()
        weight.grad = None
        if self._gradient is None:
            self._gradient = gradient
        else:
            self._gradient.add_(gradient)

    def send_weight(self) -> None:
        """Send the weight from the first stage to the last one."""
        if self.weight is not None:
            self._broadcast(self.weight.detach(), source=0)

    def send_gradient(self) -> Tensor | None:
        """Send the copy's gradient to the first stage, and return it there in fp32; return None in
        other stages.

        The caller must add it to the gradient of the parameter.
        """
        if self.weight is None or not self.trained:
            return None
        if self._pipeline.is_last:
            self._broadcast(self._gradient, source=1)
            self._gradient = None
            return None
        received = torch.empty(self.weight.shape, device=self.weight.device)
        self._broadcast(received, source=1)
        return received
