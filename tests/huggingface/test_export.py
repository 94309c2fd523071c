"""tools/convert_checkpoint.py: what transformers loads equals what was trained; what cannot be exported is refused."""

import io
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
from contextlib import redirect_stderr
from dataclasses import dataclass
from pathlib import Path

import export_cases
import pytest
import torch
import yaml
from datasets_for_tests import EOD, write_tokenizer
from launch import run_group
from released import FOLDER, load
from safetensors.torch import load_file, save_file

from megatron_tape.checkpoint.directories import digest, list_checkpoints
from megatron_tape.data.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "convert_checkpoint.py"
CASES = list(export_cases.cases())

STRANGER = """
import json, sys
from pathlib import Path

for name in ("megatron_tape", "megatron", "pretrain", "deepspeed", "sentencepiece"):
    sys.modules[name] = None  # as if it were not installed
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

exports, text, output = map(Path, sys.argv[1:])
ids, logits, told = None, {}, {}
for path in sorted(exports.iterdir()):
    model, info = AutoModelForCausalLM.from_pretrained(
        path, trust_remote_code="rope" not in path.name, output_loading_info=True
    )
    told[path.name] = {
        "class": type(model).__name__, "dtype": str(model.dtype),
        "info": {key: len(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")},
    }
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=True)
    ids = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
    told[path.name]["ids"] = ids
    told[path.name]["decoded"] = tokenizer.decode(ids)
    told[path.name]["special"] = [tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id]
    with torch.no_grad():
        logits[path.name] = model(torch.tensor(ids[:96]).view(2, 48)).logits.float()
    generated = model.generate(torch.tensor([ids[:4]]), max_new_tokens=5, do_sample=False)
    told[path.name]["generated"] = generated.shape[1]
save_file(logits, output / "logits.safetensors")
(output / "told.json").write_text(json.dumps(told))
"""


@dataclass
class Done:
    returncode: int
    stderr: str


def convert(*arguments):
    """Run the tool in this process, which has spent the seconds to import torch already."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.getsignal(number) for number in numbers}
    told, argv = io.StringIO(), sys.argv
    sys.argv = [str(TOOL), *map(str, arguments)]
    try:
        with redirect_stderr(told):
            runpy.run_path(str(TOOL), run_name="__main__")
    except SystemExit as stop:
        return Done(stop.code, told.getvalue())
    finally:
        sys.argv = argv
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs of every layout on the standard library's source, with the training models' logits on a held-out file."""
    folder = tmp_path_factory.mktemp("trained")
    write_text_data(folder)
    run_group("export_cases", 4, folder)
    return folder


def write_text_data(folder):
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    sys.path.insert(0, str(ROOT / "tools"))
    from train_tokenizer import train

    library = Path(sysconfig.get_path("stdlib"))
    texts = [(library / f"{name}.py").read_text(encoding="utf-8") for name in ("textwrap", "bisect", "heapq")]
    (folder / "tokenizer.model").write_bytes(train(texts, export_cases.VOCABULARY))
    (folder / "held_out.txt").write_text((library / "queue.py").read_text(encoding="utf-8"), encoding="utf-8")
    tokenizer = load_tokenizer(folder / "tokenizer.model")
    builder = IndexedDatasetBuilder(f"{folder}/text.bin", dtype=np.uint16)
    for document in "\n\n".join(texts).split("\n\n"):
        ids = [*tokenizer.encode(document), tokenizer.eod]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(f"{folder}/text.idx")


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """Every run exported, and loaded by a process that has transformers and not this project."""
    from megatron_tape.huggingface.to_hf.export import export

    folder = tmp_path_factory.mktemp("exported")
    models = folder / "models"
    for name in CASES:
        export(trained / name, models / name)
    export(trained / "tp2_zero3", models / "sharded", max_shard_size=20_000)
    export(trained / "tp2_zero3", models / "bf16", dtype="bf16")
    environment = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-I", "-c", STRANGER, models, trained / "held_out.txt", folder],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def told(exported):
    return json.loads((exported / "told.json").read_text())


