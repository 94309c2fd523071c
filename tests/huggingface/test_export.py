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
from safetensors.torch import load, load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_tape.checkpoint.directories import digest, list_checkpoints
from megatron_tape.data.tokenizer import load_tokenizer
from megatron_tape.errors import FileError
from megatron_tape.huggingface.export.saved_weights import find_checkpoint, open_weights
from megatron_tape.huggingface.export.to_transformers import export
from megatron_tape.io.records import write_record
from megatron_tape.io.safetensors import write_safetensors
from megatron_tape.model.names import seed_name

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
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    whole = load_file(exported / "tp2_zero3" / "model.safetensors")
    parts = {key: value for name in files for key, value in load_file(folder / name).items()}
    assert set(parts) == set(whole) == set(index["weight_map"])
    assert all(torch.equal(parts[key], whole[key]) for key in whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


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
        assert (
            ids == load_tokenizer(trained / "tokenizer.model").encode(text)
            and tokenizer.decode(ids) == text
        )
        assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 3, 0)


def test_rope_exports_no_code(exported, loaded):
    for name, model in loaded.items():
        assert type(model).__name__ == ("LlamaForCausalLM" if "rope" in name else "TapeForCausalLM")
    assert not list((exported / "tp1_zero2_rope").glob("*.py"))
    assert "auto_map" not in json.loads((exported / "tp1_zero2_rope" / "config.json").read_text())


def test_the_card_describes_the_training(exported, trained):
    card = (exported / "tp2_zero3" / "README.md").read_text()
    config = yaml.safe_load((trained / "tp2_zero3" / "config.yaml").read_text())
    batch = config["train"]["global_batch_size"]
    assert "3 of 3" in card and f"{3 * batch * 48:,} ({batch} sequences of 48 per step)" in card
    assert "16 rows" in card and str(trained) not in card
    assert "tags:\n- tape\n- pretrained\n" in card
    weights = load_file(exported / "tp2_zero3" / "model.safetensors")
    assert f"| Parameters | {sum(tensor.numel() for tensor in weights.values()):,} |" in card


def test_a_hugging_face_tokenizer_is_copied(trained, tmp_path):
    source = tmp_path / "given"
    pad = "w1"
    source.mkdir()
    write_tokenizer(source / "tokenizer.json")
    settings = {
        "eos_token": "<|endoftext|>",
        "pad_token": pad,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    with changed_state(trained / "tp1_zero2_rope" / "checkpoints" / "step-00000003", tmp_path) as (
        step,
        state,
    ):
        shutil.rmtree(step / "tokenizer")
        del state["progress"]["tokenizer"]
    manifest = json.loads((step / "manifest.json").read_text())
    files = {
        name: entry
        for name, entry in manifest["files"].items()
        if not name.startswith("tokenizer/")
    }
    (step / "manifest.json").write_text(json.dumps(manifest | {"files": files}))
    export(step, tmp_path / "out", tokenizer=str(source))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w5 w0 w62")["input_ids"] == [5, 0, 62]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token) == (EOD, None, pad)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["pad_token_id"]) == (
        EOD + 1,
        EOD,
        1,
    )


