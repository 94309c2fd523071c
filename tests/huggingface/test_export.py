"""tools/convert_checkpoint.py to-hf: exports equal the trained models, and unsupported ones are
refused.
"""

import json
import shutil

import export_cases
import pytest
import torch
import yaml
from conversions import changed_state, convert, refused
from datasets_for_tests import EOD, source_code, write_documents, write_tokenizer
from launch import run_group
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import FileError
from megatron_tape.huggingface.export.to_transformers import export

CASES = list(export_cases.cases())


@pytest.fixture(scope="module")
def trained(tmp_path_factory, code_tokenizer, source_text):
    """Train runs on the standard library's source, with logits on a held-out file."""
    folder = tmp_path_factory.mktemp("trained")
    shutil.copy(code_tokenizer, folder)
    (folder / "held_out.txt").write_text(source_text, encoding="utf-8")
    tokenizer = load_tokenizer(code_tokenizer)
    documents = [
        part for name in ("textwrap", "bisect", "heapq") for part in source_code(name).split("\n\n")
    ]
    write_documents(
        f"{folder}/text", [[*tokenizer.encode(part), tokenizer.eod] for part in documents]
    )
    run_group("export_cases", 2, folder)
    return folder


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """Export every run."""
    folder = tmp_path_factory.mktemp("exported")
    for name in CASES:
        export(trained / name, folder / name)
    export(trained / "tp2_zero3", folder / "sharded", max_shard_size=20_000)
    export(trained / "tp2_zero3", folder / "bf16", dtype="bf16")
    return folder


@pytest.fixture(scope="module")
def loaded(exported):
    """Load every export with transformers, and check that no weight is missing or unexpected."""
    models = {}
    for path in sorted(exported.iterdir()):
        remote = "rope" not in path.name
        models[path.name], found = AutoModelForCausalLM.from_pretrained(
            path, trust_remote_code=remote, output_loading_info=True
        )
        assert not any(
            found[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")
        ), path.name
    return models


@pytest.fixture(scope="module")
def logits(loaded, trained):
    text = load_tokenizer(trained / "tokenizer.model").encode(
        (trained / "held_out.txt").read_text(encoding="utf-8")
    )
    with torch.no_grad():
        return {
            name: model(torch.tensor(text[:96]).view(2, 48)).logits.float()
            for name, model in loaded.items()
        }


@pytest.fixture(scope="module")
def expected(trained):
    return load_file(trained / "logits.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_trained_model_on_real_text(logits, expected, name):
    assert logits[name].shape[-1] == export_cases.VOCABULARY
    torch.testing.assert_close(
        logits[name], expected[name][..., : export_cases.VOCABULARY], atol=1e-5, rtol=0
    )


def test_sharded_weight_files_contain_the_same_model(logits, exported):
    assert torch.equal(logits["sharded"], logits["tp2_zero3"])
    folder = exported / "sharded"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    whole = load_file(exported / "tp2_zero3" / "model.safetensors")
    parts = {key: value for name in files for key, value in load_file(folder / name).items()}
    assert set(parts) == set(whole) == set(index["weight_map"])
    assert all(torch.equal(parts[key], whole[key]) for key in whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


@pytest.mark.parametrize("name", ["tp2_zero3", "tp1_zero2_rope"])
def test_a_scaled_export_of_a_run_has_its_weights_and_a_longer_context(
    trained, exported, tmp_path, name
):
    options = ["--rope-scaling", "yarn", "--rope-scaling-factor", "4", "--dtype", "bf16"]
    output = tmp_path / "scaled"
    done = convert("to-hf", "--checkpoint", trained / name, "--output", output, *options)
    assert done.returncode == 0, done.stderr
    whole = load_file(exported / name / "model.safetensors")
    scaled = load_file(output / "model.safetensors")
    assert set(whole) == set(scaled)
    assert all(torch.equal(scaled[key], whole[key].bfloat16()) for key in whole)
    config = json.loads((output / "config.json").read_text())
    assert config["max_position_embeddings"] == 4 * 48
    rope = config["rope_parameters"]
    assert (rope["rope_type"], rope["original_max_position_embeddings"]) == ("yarn", 48)
    tokenizer = json.loads((output / "tokenizer_config.json").read_text())
    assert tokenizer["model_max_length"] == 4 * 48
    card = (output / "README.md").read_text()
    assert "trained with 48" in card
    assert "sequences of 48 per step" in card


def test_a_bf16_export_contains_the_rounded_weights(exported, loaded):
    whole, rounded = (
        load_file(exported / name / "model.safetensors") for name in ("tp2_zero3", "bf16")
    )
    assert all(torch.equal(rounded[key], whole[key].bfloat16()) for key in whole)
    assert loaded["bf16"].dtype == torch.bfloat16


def test_the_tokenizer_gives_the_same_ids_without_sentencepiece(exported, trained):
    text = (trained / "held_out.txt").read_text(encoding="utf-8")
    for path in exported.iterdir():
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
        ids = tokenizer(text)["input_ids"]
        assert ids == load_tokenizer(trained / "tokenizer.model").encode(text)
        assert tokenizer.decode(ids) == text
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 3, 0)


def test_the_card_describes_the_training(exported, trained):
    card = (exported / "tp2_zero3" / "README.md").read_text()
    config = yaml.safe_load((trained / "tp2_zero3" / "config.yaml").read_text())
    batch = config["train"]["global_batch_size"]
    assert "3 of 3" in card
    assert f"{3 * batch * 48:,} ({batch} sequences of 48 per step)" in card
    assert "16 rows" in card
    assert str(trained) not in card
    assert "tags:\n- tape\n- pretrained\n" in card
    weights = load_file(exported / "tp2_zero3" / "model.safetensors")
    assert f"| Parameters | {sum(tensor.numel() for tensor in weights.values()):,} |" in card


def test_a_hugging_face_tokenizer_is_copied(exports, tmp_path):
    source = tmp_path / "given"
    source.mkdir()
    write_tokenizer(source / "tokenizer.json")
    # Text must never become a special token, so the padding token is no word.
    text = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(text.replace('"w1"', '"<|pad|>"'))
    settings = {"eos_token": "<|endoftext|>", "pad_token": "<|pad|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    export(exports["rope"].checkpoint, tmp_path / "out", tokenizer=str(source))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w5 w0 w62")["input_ids"] == [5, 0, 62]
    ids = (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
    assert ids == (EOD, None, 1)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["eos_token_id"], config["pad_token_id"]) == (EOD, 1)


def test_a_tokenizer_json_can_replace_the_runs_sentencepiece_model(trained, exported, tmp_path):
    shutil.copy(exported / "tp2_zero3" / "tokenizer.json", tmp_path)
    export(trained / "tp2_zero3", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))
    assert (
        load_tokenizer(tmp_path / "out").equal_model_digest
        == load_tokenizer(trained / "tokenizer.model").digest
    )
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    settings["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(
        FileError, match="encodes text in another way than the one that trained the model"
    ):
        export(trained / "tp2_zero3", tmp_path / "bad", tokenizer=str(tmp_path / "tokenizer.json"))


def test_an_export_replaces_another_export_and_no_other_directory(trained, exported, tmp_path):
    output = tmp_path / "out"
    shutil.copytree(exported / "sharded", output)
    command = ["to-hf", "--output", output, "--checkpoint"]
    run = trained / "tp2_zero3"
    refused(tmp_path, "pass --overwrite to replace it", *command, run)
    damaged = tmp_path / "damaged"
    shutil.copytree(run / "checkpoints" / "step-00000003", damaged)
    flip(next(damaged.glob("tensors-tp01-*")))
    refused(tmp_path, "sha256", *command, damaged, "--overwrite")
    done = convert(*command, run, "--overwrite", "--dtype", "bf16")
    assert done.returncode == 0, done.stderr
    # Nothing of the old export is left.
    names = {path.name for path in (exported / "bf16").iterdir()}
    assert {path.name for path in output.iterdir()} == names
    found, expected = (
        (folder / "model.safetensors").read_bytes() for folder in (output, exported / "bf16")
    )
    assert found == expected
    for name in ("optimizer.pt", "checkpoint-500/model.safetensors", "base/notes.txt"):
        file = output / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        refused(tmp_path, f"{name} is not a file of an export", *command, run, "--overwrite")
        file.unlink()
    (output / "README.md").write_text("# My model")
    refused(tmp_path, "is not an export of this project", *command, run, "--overwrite")


def flip(file):
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "tensors-tp01-dp00000.safetensors is missing": lambda file, config: file.unlink(),
    "sha256": lambda file, config: flip(file),
    "experts": lambda file, config: config["model"].update(experts=8),
    "tokenizer/tokenizer.model has": lambda file, config: flip(
        file.parent / "tokenizer" / "tokenizer.model"
    ),
}


