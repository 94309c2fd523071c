"""`python -m pretrain.extend_context` on one process: how it starts, continues, and refuses
mistakes.
"""

import dataclasses
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from configurations import make
from conversions import change_config
from datasets_for_tests import write_all
from extension_cases import (
    RECIPE,
    STEPS,
    TOKENS,
    arguments,
    extended,
    first_logits,
    pretrained,
    write_llama,
)
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megatron_tape.checkpoint.directories import list_checkpoints, read_state
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.command_line import status_of
from megatron_tape.config.sections import as_dict
from megatron_tape.errors import CheckpointError, ConfigError
from megatron_tape.extension import importing
from megatron_tape.extension.base_checks import check_base
from megatron_tape.extension.base_model import Base, with_base_settings
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.model.names import MATRICES, kind_of
from megatron_tape.parallel.layout import initialize_distributed
from megatron_tape.training import trainer
from pretrain import attempt, estimate, extend_context, train

REPOSITORY = Path(__file__).parents[2]
TINY = str(REPOSITORY / "tests" / "recipes" / "tiny.yaml")
ROPE = ["--model.position_encoding=rope", "--extension.trains=[embeddings,norms]"]
YARN = [
    "--model.position.rope_scaling_type=yarn",
    "--model.position.rope_scaling_factor=2",
    "--model.position.rope_original_seq_length=16",
]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_all(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def bases(data, tmp_path_factory):
    """Return a RoPE run, a TAPE run and the directory of a Hugging Face model."""
    folder = tmp_path_factory.mktemp("bases")
    made = {name: pretrained(folder, data, name, encoding=name) for name in ("rope", "tape")}
    return made | {"llama": str(write_llama(folder / "llama", data))}


@pytest.fixture
def extend(data, bases, tmp_path):
    """Extend `bases[base]` in folder `name`."""

    def start(base="rope", *overrides, name="run"):
        return extended(tmp_path, data, bases.get(base, base), name, *overrides)

    start.folder = tmp_path
    return start


@pytest.fixture(scope="module")
def unscaled(data, bases, tmp_path_factory):
    """Return the logits of both RoPE models without scaled positions."""
    folder = tmp_path_factory.mktemp("unscaled")
    plain = [*ROPE, "--model.position.rope_scaling_factor=1"]
    return {
        base: first_logits(data, bases[base], folder / base, *plain) for base in ("rope", "llama")
    }


@pytest.mark.parametrize(
    "base, positions",
    [
        ("rope", ["--model.position.rope_scaling_factor=2"]),
        ("llama", YARN),
    ],
)
def test_at_step_0_tape_equals_rope_under_the_same_scaling_of_positions(
    data, bases, unscaled, tmp_path, base, positions
):
    tape = first_logits(data, bases[base], tmp_path / "tape", *positions)
    rope = first_logits(data, bases[base], tmp_path / "rope", *positions, *ROPE)
    torch.testing.assert_close(tape, rope, atol=1e-5, rtol=0)
    assert (rope - unscaled[base]).abs().max() > 1e-3


@pytest.mark.parametrize("base, encoding", [("rope", "tape"), ("llama", "rope")])
def test_at_step_0_learned_increments_change_no_logit(data, bases, tmp_path, base, encoding):
    same = [f"--model.position_encoding={encoding}", *YARN]
    logits = [
        first_logits(data, bases[base], tmp_path / increments, *same, *options)
        for increments, *options in (
            ("learned", "--model.position.increments=learned", "--extension.trains=[position]"),
            ("fixed", "--extension.trains=[all]"),
        )
    ]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)