@pytest.fixture(scope="module")
def logits(exported):
    return load_file(exported / "logits.safetensors")


@pytest.fixture(scope="module")
def expected(trained):
    return load_file(trained / "logits.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_the_training_models_on_real_text(logits, expected, name):
    assert logits[name].shape[-1] == export_cases.VOCABULARY
    torch.testing.assert_close(logits[name], expected[name][..., : export_cases.VOCABULARY], atol=1e-5, rtol=0)


def test_training_moved_tape_away_from_rope(exported):
    weights = load_file(exported / "models" / "tp2_zero3" / "model.safetensors")
    learnt = [weights[f"model.layers.{i}.position.{name}"] for i in (0, 1) for name in ("token_mixing", "down_proj")]
    assert all(tensor.abs().max() > 1e-3 for tensor in learnt)


def test_shards_hold_the_same_model(logits, exported):
    assert torch.equal(logits["sharded"], logits["tp2_zero3"])
    folder = exported / "models" / "sharded"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    whole = load_file(exported / "models" / "tp2_zero3" / "model.safetensors")
    parts = {key: value for name in files for key, value in load_file(folder / name).items()}
    assert set(parts) == set(whole) == set(index["weight_map"])
    assert all(torch.equal(parts[key], whole[key]) for key in whole)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in whole.values())


def test_bf16_holds_the_rounded_weights(exported, told):
    models = exported / "models"
    whole, rounded = (load_file(models / name / "model.safetensors") for name in ("tp2_zero3", "bf16"))
    assert all(torch.equal(rounded[key], whole[key].bfloat16()) for key in whole)
    assert told["bf16"]["dtype"] == "torch.bfloat16"


def test_transformers_finds_every_weight_and_no_other(told):
    for name, entry in told.items():
        assert not any(entry["info"].values()), name
        assert entry["class"] == ("LlamaForCausalLM" if "rope" in name else "TapeForCausalLM")
        assert entry["generated"] > 4


def test_the_tokenizer_gives_the_same_ids_without_sentencepiece(told, trained):
    text = (trained / "held_out.txt").read_text(encoding="utf-8")
    for entry in told.values():
        assert entry["ids"] == load_tokenizer(trained / "tokenizer.model").encode(text)
        assert entry["decoded"] == text
        assert entry["special"] == [2, 3, 0]


def test_rope_exports_no_code(exported):
    assert not list((exported / "models" / "tp1_zero2_rope").glob("*.py"))
    assert "auto_map" not in json.loads((exported / "models" / "tp1_zero2_rope" / "config.json").read_text())


def test_the_card_tells_the_training_facts(exported, trained):
    card = (exported / "models" / "tp2_zero3" / "README.md").read_text()
    rows = [json.loads(line) for line in (trained / "tp2_zero3" / "metrics.jsonl").read_text().splitlines()]
    assert f"| Training loss | {rows[-1]['loss']:.4f} | 4 |" in card
    assert f"| Validation loss | {rows[-1]['validation_loss']:.4f} | 4 |" in card
    batch = yaml.safe_load((trained / "tp2_zero3" / "config.yaml").read_text())["train"]["global_batch_size"]
    for fact in (
        "4 of 4",
        f"{4 * batch * 48:,} ({batch} sequences of 48 a step)",
        "tensor parallel 2, data parallel 2, ZeRO stage 3",
    ):
        assert fact in card
    assert "16 rows" in card and str(trained) not in card
    weights = load_file(exported / "models" / "tp2_zero3" / "model.safetensors")
    assert f"| Parameters | {sum(tensor.numel() for tensor in weights.values()):,} |" in card


