"""Files of exported encodings: complete, trusted only if unchanged, and importable again."""

import shutil
import sys

import pytest
import torch
from conversions import change_config
from exported_models import NAMES, export_with_code, make
from models import random_tokens

from megatron_tape.config.sections import as_dict
from megatron_tape.errors import FileError, UserError
from megatron_tape.evaluation.model_source import find_model
from megatron_tape.evaluation.transformers_model import HFModel, load_model
from megatron_tape.huggingface.export.remote_code import (
    ENCODED_AUTO_MAP,
    code_files,
    encoding_files,
)
from megatron_tape.huggingface.export.saved_weights import open_weights
from megatron_tape.huggingface.export.to_transformers import check_export
from megatron_tape.huggingface.imports.from_transformers import import_model
from megatron_tape.position import ENCODINGS, PositionEncoding


def test_only_unchanged_exported_code_runs_without_trust(exported, tmp_path):
    for name in ("fire", "toy_stretch"):
        assert not find_model(str(exported(name).directory)).runs_foreign_code
    own = exported("fire").directory

    def is_foreign(change):
        changed = tmp_path / "changed"
        shutil.copytree(own, changed)
        change(changed)
        found = find_model(str(changed)).runs_foreign_code
        shutil.rmtree(changed)
        return found

    for file in ("position_fire_tape.py", "modeling_encoded_tape.py", "extra.py"):
        assert is_foreign(lambda folder: (folder / file).write_text("\n"))  # noqa: B023
    elsewhere = {"AutoModel": f"{tmp_path}/sub--modeling_encoded_tape.EncodedModel"}
    for settings in (
        {"position_encoding": "t5"},
        {"position_encoding": ["fire"]},
        {"auto_map": ENCODED_AUTO_MAP | elsewhere},
    ):
        assert is_foreign(lambda folder: change_config(folder, settings))  # noqa: B023
    assert is_foreign(lambda folder: (folder / "custom_generate").mkdir())
    assert not is_foreign(lambda folder: None)


@pytest.mark.parametrize("name", NAMES)
def test_reimporting_an_export_is_exact(exported, tmp_path, name):
    made = exported(name)
    name = exported(name).model.position_encoding
    import_model(made.directory, tmp_path / "again")
    first, again = (open_weights(path) for path in (made.checkpoint, tmp_path / "again"))
    # The head size is always explicit.
    assert as_dict(again.model) == as_dict(first.model) | {"kv_channels": made.model.head_dim}
    export_with_code(name, tmp_path / "again", tmp_path / "exported")
    check_export(tmp_path / "exported")
    for file in made.directory.iterdir():
        if file.name != "README.md":
            assert (tmp_path / "exported" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.parametrize(
    "change, named",
    [
        ({"position_encoding": "nothing"}, "position_encoding"),
        ({"position_settings": {"fire_mlp_size": "32"}}, "fire_mlp_size"),
        ({"position_settings": {"rope_theta": 5.0}}, "model.position.rope_theta"),
        ({"position_settings": [1]}, "position_settings"),
    ],
)
def test_invalid_settings_of_an_export_are_refused(exported, tmp_path, change, named):
    shutil.copytree(exported("fire").directory, tmp_path / "changed")
    change_config(tmp_path / "changed", change)
    with pytest.raises(ValueError, match=named):
        import_model(tmp_path / "changed", tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_scales_of_heads_are_exported_as_a_matrix(tmp_path):
    made = make(tmp_path, "tape_learned", token_mixing="per_head", num_query_groups=4)
    ids = random_tokens()
    torch.testing.assert_close(
        made.loaded(ids).logits,
        made.built(ids),
        atol=1e-5,
        rtol=1e-5,
    )
    assert made.loaded.model.layers[0].position.token_mixing.weight.shape == (4, 4)
    import_model(made.directory, tmp_path / "imported")
    assert open_weights(tmp_path / "imported").model.position.token_mixing == "full"


def test_an_export_keeps_its_encoding(exported, tmp_path):
    with pytest.raises(FileError, match="positional encoding fire, which cannot become rope"):
        import_model(exported("fire").directory, tmp_path / "imported", "rope")


@pytest.mark.parametrize(
    "line, in_another_file",
    [
        ("import einops", False),
        ("import megatron_tape.ops.bias", False),
        ("from .other import x", False),
        ("from megatron_tape.ops import bias", False),
        ("from megatron_tape.ops.bias import Nothing", False),
        ("from megatron_tape.ops.kernels.triton_position_update import update", False),
        ("from megatron_tape.position import encoding_of", True),
    ],
)
def test_imports_that_cannot_be_exported_are_refused_with_their_line(
    tmp_path, monkeypatch, line, in_another_file
):
    path = tmp_path / "mine.py"
    module = type(sys)("mine")
    path.write_text(f"{line}\nclass Mine: pass\n")
    module.__file__ = str(path)
    own = type("Mine", (PositionEncoding,), {"name": "mine", "__module__": "mine"})
    monkeypatch.setitem(sys.modules, "mine", module)
    with pytest.raises(FileError) as caught:
        code_files(own)
    assert (caught.value.place != f"{path}, line 1") == in_another_file
    assert ", line " in caught.value.place
    monkeypatch.delitem(sys.modules, "mine")
    with pytest.raises(UserError) as caught:
        code_files(own)
    assert caught.value.subject == "the positional encoding mine"


def test_imports_for_type_checking_and_kernels_are_not_exported():
    files = encoding_files(ENCODINGS["tape"])
    assert "ops_position_update_tape.py" in files
    assert not any("kernels" in name for name in files)
    assert "raise NotImplementedError(" in files["ops_position_update_tape.py"]
    assert "if TYPE_CHECKING:\n    pass\n" in files["position_encoding_tape.py"]


def test_an_export_has_the_losses_of_training_and_a_card(exports):
    """Also if the evaluation reads the text in chunks with a cache."""
    made = exports["fire"]
    card = (made.directory / "README.md").read_text()
    assert "| Positions | fire: FIRE: functional interpolation" in card
    assert "trust_remote_code=True" in card and "TAPE" not in card and "## Adapt" not in card
    source = find_model(str(made.directory))
    loaded = load_model(source.info, source.path, "fp32", "cpu", trust_remote_code=True)
    ids = random_tokens(1, 60)[0]
    with torch.no_grad():
        expected = made.built(ids[None, :-1], ids[None, 1:], by_token=True)[0].double()
    for model in (
        loaded,
        HFModel(
            loaded.info,
            loaded.model,
            loaded.tokenizer,
            chunk=7,
        ),
    ):
        losses = torch.from_numpy(model.losses(ids.numpy(), 1))
        torch.testing.assert_close(losses, expected, atol=1e-5, rtol=1e-5)
