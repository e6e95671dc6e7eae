#!/usr/bin/env bash
# Prints the path of a Python that runs and is new enough (3.12 preferred,
# then newer), or says what to install. Every candidate is executed, because
# pyenv puts names on PATH that exist and fail.
set -u

usable() {  # PYTHON [MINOR]: it runs, can make a venv, and has that version
  "$1" -c "
import ensurepip, sys, venv
minor = sys.version_info[1]
sys.exit(sys.version_info[0] != 3 or not (12 <= minor <= 14)
         or minor != int(sys.argv[1] or minor))" "${2:-}" >/dev/null 2>&1
}

candidates() {  # MINOR
  type -ap "python3.$1"
  printf '%s\n' "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3."$1".*/bin/python |
    sort -rV
  if command -v uv >/dev/null; then
    uv python find --no-python-downloads "3.$1" 2>/dev/null
  fi
  type -ap python3 python
}

for minor in 12 13 14; do
  while read -r python; do
    if usable "$python" "$minor"; then
      "$python" -c "import sys; print(sys.executable)"
      exit
    fi
  done < <(candidates "$minor")
done
echo "no Python 3.12 to 3.14 runs here: install one (apt install" \
  "python3.12-venv, brew install python@3.12, pyenv install 3.12 or" \
  "uv python install 3.12)" >&2
exit 1
