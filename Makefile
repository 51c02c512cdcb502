# Everything starts here. Needs Python 3.11 or 3.12, with its venv module, and make.
#
#   make demo      install what the demo needs, start the service, stream three generations, stop
#   make install   install the package, and what its checks and tests need, into .venv
#   make test      install, check, run all tests except those for a GPU and those of make nightly
#   make quick     the tests of the scheduler, engine, front, contract's mapping, text and ipc: seconds
#   make unit      the tests of the serving path that only compute
#   make tools     the tests of tools/
#   make gateways  the tests of gateways/ except those on a Ray cluster
#   make nightly   the tests that make test leaves out because they take minutes, and the tests of the
#                  same folders with many more examples of each property; then make sanitize
#   make sanitize  the tests of the CPU kernels, compiled with GCC's sanitizers: a minute
#   make check     format, lint, types, layers, words, contract, generated code, Dockerfiles
#   make soak      five minutes of load while processes are stopped and killed (SOAK_ARGS=--full:
#                  two hours, more load)
#   make cases     write the tests into the table of docs/survival-cases.md
#   make architectures every causal language model of transformers, tiny, against its own forward;
#                      writes docs/architectures.md (ARCHITECTURES_ARGS="--device cuda")
#   make conformance   every language's client against the twenty scenarios; writes docs/conformance.md
#   make ray       the tests of the Ray Serve gateway on a Ray cluster of two nodes, four minutes
#   make docs      build the site of docs/ into build/site
#   make pages     write docs/contract.md, settings.md, telemetry.md, the pictures of the concepts and
#                  the chart of figures again
#   make fuzz      search for bytes that break something, a quarter of an hour and more
#   make protos    write the Python code generated from the protos again
#   make test-transformers-4    the executors' tests on transformers 4.57, as TensorRT-LLM images have
#   make format    format Python and protos, mend what the linter can mend
#   make clean     remove .venv, build output and caches

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
# Hundreds of processes are started, and every worker imports every test: without byte code, each
# would compile it all again.
unexport PYTHONDONTWRITEBYTECODE

# The torch to install. If not given: the CPU build where the indexes that pip is configured with
# (e.g. by PIP_EXTRA_INDEX_URL) offer it, else what they offer, on Linux several gigabytes of CUDA.
TORCH ?=
TORCH_REQUIREMENT = $(or $(TORCH),$$(deploy/torch_requirement.sh $(BIN)/python))
# The first of these that runs: shims may exist without the interpreter they name.
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	"$$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' \
	2>/dev/null && echo "$$python" && break; done)
# What the contract must stay compatible with: the last release, or before the first one the commit
# of the last breaking pass before 1.0 (docs/decisions/0032).
BASE ?= $(shell git describe --tags --abbrev=0 2>/dev/null || \
	git log --diff-filter=A --format=%H -- docs/decisions/0032-counts-and-rejections.md 2>/dev/null | tail -n 1)
# The grammar compilers of TensorRT-LLM 1.2 and of today, held against our check of constraints.
XGRAMMARS := 0.1.25 0.2.8
PYTEST_ARGS ?=
SOAK_ARGS ?=
ARCHITECTURES_ARGS ?=
# The folders of each group of tests; all others are of test-served.
PURE := tests/architecture tests/contract tests/fuzz tests/gpu tests/property tests/unit
CHAOS := tests/chaos
CLIENTS := tests/conformance
QUICK := $(addprefix tests/unit/,scheduler $(addprefix server/,engine front ipc rpc text))
UNIT := tests/property $(filter-out $(addprefix tests/unit/,deploy docs gateways tools __pycache__),$(wildcard tests/unit/*))
TOOLS := tests/unit/tools $(wildcard $(addprefix tests/integration/test_,\
	verify*.py demo*.py bench*.py build*.py record_service.py simulate*.py plan*.py timeline*.py))
# Workers that share what only computes, what waits for processes and sockets, and what kills processes;
# "0" runs it in one process, for a debugger.
WORKERS ?= auto
SERVED_WORKERS ?= 2
CHAOS_WORKERS ?= $(shell [ "$$(getconf _NPROCESSORS_ONLN)" -ge 4 ] && echo 2 || echo 1)
SERVED := $(filter-out $(PURE) $(CHAOS) $(CLIENTS) tests/fakes tests/support tests/__pycache__,$(patsubst %/,%,$(sort $(wildcard tests/*/))))

