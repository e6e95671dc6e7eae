# make train | test | venv | lock; each sets up what it needs first.

VENV := .venv
PYTHON := $(VENV)/bin/python
PIP := $(PYTHON) -m pip install -q --disable-pip-version-check
LOCK := requirements-cpu.lock
LOCKED := $(VENV)/locked
READY := $(VENV)/ready
WORKDIR := runs/tiny

# XLA takes its scratch memory anew each step; in huge pages that costs less.
export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1

.PHONY: train test venv lock

train: venv
	$(PYTHON) -m ultralong_jax.main --config configs/tiny.py \
	    --workdir $(WORKDIR)
	$(PYTHON) -m ultralong_jax.main --config configs/tiny.py \
	    --workdir $(WORKDIR) --mode generate --prompt "def "

test: venv
	$(PYTHON) -m flake8
	$(VENV)/bin/lint-imports
	$(PYTHON) -m pytest -n 2 --dist loadfile $(PYTEST_FLAGS)

venv: $(READY)

# An environment whose Python no longer runs is made anew; a changed lock is
# installed over the old one. Nothing is fetched that the lock has no hash of.
$(LOCKED): $(LOCK) tools/find_python.sh
	@$(PYTHON) -c "import pip" 2>/dev/null || { \
	    python=$$(tools/find_python.sh) && \
	    echo "making $(VENV) with $$python" && \
	    rm -rf $(VENV) && $$python -m venv $(VENV); }
	@echo "installing $(LOCK) into $(VENV) (a few minutes the first time)"
	@$(PIP) --no-compile --require-hashes --only-binary :all: -r $(LOCK)
	@touch $@

$(READY): $(LOCKED) setup.cfg pyproject.toml
	@$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

# Needs PyPI. The GPU and TPU extras are resolved by pip at install, not here.
lock: venv
	$(PYTHON) -m venv build/lock
	build/lock/bin/python -m pip install -q uv
	build/lock/bin/uv pip compile --quiet --upgrade --universal \
	    --python-version 3.12 --generate-hashes --no-config \
	    --default-index https://pypi.org/simple \
	    --annotation-style line --custom-compile-command "make lock" \
	    --extra dev setup.cfg --output-file $(LOCK)