@pytest.mark.parametrize("refusal", DAMAGES)
def test_damaged_or_incompatible_checkpoints_are_refused_in_one_sentence(
    trained, tmp_path, refusal
):
    source = trained / "tp2_zero3" / "checkpoints" / "step-00000003"
    with changed_state(source, tmp_path) as (step, state):
        DAMAGES[refusal](next(step.glob("tensors-tp01-*")), state["config"])
    refused(tmp_path, refusal, "to-hf", "--checkpoint", step, "--output", tmp_path / "out")


def test_training_starts_from_an_imported_checkpoint_and_exports_its_vocabulary(trained, tmp_path):
    import test_import

    from megatron_tape.huggingface.imports.from_transformers import import_model
    from pretrain import train

    test_import.write_source(tmp_path / "source", "qwen3", vocab_size=405)
    import_model(tmp_path / "source", tmp_path / "imported", vocab_multiple=16)
    options = ["--config", str(export_cases.RECIPE)]
    options += ["--config", str(tmp_path / "imported" / "model.yaml")]
    options += [
        option for option in export_cases.settings(trained) if "model.vocab_size" not in option
    ]
    options += ["--checkpoint.resume", str(tmp_path / "imported")]
    options += ["--logging.directory", str(tmp_path / "run")]
    for _ in range(2):  # a second start resumes from the run's checkpoint, and has nothing to do
        assert train.main(options) == 0
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3]
    export(tmp_path / "run", tmp_path / "exported")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("source", "exported")
    )
    assert after["model.embed_tokens.weight"].shape == (405, 32)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert after["model.layers.0.position.token_mixing.weight"].abs().max() > 0
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "Started from | the qwen3 model source" in card
