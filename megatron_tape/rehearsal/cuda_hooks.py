"""Lets autograd handle fake CUDA tensors in a torch that was built without CUDA.

In such a build a `torch._subclasses.FakeTensor` may name a CUDA device, but indexing it raises and the first backward
pass ends the process, because two C++ tables are empty: the registry of device guards and the virtual table of CUDA's
hooks. This module fills them through ctypes. Symbols and offsets belong to a version of torch, hence the list of known
versions. Nothing runs on a device, and a torch that was built with CUDA is left as it is.
"""

from ctypes import CDLL, CFUNCTYPE, POINTER, addressof, c_bool, c_int8, c_void_p, cast, py_object, pythonapi
from typing import Any

import torch

from megatron_tape.errors import refuse

KNOWN_VERSIONS = ("2.13",)
DEVICE_TYPES = 21  # of c10::DeviceType
CUDA = 1  # among them
GUARD_SLOTS = 64  # at least as many as DeviceGuardImplInterface has virtual functions
HOOKS_SLOTS = 80  # at least as many as CUDAHooksInterface has, and the two words before them
IS_BUILT, HAS_PRIMARY_CONTEXT = 4, 6  # indices of two of these functions

_filled = False


def fill_cuda_hooks() -> None:
    """Fill the tables, once per process; `ConfigError` for a version of torch whose tables are not known."""
    global _filled
    if torch.version.cuda is not None or _filled:
        return
    version = torch.__version__
    refuse(
        version.rsplit(".", 1)[0] not in KNOWN_VERSIONS,
        f"torch {version} was built without CUDA; among such builds, rehearsals support only torch "
        f"{' and '.join(KNOWN_VERSIONS)}; install that version, or a torch that was built with CUDA",
    )
    _register_guard()
    _replace_hooks()
    _filled = True


def _register_guard() -> None:
    libraries = torch.__path__[0] + "/lib/"
    symbol = "_ZN3c104impl26device_guard_impl_registryE"
    registry = (c_void_p * DEVICE_TYPES).in_dll(CDLL(libraries + "libc10.so"), symbol)
    functions = _table([_constant(c_int8, 0)] * GUARD_SLOTS)
    guard = _table([addressof(functions)])
    registry[CUDA] = addressof(guard)
    # Torch replaces a guard that counts no devices with its own, which does nothing.
    torch._C._ensureCUDADeviceGuardSet()


def _replace_hooks() -> None:
    get_hooks = CDLL(torch.__path__[0] + "/lib/libtorch_cpu.so")._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = c_void_p
    hooks = cast(get_hooks(), POINTER(c_void_p))
    before = 2 * 8  # bytes: a virtual table's pointer points behind its offset and type information
    slots = cast(hooks[0] - before, POINTER(c_void_p))[:HOOKS_SLOTS]
    slots[IS_BUILT] = _constant(c_bool, True, c_void_p)
    slots[HAS_PRIMARY_CONTEXT] = _constant(c_bool, False, c_void_p, c_int8)
    hooks[0] = addressof(_table(slots)) + before


def _table(slots: list[int]) -> Any:
    return _kept((c_void_p * len(slots))(*slots))


def _constant(result: type, value: object, *arguments: type) -> int:
    """Return the address of a C function that returns `value`."""
    return cast(_kept(CFUNCTYPE(result, *arguments)(lambda *_: value)), c_void_p).value


def _kept(thing: Any) -> Any:
    """Keep `thing` forever: static destructors call it after Python has ended."""
    pythonapi.Py_IncRef(py_object(thing))
    return thing
