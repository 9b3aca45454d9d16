#!/usr/bin/env bash
# Environment, style, types, tests. Arguments go to pytest, e.g. `bash scripts/test.sh -m slow`.
set -euo pipefail
source "$(dirname "$0")/setup.sh" test
ruff check .
ruff format --check .
mypy
# Tensors are tiny and each test has one thread: two workers use two cores. A thread that waits must not spin there.
export OMP_WAIT_POLICY=${OMP_WAIT_POLICY:-passive}
python -m pytest -n 2 --dist loadscope "$@"
