"""Batches: their datasets, their order, and the signals of loader processes."""

import dataclasses
import itertools
import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from datasets_for_tests import EOD, write_dataset, write_documents
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from models import small_model

from megatron_tape.config.data import DataConfig, LongDocumentSettings, StageSettings
from megatron_tape.config.schema import RunConfig
from megatron_tape.config.stages import stages_of
from megatron_tape.config.train import BatchRampSettings, TrainConfig
from megatron_tape.data import megatron_datasets
from megatron_tape.data.batches import build_batches, documents_from_tokens
from megatron_tape.data.long_documents import split_lengths
from megatron_tape.data.megatron_datasets import sample_order
from megatron_tape.errors import ConfigError, FileError
from megatron_tape.parallel.layout import initialize_distributed


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_dataset(folder / "a", seed=0)
    write_dataset(folder / "b", seed=1)
    write_dataset(folder / "small", documents=4, seed=2)
    return folder


@pytest.fixture(autouse=True)
def loader_processes_end():
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.terminate()
        process.join()
    assert not left


@pytest.fixture
def build(folder, tmp_path):
    def start(prefix, seq_length=16, eod=None, **changes):
        data = {"split": "900,100,0", "cache_directory": str(tmp_path / "cache"), **changes}
        config = RunConfig(
            model=small_model(seq_length=seq_length),
            data=DataConfig(prefix=prefix, **data),
            train=TrainConfig(
                steps=40, global_batch_size=4, eval_interval=5, eval_steps=2, precision="fp32"
            ),
        )
        return build_batches(config, initialize_distributed(1), eod)

    return start


def tokens_of(samples, count):
    return [samples[i]["tokens"].tolist() for i in range(count)]


def training_tokens(folder, name):
    return int(split_lengths(f"{folder}/{name}", "900,100,0", "training").sum())


def warnings_in(caplog):
    return [record.message for record in caplog.records if record.message.startswith("warning: ")]


def test_a_dataset_too_small_for_a_split_is_left_out_of_only_that_split(folder, build, caplog):
    """The 4 documents of `small` give about 100 training tokens, and no validation tokens."""
    built = build({f"{folder}/a": 0.3, f"{folder}/small": 0.6, f"{folder}/b": 0.1})
    warning, epochs = warnings_in(caplog)
    assert f"epochs on {folder}/small" in epochs
    assert f"0 tokens of {folder}/small, in 0 of its documents" in warning
    assert "excluded from the validation data" in warning
    assert [len(built.train.datasets), len(built.validation.datasets)] == [3, 2]
    assert built.train.weights == pytest.approx([0.3, 0.6, 0.1])
    assert built.validation.weights == pytest.approx([0.75, 0.25])
    assert len(list(built.evaluation())) == 8
    caplog.clear()
    built = build([f"{folder}/small", f"{folder}/a"], seq_length=256)
    assert [warning.split(";")[1] for warning in warnings_in(caplog)] == [
        " the dataset is excluded from the training data",
        " the dataset is excluded from the validation data",
        " lower train.steps or train.global_batch_size, or add data",
    ]
    assert next(built.training())["tokens"].shape == (1, 256)


def test_only_a_split_without_any_whole_sequence_is_refused(folder, build):
    with pytest.raises(ConfigError, match=r"validation split .* and no other dataset has enough"):
        build([f"{folder}/small", f"{folder}/a"], seq_length=512)


def test_the_order_of_a_blend_is_megatrons(folder, build, tmp_path):
    built = build({f"{folder}/a": 0.3, f"{folder}/b": 0.7})
    settings = GPTDatasetConfig(
        random_seed=1234,
        sequence_length=16,
        blend=([f"{folder}/a", f"{folder}/b"], [0.3, 0.7]),
        split="900,100,0",
        path_to_cache=str(tmp_path / "other"),
        tokenizer=megatron_datasets.NoTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, validation, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [160, 8, 0], lambda: True, settings
    ).build()
    assert tokens_of(built.train, 160) == tokens_of(train, 160)
    assert tokens_of(built.validation, 8) == tokens_of(validation, 8)


def test_the_epochs_of_a_run_are_logged_once_and_many_are_a_warning(folder, build, caplog):
    """The run reads 160 sequences of 16 tokens."""
    caplog.set_level("INFO", "megatron_tape")
    build(f"{folder}/a")
    epochs = 160 * 16 / training_tokens(folder, "a")
    assert caplog.messages.count(f"the run trains {epochs:.2f} epochs on {folder}/a") == 1
    assert warnings_in(caplog) == []
    build({f"{folder}/a": 1, f"{folder}/small": 3})
    epochs = 160 * 16 * 3 / 4 / training_tokens(folder, "small")
    (warning,) = [text for text in warnings_in(caplog) if "epochs" in text]
    assert f"{epochs:.2f} epochs on {folder}/small, the most repeated of 2 datasets" in warning


