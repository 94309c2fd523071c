"""transformers-tape: with this package, TAPE models load without trust_remote_code."""

import shutil
import subprocess
import sys
import zipfile

import pytest
import torch
from environments import ROOT, python_of, run_in
from transformers import AutoModelForCausalLM

from megatron_tape.huggingface.export.remote_code import AUTO_MAP

USER = """
import importlib.util, sys

site_folder, export, save_to, late = sys.argv[1:]
if late == "late":
    # What a program does that has remote code and imports the package afterwards.
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    AutoConfig.from_pretrained(export, trust_remote_code=True)
    sys.path.append(site_folder)
    import transformers_tape
else:
    import site
    site.addsitedir(site_folder)
    assert "transformers_tape" in sys.modules, "the .pth file did nothing"
    assert not {"torch", "transformers", "importlib.metadata"} & sys.modules.keys()

import torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, pipeline

expected = torch.load("expected.pt")
config = AutoConfig.from_pretrained(export)
assert type(config) is transformers.TapeConfig, type(config)
assert AutoTokenizer.from_pretrained(export)("import heapq").input_ids == expected["ids"]
model = AutoModelForCausalLM.from_pretrained(export)
assert type(model) is transformers.TapeForCausalLM
assert type(model).__module__ == "transformers_tape.modeling_tape"
with torch.no_grad():
    logits = model(torch.tensor([expected["ids"]])).logits
    torch.testing.assert_close(logits, expected["logits"], atol=1e-5, rtol=0)
assert type(AutoModel.from_config(config)) is transformers.TapeModel
import transformers_tape
for auto_class, name in transformers_tape.AUTO_CLASSES.items():
    assert type(getattr(transformers, auto_class).from_config(config)).__name__ == name
made = pipeline("text-generation", model=export)
assert made.model.config.model_type == "tape" and made("import", max_new_tokens=2)
if importlib.util.find_spec("peft"):
    assert "peft.utils.constants" not in sys.modules or late
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as targets
    assert targets["tape"] == transformers_tape.LORA_TARGETS
    from peft import LoraConfig, get_peft_model
    adapted = get_peft_model(AutoModelForCausalLM.from_pretrained(export), LoraConfig())
    names = [name for name, _ in adapted.named_parameters() if ".lora_" in name]
    assert all(any(target in name for name in names) for target in targets["tape"])
model.save_pretrained(save_to)
made.tokenizer.save_pretrained(save_to)
import transformers.processing_utils
assert transformers.TapeForCausalLM is type(model), "after transformers has run once more"
try:
    raise AssertionError(transformers.TapeForNothing)
except AttributeError:
    pass
"""


@pytest.mark.parametrize(
    "which, late",
    [("pinned", ""), ("pinned", "late"), ("transformers", "")],
)
def test_models_load_without_trust_remote_code(which, late, exports, package_site, tmp_path):
    made = exports["tape"]
    ids = tokenize(made.directory)
    with torch.no_grad():
        torch.save(
            {"ids": ids, "logits": made.loaded(torch.tensor([ids])).logits},
            tmp_path / "expected.pt",
        )
    # For an export with older code, the package's code runs.
    old = tmp_path / "export"
    shutil.copytree(made.directory, old)
    if not late:
        for file in old.glob("*_tape.py"):
            file.write_text("raise RuntimeError('remote code ran')")
    arguments = [
        "-W",
        "error::RuntimeWarning",
        "-c",
        USER,
        package_site,
        old,
        tmp_path / "saved",
        late,
    ]
    done = run_in(which, tmp_path, *arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "transformers-tape could not" not in done.stderr
    # Saved models load here without the package.
    assert "transformers_tape" not in sys.modules
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", trust_remote_code=True)
    with torch.no_grad():
        torch.testing.assert_close(
            again(torch.tensor([ids])).logits, made.loaded(torch.tensor([ids])).logits
        )


def tokenize(directory):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=True)(
        "import heapq"
    ).input_ids


def test_the_classes_match_auto_map(package_site, tmp_path):
    script = "import transformers_tape as t; print(t.AUTO_CLASSES | {'AutoConfig': t.CONFIG})"
    done = run_in("pinned", tmp_path, "-c", script, PYTHONPATH=str(package_site))
    assert done.returncode == 0, done.stderr
    assert eval(done.stdout) == {
        auto_class: reference.split(".")[1] for auto_class, reference in AUTO_MAP.items()
    }


@pytest.mark.slow
def test_pip_builds_and_installs_the_tested_package(package_site, tmp_path):
    pip = [python_of("ecosystem"), "-m", "pip", "--disable-pip-version-check", "--quiet"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run(
        [*pip, "wheel", *offline, "-w", tmp_path, ROOT / "transformers_tape"], check=True
    )
    (wheel,) = tmp_path.glob("transformers_tape-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = {
            name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name
        }
    files = [
        path
        for path in package_site.rglob("*")
        if path.is_file() and path.suffix in (".py", ".pth")
    ]
    assert found == {path.relative_to(package_site).as_posix(): path.read_bytes() for path in files}
