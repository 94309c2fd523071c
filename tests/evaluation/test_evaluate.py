"""The command on a toy task: sharing of work, resuming, records and refusals."""

import json
import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from datasets_for_tests import write_tokenizer
from huggingface.test_tokenizer_files import sentencepiece_model
from launch import run_group
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MambaConfig

from megatron_tape.command_line import Interrupted
from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import EXIT_RESTART, ConfigError
from megatron_tape.evaluation import tasks
from megatron_tape.evaluation.model_source import find_model
from megatron_tape.evaluation.ranks import Ranks
from megatron_tape.evaluation.results import Score, read_results
from megatron_tape.evaluation.runner import append_part, read_parts
from megatron_tape.evaluation.task import ModelInfo, Summary, Task, Unit
from megatron_tape.evaluation.transformers_model import HFModel, load_model
from megatron_tape.huggingface.export.remote_code import write_code
from megatron_tape.huggingface.imports.from_transformers import import_model
from megatron_tape.huggingface.tokenizer_files import write_tokenizer as write_exported
from pretrain import evaluate

SMALL = dict(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    initializer_range=0.3,
)


TURKISH = "I\u0307stanbul'da I\u0307yi bir gün, I\u0307zmir'de I\u0307ncir: import I\u0307 as a"


@dataclass(kw_only=True)
class ToySettings:
    """Losses of random tokens."""

    units: int = 4
    """How many."""


class Toy(Task):
    """The loss of random tokens."""

    name = "toy"
    Settings = ToySettings
    needs_tokenizer = False
    evaluated = []

    def units(self, model):
        return [Unit(f"unit-{i}", cost=1 + i) for i in range(self.settings.units)]

    def evaluate(self, unit, model):
        index = int(unit.key.split("-")[1])
        if unit.key == os.environ.get("TOY_FAILS_AT"):
            raise KeyboardInterrupt
        self.evaluated.append(unit.key)
        tokens = np.random.default_rng(index).integers(0, model.info.vocab_size, 40)
        return {"loss": float(model.losses(tokens, 1).mean())}

    def summarize(self, values, info):
        mean = np.mean([value["loss"] for value in values.values()])
        return Summary([Score("loss", float(mean), "lower")])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return save_llama(tmp_path_factory.mktemp("models") / "llama", seed=0)


def save_llama(directory, seed, **sizes):
    torch.manual_seed(seed)
    LlamaForCausalLM(LlamaConfig(**SMALL | sizes)).save_pretrained(directory)
    return directory


@pytest.fixture(autouse=True)
def toy(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "toy", Toy)
    monkeypatch.setattr(Toy, "evaluated", [])
    monkeypatch.setattr(evaluate.signal, "signal", lambda *_: None)


def run(*arguments):
    return evaluate.main(["toy", "--device", "cpu", *map(str, arguments)])


def test_an_interrupted_evaluation_continues_and_equals_a_whole_one(
    llama, tmp_path, monkeypatch, capsys
):
    assert run("--model", llama, "--output", tmp_path / "whole") == 0
    assert Toy.evaluated == [f"unit-{i}" for i in range(4)]
    monkeypatch.setenv("TOY_FAILS_AT", "unit-2")
    assert run("--model", llama, "--output", tmp_path / "cut") == 130
    assert "run the same command to continue" in capsys.readouterr().err
    monkeypatch.delenv("TOY_FAILS_AT")
    Toy.evaluated.clear()
    assert run("--model", llama, "--output", tmp_path / "cut") == 0
    assert Toy.evaluated == ["unit-2", "unit-3"]
    assert not list((tmp_path / "cut" / "parts").iterdir())

    results = read_results(tmp_path / "whole")
    whole = results.tasks["toy"]
    cut = read_results(tmp_path / "cut").tasks["toy"]
    for key in ("examples", "scores", "settings", "identity", "details", "notes"):
        assert getattr(whole, key) == getattr(cut, key)
    assert (whole.parts_before, cut.parts_before) == (0, 2)
    assert results.label == "llama"
    assert results.model.trained_length == 32
    assert whole.versions["torch"] == torch.__version__


@pytest.mark.parametrize(
    "error, status, marked", [(Interrupted(15), EXIT_RESTART, False), (ValueError("no"), 1, True)]
)
def test_a_failed_rank_writes_a_failure_marker_and_an_interrupted_one_does_not(
    llama, tmp_path, monkeypatch, error, status, marked
):
    def fail(*_):
        raise error

    monkeypatch.setenv("TAPE_FAILURE", str(tmp_path / "failed"))
    monkeypatch.setattr(Toy, "evaluate", fail)
    assert run("--model", llama, "--output", tmp_path / "out") == status
    assert (tmp_path / "failed").exists() == marked


