"""`python -m pretrain.extend_context` on one process: how it starts, continues, and refuses
mistakes.
"""

import dataclasses
import os
import shutil
import subprocess
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
    continued,
    extended,
    first_logits,
    pretrained,
    write_llama,
)
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from megatron_tape.checkpoint.directories import list_checkpoints, read_state
from megatron_tape.checks.arguments import parse_run_config
from megatron_tape.command_line import status_of
from megatron_tape.config.sections import as_dict
from megatron_tape.errors import CheckpointError, ConfigError
from megatron_tape.extension import importing
from megatron_tape.extension.base_model import Base, check_base, with_base_settings
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.model.names import MATRICES, kind_of
from megatron_tape.parallel.layout import initialize_distributed
from megatron_tape.training import trainer
from pretrain import attempt, estimate, extend_context, train

REPOSITORY = Path(__file__).parents[2]
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
    same = [f"--model.position_encoding={encoding}", "--extension.trains=[position]", *YARN]
    learned = first_logits(
        data, bases[base], tmp_path / "learned", *same, "--model.position.increments=learned"
    )
    same = [
        *same[:1],
        f"--extension.trains=[{'position' if encoding == 'tape' else 'norms'}]",
        *YARN,
    ]
    torch.testing.assert_close(
        learned, first_logits(data, bases[base], tmp_path / "fixed", *same), atol=1e-5, rtol=0
    )


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
    assert any(saved.read(f"layers.{layer}.position.token_mixing").any() for layer in (0, 1))
    assert (logits["tape"] - logits["rope"]).abs().max() > 1e-3


def test_at_step_0_a_hugging_face_model_has_its_own_logits(data, bases, tmp_path):
    ours = first_logits(data, bases["llama"], tmp_path)
    path = tmp_path / "scaled"
    shutil.copytree(bases["llama"], path)
    change_config(
        path, {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}
    )
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(path, dtype="float32")(TOKENS).logits
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_at_step_0_a_phi3_model_with_partial_rotation_has_its_own_logits(data, tmp_path):
    torch.manual_seed(3)
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=64,
    )
    sizes |= dict(
        num_key_value_heads=2, max_position_embeddings=16, initializer_range=0.2, pad_token_id=0
    )
    partial = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
    model = Phi3ForCausalLM(Phi3Config(**sizes, rope_parameters=partial))
    model.save_pretrained(tmp_path / "phi3")
    shutil.copy(data / "tokenizer.json", tmp_path / "phi3")
    ours = first_logits(
        data, str(tmp_path / "phi3"), tmp_path, "--model.position.rope_scaling_factor=1"
    )
    with torch.no_grad():
        torch.testing.assert_close(ours, model.eval()(TOKENS).logits, atol=1e-5, rtol=0)


def tensors(run):
    (_, newest), *_ = list_checkpoints(run / "checkpoints")
    (path,) = newest.glob("tensors-*")
    return load_file(path)


def test_only_the_named_parameters_change(extend, bases, capfd):
    rows = extend("rope", "--extension.trains=[position,norms]", "--logging.tensorboard=true")
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
    reported = capfd.readouterr().err
    assert "starting with the weights of" in reported
    table = {
        line.split()[0]: line.split()[1:]
        for line in reported.splitlines()
        if len(line.split()) == 3
    }
    assert table["position"] == ["1,168", "1,168"] and table["mlp"] == ["0", "13,824"]
    assert table["total"] == ["1,392", "28,528"]
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(
        str(extend.folder / "run" / "tensorboard"), size_guidance={"tensors": 0}
    )
    events.Reload()
    (text,) = events.Tensors("parameters/text_summary")
    assert "1,392" in text.tensor_proto.string_val[0].decode()


def test_a_continued_extension_of_an_import_equals_the_uninterrupted_one(data, bases, tmp_path):
    case = continued(tmp_path, data, bases["llama"], "run", "--checkpoint.frozen=false")
    losses = [
        [(row["train/loss"], row["train/grad_norm"]) for row in case[which]]
        for which in ("continued", "whole")
    ]
    assert losses[0] == losses[1] and case["continued_state"] == case["whole_state"]
    held = {key.partition("/")[2] for key in tensors(tmp_path / "run")}
    assert {kind_of(name) for name in held} == {"position", "embeddings", "norms"}