@pytest.mark.parametrize("chosen", ["run", "checkpoints", "step"])
def test_a_run_its_checkpoints_and_a_step_mean_the_same(trained, exported, tmp_path, chosen):
    from megatron_tape.huggingface.to_hf.export import export

    run = trained / "tp1_zero1"
    path = {"run": run, "checkpoints": run / "checkpoints", "step": run / "checkpoints" / "step-00000004"}[chosen]
    export(path, tmp_path / "out")
    for file in (exported / "models" / "tp1_zero1").iterdir():
        if file.name != "README.md":
            assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert os.listdir(tmp_path) == ["out"]


@pytest.mark.parametrize("kind", ["unigram", "bpe", "user-defined", "unigram-with-rules"])
def test_sentencepiece_models_of_other_settings_convert_exactly(tmp_path, kind):
    import sentencepiece

    from megatron_tape.huggingface.tokenizer_files import write_tokenizer

    library = Path(sysconfig.get_path("stdlib"))
    sentences = [line for name in ("argparse", "ast") for line in (library / f"{name}.py").read_text().splitlines()]
    options = {
        "unigram": dict(model_type="unigram", byte_fallback=True, normalization_rule_name="identity"),
        "bpe": dict(model_type="bpe", byte_fallback=True, normalization_rule_name="identity"),
        "user-defined": dict(model_type="bpe", byte_fallback=True, normalization_rule_name="identity"),
        "unigram-with-rules": dict(model_type="unigram", byte_fallback=True, normalization_rule_name="nmt_nfkc"),
    }[kind]
    rules = dict(remove_extra_whitespaces=kind == "unigram-with-rules", add_dummy_prefix=kind != "user-defined")
    if kind == "user-defined":
        rules["user_defined_symbols"] = ["<sep>"]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_writer=model, vocab_size=700, minloglevel=2, **options, **rules
    )
    (tmp_path / "t.model").write_bytes(model.getvalue())
    (tmp_path / "out").mkdir()
    write_tokenizer(tmp_path / "t.model", tmp_path / "out", 128)
    ours, theirs = load_tokenizer(tmp_path / "t.model"), load_tokenizer(tmp_path / "out" / "tokenizer.json")
    text = (library / "ast.py").read_text().replace("=" * 9, "")  # a unigram model has no one way to divide a line
    for piece in (text, "a<sep>b  <s> c"):
        assert theirs.encode(piece) == ours.encode(piece)
        assert theirs.decode(ours.encode(piece)) == ours.decode(ours.encode(piece))
    assert (theirs.vocab_size, theirs.eod, theirs.bos) == (ours.vocab_size, ours.eod, ours.bos)


@pytest.mark.parametrize("given", ["file", "directory with settings"])
def test_a_hugging_face_tokenizer_is_copied(trained, tmp_path, given):
    from transformers import AutoTokenizer

    from megatron_tape.huggingface.to_hf.export import export

    (tmp_path / "given").mkdir()
    write_tokenizer(tmp_path / "given" / "tokenizer.json")
    source, pad = tmp_path / "given" / "tokenizer.json", None
    if given != "file":
        source, pad = tmp_path / "given", "w1"
        settings = {"eos_token": "<|endoftext|>", "pad_token": pad, "tokenizer_class": "PreTrainedTokenizerFast"}
        (source / "tokenizer_config.json").write_text(json.dumps(settings))
    export(trained / "tp1_zero2_rope", tmp_path / "out", tokenizer=str(source))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer("w5 w0 w62")["input_ids"] == [5, 0, 62]
    assert (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token) == (EOD, None, pad)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["vocab_size"], config["eos_token_id"], config["pad_token_id"]) == (EOD + 1, EOD, 1 if pad else None)


def test_fp16_refuses_numbers_beyond_its_range(tmp_path):
    from megatron_tape.huggingface.tensor_files import TensorFile

    with TensorFile(tmp_path / "a", {"x": (2,)}, torch.float16) as file:
        file.write("x", torch.tensor([1.5, -6e4]))
    assert load_file(tmp_path / "a")["x"].tolist() == [1.5, -6e4]
    with pytest.raises(ValueError, match="fp16"), TensorFile(tmp_path / "b", {"x": (1,)}, torch.float16) as file:
        file.write("x", torch.tensor([7e4]))