def test_a_tokenizer_json_can_replace_the_runs_sentencepiece_model(trained, exported, tmp_path):
    shutil.copy(exported / "tp2_zero3" / "tokenizer.json", tmp_path)
    export(trained / "tp2_zero3", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"))
    assert (
        load_tokenizer(tmp_path / "out").same_as
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
    for name, options in (("sharded", []), ("tp1_zero2_rope", ["--dtype", "bf16"])):
        output = tmp_path / name
        shutil.copytree(exported / name, output)
        to_hf = ["to-hf", "--checkpoint", trained / "tp2_zero3", "--output", output, *options]
        refused(tmp_path, "exists; pass --overwrite to replace it", *to_hf)
        done = convert(*to_hf, "--overwrite")
        assert done.returncode == 0, done.stderr
        expected = exported / ("bf16" if options else "tp2_zero3")
        found = load_file(output / "model.safetensors")
        assert all(
            torch.equal(tensor, found[key])
            for key, tensor in load_file(expected / "model.safetensors").items()
        )
        # Nothing of the old export is left.
        assert {path.name for path in output.iterdir()} == {
            path.name for path in expected.iterdir()
        }
    to_hf = [
        "to-hf",
        "--checkpoint",
        trained / "tp2_zero3",
        "--output",
        tmp_path / "sharded",
        "--overwrite",
    ]
    damaged = tmp_path / "damaged"
    shutil.copytree(trained / "tp2_zero3" / "checkpoints" / "step-00000003", damaged)
    flip(next(damaged.glob("tensors-tp01-*")))
    refused(tmp_path, "sha256", *to_hf[:2], damaged, *to_hf[3:])
    for name in ("optimizer.pt", "checkpoint-500/model.safetensors", "base/notes.txt"):
        file = tmp_path / "sharded" / name
        file.parent.mkdir(exist_ok=True)
        file.touch()
        refused(tmp_path, f"{name} is not a file of an export", *to_hf)
        file.unlink()
    (tmp_path / "sharded" / "README.md").write_text("# My model")
    refused(tmp_path, "is not an export of this project, so it is not replaced", *to_hf)


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


def as_format_3(step, target):
    """Copy a checkpoint, and give its parameters the names that they had in format 3."""
    shutil.copytree(step, target)
    earlier = lambda name: f"gpt.{seed_name(name)}"  # noqa: E731
    index = {}
    for path in target.glob("tensors-*"):
        tensors = {tuple(key.split("/")): tensor for key, tensor in load(path.read_bytes()).items()}
        renamed = {f"{kind}/{earlier(name)}": tensor for (kind, name), tensor in tensors.items()}
        _, index[path.name] = write_safetensors(path, renamed)
    state = json.loads((target / "state.json").read_text())
    state["sharded"] = {earlier(name): how for name, how in state["sharded"].items()}
    write_record(target / "state.json", state)
    write_record(target / "index.json", {"files": index})
    files = {
        path.name: digest(path)
        for path in target.iterdir()
        if path.is_file() and path.name != "manifest.json"
    }
    manifest = json.loads((target / "manifest.json").read_text())
    write_record(
        target / "manifest.json",
        manifest | {"format_version": 3, "files": manifest["files"] | files},
    )
    return target


def test_shards_of_a_checkpoint_of_format_3_are_merged(trained, tmp_path):
    step = trained / "tp2_zero3" / "checkpoints" / "step-00000003"
    expected = open_weights(step)
    found = open_weights(find_checkpoint(as_format_3(step, tmp_path / step.name)))
    assert len(found.files) == 2 and "weight/gpt." in found.files[0]["norm.weight"][1]
    assert found.trained == expected.trained
    for name in expected.trained:
        assert torch.equal(found.read(name), expected.read(name))


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(trained, tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{i}": i for i in range(500)}, unk_token="w0")).save(
        str(tmp_path / "big.json")
    )
    arguments = ["to-hf", "--checkpoint", trained / "tp2_zero3", "--output", tmp_path / "out"]
    refused(
        tmp_path,
        "than the one that trained the model (500 ids",
        *arguments,
        "--tokenizer",
        tmp_path / "big.json",
    )


def test_a_run_falls_back_to_the_newest_complete_checkpoint(trained, tmp_path):
    whole = trained / "tp2_zero3" / "checkpoints" / "step-00000003"
    shutil.copytree(whole, tmp_path / "checkpoints" / whole.name)
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    warnings = []
    assert find_checkpoint(tmp_path, warnings.append).name == whole.name
    assert len(warnings) == 1 and "step-00000009" in warnings[0]


def test_training_starts_from_an_imported_checkpoint_and_exports_its_vocabulary(trained, tmp_path):
    import test_import

    from megatron_tape.huggingface.imports.from_transformers import import_model
    from pretrain import train

    test_import.write_source(tmp_path / "source", "qwen3", vocab_size=405)
    import_model(tmp_path / "source", tmp_path / "imported", vocab_multiple=16)
    settings = [
        option for option in export_cases.settings(trained) if "model.vocab_size" not in option
    ]
    recipe = [
        "--config",
        str(export_cases.RECIPE),
        "--config",
        str(tmp_path / "imported" / "model.yaml"),
    ]
    resume = [
        "--checkpoint.resume",
        str(tmp_path / "imported"),
        "--logging.directory",
        str(tmp_path / "run"),
    ]
    for _ in range(
        2
    ):  # A second start resumes from the run's own checkpoint, and has nothing to do.
        assert train.main([*recipe, *settings, *resume]) == 0
    steps = [
        json.loads(row)["step"]
        for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert steps == [1, 2, 3]
    assert [step for step, _ in list_checkpoints(tmp_path / "run" / "checkpoints")][0] == 3
    export(tmp_path / "run", tmp_path / "exported")
    before, after = (
        load_file(tmp_path / name / "model.safetensors") for name in ("source", "exported")
    )
    assert (
        after["model.embed_tokens.weight"].shape
        == before["model.embed_tokens.weight"].shape
        == (405, 32)
    )
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert after["model.layers.0.position.token_mixing.weight"].abs().max() > 0
    assert (
        "Started from | the qwen3 model source" in (tmp_path / "exported" / "README.md").read_text()
    )