KERNELS := executors/penstock/executor/torch/cpu_kernels/csrc
VENV := .venv
BIN := $(VENV)/bin
PROTOS_VENV := .venv-protos
# Named after the content of what they depend on: a fresh clone has no useful time stamps.
READY := $(VENV)/.ready-$(shell cat pyproject.toml hatch_build.py $(KERNELS)/* | cksum | tr ' ' '-')
DEMO_READY := $(READY:$(VENV)/.ready-%=$(VENV)/.ready-demo-%)
PROTOS_READY := $(PROTOS_VENV)/.ready-$(shell cat protos/requirements.txt | cksum | tr ' ' '-')
PIP := -m pip --disable-pip-version-check --quiet

.PHONY: help install demo test test-pure test-served test-chaos test-clients test-transformers-4 quick unit tools gateways nightly sanitize soak cases architectures conformance ray docs pages check format protos clean \
	check-python check-types check-layers check-words check-protos check-docker

help:
	@sed -n 's/^# \{3\}//p' Makefile

install: $(READY)

$(READY):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed" >&2; exit 1; }
	@echo "1/2 Compiling the CPU kernels, up to two minutes, and installing Penstock and the tools of its checks, tests and docs into $(VENV)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	$(BIN)/python -m pip --disable-pip-version-check install "$(TORCH_REQUIREMENT)" --editable ".[torch,dev]"
	@echo "2/2 Installing the grammar compilers that the tests of constraints need"
	@# Without what they ask for: triton alone is 200 MB, and only apache-tvm-ffi is missing.
	for version in $(XGRAMMARS); do \
		$(BIN)/python $(PIP) install --no-deps --upgrade --target "$(VENV)/xgrammar/$$version" \
			"xgrammar==$$version" apache-tvm-ffi==0.1.15.post2 || \
		{ rm -rf "$(VENV)/xgrammar/$$version"; echo "no xgrammar $$version: its tests are skipped" >&2; }; \
	done
	@rm -f $(VENV)/.ready-*
	@touch $@

$(PROTOS_READY): protos/requirements.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed" >&2; exit 1; }
	test -x $(PROTOS_VENV)/bin/python || "$(PYTHON)" -m venv $(PROTOS_VENV)
	$(PROTOS_VENV)/bin/python $(PIP) install --requirement protos/requirements.txt
	@rm -f $(PROTOS_VENV)/.ready-*
	@touch $@

# What the demo needs, without the tools of development. Without its hook, which pip runs silently and
# first, the package is installed without kernels; then they are compiled.
$(DEMO_READY):
	@test -n "$(PYTHON)" || { echo "Python 3.11 or 3.12 is needed" >&2; exit 1; }
	@echo "1/3 Making the environment $(VENV)"
	@test -x $(BIN)/python || "$(PYTHON)" -m venv $(VENV)
	@torch="$(TORCH_REQUIREMENT)"; \
	echo "2/3 Fetching and installing packages with $$torch: 260 MB with the CPU build, several GB with CUDA"; \
	HATCH_BUILD_NO_HOOKS=true $(BIN)/python -m pip --disable-pip-version-check install \
		"$$torch" "hatchling>=1.27,<2" --editable ".[torch,top]"
	@echo "3/3 Compiling the CPU kernels, up to two minutes"
	@$(BIN)/python hatch_build.py || echo "Without them the demo uses PyTorch's operators"
	@touch $@

demo: $(or $(wildcard $(READY)),$(DEMO_READY))
	@$(BIN)/python -m penstock.tools demo
	@echo "Next: $(BIN)/penstock serve, and in another terminal $(BIN)/penstock generate 'ROMEO:'"

# Side by side, in this order: processes that are killed, what waits for processes and sockets, clients
# in other languages, types, and last what fills every core. Most report when they are done.
test: $(READY) $(PROTOS_READY)
	@$(BIN)/python -m compileall -q -j 0 clients executors gateways protos scheduler server tools tests
	@$(MAKE) --no-print-directory --jobs 4 test-chaos test-served test-clients check-types test-pure check

# A code of 5 means that PYTEST_ARGS left it without tests.
test-served: $(READY)
	$(BIN)/python -m pytest --numprocesses $(SERVED_WORKERS) --dist loadfile $(SERVED) $(PYTEST_ARGS) || [ $$? = 5 ]

test-pure: FOLDERS = $(PURE) --numprocesses $(WORKERS)
test-chaos: FOLDERS = $(CHAOS) --numprocesses $(CHAOS_WORKERS) --dist loadfile
test-clients: FOLDERS = $(CLIENTS)
test-pure test-chaos test-clients: $(READY)
	@log="$$(mktemp)"; trap 'rm -f "$$log"' EXIT; code=0; \
	$(BIN)/python -m pytest $(FOLDERS) $(PYTEST_ARGS) \
		>"$$log" 2>&1 || code=$$?; cat "$$log"; \
	[ $$code = 0 ] || [ $$code = 5 ]

quick: $(READY)
	$(BIN)/python -m pytest --quiet --numprocesses $(WORKERS) $(QUICK) $(PYTEST_ARGS)

unit: $(READY)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) $(UNIT) $(PYTEST_ARGS)

tools: $(READY)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) $(TOOLS) $(PYTEST_ARGS)

gateways: $(READY)
	$(BIN)/python -m pytest tests/unit/gateways tests/gateway $(PYTEST_ARGS)

nightly: $(READY)
	PENSTOCK_MACHINE_RUNS=2500 PENSTOCK_NUM_REQUESTS=10000 PENSTOCK_NUM_RACES=10000 \
		PENSTOCK_CHAOS_SEED=$$RANDOM \
		PENSTOCK_HYPOTHESIS_PROFILE=thorough $(BIN)/python -m pytest --numprocesses $(WORKERS) \
		--timeout 3600 -m "not gpu" tests/property tests/unit tests/contract \
		tests/chaos/test_trtllm_cancels.py tests/integration/test_verify.py \
		tests/integration/test_demo.py tests/integration/test_case_01_05_cancels.py \
		tests/integration/test_metrics_prometheus.py tests/integration/test_trtllm_page_commands.py $(PYTEST_ARGS)
	$(MAKE) --no-print-directory sanitize

sanitize: $(READY)
	$(BIN)/python tests/sanitize/kernels.py --quiet $(PYTEST_ARGS)

test-transformers-4: $(READY)
	test -x .venv-transformers-4/bin/python || "$(PYTHON)" -m venv .venv-transformers-4
	.venv-transformers-4/bin/python $(PIP) install "$(TORCH_REQUIREMENT)" "transformers>=4.57,<5" \
		--editable ".[torch,dev]"
	.venv-transformers-4/bin/python -m pytest tests/unit/executor tests/contract $(PYTEST_ARGS)

soak: $(READY)
	PYTHONPATH=tests $(BIN)/python -m chaos.soak $(SOAK_ARGS)

cases: $(READY)
	$(BIN)/python docs/tools/case_table.py

architectures: $(READY)
	PYTHONPATH=tests $(BIN)/python -m models.sweep $(ARCHITECTURES_ARGS)

conformance: $(READY)
	$(BIN)/python tests/conformance/table.py

ray: $(READY)
	test -x .venv-ray/bin/python || "$(PYTHON)" -m venv .venv-ray
	.venv-ray/bin/python $(PIP) install ".[ray]"
	PENSTOCK_RAY_PYTHON=$(CURDIR)/.venv-ray/bin/python $(BIN)/python -m pytest tests/ray_serve

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

pages: $(READY)
	$(BIN)/python docs/tools/contract_page.py
	$(BIN)/python docs/tools/settings_page.py
	$(BIN)/python docs/tools/telemetry_page.py
	$(BIN)/python docs/tools/concept_pictures.py
	$(BIN)/python docs/tools/figures_chart.py

check: check-python check-types check-layers check-words check-protos check-docker

check-python: $(READY)
	$(BIN)/ruff format --check
	$(BIN)/ruff check

check-types: $(READY)
	$(BIN)/mypy
	$(BIN)/pyright

check-layers: $(READY)
	$(BIN)/lint-imports

check-words: $(READY)
	$(BIN)/python docs/tools/words_check.py

# The generated code must be what the toolchain writes today; the contract must be clean, and
# compatible with BASE.
check-protos: $(READY) $(PROTOS_READY)
	$(BIN)/buf lint protos
	$(BIN)/buf format protos --diff --exit-code
	@work="$$(mktemp -d)"; trap 'rm -rf "$$work"' EXIT; \
	TOOLS=$(PROTOS_VENV)/bin protos/generate.sh "$$work/new"; \
	diff -rq -x '*.proto' -x __init__.py -x py.typed -x __pycache__ "$$work/new/penstock/v1" protos/penstock/v1 \
		|| { echo "Generated code is stale: run make protos" >&2; exit 1; }; \
	git cat-file -e "$(BASE):protos/buf.yaml" \
		|| { echo "No contract at BASE=$(BASE) to compare with: a full clone has one" >&2; exit 1; }; \
	mkdir "$$work/base"; git archive "$(BASE)" protos | tar -x -C "$$work/base"; \
	echo "buf breaking against $(BASE)"; \
	$(BIN)/buf breaking protos --against "$$work/base/protos"

check-docker: $(READY)
	$(BIN)/hadolint Dockerfile deploy/trtllm/Dockerfile

format: $(READY)
	$(BIN)/ruff format
	$(BIN)/ruff check --fix
	$(BIN)/buf format protos --write

protos: $(PROTOS_READY)
	rm -f protos/penstock/v1/*_pb2.py* protos/penstock/v1/*_pb2_grpc.py*
	TOOLS=$(PROTOS_VENV)/bin protos/generate.sh

clean:
	rm -rf $(VENV) $(PROTOS_VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis

# Ten minutes of search led by branches, then mutated messages against a live service.
FUZZ_SECONDS ?= 600
.PHONY: fuzz
fuzz: $(READY)
	$(BIN)/python $(PIP) install --editable ".[fuzz]"
	$(BIN)/python tests/fuzz/run_atheris.py --seconds $(FUZZ_SECONDS)
	PENSTOCK_FUZZ_MUTATIONS=200000 PENSTOCK_FUZZ_CALLS=100000 PENSTOCK_HYPOTHESIS_PROFILE=nightly \
		$(BIN)/python -m pytest --timeout 3600 tests/fuzz tests/property/test_generate_request.py \
		tests/integration/test_case_38_39_requests.py $(PYTEST_ARGS)
