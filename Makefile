# make help lists the targets. `make sweep` and `make test` set up what they need by themselves.
SPACE ?=
EXPERIMENT ?=
TRIALS ?=
STUDY ?=
MODEL ?=
SERVE ?=
ADDRESS ?=
PROFILE ?= profile.yaml
PORT ?= 5000
# A Python of your own that has vLLM: it runs the servers, everything else runs in .venv. Nothing is installed into it.
PYTHON ?=
# The interpreter that builds the environments; Python 3.11 or newer.
PYTHON3 ?= $(shell command -v python3.11 || command -v python3)

setup = $$($(PYTHON3) requirements/setup.py $(if $(PYTHON),--engine cpu,$(1)))
adopted = $(if $(PYTHON),env TOK100_PYTHON='$(PYTHON)')
cpu = $$($(PYTHON3) requirements/setup.py --engine cpu)

sweep_options = --space '$(SPACE)' $(if $(EXPERIMENT),--experiment '$(EXPERIMENT)') $(if $(TRIALS),--trials '$(TRIALS)') \
	$(if $(STUDY),--study '$(STUDY)') $(if $(MODEL),--model '$(MODEL)') $(if $(SERVE),--serve='$(SERVE)') \
	$(if $(ADDRESS),--address '$(ADDRESS)') $(if $(DRY),--dry-run) $(if $(EVIDENCE),--evidence) $(if $(FORK),--fork '$(FORK)')

# Tests at a time: most of them wait for servers. Those that compare times come after the others, one at a time.
WORKERS ?= 5
everyday = not gpu and not bench and not soak
NONE_FOUND = 5# pytest's exit code where TESTS has none of a kind

.DEFAULT_GOAL := help
.PHONY: help sweep best ui serve doctor test check fmt lock schema golden soak bench-load

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14
	@echo
	@echo "make sweep SPACE=cpu.yaml [EXPERIMENT=..] [TRIALS=..] [STUDY=..] [MODEL=..] [SERVE='--flag ..'] [DRY=1] [PYTHON=..] [ADDRESS=..]"

sweep: ## search launch configurations: SPACE=cpu.yaml (also nccl, cudagraph, parallel, speculative, scheduler, full)
	@test -n '$(SPACE)' || { echo "which space? make sweep SPACE=cpu.yaml; others: $$(cd search_spaces && echo *.yaml)" >&2; exit 2; }
	@python=$(call setup,--space '$(SPACE)' --experiment '$(EXPERIMENT)') && exec $(adopted) "$$python" -m runner.sweep $(sweep_options)

best: ## the best configurations of the last study (STUDY=.. for another)
	@python=$(cpu) && exec "$$python" -m runner.best $(if $(STUDY),--study '$(STUDY)')

ui: ## the MLflow UI on what was measured, on 127.0.0.1 (PORT=5000)
	@python=$(cpu) && exec "$$python" -m runner.tracking --port $(PORT)

serve: ## real vLLM with an exported profile: PROFILE=profile.yaml
	@test -f '$(PROFILE)' || { echo "no profile $(PROFILE): python -m runner.best --export $(PROFILE) writes one" >&2; exit 2; }
	@python=$(call setup,--engine $$(grep -qE 'VLLM_CPU|^engine: simulated' '$(PROFILE)' && echo cpu || echo gpu)) && \
	exec $(adopted) "$$python" -m runner.serving --profile '$(PROFILE)' $(SERVE)

doctor: ## what this machine has, and what is in the way
	@python=$(cpu) && exec "$$python" -m runner.doctor

test: ## the tests, real vLLM on the CPU among them
	@python=$(cpu) && run() { "$$python" -m pytest -q "$$@" $(TESTS) || [ $$? -eq $(NONE_FOUND) ]; } && \
	run -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m '$(everyday) and not alone' && run -m '$(everyday) and alone'

check: ## format, lint, types, layers, spec files, docs
	@python=$(cpu) && bin=$$(dirname "$$python") && \
	"$$bin/ruff" format --check runner tests requirements && "$$bin/ruff" check runner tests requirements && \
	"$$bin/mypy" && "$$bin/lint-imports" && "$$python" -m pytest -q -p no:cacheprovider tests/checks

fmt: ## format and mend what can be mended
	@python=$(cpu) && bin=$$(dirname "$$python") && "$$bin/ruff" format runner tests requirements && "$$bin/ruff" check --fix runner tests requirements

lock: ## make the locks again from requirements/*.in (needs uv)
	@for engine in cpu gpu; do \
	  uv pip compile -q requirements/$$engine.in $$(test -f requirements/$$engine.overrides.txt && echo --override requirements/$$engine.overrides.txt) \
	    $(addprefix --find-links ,$(PIP_FIND_LINKS)) --python-version 3.11 --no-emit-index-url --no-emit-find-links --no-annotate --no-header \
	    -o requirements/$$engine.lock; done

schema: ## JSON schemas for editors, from the models
	@python=$(cpu) && exec "$$python" -m runner.space.json_schema --write

golden: ## rewrite the golden files, then fail so that the difference is looked at
	@python=$(cpu) && UPDATE_GOLDEN=1 exec "$$python" -m pytest -q tests/unit

soak: ## long fault runs (minutes)
	@python=$(cpu) && exec "$$python" -m pytest -q -m soak tests

bench-load: ## this load client against its peers, side by side (minutes)
	@python=$(cpu) && exec "$$python" -m pytest -q -m bench tests/bench
