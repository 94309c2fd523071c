"""The model card of an export: metadata, adapter example and evaluation results."""

import json
import re
import shutil

import pytest
import torch
import yaml
from conversions import changed_state, convert
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from test_import import write_source

from megatron_tape.errors import UserError
from megatron_tape.huggingface.export.markdown import escape_markdown
from megatron_tape.huggingface.export.model_card import write_adapter_card
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.huggingface.export.to_transformers import export
from megatron_tape.huggingface.imports.from_transformers import import_model
from megatron_tape.huggingface.imports.source_card import source_card


@pytest.fixture(scope="module")
def evaluated(exports, tmp_path_factory):
    """Create a directory with a `checkpoint` that has a tokenizer, and the `results` of its
    evaluation.
    """
    from pretrain import evaluate

    folder = tmp_path_factory.mktemp("evaluated")
    (folder / "text.jsonl").write_text(json.dumps({"text": "import heapq\n" * 60}) + "\n")
    settings = ["--perplexity.data", str(folder / "text.jsonl"), "--perplexity.lengths", "[16, 32]"]
    import_model(exports["tape"].directory, folder / "checkpoint")
    where = ["--model", str(folder / "checkpoint"), "--output", str(folder / "results")]
    assert evaluate.main(["perplexity", *where, *settings]) == 0
    return folder


def metadata(directory):
    return ModelCard.load(directory / "README.md").data.to_dict()


def imported(tmp_path, front_matter, *arguments):
    write_source(tmp_path / "source")
    (tmp_path / "source" / "README.md").write_text(front_matter, encoding="utf-8")
    done = convert(
        "from-hf", "--model", tmp_path / "source", "--output", tmp_path / "imported", *arguments
    )
    assert done.returncode == 0, done.stderr
    export(tmp_path / "imported", tmp_path / "exported", tokenizer="none")
    return tmp_path / "exported", done.stderr


def test_an_imported_model_keeps_its_license_and_has_no_pretrained_tag(tmp_path):
    front_matter = (
        "---\nlicense: other\nlicense_name: llama3\nlicense_link:"
        " https://llama.com/license\nlanguage:\n- en\n- no\nbase_model:"
        " somebody/older\nlibrary_name: exllama\n---\n# Source\n"
    )
    exported, _ = imported(tmp_path, front_matter, "--base-model", "meta-llama/Llama-3")
    expected = {
        "license": "other",
        "license_name": "llama3",
        "license_link": "https://llama.com/license",
        "language": ["en", "no"],
        "base_model": "meta-llama/Llama-3",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["tape"],
    }
    assert metadata(exported) == expected
    card = (exported / "README.md").read_text()
    assert "Imported from the llama model meta-llama/Llama-3; not trained further." in card
    saved = open_weights(tmp_path / "imported")
    write_adapter_card(tmp_path, "adapter", saved, "fp32")
    of_adapter = {
        key: expected[key] for key in ("license", "license_name", "license_link", "language")
    }
    assert metadata(tmp_path) == of_adapter | {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
    }
    # A reimported TAPE model keeps all facts.
    done = convert("from-hf", "--model", exported, "--output", tmp_path / "again")
    assert done.returncode == 0, done.stderr
    assert open_weights(tmp_path / "again").state["progress"]["card"] == {
        key: expected[key]
        for key in ("license", "license_name", "license_link", "language", "base_model")
    }


def test_an_invalid_name_on_the_hub_is_refused(tmp_path):
    with pytest.raises(UserError, match="OWNER/NAME"):
        source_card(tmp_path, "a/b/c")
    assert source_card(tmp_path) == {}


def test_the_cards_adapter_example_trains_positions_and_merges(exports, tmp_path, monkeypatch):
    (recipe,) = re.findall(
        r"## Adapt\n.*?```python\n(.*?)```",
        (exports["tape"].directory / "README.md").read_text(),
        re.S,
    )
    before, after = recipe.split(
        "# Train the model here, with transformers' Trainer or trl. Then:\n"
    )
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(before.replace('path = "."', f"path = {str(exports['tape'].directory)!r}"), names)
    model = names["model"]
    tokens = torch.randint(
        400,
        (2, 24),
        generator=torch.Generator().manual_seed(1),
    )
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad],
        lr=1e-2,
    )
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    exec(after, names)
    merged = names["merged"]
    before = exports["tape"].loaded.state_dict()
    moved = {
        name.removesuffix(".weight").rpartition(".")[2]
        for name, weight in merged.state_dict().items()
        if (weight - before[name]).abs().max() > 1e-4
    }
    assert moved >= {"token_mixing", "x_proj", "up_proj", "down_proj", "q_proj"}
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        torch.testing.assert_close(merged(tokens).logits, expected, atol=1e-5, rtol=1e-5)


