"""--rope-scaling in evaluation, generation and export equals a config.json that is edited by hand,
and its results are kept apart.
"""

import json
import shutil
from pathlib import Path

import pytest
from conversions import change_config, convert, refused
from test_generate import generate  # noqa: F401
from transformers import AutoTokenizer

from megatron_tape.evaluation.model_source import find_model
from megatron_tape.evaluation.report.page import read_runs_and_results
from megatron_tape.evaluation.results import read_results
from megatron_tape.extension.rope_scaling import RopeScaling
from megatron_tape.huggingface.export.to_transformers import export
from megatron_tape.huggingface.imports.from_transformers import import_model
from pretrain import evaluate

SCALING = ["--rope-scaling", "yarn", "--rope-scaling-factor", "4"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
"""What a user adds to the rope_parameters of models with contexts of 128 tokens."""
CODE = {"rope_scaling_type": "yarn", "rope_scaling_factor": 4.0, "rope_original_seq_length": 128}
"""The same in the settings of an export with the encoding's code."""
TEXT = "import heapq, queue\n\n\ndef main(argument, *more):\n    return heapq.merge(more)\n" * 40


@pytest.fixture(scope="module", params=["tape", "rope", "rope_learned"])
def models(request, exports, tmp_path_factory):
    """A folder with a run, its export, and the export with scaling, made by hand and by the tool.
    The format is that of TAPE, of transformers, and with the encoding's code.
    """
    folder = tmp_path_factory.mktemp(request.param)
    made = exports[request.param].directory
    # By default, an import adds TAPE to a model of transformers.
    encoding = "rope" if request.param == "rope" else None
    import_model(made, folder / "run" / "checkpoints" / "step-00000000", encoding)
    shutil.copytree(made, folder / "exported")
    shutil.copytree(made, folder / "edited")
    settings = json.loads((made / "config.json").read_text())
    if request.param == "rope_learned":
        change_config(
            folder / "edited", {"position_settings": settings["position_settings"] | CODE}
        )
    else:
        change_config(folder / "edited", {"rope_parameters": settings["rope_parameters"] | YARN})
    change_config(folder / "edited", {"max_position_embeddings": 512})
    # The change is intended.
    (folder / "edited" / "positions.json").unlink()
    done = convert(
        *["to-hf", "--checkpoint", folder / "run", "--output", folder / "scaled", *SCALING]
    )
    assert done.returncode == 0, done.stderr
    (folder / "text.jsonl").write_text(json.dumps({"text": TEXT}) + "\n")
    return folder


def perplexity(models, model, output, *options, exits=0):
    arguments = ["--model", models / model, "--output", output, "--device", "cpu", *options]
    settings = ["--perplexity.data", models / "text.jsonl", "--perplexity.lengths", "[128, 400]"]
    assert evaluate.main(["perplexity", *map(str, [*arguments, *settings])]) == exits
    if exits:
        return None
    results = read_results(output)
    examples = results.tasks["perplexity"].examples
    return results, examples


def test_perplexities_equal_those_of_an_edited_config_json(models, tmp_path):
    plain, unscaled = perplexity(models, "exported", tmp_path / "plain")
    assert plain.model.rope_scaling is None
    edited, expected = perplexity(models, "edited", tmp_path / "edited")
    _, exported = perplexity(models, "scaled", tmp_path / "scaled")
    assert exported == expected != unscaled
    checkpoint = "run/checkpoints/step-00000000"
    labels = {"run": "run", checkpoint: "run", "exported": "exported"}
    for model, label in labels.items():
        output = tmp_path / "by_option" / model
        results, examples = perplexity(models, model, output, *SCALING)
        assert examples == expected
        assert results.label == f"{label}-yarn-x4"
        assert results.model.rope_scaling == "yarn-x4"
        assert results.model.trained_length == edited.model.trained_length == 512
        config = results.model.config
        assert "yarn" in json.dumps(config.get("rope_parameters") or config["position_settings"])
    assert not list(tmp_path.glob("*/.exported*"))


def test_texts_beyond_the_trained_length_are_continued(models, generate):  # noqa: F811
    tokenizer = AutoTokenizer.from_pretrained(models / "exported", trust_remote_code=True)
    prompt = TEXT[:450]
    assert 128 < len(tokenizer(prompt)["input_ids"]) < 500
    arguments = ["--prompt", prompt, "--max-new-tokens", "12"]
    code, _, line = generate("--model", models / "exported", *arguments)
    assert code == 2 and "the model's context has 128" in line
    code, expected, line = generate("--model", models / "edited", *arguments)
    assert code == 0, line
    assert generate("--model", models / "scaled", *arguments)[:2] == (0, expected)
    for model in ("run", "exported"):
        found = generate("--model", models / model, *arguments, *SCALING)
        assert found[:2] == (0, expected), found


def test_config_json_and_card_name_the_scaling(models):
    config, edited = (
        json.loads((models / name / "config.json").read_text()) for name in ("scaled", "edited")
    )
    assert config["max_position_embeddings"] == 512
    if "position_settings" in config:
        assert config["position_settings"] == edited["position_settings"]
    else:
        assert config["rope_parameters"].items() >= edited["rope_parameters"].items()
    card = (models / "scaled" / "README.md").read_text()
    assert "scaled by 4 (yarn) |" in card
    context = "512 tokens; trained with 128, the scaling was chosen for the export"
    assert f"| Context | {context} |" in card
    card = (models / "exported" / "README.md").read_text()
    assert "| Context | 128 tokens |" in card
    assert "scaled by" not in card


def test_results_with_and_without_scaling_are_kept_apart(models, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(models)
    run = Path("run")
    factors = [None, RopeScaling("yarn", 4.0), RopeScaling("yarn", 2.0), RopeScaling("linear", 4.0)]
    for model in (run, Path("exported")):
        sources = [find_model(str(model), scaling=scaling) for scaling in factors]
        assert len({source.digest() for source in sources}) == 4
        assert len({source.default_output for source in sources}) == 4
        assert len({source.info.label for source in sources}) == 4
    # pretrain.compare reads the last of these directories as the result of a run.
    plain = find_model("run").default_output
    assert plain.match("step-*")
    scaled = find_model("run", scaling=factors[1]).default_output
    assert scaled.parent == plain.parent == run / "evaluation"
    assert not scaled.match("step-*")
    assert find_model("run", "mine", scaling=factors[1]).info.label == "mine-yarn-x4"

    # In one directory, either refuses the other, and nothing changes.
    perplexity(models, "run", tmp_path / "one")
    before = (tmp_path / "one" / "results.json").read_bytes()
    perplexity(models, "run", tmp_path / "one", *SCALING, exits=2)
    assert "holds results of another model" in capsys.readouterr().err
    assert (tmp_path / "one" / "results.json").read_bytes() == before
    perplexity(models, "run", tmp_path / "two", *SCALING)
    perplexity(models, "run", tmp_path / "two", exits=2)
    perplexity(models, "run", tmp_path / "two", *SCALING[:3], "2", exits=2)
    # The same scaling is finished already.
    perplexity(models, "run", tmp_path / "two", *SCALING)
    assert "perplexity is finished already" in capsys.readouterr().err

    # The page of a run shows both, each with its name.
    shutil.copytree(tmp_path / "one", models / plain)
    shutil.copytree(tmp_path / "two", models / scaled)
    _, results = read_runs_and_results([plain, scaled])
    assert list(results) == ["run", "run-yarn-x4"]
    # The card of an export shows only the results without scaling.
    export("run", tmp_path / "plain_export")
    assert "## Evaluation" in (tmp_path / "plain_export" / "README.md").read_text()
    convert("to-hf", "--checkpoint", "run", "--output", tmp_path / "scaled_export", *SCALING)
    assert "## Evaluation" not in (tmp_path / "scaled_export" / "README.md").read_text()
    shutil.rmtree(models / "run" / "evaluation")


def test_a_model_that_cannot_scale_is_refused_before_it_is_read(
    exports,
    generate,  # noqa: F811
    tmp_path,
    monkeypatch,
    capsys,
):
    def fails(*_):
        raise AssertionError("the model was read")

    monkeypatch.setattr("megatron_tape.evaluation.model_source.ModelSource.digest", fails)
    monkeypatch.setattr("megatron_tape.evaluation.model_source.ModelSource.export", fails)
    monkeypatch.setattr("megatron_tape.extension.scaled_export.open_exportable", fails)
    made = exports["alibi"]
    capsys.readouterr()  # discard what the export has printed
    message = "its positional encoding alibi has no scaling; omit --rope-scaling"
    for model in (made.checkpoint, made.directory):
        command = ["addition", "--model", str(model), "--output", str(tmp_path / "out"), *SCALING]
        assert evaluate.main(command) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1
        code, out, line = generate("--model", model, "--prompt", "a", *SCALING)
        assert (code, out) == (2, "")
        assert message in line
        assert evaluate.main([*command[:3], "--rope-scaling", "yarn"]) == 2
        assert "--rope-scaling-factor is missing" in capsys.readouterr().err

    to_hf = ["to-hf", "--checkpoint", made.checkpoint, "--output", tmp_path / "out"]
    refused(tmp_path, message, *to_hf, *SCALING)
    refused(tmp_path, "--rope-scaling-factor is 1", *to_hf, *SCALING[:3], "1")
    refused(tmp_path, "--rope-scaling is missing", *to_hf, *SCALING[2:])
    refused(tmp_path, "cannot be combined with --adapter", *to_hf, *SCALING, "--adapter")
    refused(tmp_path, "invalid choice: 'ntk'", *to_hf, "--rope-scaling", "ntk")
