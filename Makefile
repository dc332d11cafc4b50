# `make demo` and `make test` are all that a fresh machine needs: each makes .venv and installs what it uses.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# torch is what pip finds: on Linux a build for CUDA, of 6 GB. Without a GPU, install the CPU build in .venv first (see
# pytorch.org, "Get started"), or say where it is: make PIP_ARGS="--index-url ...", PIP_ARGS="--find-links ..."
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(PIP_ARGS)

.PHONY: demo test test-slow test-share try-benchmarks test-portable test-transformers test-lowest test-python lint docs bench clean

# all rows of both tables, in five minutes; one of each: make demo GLUE_ROW=2 TRANSLATION_ROW=2
demo: $(VENV)/.demo
	$(BIN)/python run_glue.py --demo $(GLUE_ROW)
	$(BIN)/python run_translation.py --demo $(TRANSLATION_ROW)

test: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 --durations 15 tests

test-slow: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 -m slow --durations 50 tests

# slow tests of what changed, and some of the others, another part after every commit; what fails runs once more, alone
SLOW_MINUTES ?= 20
test-share: $(VENV)/.test
	$(BIN)/python tests/once_more.py -n 2 --maxschedchunk 8 -m slow --slow_minutes $(SLOW_MINUTES) --durations 20 tests

# processors round sums in ways of their own: the numeric tests with other instructions and products, one thread, and
# loaded weights that compute with other roundings than stored ones
SETTINGS := "ATEN_CPU_CAPABILITY=default" \
            "ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41" \
            "OMP_NUM_THREADS=1" \
            "PYTEST_ADDOPTS=--unaligned"
NUMERIC  := tests/test_*contract.py tests/test_*mutations.py tests/contract tests/layers tests/model \
            tests/collaborative tests/heads tests/rotation tests/analysis tests/serving tests/vocabulary \
            tests/test_docstrings.py tests/test_docs.py tests/test_readme.py \
            --ignore=tests/plots --ignore=tests/analysis/report

# the newest transformers over this environment, in a folder of its own: CI takes it in turn with the pinned one
OVER     := $(VENV)-transformers
CLOSEST  := tests/contract tests/test_contract.py tests/test_continuation_contract.py tests/model tests/layers tests/vocabulary
test-transformers: $(VENV)/.test
	rm -rf $(OVER)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --target $(OVER) transformers
	PYTHONPATH=$(OVER) $(BIN)/python -m pytest -n 2 $(CLOSEST)

test-portable: $(VENV)/.test
	for setting in $(SETTINGS); do \
		env $$setting $(BIN)/python -m pytest -n 2 $(NUMERIC) || exit 1; \
	done

# The lowest version of everything that pyproject.toml declares, and the newest on another Python, each in an environment
# of its own. uv finds the interpreter or brings it: PYTHON_VERSION=3.13, or the path of one. Where torch comes from:
# UV_ARGS="--find-links ...", else it is the build for CUDA, as above.
# That of transformers is stated, since the engines' extras, which these tests do not use, need a later one.
LOWEST_TRANSFORMERS := 5.18.0
LOWEST   ?= tests/contract tests/test_readme.py tests/test_docs.py tests/base/test_extras.py tests/test_contract.py \
            tests/test_head_contract.py tests/layers tests/model tests/collaborative tests/heads tests/data \
            tests/command/flags tests/training
NEWEST   ?= tests
PYTHON_VERSION ?= 3.13
UV       := $(BIN)/uv

test-lowest: $(UV)
	$(UV) venv --quiet --clear --python $(BIN)/python $(VENV)-lowest
	$(UV) pip install --quiet --python $(VENV)-lowest/bin/python --resolution lowest-direct $(UV_ARGS) -e ".[test]"
	$(UV) pip install --quiet --python $(VENV)-lowest/bin/python --no-deps $(UV_ARGS) "transformers==$(LOWEST_TRANSFORMERS)"
	$(VENV)-lowest/bin/python -m pytest -n 2 $(LOWEST)

test-python: $(UV)
	$(UV) venv --quiet --clear --python $(PYTHON_VERSION) $(VENV)-newest
	$(UV) pip install --quiet --python $(VENV)-newest/bin/python $(UV_ARGS) -e ".[test]"
	$(VENV)-newest/bin/python -m pytest -n 2 $(NEWEST)

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# the site of docs/, in site/; any warning is an error
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# what a table of the documentation shows: make bench-NAME, which stands under the table with its minutes; all targets are
# in benchmarks/targets.py. python benchmarks/tables.py writes the tables. Most need ../shared (or COLLAB_HEADS_SHARED);
# rows that are stored are not measured again, but with AGAIN=1. bench-gpu needs a torch built for the device:
# make PIP_ARGS="--index-url ..." bench-gpu
.PRECIOUS: $(VENV)/.bench
bench-%: $(VENV)/.bench
	$(BIN)/python benchmarks/targets.py $*

# each of these targets on its smallest input, in folders of its own: it runs, and its rows have the fields of stored ones
try-benchmarks: $(VENV)/.test
	$(BIN)/python -m pytest -n 2 tests/benchmarks/try_benchmarks.py

# all that trains nothing: an hour on two cores
bench: $(addprefix bench-,stsb translation decomposition swap-speed attention training nmt-speed nmt-speed-inference pruning)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(UV): | $(VENV)/bin/python
	$(PIP) uv

$(VENV)/.%: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) -e ".[$*]"
	@touch $@

clean:
	rm -rf $(VENV) $(VENV)-lowest $(VENV)-newest $(OVER) dist build
