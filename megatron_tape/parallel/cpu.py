"""Training without CUDA: patch what assumes it, and keep memory that was used."""

import contextlib
import ctypes

import torch

from megatron_tape.parallel import megatron_patches

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""From glibc's malloc.h: free bytes at the end of the heap that are returned; bytes of a tensor that gets a mapping of
its own."""
_LARGEST = 2**31 - 1
"""Bytes; both are a C int."""


def prepare_cpu() -> None:
    """Make megatron-core and DeepSpeed usable without CUDA; call once per process, before a model is built.

    Changes nothing if CUDA is available.
    """
    if torch.cuda.is_available():
        return
    from megatron_tape.parallel import deepspeed_patches

    megatron_patches.run_without_cuda()
    deepspeed_patches.compile_nothing()
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Make the C library, if it is glibc, reuse the memory of freed tensors instead of returning it to the system.

    New memory must be mapped page by page when it is first touched, which takes about as long as computing what is
    written to it. What is kept is freed when the process ends.
    """
    with contextlib.suppress(OSError, AttributeError):
        set_option = ctypes.CDLL(None).mallopt
        # Before 2.35, glibc takes no more than 32 MiB. Either setting ends the automatic choice of both.
        if any(set_option(_MMAP_THRESHOLD, size) == 1 for size in (_LARGEST, 2**25)):
            set_option(_TRIM_THRESHOLD, _LARGEST)