def test_at_step_0_a_model_whose_positions_are_dropped_is_its_base_without_rotation(
    data, bases, tmp_path, monkeypatch
):
    ours = first_logits(
        data, bases["llama"], tmp_path, "--model.position_encoding=nope", "--extension.trains=[all]"
    )
    llama = "transformers.models.llama.modeling_llama.apply_rotary_pos_emb"
    monkeypatch.setattr(llama, lambda q, k, *_, **__: (q, k))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(bases["llama"], dtype="float32")(
            TOKENS
        ).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_trained_weights_are_kept_and_only_missing_ones_are_initialized(
    data, bases, tmp_path, monkeypatch
):
    names = []
    draw = trainer.initialize_weights
    logits = {}
    monkeypatch.setattr(
        trainer, "initialize_weights", lambda *given: names.extend(given[-1]) or draw(*given)
    )
    for base, kinds in (("rope", {"position"}), ("tape", set())):
        names.clear()
        same = ["--model.position.rope_scaling_factor=1", "--model.position_encoding=tape"]
        logits[base] = first_logits(data, bases[base], tmp_path / base, *same)
        assert {kind_of(name) for name in names} == kinds
    (_, newest), *_ = list_checkpoints(f"{bases['tape']}/checkpoints")
    saved = open_weights(newest)
    assert any(
        saved.read_parameter(f"layers.{layer}.position.token_mixing").any() for layer in (0, 1)
    )
    assert (logits["tape"] - logits["rope"]).abs().max() > 1e-3


def tensors(run):
    (_, newest), *_ = list_checkpoints(run / "checkpoints")
    (path,) = newest.glob("tensors-*")
    return load_file(path)


def test_only_the_named_parameters_change(extend, bases, capfd):
    rows = extend("rope", "--extension.trains=[position,norms]")
    assert [row["step"] for row in rows] == [1, 2, 3]
    before = tensors(Path(bases["rope"]))
    after = tensors(extend.folder / "run")
    for key in (key for key in after if key.startswith("weight/")):
        if kind_of(key.removeprefix("weight/")) in (*MATRICES, "embeddings", "output"):
            assert torch.equal(after[key], before[key])
        elif key in before:
            assert not torch.equal(after[key], before[key])
    moved = {key.partition("/")[2] for key in after if key.startswith("exp_avg/")}
    assert {kind_of(name) for name in moved} == {"position", "norms"}
    reported = capfd.readouterr().err.splitlines()
    assert any("starting with the weights of" in line for line in reported)
    counts = {line.split()[0]: line.split()[1:] for line in reported if len(line.split()) == 3}
    assert counts["position"] == ["1,168", "1,168"]
    assert counts["mlp"] == ["0", "13,824"]
    assert counts["total"] == ["1,392", "28,528"]


def test_a_run_continues_without_its_base_unless_the_base_has_its_frozen_weights(
    extend, bases, data, tmp_path, capfd
):
    moving = tmp_path / "moving"
    shutil.copytree(bases["rope"], moving)
    for name, frozen in (("whole", "true"), ("lean", "false")):
        extend(str(moving), "--train.steps=2", f"--checkpoint.frozen={frozen}", name=name)
    moving.rename(tmp_path / "moved")
    sentence = refused(capfd, extend_context.main, arguments(tmp_path, data, str(moving), "whole"))
    assert "give --config RUN/config.yaml instead" in sentence
    whole, lean = (
        ["--config", f"{tmp_path}/{name}/config.yaml", "--train.steps=3"]
        for name in ("whole", "lean")
    )
    assert extend_context.main(whole) == 0
    assert "restore the original" in refused(capfd, extend_context.main, lean)
    (tmp_path / "moved").rename(moving)
    flip(next(moving.glob("checkpoints/*/tensors-*")))
    assert "is not complete" in refused(capfd, extend_context.main, lean)


def flip(file):
    file.write_bytes(file.read_bytes()[:-1] + b"x")


