# Every target works from a clean clone with Python 3.11-3.13 and make.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: test lint types demo bench clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

test: $(STAMP) lint types  ## the whole test suite
	$(BIN)/pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

demo: $(STAMP)  ## a real model, served by two tiers, compared with plain decoding
	$(BIN)/outrider demo $(ARGS)

bench: $(STAMP)
	$(BIN)/outrider bench $(ARGS)

clean:
	rm -rf $(VENV)
