# SPDX-License-Identifier: Apache-2.0
# The commands of the project: people, hooks and CI use these and nothing else. `make help` lists them.
# Each command first updates .venv (tools/bootstrap.py), which takes no time if nothing changed.

.DEFAULT_GOAL := help
SHELL := /bin/sh
BIN := .venv/bin
# A recent enough Python: the one named by PYTHON=..., otherwise the first of the usual names.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && \
	echo "$$p" && break; done)
ARGS ?=
export VIRTUAL_ENV := $(CURDIR)/.venv
# Without compiled files each test process would compile kvcore again.
unexport PYTHONDONTWRITEBYTECODE
CLIPPY := cargo clippy --locked --all-targets
STUBS := target/stubs

.PHONY: help python-found setup setup-core twin demo test test-core conformance check explore fuzz mutants shrinks mutation mutation-slice mutation-tools counts bench bench-peers bench-engines engines engines-vllm engines-vllm-shadow engines-vllm-tests engines-nano engines-transformers engines-transformers-shadow engines-dynamo engines-mooncake engines-sanitizer engines-sanitizer-old demo-hybrid demo-ranks demo-apart demo-cluster demo-transformers gpu-check docs stubs lock hooks clean

help: ## list the commands
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | \
		while IFS='|' read -r name text; do printf '  make %-20s %s\n' "$$name" "$$text"; done

python-found:
	@test -n "$(PYTHON)" || { echo "kvcore needs Python 3.11 or newer: none was found on PATH."; exit 1; }

setup: python-found ## create .venv: locked packages, compiled twin, runtime, model
	@$(PYTHON) tools/bootstrap.py

setup-core: python-found ## create .venv without torch, runtime and model: 0.4 GB instead of 6
	@$(PYTHON) tools/bootstrap.py core

twin: python-found ## compile the Rust twin into the tree
	@$(PYTHON) tools/bootstrap.py twin

demo: setup ## answer prompts with SmolLM2 from a pool that is too small
	@mkdir -p build
	$(BIN)/kvcore generate --prompts examples/prompts.jsonl --verify --require-all \
		--picture build/pool.png $(ARGS)
	@echo "and the tiny random model, bit for bit:"
	@$(BIN)/kvcore generate --tiny --verify > build/tiny.txt || { cat build/tiny.txt; exit 1; }
	@tail -n 1 build/tiny.txt

test: setup ## run the tests: Rust, Python, the tiny demo; not the long explorations
	@echo "make test takes about ten minutes of CPU; one folder: $(BIN)/pytest tests/pool"
	cargo test --locked
	$(BIN)/pytest $(ARGS)

test-core: setup-core ## run the tests that need no torch
	@echo "make test-core takes about eight minutes of CPU"
	cargo test --locked
	$(BIN)/pytest --ignore=tests/runtime $(ARGS)

conformance: setup ## run the tests of each fact of docs/facts.md, and write that page
	$(BIN)/python -m tools.conformance $(ARGS)
	$(BIN)/python -m tools.facts_page

PEERS := --manifest-path benches/peers/Cargo.toml
check: setup ## check format, lint, types and stubs, in both languages
	cargo fmt --check
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(PYTHON) -m venv target/types-venv
	target/types-venv/bin/pip install --quiet --require-hashes --requirement locks/types.txt
	target/types-venv/bin/basedpyright --pythonpath $(BIN)/python tests/core/typed_program.py
	$(BIN)/vulture
	$(CLIPPY) -- -D warnings
	$(CLIPPY) --all-features -- -D warnings
	cargo fmt --check $(PEERS)
	cargo clippy --quiet --locked --no-default-features --target-dir target $(PEERS) -- -D warnings
	$(BIN)/maturin generate-stubs --features stubs --out $(STUBS)
	diff -u kvcore/_rust.pyi $(STUBS)/kvcore/_rust.pyi || { echo "stale stub: run make stubs"; exit 1; }
	$(BIN)/stubtest kvcore._rust --mypy-config-file pyproject.toml
	@echo "check: all passed"

WITH_EXAMPLES := $(addprefix tests/,property core pool policies replay legacy conformance sizing check/test_canonical.py sanitizer/test_equal.py)
explore: setup ## explore small worlds exhaustively, compare both backends edge by edge; fuzz (hours)
	$(BIN)/pytest -m slow $(ARGS)
	KVCORE_EXAMPLES=40 $(BIN)/pytest $(WITH_EXAMPLES)
	$(BIN)/python -m tools.explore
	@echo "make fuzz takes about an hour on 2 cores (docs/checking.md)"
	$(MAKE) fuzz

