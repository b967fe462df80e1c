# `make demo` and `make test` do all that is needed on a fresh Debian 12 machine, as root.
.PHONY: help setup demo test fast lint format bench wheel lock schema man clean

help:
	@echo "make demo    set up, then run the main job in the one-machine lab"
	@echo "make test    set up, then run every test, the real-root ones included"
	@echo "make fast    tests without the lab (under a minute)"
	@echo "make lint    mypy, ruff, shellcheck"
	@echo "make bench   every benchmark: one JSON line each, and a table"
	@echo "make wheel   build the wheel into dist/"
	@echo "make clean   take every lab down and remove what was built here"

setup:
	@scripts/setup

demo: setup
	@.venv/bin/sms lab demo

test: setup
	.venv/bin/python -m pytest

fast: setup
	.venv/bin/python -m pytest tests/unit

lint: setup
	.venv/bin/python -m pytest -q tests/unit/test_lint.py

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

bench: setup
	@.venv/bin/python -m bench

wheel: setup
	.venv/bin/python -m build --wheel --no-isolation

lock: setup
	.venv/bin/pip-compile -q --allow-unsafe --generate-hashes --no-emit-index-url --no-emit-find-links \
	    --no-emit-trusted-host --strip-extras --extra dev -o requirements.lock pyproject.toml

schema: setup
	.venv/bin/sms config schema >docs/sms.schema.json

clean:
	[ ! -x .venv/bin/sms ] || .venv/bin/sms lab down --all --every
	rm -rf .venv dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
