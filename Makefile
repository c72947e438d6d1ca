# `make demo` and `make test` need Python 3.11 or 3.12 and nothing else; `make setup` makes their environment in .venv.
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow lint bench check-task-metadata clean
SHELL := /bin/sh
VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

help:
	@echo 'make setup      the environment in .venv (does nothing when it is current)'
	@echo 'make demo       train, export to three formats, measure and report, in under five minutes'
	@echo 'make test       the test suite'
	@echo 'make test-slow  the long tests; fetches Fashion-MNIST'
	@echo 'make lint       ruff and mypy'
	@echo 'make bench      exported models beside what one would use instead'
	@echo 'make check-task-metadata  a picture file in tflite-support and MediaPipe, in an environment of their own'

setup: $(VENV)/.current

$(VENV)/.current: pyproject.toml tools/setup
	@tools/setup $(VENV)

demo: setup
	edgevit train mobilevit_xxs --data digits --sizes 32,64,96 --out runs/digits $(if $(wildcard runs/digits/config.toml),--resume)
	edgevit export runs/digits --format onnx,tflite,coreml --sizes 32,64,96
	edgevit sweep runs/digits
	edgevit report runs/digits

# One thread in each of the two test processes: two OpenMP pools on two cores slow each other down many times over.
test: setup
	OMP_NUM_THREADS=1 python -m pytest -n 2 --dist worksteal $(ARGS)

test-slow: setup
	edgevit data get fashion-mnist
	OMP_NUM_THREADS=1 python -m pytest -m slow $(ARGS)

lint: setup
	ruff check .
	ruff format --check .
	mypy

bench: setup
	python benchmarks/export_latency.py

check-task-metadata: setup
	tools/check_task_metadata

clean:
	rm -rf $(VENV) .venv-task-metadata .pytest_cache .mypy_cache .ruff_cache .hypothesis
