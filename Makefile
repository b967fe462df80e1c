# `make demo` and `make test` do all that is needed on a fresh Debian 12 machine, as root.
.PHONY: help setup setup-tests setup-bench core demo demo-vm demo-engines demo-adopt test test-core test-engines test-full engines fast lint format bench bench-full wheel lock apptainer-pins schema man imports clean

# Where it is set, every start of `sms` compiles its modules again: half of its processor time.
unexport PYTHONDONTWRITEBYTECODE
PYTHON = .venv/bin/python
COMPILE = .venv/bin/pip-compile -q --allow-unsafe --generate-hashes --no-emit-index-url --no-emit-find-links \
    --no-emit-trusted-host --strip-extras
EL9 = playbooks/roles/vm_packages/files/python-el9
APPTAINER = playbooks/roles/apptainer/files
MAN = docs/man/sms.1

help:
	@echo "make demo    set up, then run the main job in the one-machine lab"
	@echo "make demo-vm set up, then the provisioning VM: machines without a disk boot from it; it is switched off"
	@echo "make demo-adopt    set up, then a management node that serves is adopted with its jobs running, and gets all back"
	@echo "make demo-engines  make engines, then the services move to Kubernetes, to Nomad and back under a running job"
	@echo "make fast    unit tests that need no other program (under a minute, no root once set up)"
	@echo "make test    set up, then check and test every behaviour, with real programs as root; how long it may take: tests/budgets.toml"
	@echo "make test-core  the same without Nomad and Kubernetes; make test-engines: only these"
	@echo "make engines build Nomad and Kubernetes for the tests, once per machine (20 minutes, 15 GB of disk meanwhile)"
	@echo "make test-full  every case: matrices, soaks, 450 nodes, fuzzing (goes on where it ended)"
	@echo "make lint    mypy, ruff, shellcheck, house rules"
	@echo "make bench   the benchmarks of 20 minutes: JSON lines, and a table; make bench-full has all of them"
	@echo "make core    compile the native core of sms classify (setup does when it changed)"
	@echo "make wheel   build the wheel into dist/, and the lock file to install it with"
	@echo "make lock    write the lock files of Python packages; make apptainer-pins those of Apptainer on Debian"
	@echo "make man     write docs/man/sms.1 from the parsers"
	@echo "make imports draw docs/imports.svg, which package imports which, from the sources"
	@echo "make clean   take every lab down and remove what was built here"

setup:
	@scripts/setup

setup-tests:
	@scripts/setup tests

setup-bench:
	@scripts/setup bench

core: setup
	$(PYTHON) hatch_build.py

demo: setup
	@.venv/bin/sms lab demo

demo-vm: setup
	@.venv/bin/sms lab demo --metal 2

demo-adopt: setup
	@.venv/bin/sms lab demo --name adopt --nodes 2 --legacy

demo-engines: engines
	@.venv/bin/sms lab demo --nodes 2 --engine kubernetes --engine nomad

test: lint
	.venv/bin/python -m tests.run

test-core: lint
	.venv/bin/python -m tests.run --core

test-engines: lint
	.venv/bin/python -m tests.run --engines

engines: setup-tests
	@.venv/bin/python -m tests.engines.build

test-full: lint
	.venv/bin/python -m tests.run --full

fast: setup-tests
	.venv/bin/python -m pytest -q -n 2 --dist loadfile -m "not slow and not full" tests/unit tests/test_layers.py

lint: setup-tests
	.venv/bin/python -m pytest -q tests/test_lint.py

format: setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

# On a machine of their own: no benchmark meets what an earlier run left, and nothing of it stays.
bench: setup-bench
	@tests/machine --fill .venv/bin/python -m tests.images >&2
	@tests/machine .venv/bin/python -m bench

bench-full: setup-bench
	@tests/machine --fill .venv/bin/python -m tests.images >&2
	@tests/machine .venv/bin/python -m bench --full --runs 5

# Beside the wheel a lock file that names it: all that `pip install --require-hashes -r` needs to know.
wheel: setup
	.venv/bin/python -m build --wheel --no-isolation
	$(PYTHON) scripts/lock-wheel dist

# For a checkout with its tests, for `sms` alone, and for a provisioning VM of Enterprise Linux 9.
lock: setup
	$(COMPILE) --extra dev -o requirements.lock pyproject.toml
	$(COMPILE) -c requirements.lock -o requirements-run.lock pyproject.toml
	$(COMPILE) -o $(EL9).lock $(EL9).in

apptainer-pins:
	sh $(APPTAINER)/install-apptainer-debian --print-pins amd64 arm64 >$(APPTAINER)/pins.new
	mv $(APPTAINER)/pins.new $(APPTAINER)/apptainer-debian.pins

schema: setup
	.venv/bin/sms config schema >docs/sms.schema.json
	.venv/bin/sms survey --schema >docs/survey.schema.json

imports: setup
	$(PYTHON) docs/imports.py docs/imports.svg

# Lines are broken as on a terminal of 100 columns; no date, or the page would change every day.
man: setup
	@COLUMNS=100 $(PYTHON) -c "from argparse_manpage.cli import main; main()" --module appliance.cli --function make_parser --prog sms \
	    --project-name sms --manual-title "System Management Software" \
	    --version "$$($(PYTHON) -c 'import appliance; print(appliance.__version__)')" \
	    --description "an HPC cluster's management node, taken apart" | \
	    sed -E '1s/"[0-9]{4}[^"]*"/""/' >$(MAN).new && mv $(MAN).new $(MAN)

clean:
	[ ! -x .venv/bin/sms ] || for lab in /run/sms-lab/*/ /var/lib/sms-lab/*/; do \
	    [ ! -d "$$lab" ] || .venv/bin/sms lab down --all --name "$$(basename "$$lab")"; done
	rm -rf --one-file-system /var/lib/sms-tests /var/cache/sms-bench
	rm -rf .venv analysis/_core.abi3.so appliance/_signatures.json dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
