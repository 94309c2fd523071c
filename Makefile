# make demo: train TAPE and RoPE on real text.  make test: run every test.  make gpu-trial: check and measure on a GPU.
# make demo-smollm2: download SmolLM2-135M (93 MB), train TAPE, and LoRA, in it on two cores, and evaluate the models.
# make test TESTS="tests/slurm -m 'not slow'" runs some.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# What those have who load an exported model: nothing of this project, the oldest transformers that works.
PLAIN := .venv-transformers
OLDEST_TRANSFORMERS := 5.0.0
QUICK := $(if $(SLOW),$(if $(filter only,$(SLOW)),-m slow),-m "not slow")
PLAIN_STAMP := $(PLAIN)/.transformers-$(OLDEST_TRANSFORMERS)
# What slow tests of exported models use beside $(VENV): trainers, runtimes and servers of the Hugging Face world.
ECOSYSTEM := .venv-ecosystem
ECOSYSTEM_STAMP := $(ECOSYSTEM)/.installed
# vLLM pins versions of its own.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed

.PHONY: demo demo-smollm2 test gpu-trial wheels lint docs docs-serve install clean

demo: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" pretrain/demo.sh

demo-smollm2: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" pretrain/demo_smollm2.sh

# Those marked slow only with SLOW=1; SLOW=only runs these alone. Two files at a time, and one test of tests/slurm beside them, or two if they are slow:
# their jobs spend much of the time waiting. Their output comes last. Both halves run and are reported, whatever becomes of the other; Ctrl-C ends both.
test: $(STAMP) $(PLAIN_STAMP) $(if $(SLOW),$(ECOSYSTEM_STAMP) $(VLLM_STAMP))
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	@log=$$(mktemp); $(BIN)/python -m pytest tests/slurm $(if $(SLOW),-n 2) $(QUICK) >$$log 2>&1 & jobs=$$!; \
	trap 'wait $$jobs; rm $$log; exit 130' INT; \
	$(BIN)/python -m pytest --ignore=tests/slurm -n 2 --dist loadfile --no-loadscope-reorder $(QUICK); others=$$?; \
	echo "waiting for tests/slurm"; wait $$jobs; slurm=$$?; cat $$log; rm $$log; \
	result() { if [ $$1 -eq 0 ]; then echo passed; else echo "failed (pytest's exit status $$1)"; fi; }; \
	echo "make test: tests/slurm $$(result $$slurm); all other tests $$(result $$others)"; \
	$(if $(SLOW),,echo "Tests marked slow were left out; make test SLOW=1 runs them as well.";) \
	[ $$others -eq 0 ] && [ $$slurm -eq 0 ]
endif

# make gpu-trial ARGS="--minutes 8 --output DIR"; a machine without make runs the program itself.
gpu-trial: $(STAMP)
	$(BIN)/python -m benchmarks.gpu_trial $(ARGS)

# What a GPU machine without a network lacks, in the folder WHEELS.
wheels: $(STAMP)
	$(BIN)/python -m benchmarks.wheels $(or $(WHEELS),wheels)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site in site/. A broken link or anchor is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

install: $(STAMP)

$(STAMP): requirements.txt pyproject.toml
	@version='import sys; print("%d.%d" % sys.version_info[:2])'; found=$$($(PYTHON) -c "$$version") || found=missing; \
	case $$found in 3.11|3.12|3.13) ;; *) \
	  echo "This project needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is $$found."; \
	  echo "Choose another: make PYTHON=python3.13"; \
	  echo "To install one on Debian or Ubuntu: apt-get install python3.13-venv, or python3.12-venv or python3.11-venv,"; \
	  echo "whichever your release has. If it has none of them, uv or pyenv installs one."; exit 1;; \
	esac; \
	if [ -e $(BIN)/python ] || [ -L $(BIN)/python ]; then \
	  existing=$$($(BIN)/python -c "$$version" 2>/dev/null) || existing=broken; \
	  if [ $$existing != $$found ]; then \
	    echo "$(BIN)/python is $$existing, and $(PYTHON) is $$found."; \
	    echo "Remove $(VENV) with make clean, or choose its version with make PYTHON=..."; exit 1; \
	  fi; \
	fi; \
	$(PYTHON) -m venv $(VENV) || \
	  { echo "Could not create $(VENV). On Debian or Ubuntu: apt-get install python$$found-venv"; exit 1; }
	$(BIN)/pip install -r requirements.txt
	@# With the packages of `make docs`: they are small, and a second environment would import the library twice.
	$(BIN)/pip install -e '.[dev,docs]'
	@# A torch for GPUs brings its own; without one the tests interpret the kernels.
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install triton==3.7.1
	touch $(STAMP)

# The tests start Python there only a few times; compiling every module would take as long as installing.
$(PLAIN_STAMP): requirements.txt | $(STAMP)
	$(BIN)/python -m venv $(PLAIN)
	$(PLAIN)/bin/pip install --no-compile $$(grep '^torch==' requirements.txt) transformers==$(OLDEST_TRANSFORMERS)
	touch $@

$(PLAIN): $(PLAIN_STAMP)

# It sees the packages of $(VENV), so that only what those lack is installed.
$(ECOSYSTEM_STAMP): requirements-ecosystem.txt requirements.txt pyproject.toml | $(STAMP)
	$(BIN)/python -m venv --clear $(ECOSYSTEM)
	site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  $(BIN)/python -c "$$site" > "$$($(ECOSYSTEM)/bin/python -c "$$site")/base.pth"
	$(ECOSYSTEM)/bin/pip install -r requirements-ecosystem.txt
	touch $@

$(ECOSYSTEM): $(ECOSYSTEM_STAMP)

# PyPI's torchvision, torchaudio and torchcodec are built for CUDA: with a torch for CPUs their import fails, and vLLM's.
$(VLLM_STAMP): requirements-vllm.txt | $(STAMP)
	$(BIN)/python -m venv --clear $(VLLM)
	$(VLLM)/bin/pip install --no-compile -r requirements-vllm.txt
	$(VLLM)/bin/pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

$(VLLM): $(VLLM_STAMP)

clean:
	rm -rf $(VENV) $(PLAIN) $(ECOSYSTEM) $(VLLM) build site *.egg-info
