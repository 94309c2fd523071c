"""The choice of an attention backend, and the reasons why a backend cannot be used."""

import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from megatron_tape.errors import ConfigError
from megatron_tape.ops.backends import (
    AVERAGE,
    BIAS,
    DECAY,
    GATE,
    POINTWISE,
    REFLECTIONS,
    ROTATION,
    SCORES,
    SINK,
    WINDOW,
    choice,
)
from megatron_tape.ops.backends.choice import (
    choose_backend,
    flash_attn_version,
    takes_wide_value,
    unsupported,
)

CPU = torch.device("cpu")
GPU = torch.device("cuda")
FP32 = torch.float32
FP64 = torch.float64
BF16 = torch.bfloat16
FLA = "fla.ops.forgetting_attn"
ROOT = Path(__file__).resolve().parents[2]


def chosen(device, needs=frozenset(), requested="auto", dtype=BF16, dim=64, **settings):
    return choose_backend(requested, device, dtype, dim, needs, **settings).backend


@pytest.fixture
def installed(monkeypatch):
    """Imitate a machine with an H100 and the packages in the returned set."""
    packages = {"triton", "torch", FLA}
    monkeypatch.setattr(
        choice, "why_not_importable", lambda name: None if name in packages else "is not installed"
    )
    monkeypatch.setattr(choice, "triton_interprets", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return packages


@pytest.fixture
def flash_attn(monkeypatch, installed):
    """Return a function that imitates an installed version of flash-attn."""
    choice._flash_attn_version.cache_clear()
    yield lambda version: monkeypatch.setattr(
        choice, "_flash_attn_version", lambda major, amd: version
    )


@pytest.mark.parametrize(
    "needs, settings, on_gpu, on_cpu",
    [
        ({AVERAGE}, {}, "torch_wide", "tiled"),
        ({AVERAGE}, {"without": {"torch_wide"}}, "triton", "tiled"),
        ({AVERAGE}, {"dim": 128}, "torch", "tiled"),
        ({AVERAGE}, {"packed": True}, "triton", "tiled"),
        ({AVERAGE}, {"dtype": FP32}, "triton", "tiled"),
        (set(), {"without": {"torch"}}, "triton", "naive"),
        # SDPA would compute the masked parts of packed documents, too.
        (set(), {"packed": True}, "triton", "torch"),
        # With segments, torch is slower than without.
        ({AVERAGE}, {"segments": True}, "triton", "tiled"),
        (set(), {"segments": True}, "triton", "tiled"),
        ({ROTATION, GATE}, {}, "fla", "tiled"),
        ({GATE}, {"dtype": FP32}, "flex", "tiled"),
        ({POINTWISE}, {}, "flex", "tiled"),
        ({BIAS}, {}, "tiled", "tiled"),
        ({SCORES}, {}, "tiled", "tiled"),
        ({REFLECTIONS, GATE}, {"dim": 128}, "fla", "tiled"),
        ({REFLECTIONS}, {"dim": 96}, "tiled", "tiled"),
        ({DECAY, GATE, SINK}, {"dim": 96}, "fla", "tiled"),
        ({DECAY, GATE, SINK}, {"dtype": FP32}, "tiled", "tiled"),
        ({DECAY, GATE, SINK, WINDOW}, {}, "fla", "tiled"),
        # A window: kernels that skip the keys outside of it.
        ({WINDOW}, {}, "triton", "tiled"),
        ({WINDOW}, {"dtype": FP32, "dim": 128}, "triton", "tiled"),
        ({WINDOW}, {"without": {"triton"}}, "torch", "tiled"),
        ({AVERAGE, WINDOW}, {}, "triton", "tiled"),
        ({AVERAGE, WINDOW}, {"dim": 128, "packed": True}, "triton", "tiled"),
        ({GATE, WINDOW}, {}, "fla", "tiled"),
        ({POINTWISE, WINDOW}, {}, "flex", "tiled"),
        ({REFLECTIONS, WINDOW}, {"dim": 128}, "tiled", "tiled"),
        ({REFLECTIONS, GATE, WINDOW}, {"dim": 128}, "tiled", "tiled"),
        ({SCORES, WINDOW}, {}, "tiled", "tiled"),
    ],
)
def test_auto_is_the_first_backend_that_supports_the_features_and_can_run(
    installed, needs, settings, on_gpu, on_cpu
):
    assert (chosen(GPU, needs, **settings), chosen(CPU, needs, **settings)) == (on_gpu, on_cpu)


@pytest.mark.parametrize(
    "version, needs, settings, expected",
    [
        (4, {AVERAGE}, {"dim": 128}, "flash_attn"),
        (4, {AVERAGE}, {"dim": 128, "grouped": True}, "flash_attn"),
        (2, {AVERAGE}, {"dim": 128, "grouped": True}, "torch"),
        (4, {AVERAGE}, {"dim": 96}, "torch"),
        (4, {AVERAGE}, {"dim": 64}, "flash_attn"),
        (4, {AVERAGE}, {"dim": 64, "without": {"flash_attn"}}, "torch_wide"),
        (4, {AVERAGE}, {"dim": 64, "grouped": True}, "torch_wide"),
        (4, {AVERAGE}, {"dim": 64, "packed": True}, "triton"),
        (4, {AVERAGE}, {"dim": 32}, "torch_wide"),
        (2, {AVERAGE}, {"dim": 64}, "torch_wide"),
        (2, {AVERAGE}, {"dim": 128}, "torch"),
        (4, {ROTATION}, {"dim": 128}, "flash_attn"),
        (4, {ROTATION}, {"dim": 128, "without": {"flash_attn"}}, "torch"),
        (4, {ROTATION}, {"dim": 128, "grouped": True}, "torch"),
        (4, {ROTATION}, {"dim": 128, "dtype": FP32}, "torch"),
        (4, {ROTATION}, {"dim": 64}, "torch"),
        (2, {ROTATION}, {"dim": 128}, "torch"),
        *((version, set(), {"packed": True}, "flash_attn") for version in (2, 4)),
        (2, set(), {"segments": True}, "flash_attn"),
        *((version, {ROTATION, WINDOW}, {"dim": 64}, "flash_attn") for version in (2, 4)),
        (4, {ROTATION, WINDOW}, {"dtype": FP32}, "triton"),
        (4, {AVERAGE, WINDOW}, {"dim": 128}, "triton"),
        (2, set(), {}, "torch"),
    ],
)
def test_flash_attn_is_chosen_for_documents_and_4_where_it_is_fastest(
    flash_attn, version, needs, settings, expected
):
    flash_attn(version)
    assert chosen(GPU, needs, **settings) == expected


@pytest.mark.parametrize("capability, tape", [((10, 0), "torch_wide"), ((8, 0), "triton")])
def test_auto_does_not_choose_flash_attn_4_where_it_was_not_measured(
    flash_attn, monkeypatch, capability, tape
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    flash_attn(4)
    assert chosen(GPU, {ROTATION, AVERAGE}, dim=64) == tape
    assert chosen(GPU, {ROTATION}, dim=128) == "torch"


@pytest.mark.parametrize(
    "capability, dims",
    [((9, 0), {64, 128}), ((10, 0), {64})],
)
def test_only_version_4_takes_wide_values(flash_attn, monkeypatch, capability, dims):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    flash_attn(4)
    assert {dim for dim in (64, 96, 128) if takes_wide_value(GPU, dim)} == dims
    flash_attn(2)
    assert not takes_wide_value(GPU, 64)


@pytest.mark.parametrize(
    "capability, packages, expected",
    [
        ((9, 0), {"flash_attn.cute.interface", "flash_attn"}, 4),
        # With version 4 only, the package flash_attn has no functions; version 4 does not run on an
        # A100.
        ((8, 0), {"flash_attn.cute.interface", "flash_attn"}, None),
    ],
)
def test_the_newest_flash_attn_that_runs_on_the_gpu_is_used(
    installed, monkeypatch, capability, packages, expected
):
    modules = {name: ModuleType(name) for name in choice.FLASH_ATTN.values()}
    modules["flash_attn.cute.interface"].flash_attn_func = print
    monkeypatch.setattr(choice.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    installed |= packages
    choice._flash_attn_version.cache_clear()
    assert flash_attn_version(GPU) == expected
    choice._flash_attn_version.cache_clear()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(
    "capability, hip, tape",
    [
        ((8, 0), None, ("triton", "triton")),
        ((10, 0), None, ("torch_wide", "torch")),
        ((12, 0), None, ("triton", "triton")),
        ((9, 4), "7.0", ("triton", "triton")),  # an MI300, whose capability looks like Hopper's
        ((7, 5), None, ("torch", "torch")),
    ],
)
def test_the_choice_depends_on_the_gpu_generation(
    installed, monkeypatch, capability, hip, tape, dim
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert chosen(GPU, {ROTATION, AVERAGE}, dim=dim) == tape[dim > 64]
    assert chosen(GPU, {ROTATION}, dim=dim) == "torch"


def test_a_deterministic_run_uses_neither_cudnn_nor_flash_attn_4(flash_attn, monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    flash_attn(4)
    assert chosen(GPU, {AVERAGE}) == chosen(GPU, {AVERAGE}, dim=128) == "triton"
    # torch then does without cuDNN itself.
    assert chosen(GPU) == chosen(GPU, dim=128) == "torch"
    assert chosen(GPU, {AVERAGE}, dim=128, grouped=True) == "triton"
    assert unsupported("torch_wide", GPU, BF16, 64) == "is not deterministic, as this run must be"


@pytest.mark.parametrize(
    "requested, device, needs, settings",
    [
        ("triton", CPU, {AVERAGE}, {}),
        ("triton", GPU, {AVERAGE}, {"dim": 48}),
        ("triton", GPU, set(), {"dtype": FP64}),
        ("torch_wide", GPU, {AVERAGE}, {"dim": 128}),
        ("fla", GPU, {REFLECTIONS}, {"dim": 96}),
        ("torch", CPU, {SCORES}, {}),
        ("fla", GPU, {REFLECTIONS, WINDOW}, {"dim": 64}),
    ],
)
def test_a_named_backend_that_cannot_run_is_refused(installed, requested, device, needs, settings):
    with pytest.raises(ConfigError) as error:
        chosen(device, needs, requested, **settings)
    assert error.value.key == "model.attention_backend"
    assert error.value.fix
    assert error.value.problem.startswith(f"is {requested}, which ")


def test_old_gpus_and_broken_packages_are_reported(monkeypatch, tmp_path):
    (tmp_path / "flash_attn.py").write_text("raise ImportError('built for another torch')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert choice.why_not_importable("flash_attn") == "cannot be imported (ImportError)"
    monkeypatch.setattr(choice, "why_not_importable", lambda name: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "8.0 or newer" in unsupported("triton", GPU, BF16, 64)
