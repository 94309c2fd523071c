# `make` lists the targets.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The oldest supported transformers without this project, for tests that load exported models.
PLAIN := .venv-transformers
OLDEST_TRANSFORMERS := 5.0.0
QUICK := $(if $(SLOW),$(if $(filter only,$(SLOW)),-m slow),-m "not slow")
PLAIN_STAMP := $(PLAIN)/.transformers-$(OLDEST_TRANSFORMERS)
# Other trainers, runtimes and servers for Hugging Face models, for slow tests of exported models.
ECOSYSTEM := .venv-ecosystem
ECOSYSTEM_STAMP := $(ECOSYSTEM)/.installed
# vLLM pins its own versions of other packages.
VLLM := .venv-vllm
VLLM_STAMP := $(VLLM)/.installed
# The other of the two supported versions of Megatron-core, with the packages of .venv.
MEGATRON := .venv-megatron
MEGATRON_STAMP := $(MEGATRON)/.installed

.PHONY: help demo demo-smollm2 test test-megatron gpu-trial wheels lint docs docs-serve install clean

help:
	@echo "make install        create .venv with all packages except those for GPUs; other targets do this first"
	@echo "make demo           train TAPE and RoPE on real text: a few minutes on two cores"
	@echo "make demo-smollm2   download SmolLM2-135M (93 MB), train TAPE and LoRA in it, and evaluate the models"
	@echo "make test           run the tests that are not slow; SLOW=1 runs all tests, SLOW=only the slow ones"
	@echo "make test TESTS=X   run some tests: X is a file, or other arguments of pytest"
	@echo "make test-megatron  run the tests of what uses Megatron-core with the other supported version of it"
	@echo "make lint           run ruff and mypy"
	@echo "make docs           build the documentation in site/; make docs-serve shows it in a browser"
	@echo "make gpu-trial      check and measure on a machine with a GPU; ARGS=... are the program's arguments"
	@echo "make wheels         collect the packages that a GPU machine without a network needs; WHEELS=folder"
	@echo "make clean          remove the environments and everything built"

demo: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" pretrain/demo.sh

demo-smollm2: $(STAMP)
	PATH="$(CURDIR)/$(BIN):$$PATH" pretrain/demo_smollm2.sh

# Tests marked slow run only with SLOW=1 or SLOW=only. tests/slurm runs in the background, since its jobs mostly wait,
# while two other test files run at a time. Its output comes last. Ctrl-C ends both.
# With TESTS, only .venv is created: a test that needs another environment fails with the command that creates it.
test: $(STAMP) $(if $(TESTS),,$(PLAIN_STAMP) $(if $(SLOW),$(ECOSYSTEM_STAMP) $(VLLM_STAMP) $(MEGATRON_STAMP)))
ifdef TESTS
	$(BIN)/python -m pytest $(TESTS)
else
	@log=$$(mktemp); $(BIN)/python -m pytest tests/slurm $(if $(SLOW),-n 2) $(QUICK) >$$log 2>&1 & jobs=$$!; \
	trap 'wait $$jobs; rm $$log; exit 130' INT; \
	$(BIN)/python -m pytest --ignore=tests/slurm -n 2 --dist loadfile --no-loadscope-reorder $(QUICK); others=$$?; \
	echo "waiting for tests/slurm"; wait $$jobs; slurm=$$?; cat $$log; rm $$log; \
	result() { if [ $$1 -eq 0 ]; then echo passed; else echo "failed (pytest's exit status $$1)"; fi; }; \
	echo "make test: tests/slurm $$(result $$slurm); all other tests $$(result $$others)"; \
	$(if $(SLOW),,echo "Slow tests were not run; make test SLOW=1 runs them as well.";) \
	[ $$others -eq 0 ] && [ $$slurm -eq 0 ]
endif

# Tests of the packages that use Megatron-core, with the version that .venv does not have. Those of parallel and training
# are left out: tests/parallel/test_megatron_versions.py requires that both versions train the same weights bit for bit
# in every layout.
WITH_MEGATRON := $(addprefix tests/,model data)
test-megatron: $(MEGATRON_STAMP)
	$(MEGATRON)/bin/python -m pytest $(or $(TESTS),-n 2 --dist loadfile --no-loadscope-reorder $(QUICK) $(WITH_MEGATRON))