def test_a_hugging_face_model_is_imported_once_and_a_changed_one_is_refused(
    extend, bases, data, tmp_path, capfd
):
    source = tmp_path / "source"
    shutil.copytree(bases["llama"], source)
    (source / "README.md").write_text("---\nlicense: llama3\nlanguage: de\n---\n")
    extend(str(source), "--train.steps=1")
    base = tmp_path / "run" / "base"
    (_, trained), *_ = list_checkpoints(tmp_path / "run" / "checkpoints")
    for step in (base, trained):  # for the model cards of exports
        assert read_state(step)["progress"]["card"] == {"license": "llama3", "language": ["de"]}
    assert read_state(base)["config"]["model"]["position_encoding"] == "rope"
    written = (base / "manifest.json").stat().st_mtime_ns
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    extend(str(source), "--train.steps=1")
    assert (base / "manifest.json").stat().st_mtime_ns == written
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    os.utime(source / "model.safetensors", (1, 1))
    sentence = refused(capfd, extend_context.main, arguments(tmp_path, data, source, "run"))
    assert f"move {base} away" in sentence


def test_a_long_import_that_advances_is_not_taken_for_a_hang(monkeypatch):
    monkeypatch.setattr(importing, "POLL_SECONDS", 0.01)
    stages = []
    begun = []
    layout = initialize_distributed()
    watch = SimpleNamespace(progress=stages.append)

    def work(advance):
        for _ in range(3):
            seen = len(stages)
            advance()
            while len(stages) == seen:
                pass
            begun.append(len(stages))
        return Path("made")

    assert importing.import_on_rank_0(work, layout, watch) == Path("made")
    assert len(begun) == 3
    assert len(stages) <= 4

    def fail(advance):
        raise ValueError("the reason")

    with pytest.raises(CheckpointError, match="extension.from .*: the reason"):
        importing.import_on_rank_0(fail, layout, watch)


def test_settings_of_the_base_are_defaults(bases, data, capsys):
    config = parse_run_config(arguments("x", data, bases["rope"], "y"))
    model = config.model
    assert (model.hidden_size, model.num_query_groups, model.init_std) == (32, 2, 0.1)
    assert (config.model.seq_length, config.model.position.rope_scaling_factor) == (32, 2)
    assert config.extension.from_ == f"{bases['rope']}/checkpoints/step-00000004"
    chosen = [*arguments("x", data, bases["llama"], "y"), "--parallel.tensor_model_parallel_size=2"]
    assert parse_run_config(chosen).model.vocab_size == 64
    whole = extend_context.parse_run_config([*chosen, "--model.vocab_size=66"])
    assert (whole.model.vocab_size, whole.model.unpadded_vocab_size) == (66, 64)
    assert estimate.main(arguments("x", data, bases["rope"], "y")) == 0
    assert "28,528" in capsys.readouterr().out


def refused(capfd, act, *given):
    """Return the error sentence of a command that is refused."""
    capfd.readouterr()
    try:
        status = status_of(lambda: act(*given))
    except SystemExit as stop:
        status = stop.code
    errors = capfd.readouterr().err.splitlines()
    assert status in (1, 2)
    assert not any(line.startswith("Traceback") for line in errors)
    (sentence,) = [line for line in errors if line.startswith("error: ")]
    return sentence


def cut(file):
    file.write_bytes(file.read_bytes()[:-8])


