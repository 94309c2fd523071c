"""Every row of the compatibility table; test_plain_environment.py runs them with older
transformers.
"""

import json

import ecosystem
import pytest
from ecosystem import WORKS, Subject, try_row
from environments import run_in

ROWS = ecosystem.load_rows()
LIGHT = [name for name, entry in ROWS.items() if not entry.heavy]
# Other encodings, as three kinds of exports; test_exported_models.py tests each encoding.
OF_ENCODINGS = (
    "saves maps_and_states dynamic_cache embeddings beam_search assisted gradient_checkpointing"
    " lora_and_positions offloaded_weights sequence_classification".split()
)


@pytest.fixture(scope="module")
def subjects(streamable, tmp_path_factory):
    return {name: Subject(path, tmp_path_factory.mktemp(name)) for name, path in streamable.items()}


@pytest.fixture(scope="module", autouse=True)
def quiet():
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(level)


@pytest.mark.parametrize("name", LIGHT)
def test_row(name, subjects):
    assert try_row(ROWS[name], subjects["tape"]) == WORKS


@pytest.mark.parametrize("encoding", ["t5", "fox", "tape_learned"])
def test_rows_of_other_encodings(encoding, exports, tmp_path):
    subject = Subject(exports[encoding].directory, tmp_path)
    for name in OF_ENCODINGS:
        ROWS[name].run(subject)


def test_compared_generations_do_not_repeat_one_token(subjects):
    for subject in subjects.values():
        assert len(set(subject.greedy[0].tolist())) >= 4


@pytest.mark.slow
def test_the_rows_of_heavy_packages(streamable, package_site, tmp_path):
    command = [
        ecosystem.__file__,
        streamable["tape"],
        "--only",
        "heavy",
        "--json",
        tmp_path / "outcomes.json",
    ]
    run_in("ecosystem", tmp_path, *command, PYTHONPATH=str(package_site))
    rows = json.loads((tmp_path / "outcomes.json").read_text(encoding="utf-8"))["rows"]
    assert rows.keys() == ROWS.keys() - set(LIGHT)
    assert not {name: result for name, result in rows.items() if result != WORKS}
