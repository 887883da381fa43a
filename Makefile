# make train   train a retriever (LOSS=ColbertSigmoidLoss, WORLD=st, ARGS="--learning_rate 3e-5" to choose)
# make test    run the whole suite in both worlds
# make lint    style, formatting and types
# make docs    the documentation as a site, warnings as errors
# make bench-maxsim, bench-cached, bench-losses    speed and memory next to the peers (docs/benchmarks.md)
# make bench-all-reduces, bench-scaling            what several processes send each other (docs/scaling.md)
#
# Each world has an environment of its own, .venvs/pylate and .venvs/st: PyLate and sentence-transformers 6 cannot be
# installed together. They are made where missing and brought up to date when pyproject.toml changes.

PYTHON ?= python3
WORLD ?= pylate
LOSS ?= ColbertLoss
ARGS ?=

PIP_INSTALL = bin/python -m pip install --quiet --disable-pip-version-check

ifeq ($(filter $(WORLD),pylate st),)
$(error unknown WORLD '$(WORLD)'; choose pylate or st)
endif

.PHONY: train test lint docs bench-maxsim bench-cached bench-losses bench-quality bench-all-reduces bench-scaling clean

train: .venvs/$(WORLD)/.train-ready
	.venvs/$(WORLD)/bin/python -m training_recipes.train --world $(WORLD) --loss $(LOSS) $(ARGS)

test: .venvs/pylate/.test-ready .venvs/st/.test-ready
	@echo "== World P: PyLate"
	.venvs/pylate/bin/python -m pytest -q
	@echo "== World M: sentence-transformers 6"
	.venvs/st/bin/python -m pytest -q

lint: .venvs/st/.test-ready
	.venvs/st/bin/ruff check .
	.venvs/st/bin/ruff format --check .
	.venvs/st/bin/mypy

docs: .venvs/st/.test-ready
	.venvs/st/bin/sphinx-build --quiet --nitpicky --fail-on-warning --keep-going -c docs -d output/doctrees . output/docs
	@echo "The site is at output/docs/index.html"

bench-maxsim bench-cached bench-losses bench-quality bench-all-reduces bench-scaling: bench-%: .venvs/bench/.ready
	.venvs/bench/bin/python -m benchmarks.$(subst -,_,$*) $(ARGS)

.venvs/pylate/.train-ready: pyproject.toml | .venvs/pylate
	@echo "Installing PyLate and what it trains with into .venvs/pylate (5 GB, a few minutes) ..."
	.venvs/pylate/$(PIP_INSTALL) --editable ".[pylate,recipes]"
	@touch $@

.venvs/st/.train-ready: pyproject.toml | .venvs/st
	@echo "Installing sentence-transformers 6 and what it trains with into .venvs/st (6 GB, a few minutes) ..."
	.venvs/st/$(PIP_INSTALL) --editable ".[image,lora,recipes]" "sentence-transformers>=6.2,<7"
	@touch $@

# colpali-engine, one of the peers that the tests compare with, pins an older torch than world M has.
.venvs/pylate/.test-ready: .venvs/pylate/.train-ready
	.venvs/pylate/$(PIP_INSTALL) --editable ".[pylate,dev]" "colpali-engine==0.3.18"
	@touch $@

.venvs/st/.test-ready: .venvs/st/.train-ready
	.venvs/st/$(PIP_INSTALL) --editable ".[image,lora,dev]" "sentence-transformers>=6.2,<7"
	@touch $@

# The peers meet here: PyLate and colpali-engine without their pins, which would not admit sentence-transformers 6.
.venvs/bench/.ready: pyproject.toml | .venvs/bench
	.venvs/bench/$(PIP_INSTALL) --editable ".[image,recipes]" "sentence-transformers>=6.2,<7" late-interaction-kernels \
		peft ujson
	.venvs/bench/$(PIP_INSTALL) --no-deps pylate==1.6.0 colpali-engine==0.3.18
	@touch $@

.venvs/pylate .venvs/st .venvs/bench:
	$(PYTHON) -m venv $@
	$@/$(PIP_INSTALL) --upgrade pip

clean:
	rm -rf .venvs output
