"""Process groups (number, timeouts, abort), devices, deterministic kernels and random streams."""

import pathlib
import socket
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import p2p_communication
from torch.distributed import distributed_c10d

from megatron_tape.errors import ConfigError, NodeError
from megatron_tape.io.versions import cuda_build_fix
from megatron_tape.parallel import launcher
from megatron_tape.parallel import layout as layouts
from megatron_tape.parallel.launcher import SHARED_GPU
from megatron_tape.parallel.layout import (
    abort_process_groups,
    check_devices,
    deterministic_kernels,
    initialize_distributed,
    prepare_cpu,
)


def timeouts():
    backends = [group._get_backend(torch.device("cpu")) for group in distributed_c10d._world.pg_map]
    return {backend.options._timeout for backend in backends}


@pytest.fixture(autouse=True)
def without_process_groups():
    abort_process_groups()
    yield
    abort_process_groups()


def test_all_process_groups_time_out_later_than_the_watchdog():
    initialize_distributed(timeout=100.0)
    assert timeouts() == {timedelta(seconds=700)}
    initialize_distributed(timeout=7200.0)
    assert timeouts() == {timedelta(seconds=7800)}
    initialize_distributed(timeout=None)
    assert timeouts() == {timedelta(days=365)}


def test_no_additional_gloo_groups_are_created():
    initialize_distributed()
    names = [group.group_desc for group in distributed_c10d._world.pg_map]
    assert "TENSOR_MODEL_PARALLEL_GROUP" in names
    assert not [name for name in names if "GLOO" in name]


def test_process_groups_can_be_created_after_an_abort():
    layout = initialize_distributed()
    abort_process_groups()
    assert not dist.is_initialized()
    abort_process_groups()
    again = initialize_distributed()
    assert again.any_rank(True)
    assert again.groups.tp is not layout.groups.tp


@pytest.fixture
def gpu(monkeypatch):
    """Imitate a GPU, and return the functions that start sends and receives as they are then."""
    monkeypatch.setattr(layouts, "_own_device", lambda: torch.device("cuda", 0))
    for name in ("_batched_p2p_ops", "_p2p_ops"):
        # monkeypatch restores the functions.
        monkeypatch.setattr(p2p_communication, name, getattr(p2p_communication, name))
    return lambda: (p2p_communication._batched_p2p_ops, p2p_communication._p2p_ops)


@pytest.fixture
def backends(monkeypatch):
    """Return the list of backends with which process groups are initialized, all of them gloo's."""
    initialize = layouts._initialize_process_group
    found = []

    def recorded(backend, timeout):
        found.append(backend)
        initialize("gloo", timeout)

    monkeypatch.setattr(layouts, "_initialize_process_group", recorded)
    return found


def test_a_gpu_uses_nccl_unless_a_test_shares_it(gpu, backends, monkeypatch):
    before = gpu()
    initialize_distributed()
    assert gpu() == before
    abort_process_groups()

    monkeypatch.setenv(SHARED_GPU, "1")
    initialize_distributed()
    staged = gpu()
    assert all(start.args == (original,) for start, original in zip(staged, before, strict=True))
    abort_process_groups()

    initialize_distributed()
    assert gpu() == staged
    assert backends == ["nccl", "gloo", "gloo"]


def test_ranks_share_a_gpu_only_in_tests(gpu, backends, monkeypatch):
    monkeypatch.setenv(SHARED_GPU, "1")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    with pytest.raises(ConfigError, match=f"{SHARED_GPU} is set, but only tests may"):
        initialize_distributed()
    assert backends == []


def test_a_process_on_the_cpu_ignores_that_ranks_share_a_gpu(backends, monkeypatch):
    monkeypatch.setenv(SHARED_GPU, "1")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    initialize_distributed()
    assert backends == ["gloo"]


def test_an_unresolvable_address_of_rank_0_is_refused(monkeypatch):
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "nosuchhost.invalid",
        "MASTER_PORT": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launcher, "TRIES", 2)
    with pytest.raises(
        NodeError, match=r"cannot resolve MASTER_ADDR, which is nosuchhost.invalid \(.*--local-addr"
    ):
        initialize_distributed()


def test_gloo_uses_the_address_of_the_hostname(monkeypatch):
    def fails(*arguments, **options):
        raise socket.gaierror

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    # No network interface has the second address.
    for hostname_address, expected in (("127.0.0.9", "127.0.0.9"), ("203.0.113.7", "127.0.0.1")):
        addresses = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (hostname_address, 0))]
        monkeypatch.setattr(
            socket, "getaddrinfo", lambda *arguments, type, addresses=addresses: addresses
        )
        assert launcher.gloo_address() == expected
    monkeypatch.setattr(socket, "getaddrinfo", fails)
    assert launcher.gloo_address() == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert launcher.gloo_address() is None


def test_deterministic_kernels_restores_all_settings():
    def state():
        return (
            torch.are_deterministic_algorithms_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.cudnn.deterministic,
        )

    before = state()
    with deterministic_kernels(False):
        assert state() == before
    with pytest.raises(ZeroDivisionError), deterministic_kernels(True):
        assert state() == (True, False, True)
        raise ZeroDivisionError
    assert state() == before


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """Return a function that imitates a node with `gpus` GPUs on which torch finds only `seen`."""

    def fails():
        raise RuntimeError("The NVIDIA driver on your system is too old\nPlease update it")

    def change(gpus, seen, processes=1, cuda="13.0"):
        monkeypatch.setattr(
            layouts, "NVIDIA_DRIVER", pathlib.Path("/dev/null" if gpus else tmp_path / "none")
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
        monkeypatch.setattr(torch.cuda, "init", fails)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return change


@pytest.mark.parametrize(
    "device, case, problem",
    [
        ("auto", dict(gpus=8, seen=8, processes=8), None),
        ("auto", dict(gpus=0, seen=0), None),
        ("cpu", dict(gpus=8, seen=8), None),
        ("cpu", dict(gpus=8, seen=0), None),
        (
            "auto",
            dict(gpus=8, seen=8, processes=2),
            "is auto, but only 2 of the 8 visible GPUs would be",
        ),
        ("cuda", dict(gpus=8, seen=8, processes=2), "is cuda, but only 2 of the 8 visible GPUs"),
        (
            "auto",
            dict(gpus=8, seen=0),
            "cannot use a GPU of this node (The NVIDIA driver on your system is too old)",
        ),
        ("cuda", dict(gpus=0, seen=0), "cannot use a GPU of this node"),
        ("cuda", dict(gpus=0, seen=0, cuda=None), "cannot use a GPU of this node"),
        ("auto", dict(gpus=8, seen=0, cuda=None), None),
    ],
)
def test_idle_or_unusable_gpus_are_refused(machine, caplog, device, case, problem):
    machine(**case)
    if problem is None:
        check_devices(device)
        warned = device == "auto" and case["gpus"] > case["seen"]
        assert ("built without CUDA" in caplog.text) == warned
        assert (cuda_build_fix() in caplog.text) == warned
        return
    with pytest.raises(ConfigError) as error:
        check_devices(device)
    assert error.value.key == "train.device"
    assert problem in error.value.problem


def test_megatron_is_not_patched_if_cuda_is_available(monkeypatch):
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = (torch.cuda.current_device, random._get_cuda_rng_state)
    prepare_cpu()
    assert (torch.cuda.current_device, random._get_cuda_rng_state) == before
