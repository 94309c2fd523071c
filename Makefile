# make demo: train TAPE and RoPE on real text.  make test: run every test.  make lint: check style.
# make test TESTS="tests/slurm -m 'not slow'" runs some.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test lint install clean

demo: $(STAMP)
	$(BIN)/python -m pretrain.demo

# Two files at a time; the jobs of tests/slurm spend much of their time waiting, so there more at once.
test: $(STAMP)
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	$(BIN)/python -m pytest --ignore=tests/slurm -n 2 --dist loadfile
	$(BIN)/python -m pytest tests/slurm -n 3
endif

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

install: $(STAMP)

$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' || \
	  { echo "This project needs Python 3.10, 3.11 or 3.12; choose one with: make PYTHON=python3.11"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "Could not create $(VENV). On Debian or Ubuntu: apt-get install python3-venv"; exit 1; }
	$(BIN)/pip install -r requirements.txt
	$(BIN)/pip install -e '.[dev]'
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