def test_stages_follow_each_other_at_whole_steps_and_keep_their_place_on_resume(
    folder, build, caplog
):
    """In steps of 4 sequences, the second stage begins at 99, rounded down to 96."""
    caplog.set_level("INFO", "megatron_tape")
    mix = {f"{folder}/a": 1.0, f"{folder}/b": 2.0}
    stages = [StageSettings(prefix=f"{folder}/b", share=0.28), StageSettings(prefix=mix, share=0.1)]
    built = build(f"{folder}/a", stages=stages)
    assert [said.partition(",")[0] for said in caplog.messages[-2:]] == [
        "from step 25 on",
        "from step 37 on",
    ]
    tokens = tokens_of(built.train, 160)
    first = StageSettings(prefix=f"{folder}/a", share=0.5)
    for seed, start, end, item in (
        (1234, 0, 96, first),
        (1235, 96, 144, stages[0]),
        (1236, 144, 160, stages[1]),
    ):
        train = dataclasses.replace(
            built.config.train,
            seed=seed,
            steps=(end - start) // 4,
        )
        data = dataclasses.replace(built.config.data, prefix=item.prefix, stages=None)
        alone = build_batches(
            dataclasses.replace(built.config, data=data, train=train), built.layout
        )
        assert tokens[start:end] == tokens_of(alone.train, end - start)
    assert tokens_of(built.validation, 8) == tokens_of(build(f"{folder}/a").validation, 8)
    caplog.clear()
    resumed = build_batches(built.config, built.layout, step=30, consumed=120)
    assert next(resumed.training())["tokens"][0].tolist() == tokens[120]
    assert [said.partition(",")[0] for said in caplog.messages[-2:]] == [
        "from step 31 on",
        "from step 37 on",
    ]


@pytest.mark.parametrize("kind", ["one dataset", "blend", "long documents"])
def test_the_described_order_of_samples_changes_exactly_when_the_order_does(folder, build, kind):
    prefix = {f"{folder}/a": 0.3, f"{folder}/b": 0.7}
    if kind == "one dataset":
        prefix = f"{folder}/a"
    long = None
    if kind == "long documents":
        long = LongDocumentSettings(minimum=30, share=0.5)
    config = build(prefix, long_documents=long).config
    consumed = 60
    tokens = {}
    orders = {}
    for steps in range(20, 320, 13):
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))
        tokens[steps] = tokens_of(build_batches(config, initialize_distributed(1)).train, consumed)
        orders[steps] = sample_order(config, 4 * steps, consumed)
    pairs = list(itertools.combinations(orders, 2))
    same = [orders[one] == orders[other] for one, other in pairs]
    assert same == [tokens[one] == tokens[other] for one, other in pairs]
    assert any(same)
    assert not all(same)


def test_a_stage_that_begins_later_does_not_change_the_order_so_far(folder, build):
    config = build(f"{folder}/a", stages=[StageSettings(prefix=f"{folder}/b", share=0.3)]).config
    longer = dataclasses.replace(config, train=dataclasses.replace(config.train, steps=44))
    assert [stages_of(settings)[1].start for settings in (config, longer)] == [112, 120]
    assert sample_order(config, 160, 112) == sample_order(longer, 176, 112)
    assert sample_order(config, 160, 116) != sample_order(longer, 176, 116)


def test_a_stage_begins_with_a_step_while_the_batch_grows():
    """Steps of 2, 2, 4, 6 and then 8 end after 2, 4, 8, 14, 22, ..., 46, ... sequences."""
    ramp = BatchRampSettings(from_=2, over_samples=10)
    train = TrainConfig(steps=11, global_batch_size=8, batch_ramp=ramp)
    data = DataConfig(prefix="a", stages=[StageSettings(prefix="b", share=0.3)])
    stages = stages_of(RunConfig(model=small_model(), data=data, train=train))
    assert [stage.start for stage in stages] == [0, 46]


def test_a_cached_index_is_opened_without_reading_the_lengths_of_documents(
    folder, build, monkeypatch, tmp_path
):
    prefixes = {f"{folder}/a": 0.3, f"{folder}/b": 0.7}
    expected = [tokens_of(build(prefix).train, 160) for prefix in (f"{folder}/a", prefixes)]
    cached = sorted((tmp_path / "cache").iterdir())

    def read(dataset):
        raise AssertionError("an epoch's tokens are counted")

    monkeypatch.setattr(GPTDataset, "_get_num_tokens_per_epoch", read)
    for prefix, tokens in zip((f"{folder}/a", prefixes), expected):
        built = build(prefix).train
        for dataset in getattr(built, "datasets", [built]):
            # Megatron's list of all documents, and the maps of a .npy file each.
            maps = (dataset.indices, dataset.document_index, dataset.shuffle_index)
            assert maps == (None, None, None)
        assert tokens_of(built, 160) == tokens
    assert sorted((tmp_path / "cache").iterdir()) == cached


