"""The demo, and then the commands of the documentation, page by page, run in a copy of the
repository: small models, few steps (tests/documented_python.py), and a small Llama in place of
downloads. Commands in SKIPPED do nothing.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from pathlib import Path

import pytest
from small_llama import write_llama
from test_documentation import PAGES, ROOT
from test_documented_commands import commands
from tool_runs import write_lines
from training_cases import rows

SKIPPED = {
    "make": (
        "continuous integration runs make install, docs and test; the fixture and"
        " tests/pretrain/test_demo_smollm2.py run the demos"
    ),
    "pip": "continuous integration installs the packages",
    "sbatch": "tests/slurm runs the job scripts",
    "slurm/run_all.sh": "tests/slurm runs it",
    "slurm/compare.sh": "tests/slurm runs it",
    "scancel": "needs Slurm; tests/training sends the signals",
    "kill": "needs a run in the background; tests/training sends the signals",
    "tensorboard": "does not end",
    "hf": "needs a network",
    "unzip": "needs a download",
}
ELSEWHERE = {
    "demo.md": "its commands are those of pretrain/demo.sh",
    "cluster.md": "tests/slurm runs the job scripts",
    "gpu.md": "needs a GPU",
    "install.md": "continuous integration runs make install; the rest needs a cluster",
    "serving.md": "tests/huggingface/test_ecosystem.py and test_vllm.py run the servers",
}
LADDER_DATA = r"""
    mkdir -p runs/ladder/data
    python tools/train_tokenizer.py --input text.jsonl --vocab-size 1024 \
        --output runs/ladder/data/tokenizer.model
    python tools/preprocess_data.py --input text.jsonl \
        --tokenizer runs/ladder/data/tokenizer.model --output-prefix runs/ladder/data/stdlib"""
PREPARED = {
    "comparison.md": LADDER_DATA,
    "data.md": (
        r"""
        cp -r models/mine models/chat
        echo '{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}' \
            > models/chat/chat_template.jinja
        echo '{"messages": [{"role": "user", "content": "hi"}]}' > chats.jsonl
        for place in raw/fineweb-edu HuggingFaceFW/fineweb-edu; do
            mkdir -p $place/sample/10BT
            python -c "import pyarrow as pa, pyarrow.parquet as pq; \
                pq.write_table(pa.table({'text': ['one', 'two']}), '$place/sample/10BT/0.parquet')"
        done
        printf -- '---\nconfigs:\n- config_name: sample-10BT\n  data_files: sample/10BT/*\n---\n' \
            > HuggingFaceFW/fineweb-edu/README.md"""
    ),
    "monitoring.md": "cp -r runs/demo/tape runs/tape",
    "evaluation.md": (
        """
        cp -r runs/demo/tape runs/tape
        cp -r runs/demo/rope runs/rope
        python -m pretrain.evaluate passkey --model models/Qwen3-0.6B"""
    ),
    "report.md": (
        """
        cp -r runs/demo/tape runs/tape
        cp -r runs/demo/rope runs/rope
        python -m pretrain.evaluate passkey --model models/mine --output evaluations/llama"""
    ),
    "harness.md": (
        r"""
        cp -r runs/demo/tape-1024 runs/extended
        mkdir -p mytasks
        echo '{"text": "one two", "choices": [" three", " one"], "answer": 0}' \
            > mytasks/rows.jsonl"""
    ),
    "positions.md": "mkdir exported && cp -r runs/demo/tape-hf exported/tape_demo",
    "verification.md": "mkdir exported && cp -r runs/demo/tape-hf exported/tape_demo",
    "scrolls.md": (
        r"""
        cp -r runs/demo/tape runs/tape_155m
        mkdir -p runs/c4/data data/scrolls/qasper
        cp tokenizer.model runs/c4/data
        for part in train validation; do
            for i in 1 2 3 4; do
                echo '{"id": "'$i'", "input": "Who? '$i'", "output": "Ann"}' \
                    >> data/scrolls/qasper/$part.jsonl
            done
        done
        cd data/scrolls && python -m zipfile -c qasper.zip qasper/"""
    ),
    "your-encoding.md": (
        r"""
        imported='from megatron_tape.position.kerple import KerplePosition'
        grep "^    $imported$" docs/your-encoding.md
        sed -i "s/^BUILT_IN.*/$imported\n\n&\n    KerplePosition,/" \
            megatron_tape/position/__init__.py"""
    ),
    "synthetic.md": (
        """
        python -m pretrain.train --config synthetic/addition_tape
        python -m pretrain.train --config synthetic/grid_navigation_tape
        python -m pretrain.train --config compare/recall --logging.directory runs/recall"""
    ),
}
"""What pages presume: runs, exports and evaluations."""
FILE = r"^# ([\w/]+\.yaml)\n((?:.+\n?)+)"
"""The name of a file in a comment, and its lines."""
SHELL = re.compile(rf"\S*(python|torchrun|export |for |sed |{'|'.join(SKIPPED)})|[A-Z_]+=")


def parts(text):
    """Yield the code blocks of a page and the commands in its tables, in order."""
    fenced = r"^```\w*\n((?s:.)*?)^```"
    indented = r"((?:^    .*\n|^\n(?=    ))+)"
    in_table = r"^\|[^|\n]*\|[^|\n]*`((?:python|torchrun) [^`\n]+[^.`\n])`.*\n"
    for found in re.findall(f"{fenced}|{indented}|{in_table}", text, re.M):
        yield textwrap.dedent("".join(found)).strip("\n")


def run(folder, code, *command):
    environment = os.environ | {
        "HOME": str(folder / "home"),
        "PATH": f"{folder}/home/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(folder),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command,
        input=code,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=850,
    )
    errors = "".join(re.findall(r"^.*error: .*\n", done.stderr, re.M))
    assert done.returncode == 0, f"{code}\n{errors}{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done


def shell(folder, code):
    skipped = "".join(f"{name}() {{ :; }}\n" for name in SKIPPED)
    run(folder, f"{skipped}{code}", "bash", "-eo", "pipefail", "-s")


def follow(folder, page):
    """Do what a page says: save its files, and run its commands and programs."""
    text = page.read_text(encoding="utf-8")
    for path, content in files_of(text):
        save(folder / path, content)
    for code in parts(text):
        code = re.sub(FILE, "", code, flags=re.M).strip()
        if SHELL.match(code):
            shell(folder, code)
        elif re.match(r"from|import", code) and "BUILT_IN" not in code:
            run(folder, code, sys.executable, "-")


def files_of(text):
    """Return the path and content of each file that a page tells its reader to write."""
    files = re.findall(r"^Save this as `?([\w/.-]*\w).*?```\w+\n(.*?)^```", text, re.M | re.S)
    for code in parts(text):
        files += re.findall(FILE, code, re.M)
    return files


def git(folder, *arguments):
    return subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout


def save(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content, encoding="utf-8")


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """A copy of the repository in which the demo has run, with the texts and models that the pages
    name.
    """
    folder = tmp_path_factory.mktemp("repository")
    for path in git(ROOT, "ls-files").splitlines():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, folder / path)
    programs = folder / "home" / "bin"
    programs.mkdir(parents=True)
    stand_in = (ROOT / "tests" / "documented_python.py").read_text(encoding="utf-8")
    for name in ("python", "torchrun"):
        (programs / name).write_text(f"#!{sys.executable}\n{stand_in}", encoding="utf-8")
        (programs / name).chmod(0o755)
    shown = run(folder, None, "bash", "pretrain/demo.sh", "2").stdout
    (folder / "shown.txt").write_text(shown, encoding="utf-8")
    files = sorted(
        Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.stat().st_size
    )[-60:]
    texts = [path.read_text(encoding="utf-8") for path in files]
    (folder / "data").mkdir()
    for name in ("held_out.jsonl", "data/held_out.jsonl"):
        write_lines(folder / name, texts[-6:])
    for name in ("Llama-2-7b-hf", "Qwen3-0.6B", "mine", "base"):
        write_llama(folder / "models" / name, texts)
    shutil.copy(folder / "runs/demo/data/tokenizer.model", folder)
    for name in ("text.jsonl", "more.jsonl"):
        write_lines(folder / name, texts)
    for suffix in ("bin", "idx", "origin"):
        shutil.copy(folder / f"runs/demo/data/stdlib.{suffix}", folder / f"data/c4-0.{suffix}")
    shell(
        folder,
        "python tools/preprocess_data.py --input text.jsonl --tokenizer models/Llama-2-7b-hf"
        " --output-prefix data/long",
    )
    return folder


FOLLOWED = [
    page
    for page in PAGES
    if page.parent.name != "reproductions" and page.name not in ELSEWHERE
    if any(SHELL.match(code) for code in parts(page.read_text(encoding="utf-8")))
]


@pytest.mark.slow
def test_the_demo_makes_its_page(repository):
    demo = repository / "runs" / "demo"
    for name in ("tape", "rope", "tape-1024", "rope-1024"):
        assert 6 < rows(demo / name)[-1]["validation/loss"] < 8.4  # log(4096) is 8.3
    page = (demo / "report.html").read_text(encoding="utf-8")
    for part in ("tape-1024", "perplexity", "tape+increments=signed"):
        assert part in page


@pytest.mark.slow
def test_the_page_of_the_demo_has_the_commands_of_its_script(repository):
    shown = (repository / "shown.txt").read_text(encoding="utf-8")
    printed = [set(shlex.split(line)) for line in re.findall(r"^\[\d+ minutes\] (.*)", shown, re.M)]
    page = (ROOT / "docs" / "demo.md").read_text(encoding="utf-8")
    # The script was given another number of steps, and starts one process on one core.
    documented = [set(words) - {"400", "40", "2"} for words in commands(page)]
    checked = [words for words in documented if words & {"python", "torchrun"}]
    assert len(checked) == 11
    for words in checked:
        assert any(words <= others for others in printed), words


@pytest.mark.slow
@pytest.mark.parametrize("page", FOLLOWED, ids=lambda page: page.name)
def test_the_commands_of_a_page_run(page, repository, tmp_path):
    folder = tmp_path / "repository"
    shutil.copytree(repository, folder)
    shell(folder, textwrap.dedent(PREPARED.get(page.name, "")))
    git(folder, "init", "--quiet")
    git(folder, "add", "--all")
    follow(folder, page)
    new = git(folder, "ls-files", "--others", "--exclude-standard", "--exclude=/home/").splitlines()
    text = page.read_text(encoding="utf-8")
    of_reader = {path for path, _ in files_of(text)} | set(re.findall(r"^ +> (\S+)$", text, re.M))
    assert set(new) <= of_reader, "a command leaves files that .gitignore does not list"
    shutil.rmtree(folder)


@pytest.mark.slow
def test_the_comparisons_of_the_research_log_are_valid(repository, monkeypatch):
    shell(repository, textwrap.dedent(LADDER_DATA))
    monkeypatch.setenv("ONLY_CHECK", "1")
    log = ROOT / "docs" / "reproductions.md"
    variables = "\n".join(
        code for code in parts(log.read_text(encoding="utf-8")) if SHELL.match(code)
    )
    for page in sorted(log.with_suffix("").glob("*.md")):
        code = "\n".join(
            code for code in parts(page.read_text(encoding="utf-8")) if SHELL.match(code)
        )
        shell(repository, f"sed() {{ :; }}\n{variables}\n{code}")
