# `make help` lists the targets. All is installed into .venv, nothing outside of it.
.DEFAULT_GOAL := help
.PHONY: setup demo table test test-all test-soak check docs bench gpu papers-small clean help

PYTHON ?= python3
# Ahead of the rest of PATH, so that an mpirun in .venv meets the MPI library in .venv.
export PATH := $(CURDIR)/.venv/bin:$(PATH)
# The ranks of one machine share its cores.
export OMP_NUM_THREADS ?= 1

setup: .venv/.installed  ## install fedmpi and all that it needs into .venv, once (PYTHON=python3.12 chooses the Python)

.venv/.installed: pyproject.toml constraints.txt .ci/setup
	@.ci/setup $(PYTHON)
	@touch $@

demo: setup  ## the main job: FedLD on handwritten digits, five ranks on this machine
	@launch/mpirun.sh 5 configs/quickstart.yaml
	@printf '%s\n' '' 'What to try next:' \
	    '  source .venv/bin/activate' \
	    '  launch/mpirun.sh 5 configs/quickstart.yaml method.name=fedavg name=fedavg    the same with FedAvg' \
	    '  fedmpi run configs/quickstart.yaml data.partition.scheme=iid name=even       labels spread evenly; one process' \
	    '  fedmpi list                                                                  what else a config may name'

table: setup  ## five methods, three seeds, paired: a table and its report, in minutes
	@fedmpi sweep configs/five_methods.yaml
	@fedmpi table configs/five_methods.yaml
	@fedmpi report runs/five_methods

# Workers of pytest: unit tests keep a core busy each, jobs mostly wait for others.
WORKERS ?= 2
JOBS ?= 4
JOB_TESTS = pytest tests/jobs -n $(JOBS) --dist loadgroup

test: setup  ## the unit tests and one job for each launcher, back end and kind of failure: eight minutes on two cores
	pytest tests/unit -n $(WORKERS) --dist loadscope -m 'not soak'
	$(JOB_TESTS) -m smoke

test-all: setup  ## all tests: each job, and the commands of README and docs: thirty minutes on two cores
	pytest tests/unit -n $(WORKERS) --dist loadscope -m 'not soak'
	pytest tests/docs -n $(WORKERS) --dist loadscope
	$(JOB_TESTS) -m 'not soak'

test-soak: setup  ## random faults on real jobs, FEDMPI_FAULTS of them (300: two hours), and many preemptions
	FEDMPI_FAULTS=$${FEDMPI_FAULTS:-300} pytest tests -m soak

check: setup  ## lint, docstrings, names, format, types, shell scripts, spelling
	ruff check .
	python .ci/check_names.py fedmpi
	ruff format --check .
	mypy
	shellcheck launch/*.sh slurm/* tests/*.sh .ci/run .ci/setup
	codespell --ignore-words-list alhpa,gird,sav,somme,wite,alligned,autor,acuracy,lsit,shedule,toi --check-hidden --skip './.git,./.venv,./.*_cache,./runs,./data,./build'

docs: .venv/.docs  ## the documentation as pages, in build/docs; LINKS=1: also whether what it links to answers
	sphinx-build -q -W --keep-going docs build/docs
	@test -z "$(LINKS)" || sphinx-build -q -b linkcheck docs build/links
	@echo "docs: build/docs/index.html"

.venv/.docs: .venv/.installed
	@.venv/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	@touch $@

bench: setup  ## speed next to the same work by other means, 15 minutes of a quiet machine: docs/performance.md
	@python benchmarks/suite.py; code=$$?; python docs/make_performance.py > docs/performance.md; exit $$code

gpu:  ## all that a machine with one GPU can tell in ten minutes, without a network; ARGS=--quick: in one; docs/gpu.md
	@python3 benchmarks/gpu/kit.py $(ARGS)

papers-small: setup  ## every table and figure of configs/papers and configs/benchmarks in small, on bundled data: half an hour
	@for file in configs/papers/*_small.yaml configs/benchmarks/*_small.yaml; do \
	    echo "$$file"; fedmpi sweep "$$file" || failed="$$failed $$file"; \
	done; test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

clean:  ## remove .venv and caches; runs and data stay
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:
	@sed -n 's/^\([a-z-]*\):.*  ## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r target what; do printf '%-10s %s\n' "$$target" "$$what"; done