def test_finished_tasks_run_again_only_if_something_changed(llama, tmp_path, capsys):
    output = tmp_path / "out"
    for options, count in (([], 4), ([], 4), (["--overwrite"], 8), (["--toy.units", 2], 10)):
        assert run("--model", llama, "--output", output, *options) == 0
        assert len(Toy.evaluated) == count
    assert capsys.readouterr().err.count("toy is finished already") == 1
    results = (output / "results.json").read_bytes()
    assert len(read_results(output).tasks["toy"].examples) == 2

    another = save_llama(tmp_path / "another", seed=1)
    assert run("--model", another, "--output", output) == 2
    assert "holds results of another model" in capsys.readouterr().err
    assert (output / "results.json").read_bytes() == results


def test_only_end_tokens_of_generation_settings_are_used(tmp_path):
    save_llama(tmp_path, seed=0)
    sampling = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 3.0}
    settings = json.dumps({**sampling, "eos_token_id": [5, 6]})
    (tmp_path / "generation_config.json").write_text(settings)
    config = load_model(INFO, tmp_path, "fp32", "cpu").model.generation_config
    assert config.eos_token_id == [5, 6]
    assert not sampling.keys() & config.to_diff_dict().keys()


def write_model(directory, llama, **config):
    """A copy of the model `llama` with other settings in its config.json."""
    directory.mkdir(exist_ok=True)
    settings = json.loads((llama / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(settings | config))
    (directory / "model.safetensors").write_bytes((llama / "model.safetensors").read_bytes())
    return directory


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["toy"], "--model is missing"),
        (["--model", "llama"], "TASK is missing"),
        (["passkey", "--model", "llama"], "save the model's tokenizer into that directory"),
        (["perplexity", "--model", "llama"], "perplexity.data must be set; give --perplexity.data"),
        (["toy", "--model", "meta-llama/Llama-2-7b-hf"], "hf download meta-llama/Llama-2-7b-hf"),
        (["toy", "--model", "empty"], "has no checkpoint"),
        (["selective_copy", "--model", "text"], "text was trained on text; give a model that"),
        (["toy", "--model", "llama", "--output", "file"], "file is not a writable directory"),
        (["toy", "--model", "adapter"], "is an adapter"),
        (["toy", "--model", "pickle"], "no .safetensors files"),
        (["toy", "--model", "code"], "pass --trust-remote-code"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_is_written(
    llama, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "llama", llama)
    write_model(tmp_path / "text", llama)
    (tmp_path / "text" / "tokenizer.json").write_text("{}")
    write_model(tmp_path / "code", llama, auto_map={"AutoConfig": "x.Y"})
    (tmp_path / "code" / "x.py").write_text("raise SystemExit('this must not run')")
    (write_model(tmp_path / "pickle", llama) / "model.safetensors").unlink()
    for name in ("empty", "adapter"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text("{}")
    (tmp_path / "file").touch()
    before = set(tmp_path.rglob("*"))
    status = evaluate.main(["--device", "cpu", *arguments])
    error = capsys.readouterr().err
    assert status == 2 and message in error and error.count("\n") == 1, error
    assert set(tmp_path.rglob("*")) == before


def test_task_files_of_the_user_need_trust_remote_code(tmp_path, capsys):
    ran = tmp_path / "ran"
    template = "{{ cycler.__init__.__globals__.os.popen('touch RAN').read() }}"
    task = f'task: x\ndataset_path: !function x.f\ndoc_to_text: "{template}"\n'
    (tmp_path / "x.yaml").write_text(task.replace("RAN", str(ran)))
    (tmp_path / "x.py").write_text(f"open({str(ran)!r}, 'w')")
    for given in (
        [f"--lm_eval.tasks=[{tmp_path / 'x.yaml'}]"],
        [f"--lm_eval.tasks=[{tmp_path / 'x.yml'}]"],  # whether or not it exists
        ["--lm_eval.tasks=[x]", f"--lm_eval.include_path={tmp_path}"],
    ):
        command = ["lm_eval", "--model", "nowhere", *given]
        assert evaluate.main(command) == 2
        error = capsys.readouterr().err
        assert "may run any code; read it, and pass --trust-remote-code" in error
        assert error.count("\n") == 1
        assert evaluate.read_command([*command, "--trust-remote-code"])[1][0].name == "lm_eval"
    assert evaluate.read_command(["lm_eval", "--model", "nowhere", "--lm_eval.tasks=[arc_easy]"])
    assert not ran.exists()


def test_damaged_weights_are_named(llama, tmp_path, capsys):
    damaged = write_model(tmp_path / "damaged", llama)
    with open(damaged / "model.safetensors", "r+b") as file:
        file.truncate(900)
    assert run("--model", damaged, "--output", tmp_path / "out") == 2
    assert f"{damaged} cannot be loaded" in capsys.readouterr().err


def test_only_code_of_this_project_runs_without_trust_remote_code(llama, tmp_path):
    write_code(tmp_path)
    own = {
        "AutoConfig": "configuration_tape.TapeConfig",
        "AutoModelForCausalLM": "modeling_tape.TapeForCausalLM",
    }

    def runs_foreign_code(classes=own):
        return find_model(str(write_model(tmp_path, llama, auto_map=classes))).runs_foreign_code

    assert not runs_foreign_code()
    # transformers looks for such a class in another directory, or in a repository of the hub.
    elsewhere = f"{tmp_path}/sub--modeling_tape.TapeForCausalLM"
    assert runs_foreign_code(own | {"AutoModelForCausalLM": elsewhere})
    assert runs_foreign_code(["modeling_tape.TapeForCausalLM"])
    tokenizer = tmp_path / "tokenizer_config.json"
    tokenizer.write_text('{"auto_map": {"AutoTokenizer": ["tokenization.Own", null]}}')
    assert runs_foreign_code()
    tokenizer.unlink()
    # transformers replaces `generate` by that of such a file.
    (tmp_path / "custom_generate").mkdir()
    assert runs_foreign_code()


def test_the_digest_of_a_model_covers_the_files_of_its_tokenizer(llama, tmp_path):
    model = find_model(str(write_model(tmp_path / "model", llama)))
    before = model.digest()
    (model.path / "merges.txt").write_text("a b")
    assert model.digest() != before


def test_code_of_a_checkpoints_tokenizer_is_not_exported(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["x--y.Z"]}}')
    (tmp_path / "out").mkdir()
    write_exported(load_tokenizer(tmp_path), tmp_path / "out", 32, str(tmp_path))
    assert "auto_map" not in (tmp_path / "out" / "tokenizer_config.json").read_text()


INFO = ModelInfo("model", 64, 32, {}, has_tokenizer=False)
TOKENS = np.random.default_rng(0).integers(0, 64, 97)


def plain_losses(model, tokens):
    """Return the losses of all tokens but the first, from a single pass over the text."""
    ids = torch.from_numpy(tokens)[None]
    with torch.no_grad():
        logits = model(ids[:, :-1], use_cache=False).logits[0]
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").numpy()


def test_losses_equal_a_plain_loop_for_every_chunk_size(llama):
    model = load_model(INFO, llama, "fp32", "cpu").model.double()
    expected = plain_losses(model, TOKENS)
    for chunk in (2048, 96, 20, 7):
        for first in (1, 20, 21, 96, 97):
            losses = HFModel(INFO, model, None, chunk).losses(TOKENS, first)
            assert losses.shape == (97 - first,)
            assert losses.dtype == np.float64
            np.testing.assert_allclose(losses, expected[first - 1 :], atol=2e-6)


DYNAMIC_ROPE = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
RECURRENT = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8)


