"""The part of the model that a pipeline stage holds, run by Megatron-core's schedules.

Stages hand on one tensor, in which the position state goes with the hidden states where it cannot be made again (see
`ops.stage_boundary` and `PositionEncoding.carries`). Parameters have the names of the whole model.
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
from megatron_tape.model.layers import LayerPosition

TIED = "gpt.embedding.word_embeddings.weight"
"""The parameter that is also the output layer's weight in models with tied embeddings."""


class Pipeline(nn.Module):
    """The stretches of layers of one stage, which are `LanguageModel`s; its methods are called by all stages together.

    Stage p of P holds stretch p and, with virtual stages, every P-th stretch after it.
    """

    def __init__(self, stretches: list[LanguageModel], config: TransformerConfig, groups: ProcessGroupCollection):
        super().__init__()
        self.stretches = nn.ModuleList(stretches)
        self.groups, first = groups, stretches[0]
        self.tokens, self.model, self.encoding, self.dtype = first.tokens, first.model, first.encoding, first.dtype
        self.attention_backend = first.attention_backend
        # Every stretch of layers but the first is sent tensors of one shape.
        self._config = copy.copy(config)
        self._config.hidden_size = first.sent_width(1)
        self._config.pipeline_model_parallel_size = groups.pp.size()
        self._config.virtual_pipeline_model_parallel_size = len(stretches) if len(stretches) > 1 else None
        self._config.microbatch_group_size_per_vp_stage = groups.pp.size()
        # Sent in batches, what two stages send each other as neighbours in both directions would be mixed up.
        self._config.overlap_p2p_comm = len(stretches) > 1
        self._config.batch_p2p_comm, self._config.batch_p2p_sync = len(stretches) == 1, False
        self._config.deallocate_pipeline_outputs = len(stretches) == 1
        for stretch in stretches:
            stretch.config, stretch.model_type = self._config, ModelType.encoder_or_decoder
        self._communicator = P2PCommunicator(groups.pp, self._config)
        self._run = get_forward_backward_func(groups.pp.size(), self._config.virtual_pipeline_model_parallel_size)
        self.tied = TiedWeight(self) if self.model.tie_embeddings else None

    def named_parameters(self, *args, **kwargs) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters by the names that they have in the whole model, and `add_empty`'s."""
        yield from self._parameters.items()
        for stretch in self.stretches:
            yield from stretch.named_parameters(*args, **kwargs)

    def add_empty(self) -> nn.Parameter:
        """Return a new parameter that takes part in nothing, for a group of the optimizer that would have none."""
        like, name = next(self.stretches.parameters()), f"empty_{len(self._parameters)}"
        self.register_parameter(name, nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device)))
        return self.get_parameter(name)

    @property
    def embedding(self) -> nn.Module | None:
        """The embedding of tokens, in the first stage."""
        return self.stretches[0].embedding

    @property
    def is_first(self) -> bool:
        """Whether this stage begins with the embedding."""
        return self.stretches[0].is_first

    @property
    def is_last(self) -> bool:
        """Whether this stage ends with the output layer."""
        return self.stretches[-1].is_last

    def train_micro_batches(
        self,
        batches: list[dict[str, Tensor]],
        positions: Tensor,
        scaled: Callable[[Tensor], Tensor],
        accumulating: Callable[[], AbstractContextManager],
    ) -> Tensor:
        """Run the batches, arguments of `LanguageModel.forward`, forward and backward.

        The gradients are those of the mean of what `scaled` makes of the losses. Megatron's `no_sync_func`,
        `accumulating`, is entered but for the last backward pass of each stretch of layers. Returns the sum of the
        losses in the last stage, elsewhere 0.
        """
        tokens = batches[0]["tokens"]
        self._config.no_sync_func = accumulating

        def forward(batches: Iterator[dict[str, Tensor]], stretch: LanguageModel) -> tuple[Tensor, Callable]:
            return stretch(**next(batches), positions=positions), loss_of

        def loss_of(loss: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            # With a number of tokens, which is 1, the schedule does not multiply by the number of context ranks.
            return scaled(loss), torch.ones((), dtype=torch.int, device=loss.device), loss.detach()

        losses = self._run(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in self.stretches],
            model=list(self.stretches),
            num_microbatches=len(batches),
            seq_length=tokens.shape[1],
            micro_batch_size=len(tokens),
            p2p_communicator=self._communicator,
            pg_collection=self.groups,
        )
        return sum(losses, torch.zeros((), device=tokens.device))

    def forward(self, tokens: Tensor, labels: Tensor | None = None, **settings) -> Tensor:
        """Return what `LanguageModel.forward` does in the last stage; elsewhere a tensor of its shape and dtype."""
        shape = [tokens.shape[1] // self.tokens.sequence_shards, len(tokens), self._config.hidden_size]
        for stretch in self.stretches:
            stretch.set_input_tensor([self._communicator.recv_forward(shape, stretch.is_first)])
            result = stretch(tokens, labels, **settings)
            self._communicator.send_forward(result, stretch.is_last)
        if self.is_last:
            return result
        if labels is None:
            return torch.empty(*tokens.shape, self.model.vocab_size, dtype=self.dtype, device=tokens.device)
        return torch.empty(tokens.shape if settings.get("by_token") else (), device=tokens.device)

    def token_positions(self, tokens: Tensor, random: np.random.Generator | None = None) -> Tensor:
        """See `LanguageModel.token_positions`."""
        return self.stretches[0].token_positions(tokens, random)

    def take_z_loss(self) -> Tensor | float:
        """See `LanguageModel.take_z_loss`; 0 except in the last stage."""
        return self.stretches[-1].take_z_loss()

    def position_updates(self) -> list[LayerPosition]:
        """Return this stage's modules that rewrite the position state."""
        return [update for stretch in self.stretches for update in stretch.position_updates()]


class TiedWeight:
    """The embedding's weight where the last stage needs a copy of it for its output layer. `trained` must be set.

    The copy has no optimizer's state: its gradient goes to the first stage, which sends the updated weight back.
    """

    def __init__(self, pipeline: Pipeline):
        self._pipeline, self._group = pipeline, pipeline.groups.embd
        self.trained = False
        self.weight: Tensor | None = None
        self._gradient: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Of this tensor-parallel rank's part."""
        model = self._pipeline.model
        return model.vocab_size // self._pipeline.groups.tp.size(), model.hidden_size

    def start(self, device: torch.device) -> None:
        """Make the copy on `device`; call it when the first stage has the weight."""
        pipeline = self._pipeline
        if pipeline.is_first:
            self.weight = dict(pipeline.named_parameters())[TIED]
        elif pipeline.is_last:
            self.weight = torch.empty(self.shape, dtype=pipeline.dtype, device=device)
            pipeline.stretches[-1].gpt.use_output_weight(self.weight)
            if self.trained:
                self.weight.requires_grad_().register_post_accumulate_grad_hook(self._add)
        self.share()

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        dist.broadcast(tensor, dist.get_global_rank(self._group, source), self._group)

    def _add(self, weight: Tensor) -> None:
        """Add up the gradients of micro-batches in fp32, as ZeRO does those of parameters."""
        gradient, weight.grad = weight.grad.float(), None
        self._gradient = gradient if self._gradient is None else self._gradient.add_(gradient)

    def share(self) -> None:
        """Send the weight from the first stage to the last."""
        if self.weight is not None:
            self._broadcast(self.weight.detach(), 0)

    def gradient(self) -> Tensor | None:
        """Return in the first stage what it has to add to the weight's gradient, in fp32; elsewhere None."""
        if self.weight is None or not self.trained:
            return None
        if self._pipeline.is_last:
            self._broadcast(self._gradient, 1)
            self._gradient = None
            return None
        received = torch.empty(self.weight.shape, device=self.weight.device)
        self._broadcast(received, 1)
        return received