def refused(tmp_path, told, *arguments):
    """The tool must say `told` in one sentence, exit with 1, and leave `tmp_path` as it is."""
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    done = convert(*arguments)
    errors = [line for line in done.stderr.splitlines() if not line.startswith("checking")]
    assert done.returncode == 1, done.stderr
    assert len(errors) == 1 and errors[0].startswith("error: ") and told in errors[0], done.stderr
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def damage(step, how):
    tensors = next(step.glob("tensors-tp01-*"))
    state = json.loads((step / "state.json").read_text())
    if how == "missing":
        tensors.unlink()
    elif how == "corrupted":
        content = bytearray(tensors.read_bytes())
        content[-5] ^= 1
        tensors.write_bytes(content)
    elif how == "other sizes":
        state["config"]["model"]["num_layers"] += 1
    elif how == "other settings":
        state["config"]["model"]["experts"] = 8
    elif how == "tokenizer":
        state["config"]["data"]["tokenizer"] = "gone.model"
    elif how == "no tokenizer":
        state["config"]["data"]["tokenizer"] = None
    if how in ("other sizes", "other settings", "tokenizer", "no tokenizer"):
        (step / "state.json").write_text(json.dumps(state))
        manifest = json.loads((step / "manifest.json").read_text())
        size, sha256 = digest(step / "state.json")
        manifest["files"]["state.json"] = {"bytes": size, "sha256": sha256}
        (step / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    "how, told",
    [
        ("missing", "tensors-tp01-dp00000.safetensors is missing"),
        ("corrupted", "sha256"),
        ("other sizes", "decoder.layers.2.position_update.token_mixing is missing"),
        ("other settings", "experts"),
        ("tokenizer", "gone.model"),
        ("no tokenizer", "--tokenizer"),
    ],
)
def test_a_broken_or_foreign_checkpoint_is_refused_in_one_sentence(trained, tmp_path, how, told):
    step = tmp_path / "step-00000004"
    shutil.copytree(trained / "tp2_zero3" / "checkpoints" / step.name, step)
    damage(step, how)
    refused(tmp_path, told, "to-hf", "--checkpoint", step, "--output", tmp_path / "out")


def test_nope_is_refused(tmp_path):
    from megatron_tape.huggingface.from_hf.released import import_released

    write_released(tmp_path, "nope")
    import_released(tmp_path / "model.safetensors", tmp_path / "config.json", tmp_path / "imported")
    refused(tmp_path, "nope", "to-hf", "--checkpoint", tmp_path / "imported", "--output", tmp_path / "out")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(trained, tmp_path):
    from tokenizers import Tokenizer, models

    Tokenizer(models.WordLevel({f"w{i}": i for i in range(500)}, unk_token="w0")).save(str(tmp_path / "big.json"))
    arguments = ["to-hf", "--checkpoint", trained / "tp1_zero1", "--output", tmp_path / "out"]
    refused(tmp_path, "500 ids", *arguments, "--tokenizer", tmp_path / "big.json")