@pytest.mark.parametrize(
    "config",
    [
        # The frequencies depend on the length, so that the keys of the first chunks would be cached
        # with others.
        LlamaConfig(**SMALL, rope_parameters=DYNAMIC_ROPE),
        # A recurrent state, which the model goes on with for single tokens only.
        MambaConfig(**RECURRENT, initializer_range=0.3),
    ],
    ids=["dynamic RoPE", "Mamba"],
)
def test_models_without_chunk_support_use_one_pass_and_do_not_depend_on_earlier_texts(config):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    short = TOKENS[:50]
    expected = {len(tokens): plain_losses(model, tokens) for tokens in (short, TOKENS)}
    evaluated = HFModel(INFO, model, None, chunk=16)
    # The short text again after the long one.
    for tokens in (TOKENS, short):
        losses = expected[len(tokens)]
        np.testing.assert_allclose(
            evaluated.losses(tokens, 5),
            losses[4:],
            atol=2e-6,
        )
        ids = torch.from_numpy(tokens)
        logits = evaluated.logits(ids[None, :-1])[0]
        found = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        np.testing.assert_allclose(found.numpy(), losses, atol=2e-6)


def test_a_model_that_ignores_the_cache_uses_one_pass(llama, monkeypatch):
    model = load_model(INFO, llama, "fp32", "cpu").model
    forward = model.forward
    ignoring = lambda *a, past_key_values=None, **more: forward(*a, **more)  # noqa: E731
    monkeypatch.setattr(model, "forward", ignoring)
    losses = HFModel(INFO, model, None, chunk=16).losses(TOKENS, 1)
    np.testing.assert_allclose(losses, plain_losses(model, TOKENS), atol=2e-6)