def test_the_card_shows_only_this_models_evaluation(evaluated, exports, tmp_path):
    results = evaluated / "results"
    scores = json.loads((results / "results.json").read_text())["tasks"]["perplexity"]["scores"]
    cards = {}
    for name, source in (("own", evaluated / "checkpoint"), ("other", exports["rope"].checkpoint)):
        step = tmp_path / name / "checkpoints" / "step-00000000"
        shutil.copytree(source, step)
        shutil.copytree(results, tmp_path / name / "evaluation" / step.name)
        export(step, tmp_path / "exported" / name, tokenizer="none")
        cards[name] = (tmp_path / "exported" / name / "README.md").read_text()
    assert "## Evaluation" not in cards["other"]
    assert "text.jsonl" in cards["own"]
    assert "measured in fp32 on" in cards["own"]
    assert str(evaluated) not in cards["own"]
    for score in scores:
        assert f"| {score['metric']} | {score['value']:.4g}" in cards["own"]


HOSTILE = (
    "<script>alert(1)</script> <img src=x onerror=alert(1)> [x](javascript:alert(1)) ![y](z) `code`"
    " ``` | a | **b** _c_ ~~d~~ &lt;e&gt; <!-- f --> $g$ \\* www.h.org https://h.org a_b_c # --- 1."
    " {{ 7 * 7 }}"
)
ON_LINES = (
    f"\n---\nlicense: evil\n---\n\n# {HOSTILE}\n\n| x |\n|---|\n- y\n\x1b[31m\u202e\x85\u2028 %s"
)
FRONT_MATTER = {
    "base_model": f"a: b # c{ON_LINES}",
    "license": "---",
    "license_name": f"!!python/object {ON_LINES}",
    "license_link": "no",
    "language": ["no", "1e3", "- x\n---\ny: z", "{a: b}", "*x"],
}
RUN = {
    "train": {"steps": 3, "global_batch_size": 2, "precision": ON_LINES % 1, "seed": ON_LINES % 2},
    "optimizer": {"kind": "adamw", "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.9, "lr": 0.1},
    "schedule": {"kind": ON_LINES % 3, "warmup_steps": 1},
    "extension": {"from": "x/" + HOSTILE.replace("/", "%") + " 4"},
    "data": {"prefix": None, "generator": {ON_LINES % 5: ON_LINES % 6}},
}


def read_card(directory):
    """Return the metadata of a card, and the rendered text, links and HTML."""
    front_matter, body = re.fullmatch(
        r"---\n(.*?)\n---\n(.*)", (directory / "README.md").read_text(), re.S
    ).groups()
    blocks = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(body)
    inline = [child for block in blocks for child in block.children or ()]
    text = "\n".join(
        "".join(child.content for child in block.children) for block in blocks if block.children
    )
    links = {
        value
        for token in inline
        for value in (token.attrGet("href"), token.attrGet("src"))
        if value
    }
    html = [token for token in [*blocks, *inline] if token.type.startswith("html")]
    emphasis = [
        token
        for token in inline
        if token.type in ("strong_open", "em_open", "s_open", "code_inline")
    ]
    return yaml.safe_load(front_matter), text, links, html + emphasis


def test_text_of_a_checkpoint_is_escaped_in_its_card(exports, tmp_path):
    with changed_state(exports["rope"].checkpoint, tmp_path) as (step, state):
        state["progress"] |= {"origin": ON_LINES % 0, "card": FRONT_MATTER}
        state["config"] |= RUN
    export(step, tmp_path / "out", tokenizer="none")
    facts, text, links, markup = read_card(tmp_path / "out")
    assert {key: facts[key] for key in FRONT_MATTER} == FRONT_MATTER
    assert "evil" not in facts.values()
    assert not links
    assert not markup
    assert "|" in text
    assert text.count(HOSTILE.replace("/", "%") + " 4") == 1
    for number in (0, 1, 2, 3, 5, 6):
        said = " ".join((ON_LINES % number).translate({0x1B: " ", 0x202E: " "}).split())
        assert text.count(said) == 1, number


@pytest.mark.parametrize("text", ["+0.041", "−0.2 (p < 0.05)", "tape+increments=signed", "a_b 2-1"])
def test_numbers_and_comparisons_are_not_escaped(text):
    assert escape_markdown(text) == text


@pytest.mark.parametrize("text", ["<b>x", "a <b", "a <", "+ 1", "- x", "---", "=", "1. x", "&lt;"])
def test_text_that_markdown_would_interpret_is_escaped(text):
    escaped = escape_markdown(text)
    assert escaped != text
    (_, inline, _) = MarkdownIt("commonmark").parse(escaped)
    assert "".join(child.content for child in inline.children) == text