def rename_piece(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"w1"', '"changed"'))


DAMAGES = {
    "checkpoint": lambda folder: cut(next(folder.glob("checkpoints/*/tensors-*"))),
    "weights": lambda folder: cut(folder / "model.safetensors"),
    "empty": lambda folder: [file.unlink() for file in folder.iterdir()],
    "widths": lambda folder: change_config(folder, {"intermediate_size": 64}),
    "tokenizer": rename_piece,
}


def damaged(folder, bases, name):
    """Return a base model with a problem."""
    path = folder / name
    shutil.copytree(bases["rope" if name == "checkpoint" else "llama"], path)
    DAMAGES[name](path)
    return path


@pytest.mark.parametrize(
    "base, overrides, part",
    [
        ("nowhere", [], "extension.from is nowhere, which is not a directory"),
        ("owner/name", [], "hf download owner/name --local-dir DIR"),
        ("empty", [], "has no checkpoint"),
        ("checkpoint", [], "has no complete checkpoint"),
        ("weights", [], "is not a complete safetensors file"),
        ("widths", [], "gate_proj.weight the shape (48, 32)"),
        ("tokenizer", ["--data.tokenizer=TOKENIZER"], "encodes text in another way"),
        ("rope", ["--extension.trains=[norms]"], "extension.trains does not include position"),
        ("rope", [*ROPE, "--model.position.increments=learned"], "extension.trains does not"),
        ("rope", ["--model.hidden_size=64"], "model.hidden_size: checkpoint 32"),
        ("tape", [*ROPE], "model.position_encoding: checkpoint tape"),
        ("llama", ["--model.vocab_size=60"], "model.vocab_size"),
        ("rope", ["--model.seq_length=8"], "model.seq_length is 8"),
        ("llama", [*YARN[:2], "--model.position.rope_original_seq_length=17"], "length is 17"),
    ],
)
def test_wrong_extensions_are_refused_in_one_sentence_before_torch_is_imported(
    extend, bases, data, monkeypatch, capfd, base, overrides, part
):
    if base in DAMAGES:
        base = str(damaged(extend.folder, bases, base))
    monkeypatch.setitem(sys.modules, "torch", None)
    overrides = [override.replace("TOKENIZER", f"{data}/tokenizer.json") for override in overrides]
    chosen = arguments(extend.folder, data, bases.get(base, base), "run", *overrides)
    assert part in refused(capfd, extend_context.main, chosen)
    assert not (extend.folder / "run").exists()


def test_the_message_lists_what_an_extension_may_change(bases, data):
    config = parse_run_config(arguments("x", data, bases["rope"], "y", "--model.num_layers=9"))
    with pytest.raises(ConfigError) as error:
        check_base(config)
    assert "model.seq_length" in error.value.fix
    assert "tape, nope" in error.value.fix


def test_a_checksum_error_is_refused_before_training(bases, data, tmp_path, capfd):
    base = tmp_path / "base"
    shutil.copytree(bases["rope"], base)
    flip(next(base.glob("checkpoints/*/tensors-*")))
    sentence = refused(capfd, extend_context.main, arguments(tmp_path, data, base, "run"))
    assert "has sha256" in sentence
    assert "or change extension.from" in sentence
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")


def test_each_command_refuses_the_checkpoints_of_the_other(extend, bases, data, tmp_path, capfd):
    extend("rope", "--model.position_encoding=rope", "--extension.trains=[lora]", "--train.steps=1")
    (_, extended_step), *_ = list_checkpoints(tmp_path / "run" / "checkpoints")
    (_, base_step), *_ = list_checkpoints(f"{bases['rope']}/checkpoints")
    tiny = [
        "--config",
        TINY,
        f"--data.prefix={data}/a",
        "--model.position_encoding=rope",
        "--model.seq_length=32",
        "--model.position.rope_scaling_factor=2",
        f"--logging.directory={tmp_path}/other",
    ]
    without = ["--config", str(RECIPE), f"--data.prefix={data}/a"]
    resumed = arguments(tmp_path, data, bases["rope"], "new", f"--checkpoint.resume={base_step}")
    of_lora = arguments(tmp_path, data, tmp_path / "run", "again", *ROPE)
    for program, given, part in (
        (train, [*tiny, f"--checkpoint.resume={extended_step}"], "pretrain.extend_context"),
        (train, [*tiny, f"--logging.directory={tmp_path}/run"], "pretrain.extend_context"),
        (train, [*tiny, f"--extension.from={base_step}"], "run pretrain.extend_context"),
        (train, [*tiny, "--extension.trains=[norms]"], "run pretrain.extend_context"),
        (extend_context, resumed, "checkpoint.resume selects"),
        (extend_context, without, "extension.from is not set"),
        (extend_context, tiny, "extension.from is not set"),
        (extend_context, of_lora, "has LoRA layers; merge them first"),
    ):
        assert part in refused(capfd, program.main, given)
    assert not (tmp_path / "other").exists()


def test_a_continued_run_must_extend_the_same_model_and_train_the_same_parameters(
    extend, bases, data, tmp_path, capfd
):
    shutil.copytree(bases["rope"], tmp_path / "copy")
    lora = ["--model.position_encoding=rope", "--extension.trains=[norms,lora]", "--train.steps=1"]
    extend("rope", *lora)
    (_, step), *_ = list_checkpoints(tmp_path / "run" / "checkpoints")
    for base, changed, key in (
        (bases["rope"], "--extension.trains=[lora]", "extension.trains"),
        (bases["rope"], "--extension.lora_rank=4", "extension.lora_rank"),
        (tmp_path / "copy", "--train.steps=2", "extension.from"),
    ):
        chosen = arguments(tmp_path, data, base, "run", *lora, changed)
        sentence = refused(capfd, extend_context.main, chosen)
        assert f"{key}: was" in sentence
        assert "--logging.directory NEW" in sentence
        elsewhere = [f"--checkpoint.resume={step}", f"--logging.directory={tmp_path}/x"]
        sentence = refused(capfd, extend_context.main, [*chosen, *elsewhere])
        assert "--logging.directory NEW" in sentence
    assert not (tmp_path / "x").exists()
    changed = ["--extension.trains=[lora,norms]", "--extension.attention=shifted_sparse"]
    extend("rope", *lora, *changed, "--train.steps=2")


def test_a_requeued_job_needs_no_settings_of_its_base(bases, data, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source" / "pretrain").mkdir(parents=True)
    shutil.copytree(bases["rope"], tmp_path / "base")
    begin = ["begin", "--job", "7", "--source", "source", "--job-link", "link"]
    begin += ["--nodes", "a", "--processes", "1", "--module"]
    extension = [*begin, "pretrain.extend_context"]
    recipe = [str(RECIPE), f"--data.prefix={data}/a", "--logging.directory=run"]
    chosen = [*recipe, "--extension.from=base"]
    broken = [*recipe, f"--extension.from={damaged(tmp_path, bases, 'weights')}"]
    for given, part in (
        ([*extension, "--", *recipe], "extension.from is not set"),
        ([*extension, "--", *broken], "is not a complete safetensors file"),
        ([*begin, "pretrain.train", "--", *chosen], "run pretrain.extend_context"),
    ):
        assert part in refused(capfd, attempt.main, given)
    attempt.main(["check", "--", *chosen])
    attempt.main([*extension, "--", *chosen])
    config = str((tmp_path / "link" / "config.yaml").resolve())
    assert extend_context.main(["--config", config, f"--train.steps={STEPS - 1}"]) == 0
    shutil.rmtree(tmp_path / "base")
    attempt.main([*extension, "--requeued", "--", *chosen])
    assert extend_context.main(["--config", config, f"--train.steps={STEPS}"]) == 0


def test_a_job_whose_settings_do_not_fit_its_base_is_not_submitted(bases, data, capfd):
    given = [str(RECIPE), f"--data.prefix={data}/a", f"--extension.from={bases['rope']}"]
    check = ["check", "--module", "pretrain.extend_context", "--", *given]
    attempt.main(check)
    sentence = refused(capfd, attempt.main, [*check, "--model.num_layers=9"])
    assert "model.num_layers: checkpoint 3, configuration 9" in sentence


def test_a_chain_is_checked_before_its_first_model_exists(data, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    chain = ["chain", "--", TINY, f"--data.prefix={data}/a", "--logging.directory=first"]
    chain += ["--model.position_encoding=rope"]
    attempt.main(chain)
    assert capfd.readouterr().out == "first\n"
    chain += ["--extend", str(RECIPE), f"--data.prefix={data}/a"]
    attempt.main(chain)
    assert capfd.readouterr().out == "first\nruns/extend\n"
    for wrong, part in (
        ("--model.num_layers=9", "model.num_layers: checkpoint 3"),
        ("--extension.from=elsewhere", "remove extension.from"),
        ("--logging.directory=first", "for both pretraining and extension"),
    ):
        assert part in refused(capfd, attempt.main, [*chain, wrong])


def rope_base(**model):
    """Return a base model with RoPE."""
    config = make(**{f"model__{key}": value for key, value in model.items()})
    return Base(Path("somewhere"), config.model, None)


def test_a_recipe_with_a_complete_model_inherits_other_settings():
    base = rope_base(position_encoding="rope", position__rope_theta=5e5, norm_epsilon=1e-3)
    sizes = ("num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "vocab_size")
    given = {key: getattr(base.model, key) for key in sizes} | {"seq_length": 64}
    extension = {"extension": {"from": "somewhere"}}
    found = with_base_settings({"model": given, **extension}, base)["model"]
    assert found["position"]["rope_theta"] == 5e5
    assert (found["norm_epsilon"], found["seq_length"]) == (1e-3, 64)
    # A run that may have started already.
    older = {key: value for key, value in as_dict(base.model).items() if key != "norm_epsilon"}
    assert with_base_settings({"model": older, **extension}) == {"model": older, **extension}


@pytest.mark.parametrize(
    "extended",
    [
        {"position_encoding": "nope"},
        # With one group, the parameters of both encodings have the same shape.
        {"position_encoding": "tape", "position__increments": "learned"},
    ],
)
def test_increments_that_another_encoding_does_not_have_are_refused(extended):
    groups = {"num_query_groups": 1}
    base = rope_base(position_encoding="rope", position__increments="signed", **groups)
    model = {f"model__{key}": value for key, value in (extended | groups).items()}
    with pytest.raises(ConfigError, match="position.increments"):
        check_base(make(**model, data__tokenizer=None), base)


def test_a_run_that_has_not_started_and_has_no_tokenizer_gives_none(tmp_path):
    first = make(logging__directory=str(tmp_path / "first"), data__tokenizer=None)
    assert Base.made_by(first).tokenizer is None


def test_an_extension_may_change_only_the_range_of_random_positions():
    base = rope_base(position_encoding="randpe", position__randpe_range=50)
    longer = {"model__position__randpe_range": 99, "model__seq_length": 64}
    for changes, is_refused in (
        (longer, False),
        ({"model__num_layers": 2}, True),
        ({"model__position_encoding": "repo"}, True),
    ):
        config = make(**{"model__position_encoding": "randpe", "data__tokenizer": None} | changes)
        config = dataclasses.replace(
            config, extension=dataclasses.replace(config.extension, trains=["all"])
        )
        if is_refused:
            with pytest.raises(ConfigError, match="is another model"):
                check_base(config, base)
        else:
            check_base(config, base)


def test_another_encoding_is_refused_with_the_encodings_that_are_possible():
    refused = make(model__position_encoding="alibi", data__tokenizer=None)
    with pytest.raises(ConfigError) as error:
        check_base(refused, rope_base(position_encoding="rope"))
    assert "and model.position_encoding from rope to one of: tape, nope; " in error.value.fix
    assert error.value.fix.endswith("; to keep its encoding, set model.position_encoding to rope")

    # No encoding can follow ALiBi.
    refused = make(model__position_encoding="rope", data__tokenizer=None)
    with pytest.raises(ConfigError) as error:
        check_base(refused, rope_base(position_encoding="alibi"))
    assert "one of" not in error.value.fix
    assert error.value.fix.endswith("; to keep its encoding, set model.position_encoding to alibi")
