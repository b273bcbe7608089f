#!/usr/bin/env bash
# Runs the tests that compare with peft against several versions of it, on the torch and
# transformers of .venv. Each version lies in a folder of its own (a few MB), in front of the
# installed one.
#
#   tools/peft_matrix.sh                 # the versions below
#   tools/peft_matrix.sh 0.18.1 0.20.0   # these
set -euo pipefail
cd "$(dirname "$0")/.."

python=${PYTHON:-.venv/bin/python}
versions=("$@")
if [ ${#versions[@]} -eq 0 ]; then
  versions=(0.18.0 0.18.1 0.19.0 0.19.1 0.20.0 0.21.0 0.21.1)
fi

folders=$(mktemp -d)
trap 'rm -rf "$folders"' EXIT
failed=()
for version in "${versions[@]}"; do
  echo "== peft $version"
  folder="$folders/$version"
  "$python" -m pip install -q --disable-pip-version-check --no-deps --target "$folder" \
    "peft==$version"
  found=$(PYTHONPATH="$folder" "$python" -c 'import peft; print(peft.__version__)')
  if [ "$found" != "$version" ]; then
    echo "the interpreter imports peft $found" >&2
    exit 2
  fi
  OMP_NUM_THREADS=1 PYTHONPATH="$folder" "$python" -m pytest -q -p no:cacheprovider \
    tests/adapters tests/nn || failed+=("$version")
done
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed with peft ${failed[*]}" >&2
  exit 1
fi
