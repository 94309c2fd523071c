"""Selective activation checkpointing: attention is recorded and replayed, the rest of a layer is recomputed.

A checkpointed layer runs twice: first without gradients, then in the backward pass. `AttentionRecorder` computes
attention in the first run only and keeps its autograd graph with all saved tensors except the inputs, usually outputs
and log-sum-exp. The second run recomputes the inputs, inserts them into the graph, and returns the recorded outputs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

Averages = Callable[..., tuple[Tensor, ...]]
"""Maps tensors or None to tensors. Every tensor that needs a gradient must be an argument."""


def run_directly(function: Averages, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Call `function`. Selective checkpointing uses `AttentionRecorder.run` instead."""
    return function(*tensors)


class AttentionRecorder:
    """Records attention in the first forward pass of a model's layers, and replays it in the second."""

    def __init__(self):
        self._calls: dict[Hashable, deque[_RecordedCall]] = defaultdict(deque)

    def run(self, layer: Hashable, function: Averages, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Call `function` on `tensors` in the first run of a layer, and return the recorded outputs in the second.

        The first run cannot know which tensors need gradients in the second one, so all of them get one.
        """
        if not torch.is_grad_enabled():
            call = _RecordedCall(function, tensors)
            self._calls[layer].append(call)
            return call.results()
        if not self._calls[layer]:
            raise RuntimeError(f"layer {layer} is recomputed, but its first run without gradients was not recorded")
        return _Replay.apply(self._calls[layer].popleft(), *tensors)


class _RecordedCall:
    """A recorded call of attention, whose graph receives its inputs in the backward pass.

    The graph holds a weak reference to the call: Python cannot collect reference cycles through an autograd graph.
    """

    def __init__(self, function: Averages, tensors: tuple[Tensor | None, ...]):
        self._inputs = tensors
        self._gradients: tuple[Tensor | None, ...] = ()
        call = ref(self)
        hooks = saved_tensors_hooks(lambda saved: call()._pack(saved), lambda packed: call()._unpack(packed))
        # Without detach, parameters would be leaves of this graph, and their hooks would run without a gradient.
        detached = (None if x is None else x.detach() for x in tensors)
        with torch.enable_grad(), hooks:
            self._outputs = function(*_GraphInputs.apply(call, torch.empty(0, requires_grad=True), *detached))
        self._inputs = ()

    def results(self) -> tuple[Tensor, ...]:
        """Return the outputs, without the graph."""
        return tuple(output.detach() for output in self._outputs)

    def backward(self, inputs: tuple[Tensor | None, ...], gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of `inputs` for those of the outputs, and free the graph."""
        self._inputs = inputs
        torch.autograd.backward(self._outputs, gradients)
        found, self._inputs, self._outputs, self._gradients = self._gradients, (), (), ()
        return found

    def set_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Store the gradients of the inputs."""
        self._gradients = gradients

    def _pack(self, saved: Tensor) -> Tensor | int:
        """Return the index of the input if `saved` is one, otherwise `saved` detached."""
        place = _place(saved)
        for i, x in enumerate(self._inputs):
            if x is not None and _place(x) == place:
                return i
        # Without detach, an output saved by its own operation would refer to itself.
        return saved.detach()

    def _unpack(self, packed: Tensor | int) -> Tensor:
        return self._inputs[packed] if isinstance(packed, int) else packed


def _place(x: Tensor) -> tuple:
    # Fake tensors have a storage but no address.
    return x.untyped_storage()._cdata, x.storage_offset(), x.dtype, x.shape, x.stride()


class _GraphInputs(torch.autograd.Function):
    """Identity whose outputs are not leaves, which a recorded graph would keep alive; backward stores gradients."""

    @staticmethod
    def forward(ctx, call: ref[_RecordedCall], learned: Tensor, *tensors: Tensor | None):
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(None if x is None else x.detach() for x in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        ctx.call().set_gradients(gradients)
        return None, None, *(None for _ in gradients)


class _Replay(torch.autograd.Function):
    """Autograd node of a recorded call between the inputs and outputs of the second run."""

    @staticmethod
    def forward(ctx, call: _RecordedCall, *tensors: Tensor | None):
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call.results()

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, *ctx.call.backward(ctx.saved_tensors, gradients)