fuzz: setup ## give every decoder a million damaged inputs, in both languages (an hour of 2 cores)
	BOLERO_RANDOM_ITERATIONS=1000000 cargo test --locked --profile fuzz --lib -- --nocapture fuzz::doors
	$(BIN)/python -m tests.bytes.run
	$(BIN)/python -m tests.bytes.agree

mutants: setup ## search for every seeded bug, in both languages; fails if one survives
	$(BIN)/kvcore check --mutants
	$(BIN)/kvcore check --facade v0 --mutants
	$(BIN)/kvcore check --facade v0.3 --mutants
	PYO3_BUILD_EXTENSION_MODULE=1 PYO3_PYTHON=$(BIN)/python cargo rustc --locked --release \
		--features python,mutants --lib --crate-type cdylib
	$(BIN)/python -m tools.twin_mutants "$$(ls -d target/release/libkvcore.so target/release/libkvcore.dylib 2> /dev/null)"

shrinks: setup ## shrink records of ten seeded bugs of the twin to at most 20 calls, in at most 2 minutes each
	PYO3_BUILD_EXTENSION_MODULE=1 PYO3_PYTHON=$(BIN)/python cargo rustc --locked --release \
		--features python,mutants --lib --crate-type cdylib
	$(BIN)/python -m tools.shrinks "$$(ls -d target/release/libkvcore.so target/release/libkvcore.dylib 2> /dev/null)"

mutation: setup ## try the one-line defects that nothing has killed yet, in both languages (hours)
	$(BIN)/python -m tools.mutation run $(ARGS)

mutation-slice: setup ## try again ten of the table's defects that the commit's hash selects
	$(BIN)/python -m tools.mutation slice

MUTATION := target/mutation-tools
mutation-tools: setup ## install cosmic-ray and cargo-mutants, which draw defects, outside .venv
	$(PYTHON) -m venv $(MUTATION)/venv
	$(MUTATION)/venv/bin/pip install --quiet cosmic-ray==8.7.0
	cargo install --quiet --locked --root $(MUTATION) --version 27.1.0 cargo-mutants

counts: setup ## check the number of instructions of the twin's calls, under valgrind
	$(BIN)/python -m tools.counts