def test_a_run_continues_without_its_base_unless_the_base_has_its_frozen_weights(
    extend, bases, data, tmp_path, capfd
):
    moving = tmp_path / "moving"
    shutil.copytree(bases["rope"], moving)
    for name, frozen in (("whole", "true"), ("lean", "false")):
        extend(str(moving), "--train.steps=2", f"--checkpoint.frozen={frozen}", name=name)
    moving.rename(tmp_path / "moved")
    capfd.readouterr()
    sentence = refused(capfd, extend_context.main, arguments(tmp_path, data, str(moving), "whole"))
    assert "to continue a run that has started, give --config RUN/config.yaml instead" in sentence
    again = {
        name: ["--config", f"{tmp_path}/{name}/config.yaml", "--train.steps=3"]
        for name in ("whole", "lean")
    }
    assert extend_context.main(again["whole"]) == 0
    sentence = refused(capfd, extend_context.main, again["lean"])
    assert "but that does not exist; restore the original" in sentence
    (tmp_path / "moved").rename(moving)
    file = next(moving.glob("checkpoints/*/tensors-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert "is not complete" in refused(capfd, extend_context.main, again["lean"])


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
    capfd.readouterr()
    extend(str(source), "--train.steps=1")
    assert (
        f"starting from {base}, which was imported from {source} before" in capfd.readouterr().err
    )
    assert (base / "manifest.json").stat().st_mtime_ns == written
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    os.utime(source / "model.safetensors", (1, 1))
    sentence = refused(capfd, extend_context.main, arguments(tmp_path, data, source, "run"))
    assert (
        f"{base} was not imported from the files that {source} has now; move {base} away"
        in sentence
    )


def test_a_run_continues_from_its_import_when_both_have_moved(extend, bases, data, tmp_path, capfd):
    source = tmp_path / "source"
    lean = "--checkpoint.frozen=false"
    shutil.copytree(bases["llama"], source)
    first = extend(str(source), lean, "--train.steps=2", "--checkpoint.interval=1")
    source.rename(tmp_path / "gone")
    (tmp_path / "run").rename(tmp_path / "moved")
    extend(str(source), lean, name="moved")
    (_, newest), *_ = list_checkpoints(tmp_path / "moved" / "checkpoints")
    assert read_state(newest)["frozen_from"]["path"] == str(tmp_path / "moved" / "base")
    shutil.rmtree(tmp_path / "moved" / "checkpoints")
    again = extend(str(source), lean, "--train.steps=2", "--checkpoint.interval=1", name="moved")
    assert [row["train/loss"] for row in again] == [row["train/loss"] for row in first]
    capfd.readouterr()
    sentence = refused(
        capfd, extend_context.main, arguments(tmp_path, data, source, "run"), statuses=[2]
    )
    assert "is not a directory; give a run" in sentence and "hf download" not in sentence


def test_a_failed_import_leaves_no_files(bases, data, tmp_path, capfd):
    source = tmp_path / "source"
    shutil.copytree(bases["llama"], source)
    weights = load_file(source / "model.safetensors")
    weights["model.norm.weight"][0] = float("nan")
    save_file(weights, source / "model.safetensors")
    sentence = refused(capfd, extend_context.main, arguments(tmp_path, data, source, "run"))
    assert "contains NaN or infinity in model.norm.weight" in sentence
    assert (
        not (tmp_path / "run" / "base").exists()
        and not (tmp_path / "run" / "base.partial").exists()
    )


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
    assert len(begun) == 3 and len(stages) <= 4

    def fail(advance):
        raise ValueError("the reason")

    with pytest.raises(CheckpointError, match="extension.from cannot be imported: the reason"):
        importing.import_on_rank_0(fail, layout, watch)


def test_settings_of_the_base_are_defaults(bases, data, capsys):
    config = parse_run_config(arguments("x", data, bases["rope"], "y"))
    assert (config.model.hidden_size, config.model.num_query_groups, config.model.init_std) == (
        32,
        2,
        0.1,
    )
    assert (config.model.seq_length, config.model.position.rope_scaling_factor) == (32, 2)
    assert config.extension.from_ == f"{bases['rope']}/checkpoints/step-00000004"
    chosen = [*arguments("x", data, bases["llama"], "y"), "--parallel.tensor_model_parallel_size=2"]
    assert parse_run_config(chosen).model.vocab_size == 64
    whole = extend_context.parse_run_config([*chosen, "--model.vocab_size=66"])
    assert (whole.model.vocab_size, whole.model.unpadded_vocab_size) == (66, 64)
    assert estimate.main(arguments("x", data, bases["rope"], "y")) == 0
    assert "28,528" in capsys.readouterr().out


def refused(capfd, act, *arguments, statuses=(1, 2)):
    """Return the error sentence of a command that is refused."""
    try:
        status = status_of(lambda: act(*arguments))
    except SystemExit as stop:
        status = stop.code
    errors = capfd.readouterr().err.splitlines()
    assert status in statuses and not any(line.startswith("Traceback") for line in errors)
    (sentence,) = [line for line in errors if line.startswith("error: ")]
    return sentence


def cut(file):
    file.write_bytes(file.read_bytes()[:-8])


def pickle(folder):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def rename_piece(folder):
    path = folder / "tokenizer.json"
    path.write_text(path.read_text().replace('"w1"', '"changed"'))


DAMAGES = {
    "checkpoint": lambda folder: cut(next(folder.glob("checkpoints/*/tensors-*"))),
    "weights": lambda folder: cut(folder / "model.safetensors"),
    "empty": lambda folder: [file.unlink() for file in folder.iterdir()],
    "widths": lambda folder: change_config(folder, {"intermediate_size": 64}),
    "pickle": pickle,
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
        ("nowhere", [], "extension.from is nowhere, which is not a directory; give a run"),
        ("owner/name", [], "from the Hugging Face Hub: hf download owner/name --local-dir DIR"),
        ("empty", [], "contains neither a checkpoint nor a config.json; give a run"),
        ("checkpoint", [], "has no complete checkpoint"),
        ("weights", [], "is not a complete safetensors file"),
        ("widths", [], "gate_proj.weight the shape (48, 32), but its settings require (64, 32)"),
        ("pickle", [], "is a pickle, which may run code"),
        (
            "tokenizer",
            ["--data.tokenizer=TOKENIZER"],
            "encodes text in another way than that of extension.from",
        ),
        (
            "rope",
            ["--extension.trains=[norms]"],
            "the new parameters would not be trained; add position",
        ),
        (
            "rope",
            [*ROPE, "--model.position.increments=learned"],
            "position.increments is learned, unlike in extension",
        ),
        ("rope", ["--model.hidden_size=64"], "model.hidden_size: checkpoint 32, configuration 64"),
        ("tape", [*ROPE], "model.position_encoding: checkpoint tape, configuration rope"),
        ("llama", ["--model.vocab_size=60"], "model.vocab_size"),
        ("rope", ["--model.seq_length=8"], "model.seq_length is 8, but extension.from"),
        (
            "llama",
            [*YARN[:2], "--model.position.rope_original_seq_length=17"],
            "model.position.rope_original_seq_length is 17, but",
        ),
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


def test_checks_import_no_torch(bases, data, tmp_path):
    program = (
        "import sys\nsys.modules['torch'] = None\nfrom pretrain import extend_context as"
        " e\ne.main(sys.argv[1:])"
    )
    chosen = arguments(
        tmp_path, data, bases["llama"], "run", f"--data.tokenizer={data}/tokenizer.json"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *chosen], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert "loading torch" in done.stderr and "import of torch halted" in done.stderr, done.stderr


def test_a_checksum_error_is_refused_before_training(bases, data, tmp_path, capfd):
    shutil.copytree(bases["rope"], tmp_path / "base")
    file = next((tmp_path / "base").glob("checkpoints/*/tensors-*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    sentence = refused(
        capfd, extend_context.main, arguments(tmp_path, data, tmp_path / "base", "run")
    )
    assert (
        "has sha256" in sentence
        and "; download or write it again, or change extension.from" in sentence
    )
    assert not list_checkpoints(tmp_path / "run" / "checkpoints")


def test_each_command_refuses_the_checkpoints_of_the_other(extend, bases, data, tmp_path, capfd):
    extend("rope", *ROPE, "--train.steps=1")
    (_, extended_step), *_ = list_checkpoints(tmp_path / "run" / "checkpoints")
    (_, base_step), *_ = list_checkpoints(f"{bases['rope']}/checkpoints")
    model = [
        "--model.position_encoding=rope",
        "--model.seq_length=32",
        "--model.position.rope_scaling_factor=2",
    ]
    tiny = [
        "--config",
        str(REPOSITORY / "tests/recipes/tiny.yaml"),
        f"--data.prefix={data}/a",
        *model,
    ]
    for where in (f"--logging.directory={tmp_path}/run", f"--checkpoint.resume={extended_step}"):
        chosen = [*tiny, f"--logging.directory={tmp_path}/other", where, "--train.steps=10"]
        assert "continue it with pretrain.extend_context" in refused(
            capfd, train.main, chosen, statuses=[2]
        )
    assert not (tmp_path / "other").exists()
    assert "run pretrain.extend_context" in refused(
        capfd, train.main, [*tiny, f"--extension.from={base_step}"]
    )
    assert "train does not use this section" in refused(
        capfd, train.main, [*tiny, "--extension.trains=[norms]"]
    )
    chosen = arguments(tmp_path, data, bases["rope"], "new", f"--checkpoint.resume={base_step}")
    assert "set extension.from to it instead of checkpoint.resume" in refused(
        capfd, extend_context.main, chosen
    )
    without = ["--config", str(RECIPE), f"--data.prefix={data}/a"]
    assert "extension.from is not set" in refused(capfd, extend_context.main, without)
    assert "extension.from is not set" in refused(capfd, extend_context.main, tiny)
    lora = tmp_path / "lora"
    extend(
        "rope",
        "--model.position_encoding=rope",
        "--extension.trains=[lora]",
        "--train.steps=1",
        name="lora",
    )
    assert "has LoRA layers; merge them first" in refused(
        capfd, extend_context.main, arguments(tmp_path, data, lora, "again", *ROPE)
    )


def test_a_continued_run_must_extend_the_same_model_and_train_the_same_parameters(
    extend, bases, data, tmp_path, capfd
):
    shutil.copytree(bases["rope"], tmp_path / "copy")
    lora = ["--model.position_encoding=rope", "--extension.trains=[norms,lora]", "--train.steps=1"]
    extend("rope", *lora)
    (_, step), *_ = list_checkpoints(tmp_path / "run" / "checkpoints")
    capfd.readouterr()
    for base, changed, part in (
        (
            bases["rope"],
            "--extension.trains=[lora]",
            "extension.trains: was ['norms', 'lora'], is now ['lora']",
        ),
        (bases["rope"], "--extension.lora_rank=4", "extension.lora_rank: was 8, is now 4"),
        (
            tmp_path / "copy",
            "--train.steps=2",
            f"extension.from: was '{bases['rope']}/checkpoints/",
        ),
    ):
        chosen = arguments(tmp_path, data, base, "run", *lora, changed)
        sentence = refused(capfd, extend_context.main, chosen, statuses=[2])
        assert part in sentence and sentence.endswith(
            "or start another run with --logging.directory NEW"
        )
        elsewhere = [f"--checkpoint.resume={step}", f"--logging.directory={tmp_path}/x"]
        assert "and without checkpoint.resume" in refused(
            capfd, extend_context.main, [*chosen, *elsewhere]
        )
    whole_run = [
        *arguments(tmp_path, data, bases["rope"], "x", *lora),
        f"--checkpoint.resume={tmp_path}/run",
    ]
    sentence = refused(capfd, extend_context.main, whole_run, statuses=[2])
    assert sentence.endswith(f"choose one of them, such as {step}")
    assert not (tmp_path / "x").exists()
    extend(
        "rope",
        *lora,
        "--extension.trains=[lora,norms]",
        "--extension.attention=shifted_sparse",
        "--train.steps=2",
    )


def test_a_requeued_job_needs_no_settings_of_its_base(bases, data, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "source" / "pretrain").mkdir(parents=True)
    shutil.copytree(bases["rope"], tmp_path / "base")
    options = [
        "begin",
        "--module",
        "pretrain.extend_context",
        "--job",
        "7",
        "--source",
        "source",
        "--job-link",
        "link",
    ]
    options += ["--nodes", "a", "--processes", "1"]
    chosen = [str(RECIPE), f"--data.prefix={data}/a", "--logging.directory=run"]
    assert "extension.from is not set" in refused(capfd, attempt.main, [*options, "--", *chosen])
    damaged_one = [*chosen, f"--extension.from={damaged(tmp_path, bases, 'weights')}"]
    assert "is not a complete safetensors file" in refused(
        capfd, attempt.main, [*options, "--", *damaged_one]
    )
    chosen += ["--extension.from=base"]
    module = options[:2] + ["pretrain.train"] + options[3:]
    assert "run pretrain.extend_context" in refused(capfd, attempt.main, [*module, "--", *chosen])
    attempt.main(["check", "--", *chosen])
    attempt.main([*options, "--", *chosen])
    config = str((tmp_path / "link" / "config.yaml").resolve())
    assert extend_context.main(["--config", config, f"--train.steps={STEPS - 1}"]) == 0
    shutil.rmtree(tmp_path / "base")
    attempt.main([*options, "--requeued", "--", *chosen])
    assert extend_context.main(["--config", config, f"--train.steps={STEPS}"]) == 0


@pytest.mark.parametrize(
    "wrong, message",
    [
        ("--model.seq_length=8", "set extension.allow_shorter_context: true"),
        ("--model.num_layers=9", "model.num_layers: checkpoint 3, configuration 9"),
        ("--extension.trains=[norms]", "does not include position"),
    ],
)
def test_a_job_whose_settings_do_not_fit_its_base_is_not_submitted(
    bases, data, capfd, wrong, message
):
    given = [str(RECIPE), f"--data.prefix={data}/a", f"--extension.from={bases['rope']}"]
    check = ["check", "--module", "pretrain.extend_context", "--", *given]
    attempt.main(check)
    assert message in refused(capfd, attempt.main, [*check, wrong])


def test_a_chain_is_checked_before_its_first_model_exists(data, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    tiny = [
        str(REPOSITORY / "tests/recipes/tiny.yaml"),
        f"--data.prefix={data}/a",
        "--logging.directory=first",
    ]
    first = [*tiny, "--model.position_encoding=rope"]
    second = ["--extend", str(RECIPE), f"--data.prefix={data}/a"]
    attempt.main(["chain", "--", *first, *second])
    assert capfd.readouterr().out == "first\nruns/extend\n"
    for wrong, part in (
        ("--model.num_layers=9", "model.num_layers: checkpoint 3, configuration 9"),
        (
            "--extension.from=elsewhere",
            "run_all.sh extends the model that its pretraining job makes; remove extension.from",
        ),
        ("--logging.directory=first", "for both pretraining and extension"),
    ):
        assert part in refused(capfd, attempt.main, ["chain", "--", *first, *second, wrong])
    attempt.main(["chain", "--", *first])
    assert capfd.readouterr().out == "first\n"


def test_the_original_length_is_that_of_the_model_by_default():
    model = make(model__position_encoding="rope").model
    base = Base(Path("somewhere"), model, None)
    position = {"rope_scaling_type": "yarn", "rope_scaling_factor": 2.0}
    for given, expected in ({}, model.seq_length), ({"rope_original_seq_length": 7}, 7):
        found = with_base_settings(
            {"model": {"position": position | given}, "extension": {"from": "somewhere"}}, base
        )
        assert found["model"]["position"]["rope_original_seq_length"] == expected


def test_a_recipe_with_a_complete_model_inherits_other_settings():
    model = make(
        model__position_encoding="rope", model__position__rope_theta=5e5, model__norm_epsilon=1e-3
    ).model
    required = (
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "seq_length",
        "vocab_size",
    )
    given = {key: getattr(model, key) for key in required}
    extension = {"extension": {"from": "somewhere"}}
    found = with_base_settings(
        {"model": given | {"seq_length": 64}, **extension}, Base(Path("somewhere"), model, None)
    )["model"]
    assert (found["position"]["rope_theta"], found["norm_epsilon"], found["seq_length"]) == (
        5e5,
        1e-3,
        64,
    )
    whole = {"model": as_dict(model), **extension}
    assert with_base_settings(whole) == whole
    older = {key: value for key, value in whole["model"].items() if key != "norm_epsilon"}
    assert with_base_settings(whole | {"model": older}) == whole | {
        "model": older
    }  # it may have started


def test_yarn_without_a_factor_is_refused():
    base = Base(
        Path("somewhere"), make(model__position_encoding="rope", model__seq_length=16).model, None
    )
    now = {
        "model__position__rope_scaling_type": "yarn",
        "model__position__rope_original_seq_length": 16,
        "data__tokenizer": None,
    }
    with pytest.raises(
        ConfigError, match="^model.position.rope_scaling_factor is 1, so .* yarn has no effect"
    ):
        check_base(make(model__position_encoding="rope", model__seq_length=32, **now), base)


def test_a_linear_factor_that_is_too_small_for_the_new_length_is_warned_about(capsys):
    scaled = {
        "model__position_encoding": "rope",
        "model__position__rope_scaling_factor": 2.0,
        "model__seq_length": 16,
    }
    base = Base(Path("somewhere"), make(**scaled).model, None)
    for factor, length, warnings in ((4.0, 32, 0), (2.0, 32, 1), (2.0, 16, 0)):
        now = {
            "model__position__rope_scaling_factor": factor,
            "model__seq_length": length,
            "data__tokenizer": None,
        }
        check_base(make(**scaled | now), base)
        said = capsys.readouterr().err
        assert (
            said.count("grow from 16 to 32 tokens; set it to 4 unless this is intended") == warnings
        )


@pytest.mark.parametrize("encoding", ["tape", "nope"])
def test_increments_that_another_encoding_does_not_have_are_refused(encoding):
    model = make(model__position_encoding="rope", model__position__increments="signed").model
    changed = {"model__position_encoding": encoding, "data__tokenizer": None}
    changed |= {"model__position__increments": "signed"} if encoding == "tape" else {}
    with pytest.raises(
        ConfigError, match="position.increments, which .* does not have or has in another shape"
    ):
        check_base(make(**changed), Base(Path("somewhere"), model, None))


def test_an_extension_may_change_only_the_range_of_random_positions():
    base = make(model__position_encoding="randpe", model__position__randpe_range=50)
    extended = make(
        model__position_encoding="randpe", model__position__randpe_range=99, model__seq_length=64
    )
    replace = dataclasses.replace
    extended = replace(extended, extension=replace(extended.extension, trains=["all"]))
    extended = replace(extended, data=replace(extended.data, tokenizer=None))
    check_base(extended, Base(Path("somewhere"), base.model, None))
    for changes in (
        {"model__position__randpe_range": 50, "model__num_layers": 2},
        {"model__position_encoding": "repo"},
    ):
        other = make(**{"model__position_encoding": "randpe"} | changes)
        with pytest.raises(ConfigError, match="is another model than these settings describe"):
            check_base(other, Base(Path("somewhere"), base.model, None))