def test_the_exit_code_reaches_the_shell(tmp_path):
    arguments = ["to-hf", "--checkpoint", "nowhere", "--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, str(TOOL), *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == "" and os.listdir(tmp_path) == []
    assert done.stderr.splitlines()[-1].startswith("error: checkpoint nowhere does not exist")


def test_an_output_that_exists_is_left_alone(trained, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "file").write_text("mine")
    refused(tmp_path, "exists", "to-hf", "--checkpoint", trained / "tp1_zero1", "--output", tmp_path / "out")


def test_a_run_falls_back_to_the_newest_whole_checkpoint(trained, tmp_path):
    from megatron_tape.huggingface.to_hf.saved_weights import find_checkpoint

    whole = trained / "tp1_zero0" / "checkpoints" / "step-00000004"
    shutil.copytree(whole, tmp_path / "checkpoints" / whole.name)
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    warnings = []
    assert find_checkpoint(tmp_path, warnings.append).name == whole.name
    assert len(warnings) == 1 and "step-00000009" in warnings[0]


def write_released(folder, name):
    config, weights, _, rest = load(name)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({key: value.contiguous() for key, value in weights.items()}, folder / "model.safetensors")
    return config, weights, rest


@pytest.mark.parametrize("mixing", ["full", "per_head"])
@pytest.mark.parametrize("name", ["adape", "adape_interp", "rope"])
def test_released_checkpoints_keep_their_logits_through_import_and_export(tmp_path, name, mixing):
    from transformers import AutoModelForCausalLM

    from megatron_tape.huggingface.from_hf.released import import_released
    from megatron_tape.huggingface.to_hf.export import export

    _, _, rest = write_released(tmp_path, name)
    # As released checkpoints are, and as the reference data records them.
    source = tmp_path / "model.safetensors" if mixing == "full" else FOLDER / f"{name}.safetensors"
    import_released(source, tmp_path / "config.json", tmp_path / "imported", 48, mixing)
    assert json.loads((tmp_path / "imported" / "state.json").read_text())["config"]["model"]["vocab_size"] == 96
    export(tmp_path / "imported", tmp_path / "exported", tokenizer="none")
    # In float64 only the released code's own rounding is left: that of float32 differs between CPUs.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", trust_remote_code=True, dtype=torch.float64)
    with torch.no_grad():
        logits = model(rest["input_ids"]).logits
    torch.testing.assert_close(logits, rest["logits"].double(), atol=1e-5, rtol=0)


def test_released_pickles_need_permission(tmp_path):
    _, weights, _ = write_released(tmp_path, "adape")
    torch.save(weights, tmp_path / "model.bin")
    arguments = ["from-released", "--config", tmp_path / "config.json", "--weights", tmp_path / "model.bin"]
    refused(tmp_path, "--allow-pickle", *arguments, "--output", tmp_path / "out")
    done = convert(*arguments, "--output", tmp_path / "out", "--allow-pickle")
    assert done.returncode == 0, done.stderr
    from megatron_tape.huggingface.from_hf.released import import_released

    import_released(tmp_path / "model.safetensors", tmp_path / "config.json", tmp_path / "again")
    name = "tensors-tp00-dp00000.safetensors"
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize(
    "change, told",
    [
        ({"rpe_type": "alibi"}, "rpe_type"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"num_hidden_layers": 3}, "lacks the parameter model.layers.2"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"intermediate_size": 48}, "mlp"),
        ({"vocab_size": 60}, "settings ask for"),
    ],
)
def test_released_checkpoints_that_do_not_fit_are_refused(tmp_path, change, told):
    from megatron_tape.huggingface.from_hf.released import import_released

    config, _, _ = write_released(tmp_path, "adape")
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ValueError, match=told):
        import_released(tmp_path / "model.safetensors", tmp_path / "config.json", tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == before


def test_training_starts_from_an_imported_checkpoint_and_exports_its_vocabulary(trained, tmp_path):
    import test_import

    from megatron_tape.huggingface.from_hf.llama_family import import_model
    from megatron_tape.huggingface.to_hf.export import export
    from pretrain import train

    test_import.write_source(tmp_path / "source", "qwen3", vocab_size=405)
    import_model(tmp_path / "source", tmp_path / "imported", vocab_multiple=16)
    settings = [option for option in export_cases.settings(trained) if "model.vocab_size" not in option]
    recipe = ["--config", str(export_cases.RECIPE), "--config", str(tmp_path / "imported" / "model.yaml")]
    resume = ["--checkpoint.resume", str(tmp_path / "imported"), "--logging.directory", str(tmp_path / "run")]
    for _ in range(2):  # Started again, the run's own checkpoint goes before the import, and there is nothing to do.
        assert train.main([*recipe, *settings, *resume]) == 0
    steps = [json.loads(row)["step"] for row in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert [step for step, _ in list_checkpoints(tmp_path / "run" / "checkpoints")][0] == 4
    export(tmp_path / "run", tmp_path / "exported")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("source", "exported"))
    assert after["model.embed_tokens.weight"].shape == before["model.embed_tokens.weight"].shape == (405, 32)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert after["model.layers.0.position.token_mixing"].abs().max() > 0
    assert "Started from | the qwen3 model source" in (tmp_path / "exported" / "README.md").read_text()


BIG = {
    "position_encoding": "tape",
    "num_layers": 16,
    "hidden_size": 2048,
    "ffn_hidden_size": 8192,
    "num_attention_heads": 16,
    "num_query_groups": 8,
    "seq_length": 1024,
    "vocab_size": 32000,
    "tie_embeddings": False,
}


def write_synthetic(step, size):
    """A checkpoint of zeros, without Adam's state, whose files have holes for their contents."""
    from megatron_tape.config.schema import ModelConfig
    from megatron_tape.model.weights import parameter_shapes

    model = ModelConfig(**BIG)
    assert model.parameter_count() > 1e9
    cut = {"linear_qkv": (0, 1), "linear_proj": (1, 1), "linear_fc1": (0, 2), "linear_fc2": (1, 1)}
    cut |= {"word_embeddings": (0, 1), "output_layer": (0, 1)}
    shapes = {f"gpt.{name}": shape for name, shape in parameter_shapes(model).items()}
    sharded = {
        name: {"dim": dim, "stride": stride} for name in shapes for part, (dim, stride) in cut.items() if part in name
    }
    step.mkdir(parents=True)
    files = {}
    for rank in range(size):
        header, end = {}, 0
        for name, whole in shapes.items():
            shape = list(whole)
            if name in sharded:
                shape[sharded[name]["dim"]] //= size
            start, end = end, end + 4 * int(torch.tensor(shape).prod())
            header[f"weight/{name}"] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
        encoded = json.dumps(header).encode()
        path = step / f"tensors-tp{rank:02d}-dp00000.safetensors"
        with open(path, "wb") as file:
            file.write(len(encoded).to_bytes(8, "little") + encoded)
            file.truncate(8 + len(encoded) + end)
        files[path.name] = path
    state = {"step": 1, "optimizer_steps": 1, "consumed_samples": 1, "progress": {}}
    state |= {"tensor_model_parallel_size": size, "data_parallel_size": 1, "sharded": sharded, "config": {"model": BIG}}
    (step / "state.json").write_text(json.dumps(state))
    files["state.json"] = step / "state.json"
    entries = {name: dict(zip(("bytes", "sha256"), digest(path))) for name, path in files.items()}
    (step / "manifest.json").write_text(json.dumps({"format_version": 1, "step": 1, "files": entries}))
    return model


@pytest.mark.slow
def test_a_billion_parameters_stream_through_little_memory(tmp_path):
    model = write_synthetic(tmp_path / "step-00000001", 2)
    program = (
        "import resource, runpy, sys; sys.argv[:] = sys.argv[1:]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally: print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    arguments = [TOOL, "to-hf", "--checkpoint", tmp_path / "step-00000001", "--output", tmp_path / "out"]
    arguments += ["--tokenizer", "none", "--dtype", "bf16", "--max-shard-size", "1.5GB"]
    done = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr
    largest = 4 * model.hidden_size * max(model.vocab_size, 3 * model.ffn_hidden_size)
    peak = 1024 * int(done.stdout)
    assert peak < 3 * largest + 2e9
    # That bound would hold most of this model; what streams stays far below.
    assert peak < 1.5e9
    written = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.safetensors"))
    assert written > 2 * model.parameter_count()
    assert len(list((tmp_path / "out").glob("*.safetensors"))) == 2
    shutil.rmtree(tmp_path)