bench: setup ## measure the twin, the Python API, the engine and the copies
	$(BIN)/python -m benches.record --kind turns --out build/ops/turns.ops
	cargo bench --locked $(ARGS)
	@set -e; for file in $(filter-out benches/record.py,$(wildcard benches/*.py)); do \
		echo "== $$file"; $(BIN)/python -m benches.$$(basename "$$file" .py); done

bench-peers: setup ## compare with vLLM, SGLang and kvbm-logical; ARGS=--quick takes three minutes
	$(BIN)/python -m benches.peers $(ARGS)

bench-engines: setup ## measure engines' steps over kvcore and over their own managers (10 minutes)
	$(BIN)/python -m benches.engines $(ARGS)

engines-vllm: setup ## run vLLM 0.33.0's schedulers over kvcore and over its own manager, and compare the steps
	$(BIN)/python -m benches.vllm $(ARGS)

engines-vllm-shadow: setup ## run vLLM 0.33.0's schedulers with kvcore in the shadow: 4 random runs of each mode
	$(BIN)/python -m benches.vllm --shadow --seeds 4 --steps 200 $(ARGS)

engines-vllm-tests: setup ## run vLLM 0.33.0's own tests of its scheduler and manager over kvcore
	$(BIN)/python -m tests.engines.vllm.environment $(ARGS)

engines-nano: setup ## run nano-vllm's scheduler over kvcore and over its own manager, and compare
	$(BIN)/python -m benches.nano_vllm $(ARGS)

engines-transformers: setup ## install transformers 5.23.0 outside the project and test kvcore under it
	$(BIN)/python -m tests.engines.transformers.environment $(ARGS)

engines-transformers-shadow: setup ## run transformers 5.23.0 with kvcore in the shadow: 4 random runs of each mode
	$(BIN)/python -m tests.engines.transformers.environment shadow $(ARGS)

engines-dynamo: setup ## install Dynamo 1.6.1's indexer outside the project and feed it kvcore's events
	$(BIN)/python -m benches.peers.install dynamo
	$(BIN)/pytest -m dynamo tests/runtime/events $(ARGS)

engines-mooncake: setup ## install Mooncake 0.3.13 outside the project and keep pages in it (10 minutes)
	$(BIN)/python -m benches.peers.install mooncake
	$(BIN)/pytest -m mooncake tests/runtime/far $(ARGS)

engines-sanitizer: setup ## reproduce each bug of docs/found.md in the installed engines
	$(BIN)/pytest -m "slow or not slow" tests/sanitizer/test_found.py tests/sanitizer/test_found_programs.py tests/sanitizer/test_sanitize_command.py tests/sanitizer/test_sglang_host.py tests/sanitizer/test_lmdeploy_mends.py $(ARGS)

engines-sanitizer-old: setup ## install old versions of engines and reproduce each bug of docs/found_old.md in them
	$(BIN)/python -m tests.sanitizer.old.versions
	$(BIN)/pytest -m "slow or not slow" tests/sanitizer/test_found_old.py $(ARGS)

engines: engines-nano engines-transformers engines-transformers-shadow engines-dynamo engines-mooncake engines-vllm-tests engines-vllm engines-vllm-shadow engines-sanitizer ## test all adapters, each under its engine (an hour)

demo-hybrid: setup ## answer prompts with a tiny model that keeps recurrent states, with hits inside blocks, bit for bit (seconds)
	$(BIN)/kvcore generate --tiny --states --block-size 48 --hash-block-size 8 --blocks 24 --host-blocks 6 --guard --verify --require-all $(ARGS)

demo-ranks: setup ## run SmolLM2 on two processes, and compare its answers with those of one (two minutes)
	$(BIN)/python -m kvcore_runtime.demos.ranks $(ARGS)

demo-cluster: setup ## run two engines, Redis, an index and metrics on this machine; one prompt moves
	$(BIN)/python -m kvcore_runtime.demos.cluster $(ARGS)

demo-apart: setup ## run SmolLM2 in two processes: one computes prompts, the other one answers
	$(BIN)/python -m kvcore_runtime.demos.apart $(ARGS)

demo-transformers: setup ## answer chats with SmolLM2 under transformers, with its own cache and with kvcore's
	$(BIN)/python -m tests.engines.transformers.environment demo

gpu-check: setup ## test and measure on a CUDA device, or say that there is none
	$(BIN)/pytest -m gpu $(ARGS)
	$(BIN)/python -m benches.gpu

docs: setup ## build the documentation site into target/site and check its links
	$(PYTHON) -m venv target/docs-venv
	target/docs-venv/bin/pip install --quiet --require-hashes --requirement locks/docs.txt
	NO_MKDOCS_2_WARNING=1 target/docs-venv/bin/mkdocs build --quiet --config-file tools/site/mkdocs.yml

stubs: twin ## write kvcore/_rust.pyi from the Rust bindings
	$(BIN)/maturin generate-stubs --features stubs --out $(STUBS)
	cp $(STUBS)/kvcore/_rust.pyi kvcore/_rust.pyi

lock: setup ## resolve the dependencies again into locks/ and Cargo.lock
	echo kvcore > .venv/own-packages.txt
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header \
		--annotation-style line --excludes .venv/own-packages.txt --group tools --extra completion --extra events --extra prometheus --extra redis \
		--output-file locks/python.txt $(ARGS) pyproject.toml runtime/pyproject.toml
	$(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header \
		--annotation-style line --excludes .venv/own-packages.txt --group tools --all-extras \
		--constraints locks/python.txt --output-file locks/core.txt $(ARGS) pyproject.toml
	for group in docs types; do \
		$(BIN)/uv pip compile --quiet --universal --generate-hashes --python-version 3.11 --no-header \
			--annotation-style line --group $$group --output-file locks/$$group.txt $(ARGS) || exit 1; done
	cargo update --workspace
	cargo update --workspace $(PEERS)

hooks: setup ## install a git hook that checks each commit before it is made
	printf '#!/bin/sh\nexec make check\n' > "$$(git rev-parse --git-path hooks)/pre-commit"
	chmod +x "$$(git rev-parse --git-path hooks)/pre-commit"

clean: ## remove build output; keeps .venv
	rm -rf target build dist kvcore/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find kvcore runtime engines tests benches tools -name __pycache__ -type d -prune -exec rm -rf {} +
