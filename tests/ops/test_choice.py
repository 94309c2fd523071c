"""Which backend is chosen, and why one cannot run or do what is needed."""

import sys
from types import ModuleType

import pytest
import torch
from models import small_model

from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import AVERAGE, BIAS, GATE, POINTWISE, REFLECTIONS, ROTATION, SCORES, choice
from megatron_tape.ops.backends.choice import choose_backend, unsupported
from megatron_tape.position import encoding_of

CPU, GPU = torch.device("cpu"), torch.device("cuda")
FP32, FP64, BF16 = torch.float32, torch.float64, torch.bfloat16
FLA = "fla.ops.forgetting_attn"


def chosen(device, needs=frozenset(), wanted="auto", dtype=BF16, dim=64, **settings):
    return choose_backend(wanted, device, dtype, dim, needs, **settings).backend


@pytest.fixture
def installed(monkeypatch):
    """The packages that there seem to be, on a machine that seems to have an H100."""
    packages = {"triton", "flash_attn", "flash_attn_interface", "torch", FLA}
    monkeypatch.setattr(choice, "why_not_importable", lambda name: None if name in packages else "is not installed")
    monkeypatch.setattr(choice, "triton_interprets", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return packages


@pytest.mark.parametrize(
    "needs, settings, on_gpu, on_cpu",
    [
        ({AVERAGE}, {}, "triton", "tiled"),
        (set(), {}, "flash_attn_3", "torch"),
        (set(), {"packed": True}, "flash_attn_3", "torch"),
        (set(), {"without": {"flash_attn_3"}}, "cudnn", "torch"),
        # cuDNN would compute whole rows of documents, too.
        (set(), {"without": {"flash_attn_3"}, "packed": True}, "flash_attn", "torch"),
        (set(), {"without": {"flash_attn_3", "cudnn"}}, "flash_attn", "torch"),
        (set(), {"without": {"flash_attn_3", "cudnn", "flash_attn"}}, "torch", "torch"),
        # With segments, torch would be slower than without them.
        ({AVERAGE}, {"segments": True}, "triton", "tiled"),
        (set(), {"segments": True}, "flash_attn_3", "tiled"),
        (set(), {"segments": True, "without": {"flash_attn_3"}}, "flash_attn", "tiled"),
        (set(), {"segments": True, "wanted": "torch"}, "torch", "torch"),
        ({AVERAGE}, {"wanted": "torch"}, "torch", "torch"),
        ({AVERAGE}, {"dim": 48}, "torch", "tiled"),
        ({AVERAGE}, {"dtype": FP64}, "torch", "tiled"),
        (set(), {"dtype": FP32}, "torch", "torch"),
        (set(), {"dim": 512}, "torch", "torch"),
        ({GATE}, {}, "fla", "tiled"),
        ({ROTATION, GATE}, {}, "fla", "tiled"),
        ({GATE}, {"dim": 96}, "fla", "tiled"),
        ({GATE}, {"dtype": FP32}, "flex", "tiled"),
        ({GATE}, {"dtype": FP64}, "tiled", "tiled"),
        ({GATE}, {"dim": 512}, "tiled", "tiled"),
        ({POINTWISE}, {}, "flex", "tiled"),
        ({GATE, POINTWISE}, {}, "flex", "tiled"),
        ({BIAS}, {}, "tiled", "tiled"),
        ({SCORES}, {}, "tiled", "tiled"),
        ({SCORES, BIAS}, {}, "tiled", "tiled"),
        ({ROTATION, SCORES}, {}, "tiled", "tiled"),
        ({ROTATION, AVERAGE, GATE}, {}, "tiled", "tiled"),
        ({REFLECTIONS}, {}, "fla", "tiled"),
        ({REFLECTIONS, GATE}, {"dim": 128}, "fla", "tiled"),
        ({REFLECTIONS}, {"dim": 96}, "tiled", "tiled"),
        ({REFLECTIONS}, {"dtype": FP32}, "tiled", "tiled"),
    ],
)
def test_auto_is_the_first_that_can_do_and_run_it(installed, needs, settings, on_gpu, on_cpu):
    assert (chosen(GPU, needs, **settings), chosen(CPU, needs, **settings)) == (on_gpu, on_cpu)


@pytest.mark.parametrize(
    "needs, settings, without, instead",
    [
        (set(), {}, {"flash_attn_interface"}, "cudnn"),
        (set(), {"packed": True}, {"flash_attn_interface", "flash_attn"}, "torch"),
        (set(), {"segments": True}, {"flash_attn_interface", "flash_attn"}, "triton"),
        ({AVERAGE}, {}, {"triton"}, "torch"),
        ({GATE}, {}, {FLA}, "flex"),
        ({GATE}, {}, {FLA, "triton"}, "tiled"),
    ],
)
def test_auto_does_without_packages_that_are_not_installed(installed, needs, settings, without, instead):
    installed -= without
    assert chosen(GPU, needs, **settings) == instead


@pytest.mark.parametrize(
    "capability, expected", [((8, 0), "flash_attn"), ((9, 0), "flash_attn_3"), ((10, 0), "cudnn"), ((7, 5), "torch")]
)
def test_rope_takes_the_library_that_is_made_for_the_kind_of_gpu(installed, monkeypatch, capability, expected):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert chosen(GPU) == expected


def test_a_deterministic_run_does_without_cudnn(installed, monkeypatch):
    installed -= {"flash_attn_interface"}
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert chosen(GPU) == "flash_attn"
    assert unsupported("cudnn", GPU, BF16, 64) == "does not give the same bits every time"


@pytest.mark.parametrize(
    "wanted, device, needs, settings, why",
    [
        ("triton", CPU, {AVERAGE}, {}, "needs a GPU, and this runs on cpu"),
        ("flash_attn", CPU, set(), {}, "needs a GPU, and this runs on cpu"),
        ("flex", CPU, {GATE}, {}, "needs a GPU, and this runs on cpu"),
        ("fla", CPU, {GATE}, {}, "needs a GPU, and this runs on cpu"),
        ("triton", GPU, {AVERAGE}, {"dim": 48}, "supports heads of 32, 64, 80, 96, 128, not 48"),
        ("triton", GPU, set(), {"dtype": FP64}, "computes in bfloat16 or float16 or float32, not in float64"),
        ("flash_attn", GPU, set(), {"dtype": FP32}, "computes in bfloat16 or float16, not in float32"),
        ("cudnn", CPU, set(), {}, "needs a GPU, and this runs on cpu"),
        ("cudnn", GPU, set(), {"dtype": FP32}, "computes in bfloat16 or float16, not in float32"),
        ("flash_attn", GPU, set(), {"dim": 512}, "does not support heads of 512"),
        ("fla", GPU, {GATE}, {"dtype": FP32}, "computes in bfloat16 or float16, not in float32"),
        ("flex", GPU, {GATE}, {"dim": 8}, "does not support heads of 8"),
        ("fla", GPU, {REFLECTIONS}, {"dim": 96}, "applies reflections to heads of 16, 32, 64, 128, not 96"),
        ("flex", GPU, {REFLECTIONS}, {}, "cannot apply the reflections of all tokens between a key and a query"),
        ("flex", GPU, {BIAS}, {}, "cannot add a bias to the scores, tile by tile"),
        ("flex", GPU, {SCORES}, {}, "cannot compute scores from whole rows"),
        ("torch", CPU, {SCORES}, {}, "cannot compute scores from whole rows"),
        ("fla", GPU, {POINTWISE}, {}, "cannot add a bias to the scores, pair by pair"),
    ],
)
def test_a_named_backend_that_cannot_is_refused_with_the_reason(installed, wanted, device, needs, settings, why):
    with pytest.raises(ConfigError) as error:
        chosen(device, needs, wanted, **settings)
    assert error.value.key == "model.attention_backend" and error.value.problem == f"is {wanted}, which {why}"


@pytest.mark.parametrize("backend", ["triton", "flash_attn"])
def test_a_backend_that_is_not_installed_is_refused(installed, backend):
    installed.clear()
    with pytest.raises(ConfigError, match="which is not installed"):
        chosen(GPU, wanted=backend)


def test_needs_that_no_backend_has_are_refused_together():
    with pytest.raises(ConfigError) as error:
        chosen(CPU, {ROTATION, "dream"})
    assert error.value.subjects == ("model.attention_backend", "model.position_encoding")
    assert "dream" in error.value.problem


def test_an_interpreter_that_cannot_read_the_bounds_of_loops_is_reported(installed, monkeypatch):
    def refuse(count):
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    triton, numpy = ModuleType("triton"), ModuleType("numpy")
    numpy.__version__, numpy.zeros = "2.5.2", refuse
    monkeypatch.setattr(choice, "triton_interprets", lambda: True)
    for name, module in (("triton", triton), ("numpy", numpy)):
        monkeypatch.setitem(sys.modules, name, module)
    triton.__version__ = "3.6.0"
    why = "cannot be interpreted by triton 3.6.0 with numpy 2.5.2; use triton 3.7 or newer"
    assert unsupported("triton", CPU, FP32, 64) == why
    triton.__version__ = "3.7.1"
    assert unsupported("triton", CPU, FP32, 64) is None


def test_old_gpus_and_broken_packages_are_reported(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert unsupported("flash_attn", GPU, BF16, 64) == "cannot be imported (ImportError)"
    monkeypatch.setattr(choice, "why_not_importable", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "8.0 or newer" in unsupported("triton", GPU, BF16, 64)


def test_encodings_need_what_the_choice_goes_by():
    needs = {name: encoding_of(small_model(position_encoding=name)).needs for name in ("path", "path_fox", "alibi")}
    assert needs == {"path": {REFLECTIONS}, "path_fox": {REFLECTIONS, GATE}, "alibi": {POINTWISE}}
