"""A run keeps its tokenizer and recognizes its data even if the files in its settings change."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from conversions import convert
from data.test_tokenizer import MENTIONS
from datasets_for_tests import bpe_tokenizer, write_dataset
from evaluation.loss_cases import write_jsonl
from tool_runs import run_here, write_lines
from training_cases import RECIPE, option, rows

from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.evaluation.results import read_results
from pretrain import evaluate, extend_context, train

SIZE = 300
PERPLEXITY = ["--perplexity.lengths=[12]", "--perplexity.stride=8"]


def preprocess(tokenizer, prefix, *others):
    arguments = ["--input", "text.jsonl", "--tokenizer", tokenizer, "--workers", "1", *others]
    assert run_here("preprocess_data", *arguments, "--output-prefix", prefix).returncode == 0


@pytest.fixture(scope="module")
def source_folder(tmp_path_factory, texts):
    """A folder with two tokenizers of the same size, `a` and `b`, and the dataset `data`, tokenized
    with `a`.
    """
    folder = tmp_path_factory.mktemp("source_folder")
    for name, sample in (("a", texts), ("b", [text.swapcase() for text in texts])):
        (folder / name).mkdir()
        bpe_tokenizer(sample, SIZE).save(str(folder / name / "tokenizer.json"))
        assert load_tokenizer(folder / name).vocab_size == SIZE

    pieces = [text[i : i + 400] for text in texts for i in range(0, len(text), 400)]
    write_lines(folder / "text.jsonl", pieces[:100])
    write_jsonl(
        folder / "held_out.jsonl",
        [" ".join(MENTIONS) + texts[3][:60], texts[4][:90]],
    )
    with contextlib.chdir(folder):
        preprocess("a", "data")
    return folder


@pytest.fixture
def work(source_folder, tmp_path, monkeypatch):
    """A copy of `source_folder` as the current directory, so that data and tokenizers have relative
    paths.
    """
    shutil.copytree(source_folder, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr(evaluate.signal, "signal", lambda *_: None)
    return tmp_path / "work"


def start(*overrides, steps=2):
    settings = [
        f"--model.vocab_size={SIZE}",
        "--data.prefix=data",
        "--data.tokenizer=a",
        "--data.reset_attention_mask=true",
        "--logging.directory=run",
        f"--train.steps={steps}",
        "--train.evaluations=[]",
        "--schedule.warmup_steps=1",
    ]
    return train.main(["--config", str(RECIPE), *settings, *overrides])


WITHOUT_TOKENIZER = ("--data.tokenizer=null", "--data.reset_attention_mask=false")


def extend(base, data, *overrides):
    settings = [
        f"--extension.from={base}",
        f"--data.prefix={data}",
        "--logging.directory=extended",
        "--train.steps=2",
        "--model.seq_length=32",
        "--train.eval_interval=0",
    ]
    recipe = RECIPE.with_name("extend.yaml")
    return extend_context.main(["--config", str(recipe), *settings, *overrides])


def export(checkpoint, output, *others, exits=0):
    """Export a checkpoint; return the output on stderr."""
    done = convert("to-hf", "--checkpoint", checkpoint, "--output", output, *others)
    assert done.returncode == exits, done.stderr
    return done.stderr


def perplexity(model, output, text="held_out.jsonl"):
    command = ["perplexity", "--model", str(model), "--output", str(output), "--device=cpu"]
    assert evaluate.main([*command, f"--perplexity.data={text}", *PERPLEXITY]) == 0
    scores = read_results(output).tasks["perplexity"].scores
    return {(score.metric, score.group): score.value for score in scores}


def replaced_by(path, other):
    shutil.rmtree(path)
    shutil.copytree(other, path)


def digest_in(checkpoint):
    return load_tokenizer(f"{checkpoint}/tokenizer").digest


def test_later_programs_use_the_tokenizer_from_the_start_of_the_run(work, capfd):
    settings = json.dumps({"data": "held_out.jsonl", "lengths": [12], "stride": 8})
    assert start(option("evaluation.perplexity", settings)) == 0
    during = {
        tuple(key.split("/")[2:4]): value
        for key, value in rows("run")[-1].items()
        if key.startswith("evaluation/")
    }
    original = load_tokenizer("a")
    before = perplexity("run", "before")
    # Text that contains special tokens is tokenized in the same way during and after training.
    assert during == pytest.approx(before, rel=1e-5)

    replaced_by("a", "b")
    os.rename("run", "moved")
    os.chdir(work.parent)
    assert perplexity("work/moved", "after", "work/held_out.jsonl") == before
    step = work / "moved" / "checkpoints" / "step-00000002"
    copied = shutil.copytree(step, work.parent / step.name)
    for output, model in (("run", "work/moved"), ("step", copied)):
        export(model, output)
        assert load_tokenizer(output).digest == original.digest
    assert perplexity("run", "exported", "work/held_out.jsonl") == pytest.approx(before, rel=1e-6)
    # A tokenizer on the command line is compared with the run's.
    error = export(
        "work/moved",
        "bad",
        "--tokenizer",
        "work/b",
        exits=2,
    )
    assert "encodes text in another way than the one that trained the model" in error
    export("work/moved", "good", "--tokenizer", "run")


def test_a_run_continues_without_its_tokenizer_files_but_not_with_another_tokenizer(work, capfd):
    assert start() == 0
    replaced_by("a", "b")
    capfd.readouterr()
    assert start(steps=3) == 2
    refusal = "data.tokenizer a encodes text in another way than that of checkpoint"
    assert refusal in capfd.readouterr().err
    shutil.rmtree("a")
    assert start(steps=3) == 0
    shutil.copytree("b", "a")
    continued = [
        "--config=run/config.yaml",
        "--checkpoint.resume=run/checkpoints/step-00000003",
        "--logging.directory=other",
        "--checkpoint.directory=null",
        "--train.steps=4",
    ]
    capfd.readouterr()
    assert train.main(continued) == 2
    refusal = "another way than that of checkpoint run/checkpoints/step-00000003; set data.tokenize"
    assert refusal in capfd.readouterr().err
    assert train.main([*continued, *WITHOUT_TOKENIZER]) == 0
    kept = digest_in("other/checkpoints/step-00000004")
    assert kept == digest_in("run/checkpoints/step-00000003")


def test_a_continued_run_refuses_data_that_was_preprocessed_again(work, capfd):
    assert start() == 0
    write_lines(Path("text.jsonl"), ["other text " * 200] * 70)
    preprocess("a", "data", "--overwrite")
    capfd.readouterr()
    assert start(steps=3) == 2
    error = capfd.readouterr().err
    assert "data.prefix has changed since" in error
    assert "--data.allow_changed true" in error
    assert start("--data.allow_changed=true", steps=3) == 0
    assert "warning: the data has changed since" in capfd.readouterr().err
    assert start(steps=4) == 0  # the run now uses the new data


def test_evaluation_refuses_a_dataset_of_another_tokenizer(work, capfd):
    assert start() == 0
    preprocess("b", "others")
    write_dataset("foreign")
    command = ["perplexity", "--model", "run", "--output", "out", "--device=cpu", *PERPLEXITY]
    assert evaluate.main([*command, "--perplexity.data=others"]) == 2
    refusal = "others was made with a tokenizer that encodes text in another way than that of run"
    assert refusal in capfd.readouterr().err
    assert perplexity("run", "own", "data")
    perplexity("run", "foreign-results", "foreign")
    assert "foreign does not record which tokenizer made it" in capfd.readouterr().err


@pytest.mark.parametrize("base", ["run", "exported"])
def test_an_extension_compares_its_data_with_the_tokenizer_of_its_base(work, capfd, base):
    assert start() == 0
    if base == "exported":
        export("run", "exported")
    preprocess("b", "others")
    capfd.readouterr()
    assert extend(base, "others") == 2
    refusal = "others, which was made with a tokenizer that encodes text in another way"
    assert refusal in capfd.readouterr().err
    assert extend(base, "others", "--data.tokenizer=b") == 2
    assert "data.tokenizer b encodes text in another way than that of" in capfd.readouterr().err
    assert extend(base, "data") == 0
    kept = digest_in("extended/checkpoints/step-00000002")
    assert kept == digest_in("run/checkpoints/step-00000002")


def test_a_base_without_a_tokenizer_uses_the_record_of_its_data(work, capfd):
    assert start(*WITHOUT_TOKENIZER) == 0
    preprocess("b", "others")
    for tokenizer in ([], ["--data.tokenizer=b"]):
        capfd.readouterr()
        assert extend("run", "others", *tokenizer) == 2
        assert "encodes text in another way" in capfd.readouterr().err
    error = export(
        "run",
        "bad",
        "--tokenizer",
        "b",
        exits=2,
    )
    assert "encodes text in another way" in error
    export("run", "good", "--tokenizer", "a")


def test_files_added_to_a_checkpoint_are_refused_by_name(work, capfd):
    assert start() == 0
    (work / "a" / "chat_template.jinja").write_text("{{ new }}")
    assert start("--data.allow_changed=true", steps=3) == 0
    checkpoints = work / "run" / "checkpoints"
    added = checkpoints / "step-00000003" / "tokenizer" / "chat_template.jinja"
    added.write_text("{{ x }}")
    capfd.readouterr()
    assert start(steps=4) == 2
    refusal = "is not listed in the checkpoint's manifest"
    assert f"chat_template.jinja {refusal}; remove it" in capfd.readouterr().err
    added.unlink()
    first = checkpoints / "step-00000002"
    (first / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<s>"}')
    assert f"tokenizer_config.json {refusal}" in export(first, "out", exits=2)
    assert "allow_changed: false" in (work / "run" / "config.yaml").read_text()


def test_a_tokenizer_that_cannot_be_exported_is_reported_before_training(work, texts, capfd):
    import sentencepiece

    with open("word.model", "wb") as model:
        lines = [line for text in texts for line in text.splitlines() if len(line) < 200]
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines),
            model_writer=model,
            vocab_size=200,
            model_type="word",
            minloglevel=2,
        )
    write_dataset("words", vocabulary=63)
    settings = ("--data.tokenizer=word.model", "--data.reset_attention_mask=false")
    assert start("--data.prefix=words", *settings) == 0
    warning = "exports to Hugging Face will not include a tokenizer"
    (line,) = [line for line in capfd.readouterr().err.splitlines() if warning in line]
    assert line.startswith("warning: data.tokenizer word.model ")
    assert "--tokenizer none" in export("run", "out", exits=2)
    export("run", "out", "--tokenizer", "none")