def test_each_unit_is_assigned_to_one_rank_and_the_load_is_balanced():
    units = [Unit(str(i), cost=1 + i % 5) for i in range(23)]
    shares = Ranks(0, 3).assign(units)
    assert set(units) == set(sum(shares, []))
    assert sum(map(len, shares)) == 23
    loads = [sum(unit.cost for unit in share) for share in shares]
    assert max(loads) - min(loads) <= 1


def test_an_error_on_one_process_is_reported_by_that_process(llama, tmp_path, monkeypatch, capsys):
    def fails(*_):
        raise ConfigError("--device", "has no GPU left")

    monkeypatch.setattr(Ranks, "join", classmethod(lambda cls: Ranks(1, 2)))
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("megatron_tape.evaluation.transformers_model.choose_device", fails)
    assert run("--model", llama, "--output", tmp_path) == 1
    assert capsys.readouterr().err == "error (rank 1): --device has no GPU left\n"


def test_unreadable_parts_are_ignored(tmp_path):
    append_part(tmp_path, 0, "unit", {"loss": 1.0})
    with pytest.raises(ValueError):
        append_part(tmp_path, 0, "other", {"loss": float("nan")})
    with open(tmp_path / "rank-00000.jsonl", "ab") as file:
        for line in (b"[" * 100_000, b'{"key": "b", "value": 3}', b"\xff", b"[]", b'{"key": "c", '):
            file.write(line + b"\n")
    assert read_parts(tmp_path) == {"unit": {"loss": 1.0}}


def test_a_picture_that_cannot_be_drawn_is_a_warning(llama, tmp_path, monkeypatch, capsys):
    def fail(cls, results):
        raise OverflowError("too large")

    monkeypatch.setattr(Toy, "draw", classmethod(fail))
    assert run("--model", llama, "--output", tmp_path) == 0
    error = capsys.readouterr().err
    assert "warning: pictures of toy are missing (OverflowError: too large)" in error
    assert (tmp_path / "results.json").is_file()


def main(folder, model, output):
    """Evaluate on all ranks of a group."""
    tasks.TASKS["toy"] = Toy
    return run("--model", model, "--output", output)


def test_two_processes_give_the_same_scores_as_one(llama, tmp_path):
    assert run("--model", llama, "--output", tmp_path / "one") == 0
    assert run_group("evaluation.test_evaluate", 2, llama, tmp_path / "two") == 0
    one, two = (read_results(tmp_path / name).tasks["toy"] for name in ("one", "two"))
    assert two.processes == 2
    for key, value in one.examples.items():
        assert abs(two.examples[key]["loss"] - value["loss"]) < 1e-6


def test_a_checkpoint_is_evaluated_with_its_training_token_ids(tmp_path, capsys, monkeypatch):
    """transformers has no tokenizer of whole words.

    What needs transformers' tokenizer is refused before anything is exported.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "llama").mkdir()
    tokenizer = sentencepiece_model(
        model_type="word", normalization_rule_name="nmt_nfkc_cf", sentences=[f"{TURKISH} İ"] * 9
    )
    (tmp_path / "llama" / "tokenizer.model").write_bytes(tokenizer)
    reader = load_tokenizer(tmp_path / "llama")
    save_llama(tmp_path / "llama", seed=0, vocab_size=reader.vocab_size)
    import_model(tmp_path / "llama", tmp_path / "run")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": TURKISH}) + "\n")

    read = []
    losses = HFModel.losses
    monkeypatch.setattr(
        HFModel,
        "losses",
        lambda *a: read.append(list(a[1])) or losses(*a),
    )
    command = ["--model=run", "--output=out", "--device=cpu"]
    settings = ["--perplexity.data=text.jsonl", "--perplexity.lengths=[8]", "--perplexity.stride=4"]
    assert evaluate.main(["perplexity", *command, *settings]) == 0
    ids = [*reader.prefix_ids, *reader.encode(TURKISH)]
    parts = [ids[start : start + len(read[0])] for start in range(len(ids))]
    assert read
    assert all(window in parts for window in read)
    assert evaluate.main(["passkey", *command, "--check"]) == 2
    said = capsys.readouterr().err
    assert "would give different ids" in said
    assert "--tokenizer" not in said
