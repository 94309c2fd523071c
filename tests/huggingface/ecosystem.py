"""Try an exported model with the Hugging Face ecosystem.

    python tests/huggingface/ecosystem.py exported/my-model

needs torch, transformers and this folder, nothing else of this project; a row whose package is
missing says `not installed`. Every row compares with a truth that the model itself gives, such as
generation without a cache, in fp32. The code of an export is run: give only exports that you trust.
"""

import argparse
import contextlib
import importlib.util
import json
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

WORKS = "works"
FAILS = "fails"
NOT_INSTALLED = "not installed"
NEW = 12
"""Tokens that rows generate."""


@dataclass(frozen=True)
class Row:
    """One thing to try, which raises an error if the model fails."""

    name: str
    what: str
    run: Callable[["Subject"], None]
    needs: tuple[str, ...]
    heavy: bool


ROWS: dict[str, Row] = {}


def row(what: str, needs: tuple[str, ...] = (), heavy: bool = False):
    """Register a function as a row: `what` is done and compared; it needs these packages besides
    transformers.
    """

    def register(function):
        ROWS[function.__name__] = Row(function.__name__, what, function, needs, heavy)
        return function

    return register


class Subject:
    """A model directory, with helpers that several rows use."""

    def __init__(self, directory: str | Path, work: Path):
        self.directory = Path(directory).resolve()
        self.work = work
        config = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        self.is_tape = config["model_type"] == "tape"
        self.trust = {"trust_remote_code": True} if "auto_map" in config else {}
        work.mkdir(parents=True, exist_ok=True)

    @property
    def is_small(self) -> bool:
        return self.model.num_parameters() < 1e6

    def load(self, auto_class=AutoModelForCausalLM, directory: Path | None = None, **options):
        """Return a new model in evaluation mode, in fp32 unless `options` say otherwise."""
        options = {"dtype": torch.float32, **self.trust, **options}
        return auto_class.from_pretrained(directory or self.directory, **options).eval()

    @cached_property
    def model(self):
        return self.load()

    @cached_property
    def tokenizer(self):
        tokenizer = AutoTokenizer.from_pretrained(self.directory, padding_side="left", **self.trust)
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        return tokenizer

    def ids(self, count: int, start: int = 0) -> torch.Tensor:
        """Return (1, count) tokens of Python's own source, from `start` on, which counts from the
        first function.
        """
        text = Path(traceback.__file__).read_text(encoding="utf-8")
        text = text[text.index("def ") :][:6000]
        ids = self.tokenizer(text, add_special_tokens=False).input_ids
        return torch.tensor(ids[start : start + count])[None]

    def generate(self, ids: torch.Tensor, model=None, **options) -> torch.Tensor:
        """Return the `NEW` tokens after `ids`, greedily unless `options` say otherwise."""
        options = {
            "do_sample": False,
            "attention_mask": torch.ones_like(ids),
            "disable_compile": True,
            **options,
        }
        model = self.model if model is None else model
        return model.generate(ids, **self.count(), **options)[:, ids.shape[1] :]

    def count(self) -> dict:
        """Return options that make `generate` return exactly `NEW` tokens."""
        return {
            "max_new_tokens": NEW,
            "eos_token_id": -1,
            "pad_token_id": self.tokenizer.pad_token_id,
        }

    @cached_property
    def greedy(self) -> torch.Tensor:
        """The expected result of many rows: the continuation of `ids(24)` without a cache."""
        return self.generate(self.ids(24), use_cache=False)

    @torch.no_grad()
    def logits(self, model=None, ids: torch.Tensor | None = None, **options) -> torch.Tensor:
        """Return the logits of `ids` (default: `ids(24)`)."""
        ids = self.ids(24) if ids is None else ids
        return (self.model if model is None else model)(ids, **options).logits.float()


def equal_tokens(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.tolist() == expected.tolist(), (
        f"tokens {found.tolist()} instead of {expected.tolist()}"
    )


def equal_logits(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Raise AssertionError if anything differs by more than `tolerance` of the largest expected
    value.
    """
    difference = (found - expected).abs().max().item()
    largest = expected.abs().max().item()
    assert difference <= tolerance * largest, (
        f"differs by {difference:.1e}, the largest is {largest:.1e}"
    )


def is_installed(package: str) -> bool:
    """Return whether `package` can be imported; a folder of that name without code does not
    count.
    """
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None


def try_row(entry: Row, subject: Subject) -> str:
    """Run a row and return its outcome; catches all exceptions except KeyboardInterrupt."""
    needed = (
        package for package in entry.needs if package != "transformers_tape" or subject.is_tape
    )
    if missing := [package for package in needed if not is_installed(package)]:
        return f"{NOT_INSTALLED} ({', '.join(missing)})"
    torch.manual_seed(0)
    try:
        # Results are on stdout, to which trainers and libraries also print.
        with contextlib.redirect_stdout(sys.stderr):
            entry.run(subject)
    except Exception as error:
        return f"{FAILS} ({type(error).__name__}: {' '.join(str(error).split())[:300]})"
    return WORKS


def load_rows() -> dict[str, Row]:
    """Return every row by name, light ones first."""
    # As a script this module is __main__, but the rows import it by name.
    sys.modules.setdefault("ecosystem", sys.modules[__name__])
    sys.path.insert(0, str(Path(__file__).parent))
    import ecosystem_generation
    import ecosystem_heavy
    import ecosystem_serving
    import ecosystem_training

    assert all((ecosystem_generation, ecosystem_training, ecosystem_heavy, ecosystem_serving))
    return dict(sorted(ROWS.items(), key=lambda item: item[1].heavy))


def main() -> None:
    """Run the rows and print their outcomes; the exit status is 1 if one fails."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "export", type=Path, help="directory of an exported model, or of one of transformers"
    )
    parser.add_argument(
        "--only",
        choices=("light", "heavy"),
        help="only rows without, or with, packages of their own",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results to FILE")
    options = parser.parse_args()
    rows = {
        name: row
        for name, row in load_rows().items()
        if options.only in (None, "heavy" if row.heavy else "light")
    }
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    found = {}
    with tempfile.TemporaryDirectory() as work:
        subject = Subject(options.export, Path(work))
        for name, entry in rows.items():
            found[name] = try_row(entry, subject)
            print(f"{entry.what}: {found[name]}", flush=True)
    if options.json:
        kept = {"transformers": transformers.__version__, "rows": found}
        options.json.write_text(json.dumps(kept, indent=2), encoding="utf-8")
    sys.exit(1 if any(result.startswith(FAILS) for result in found.values()) else 0)


if __name__ == "__main__":
    main()
