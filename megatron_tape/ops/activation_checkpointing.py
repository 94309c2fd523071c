"""Selective activation checkpointing: attention is recorded and replayed, and the rest of a layer is computed again.

A layer that is recomputed runs twice: first without gradients, and again in the backward pass. `AttentionRecorder` runs
attention in the first run only, with its graph. Of what the graph saves, it keeps all but the inputs: as a rule
outputs and log-sums. The second run computes the inputs again, puts them into the graph, and gets the recorded outputs.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Hashable
from weakref import ref

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import saved_tensors_hooks

Averages = Callable[..., tuple[Tensor, ...]]
"""Maps tensors, some of which may be None, to tensors; what needs a gradient must be among its arguments."""


def run_directly(function: Averages, *tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Return what `function` returns; `AttentionRecorder.run` takes its place under selective checkpointing."""
    return function(*tensors)


class AttentionRecorder:
    """Records attention in the first forward pass of a model's layers, and replays it in the second."""

    def __init__(self):
        self._calls: dict[Hashable, deque[_RecordedCall]] = defaultdict(deque)

    def run(self, layer: Hashable, function: Averages, *tensors: Tensor | None) -> tuple[Tensor, ...]:
        """Return what `function` returns for `tensors`: in a layer's first run by calling it, then as it was recorded.

        The first run cannot know which tensors need gradients in the second one, so all of them get one.
        """
        if not torch.is_grad_enabled():
            call = _RecordedCall(function, tensors)
            self._calls[layer].append(call)
            return call.results()
        if not self._calls[layer]:
            raise RuntimeError(f"layer {layer} runs again, but its first run, without gradients, was not recorded")
        return _Replay.apply(self._calls[layer].popleft(), *tensors)


class _RecordedCall:
    """A call of attention, whose graph gets its inputs when it is run backward.

    The graph refers to the call weakly: Python would never find a cycle through a graph, which would then stay.
    """

    def __init__(self, function: Averages, tensors: tuple[Tensor | None, ...]):
        self._inputs = tensors
        self._gradients: tuple[Tensor | None, ...] = ()
        call = ref(self)
        hooks = saved_tensors_hooks(lambda saved: call()._pack(saved), lambda packed: call()._unpack(packed))
        # Attached, parameters would be leaves of this graph, and their hooks would run without a gradient.
        detached = (None if x is None else x.detach() for x in tensors)
        with torch.enable_grad(), hooks:
            self._outputs = function(*_GraphInputs.apply(call, torch.empty(0, requires_grad=True), *detached))
        self._inputs = ()

    def results(self) -> tuple[Tensor, ...]:
        """Return the outputs, without the graph."""
        return tuple(output.detach() for output in self._outputs)

    def backward(self, inputs: tuple[Tensor | None, ...], gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
        """Return the gradients of `inputs`, given those of the outputs, and let go of the graph."""
        self._inputs = inputs
        torch.autograd.backward(self._outputs, gradients)
        found, self._inputs, self._outputs, self._gradients = self._gradients, (), (), ()
        return found

    def set_gradients(self, gradients: tuple[Tensor | None, ...]) -> None:
        """Take the gradients of the inputs."""
        self._gradients = gradients

    def _pack(self, saved: Tensor) -> Tensor | int:
        """Return the number of the input that `saved` is, or else `saved`."""
        place = _place(saved)
        for i, x in enumerate(self._inputs):
            if x is not None and _place(x) == place:
                return i
        # An output that its own operation saves would otherwise refer to itself.
        return saved.detach()

    def _unpack(self, packed: Tensor | int) -> Tensor:
        return self._inputs[packed] if isinstance(packed, int) else packed


def _place(x: Tensor) -> tuple:
    # Fake tensors have storage, but no address.
    return x.untyped_storage()._cdata, x.storage_offset(), x.dtype, x.shape, x.stride()


class _GraphInputs(torch.autograd.Function):
    """Hands tensors to a call's graph, which does not keep them as it would keep leaves, and their gradients back."""

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
    """A recorded call, between the inputs and the outputs of the second run."""

    @staticmethod
    def forward(ctx, call: _RecordedCall, *tensors: Tensor | None):
        ctx.call = call
        ctx.save_for_backward(*tensors)
        return call.results()

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):
        return None, *ctx.call.backward(ctx.saved_tensors, gradients)