# For example: make gpu-trial ARGS="--minutes 8 --output DIR"
gpu-trial: $(STAMP)
	$(BIN)/python -m benchmarks.gpu_trial $(ARGS)

wheels: $(STAMP)
	$(BIN)/python -m benchmarks.wheels $(or $(WHEELS),wheels)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The documentation as a site in site/. A broken link or anchor is an error.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

docs-serve: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs serve

install: $(STAMP)

$(STAMP): requirements.txt pyproject.toml setup.py
	@version='import sys; print("%d.%d" % sys.version_info[:2])'; found=$$($(PYTHON) -c "$$version") || found=missing; \
	case $$found in 3.11|3.12|3.13) ;; *) \
	  echo "This project needs Python 3.11, 3.12 or 3.13, and $(PYTHON) is $$found."; \
	  echo "Choose another: make PYTHON=python3.13"; \
	  echo "To install one on Debian or Ubuntu: apt-get install python3.13-venv, or python3.12-venv or python3.11-venv,"; \
	  echo "whichever your release has. If it has none of them, install one with uv or pyenv."; exit 1;; \
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
	@# The CUDA build of torch depends on Triton. With a CPU build, the tests run the kernels in Triton's interpreter.
	$(BIN)/python -c 'import triton' 2>/dev/null || $(BIN)/pip install triton==3.7.1
	touch $(STAMP)

# --no-compile: compiling to bytecode takes as long as installing, and tests use this environment only a few times.
$(PLAIN_STAMP): requirements.txt | $(STAMP)
	$(BIN)/python -m venv $(PLAIN)
	$(PLAIN)/bin/pip install --no-compile $$(grep '^torch==' requirements.txt) transformers==$(OLDEST_TRANSFORMERS)
	touch $@

$(PLAIN): $(PLAIN_STAMP)

# A .pth file makes the packages of $(VENV) available, so that only additional ones are installed.
$(ECOSYSTEM_STAMP): requirements-ecosystem.txt requirements.txt pyproject.toml | $(STAMP)
	$(BIN)/python -m venv --clear $(ECOSYSTEM)
	site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  $(BIN)/python -c "$$site" > "$$($(ECOSYSTEM)/bin/python -c "$$site")/base.pth"
	$(ECOSYSTEM)/bin/pip install -r requirements-ecosystem.txt
	touch $@

$(ECOSYSTEM): $(ECOSYSTEM_STAMP)

# PyPI's torchvision, torchaudio and torchcodec need CUDA: with a CPU build of torch, importing them or vLLM fails.
$(VLLM_STAMP): requirements-vllm.txt | $(STAMP)
	$(BIN)/python -m venv --clear $(VLLM)
	$(VLLM)/bin/pip install --no-compile -r requirements-vllm.txt
	$(VLLM)/bin/pip uninstall --yes torchvision torchaudio torchcodec
	touch $@

$(VLLM): $(VLLM_STAMP)

# requirements.txt pins one version for each Python; this installs the one that .venv does not have. Megatron-core 0.19.2
# refuses Python 3.11, but has wheels for it. The .pth file also makes this project importable. Packages of .venv come
# after those of the environment itself.
$(MEGATRON_STAMP): requirements.txt | $(STAMP)
	$(BIN)/python -m venv --clear $(MEGATRON)
	installed=$$($(BIN)/python -c 'from importlib import metadata; print(metadata.version("megatron-core"))'); \
	  other=$$(sed -n 's/^\(megatron-core==[^;]*\);.*/\1/p' requirements.txt | grep -vx "megatron-core==$$installed"); \
	  $(MEGATRON)/bin/pip install --no-compile --no-deps --ignore-requires-python $$other
	site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	  echo "import site; site.addsitedir('$$($(BIN)/python -c "$$site")')" \
	  > "$$($(MEGATRON)/bin/python -c "$$site")/base.pth"
	touch $@

$(MEGATRON): $(MEGATRON_STAMP)

clean:
	rm -rf $(VENV) $(PLAIN) $(ECOSYSTEM) $(VLLM) $(MEGATRON) build site *.egg-info