def test_a_dataset_that_vanishes_after_its_checks_ends_every_rank_in_one_sentence(
    folder, build, monkeypatch
):
    config = build(f"{folder}/a").config
    sent = []
    monkeypatch.setattr(
        megatron_datasets.dist, "broadcast_object_list", lambda values, src: sent.append(values[0])
    )
    gone = dataclasses.replace(
        config, data=dataclasses.replace(config.data, prefix=f"{folder}/gone")
    )
    with pytest.raises(ConfigError, match="can no longer be read"):
        megatron_datasets.plan_for_all(gone, False)
    assert isinstance(sent[0], ConfigError)


def test_a_document_ends_with_its_end_of_document_token(folder, build):
    tokens = torch.tensor([[5, EOD, 6, 7, EOD], [EOD, EOD, 5, 5, 5]])
    assert documents_from_tokens(tokens, EOD).tolist() == [[0, 0, 1, 1, 1], [0, 1, 2, 2, 2]]
    built = build(f"{folder}/a", eod=EOD, reset_attention_mask=True)
    batch = next(built.training())
    assert torch.equal(batch["documents"], documents_from_tokens(batch["tokens"], EOD))


def test_loaders_do_not_change_the_random_stream_of_the_run_and_evaluation_starts_no_processes(
    folder, build
):
    built = build(f"{folder}/a", num_workers=2)
    before = torch.get_rng_state()
    next(built.evaluation())
    assert not multiprocessing.active_children()
    next(built.training()), list(built.evaluation())
    assert torch.equal(torch.get_rng_state(), before)


def test_a_token_outside_the_models_vocabulary_is_one_sentence_even_with_loader_processes(
    build, tmp_path
):
    write_documents(
        tmp_path / "larger",
        [[*range(60)]] * 9 + [[64]],
        "<i4",
    )
    built = build(f"{tmp_path}/larger", num_workers=1, split="1,0,0")
    with pytest.raises(ConfigError) as refusal:
        list(built.training())
    assert refusal.value.subjects == ("data.prefix", "model.vocab_size")
    assert "document 9 has the token id 64" in refusal.value.problem
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    "dtype, padding",
    [("i1", -1), ("<i8", -100)],
)
@pytest.mark.parametrize("long_documents", [None, LongDocumentSettings(minimum=200, share=1.0)])
def test_negative_ids_are_refused_with_dataset_and_document(
    build, tmp_path, dtype, padding, long_documents
):
    """Megatron's dataset would replace -1 by token 0."""
    documents = [[*range(60)] * 4 for _ in range(10)]
    documents[7][100] = padding
    write_documents(tmp_path / "padded", documents, dtype)
    built = build(f"{tmp_path}/padded", long_documents=long_documents)
    with pytest.raises(ConfigError, match=f"document 7 has the token id {padding},") as error:
        list(built.training())
    assert error.value.key == "data.prefix"


def wait_until_gone(processes):
    deadline = time.monotonic() + 10
    while any(process.is_alive() for process in processes):
        assert time.monotonic() < deadline, processes
        time.sleep(0.02)


def test_an_index_that_vanishes_while_loader_processes_read_it_is_one_sentence(
    folder, build, tmp_path
):
    built = build(f"{folder}/a", num_workers=1)
    (directory,) = (tmp_path / "cache").iterdir()
    for path in directory.glob("*train-shuffle_index.npy"):
        path.unlink()
    with pytest.raises(FileError, match=f"remove {directory} and start the run again"):
        next(built.training())


def test_loader_processes_survive_signals_that_are_sent_to_everyone(folder, build):
    alone = [batch["tokens"] for batch in build(f"{folder}/a").training()]
    batches = build(f"{folder}/a", num_workers=2).training()
    found = [next(batches)["tokens"]]
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    # Another process must send the signals, as Slurm does: those of the parent end a loader
    # process.
    send = "import os, sys; [os.kill(int(worker), int(sys.argv[1])) for worker in sys.argv[2:]]"
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
        pids = [str(worker.pid) for worker in workers]
        subprocess.run(
            [sys.executable, "-c", send, str(int(number)), *pids],
            check=True,
        )
    found += [batch["tokens"] for batch in batches]
    assert len(found) == 160
    assert all(map(torch.equal, found, alone))
    assert not any(worker.is_alive() for worker in workers)


@pytest.fixture(params=["fork", "forkserver"])
def start_method(request):
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(request.param, force=True)
    yield
    multiprocessing.set_start_method(before, force=True)


def test_loader_processes_end_when_their_parent_signals_them(folder, build, start_method):
    """When Python exits, multiprocessing sends SIGTERM to its processes and waits without limit."""
    batches = build(f"{folder}/a", num_workers=2).training()
    # The first two batches come from different processes, so both have started.
    next(batches)
    next(batches)
    workers = multiprocessing.active_children()
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
    wait_until_gone(workers)
    assert [worker.exitcode for worker in workers] == [0, 0]
    batches.close()
