# `make demo` and `make test` do everything on a fresh machine: they build .venv with uv first.
PY := .venv/bin/python
# A local wheel folder, when the machine names one (it may hold a small CPU torch).
WHEELS := $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS),$(shell python3 -m pip config get global.find-links 2>/dev/null))
# `make demo TORCH_BACKEND=cpu` takes the small CPU build of torch from its own index.
BACKEND := $(if $(TORCH_BACKEND),--torch-backend $(TORCH_BACKEND))

# Without their bytecode the tests would be compiled anew each time.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo test check proof chaos bench clean

venv: .venv/.ready

.venv/.ready: requirements-cpu.txt overrides-cpu.txt requirements-dev.txt requirements-trackers.txt
	@command -v uv >/dev/null || python3 -m pip install -q uv || { python3 -m venv .uv && .uv/bin/pip install -q uv; }
	@PATH="$$PATH:$$HOME/.local/bin:$(CURDIR)/.uv/bin"; set -e; \
	  version=3.12; uv python find 3.11 >/dev/null 2>&1 && version=3.11; \
	  uv venv -q --clear --python $$version .venv; \
	  uv pip install --python $(PY) -r requirements-cpu.txt -r requirements-dev.txt --override overrides-cpu.txt \
	    $(addprefix --find-links ,$(WHEELS)) $(BACKEND); \
	  uv pip install -q --python $(PY) --no-deps --target .venv/trackers -r requirements-trackers.txt
	@touch $@

demo: venv
	$(PY) demo/run.py

check: venv
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m pytest -m "not slow and not proof and not chaos" -n 2

test: check
	$(PY) -m pytest -m "slow and not proof" -n 2 --dist loadfile --no-loadscope-reorder

proof: venv
	$(PY) -m pytest -m proof

# Sixty kills (CHAOS_KILLS), every fault, 10,000 random jobs (CHAOS_EXAMPLES); forty minutes on two cores.
chaos: venv
	$(PY) -m pytest tests/chaos -m chaos -n 2 --dist worksteal

bench: venv
	$(PY) bench/adapter_sync.py
	$(PY) bench/conversations.py
	$(PY) bench/startup.py
	$(PY) bench/slow_hub.py

clean:
	rm -rf .venv .uv demo-out artifacts .pytest_cache .ruff_cache .mypy_cache .hypothesis
