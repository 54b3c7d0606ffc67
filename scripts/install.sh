#!/bin/sh
# Install this project into $VENV, with the versions of constraints.txt.
#
#   VENV=.venv PYTHON=python3 TORCH_INDEX= sh scripts/install.sh '.[dev]'         or a wheel, with or without [extras]
#
# INSTALLER=uv: all but torch is installed by uv, in a quarter of the time; it reads none of pip's configuration.
#
# torch comes in builds of very different size. On a machine without an NVIDIA GPU the CPU build is wanted: from wherever
# pip is configured to find one, else from PyTorch's own CPU index, else what PyPI has (with CUDA, some gigabytes).
set -eu

VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
TORCH_INDEX=${TORCH_INDEX:-}
INSTALLER=${INSTALLER:-pip}
UV_PIN=${UV_PIN:-uv}
CPU_INDEX=https://download.pytorch.org/whl/cpu
project=${1:-.}
torch=$(grep '^torch==' constraints.txt)

say() { printf '%s\n' "$*" >&2; }

if ! "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    say "error: $PYTHON is not Python 3.11 or newer. Choose one: make PYTHON=python3.12 ..."
    exit 2
fi

# A venv of another Python, or one that was moved, is made anew.
if [ -e "$VENV" ] && ! "$VENV/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    rm -rf "$VENV"
fi
if [ ! -e "$VENV" ]; then
    say "Making $VENV ..."
    # Some systems ship Python without ensurepip: there, pip from outside puts pip into the venv.
    if ! "$PYTHON" -m venv "$VENV" >/dev/null 2>&1; then
        rm -rf "$VENV"
        "$PYTHON" -m venv --without-pip "$VENV"
        "$PYTHON" -m pip --python "$VENV/bin/python" install -q pip
    fi
fi

pip() { "$VENV/bin/python" -m pip --disable-pip-version-check "$@"; }

# A module is compiled when it is first imported: most of what is installed here never is, and all of it takes half a minute.
pip_install() { pip install -q --no-compile "$@"; }

install() {
    case $INSTALLER in
        uv) "$VENV/bin/uv" pip install -q --python "$VENV/bin/python" "$@" ;;
        *) pip_install "$@" ;;
    esac
}

has_torch() { "$VENV/bin/python" - "$torch" 2>/dev/null <<'PY'
import sys
from importlib.metadata import version
sys.exit("torch==" + version("torch").partition("+")[0] != sys.argv[1])
PY
}

finds_cpu_build() {
    pip install -q --dry-run --no-deps --ignore-installed --report - "$torch" 2>/dev/null |
        "$VENV/bin/python" -c 'import json, sys; sys.exit("+cpu" not in json.load(sys.stdin)["install"][0]["metadata"]["version"])' 2>/dev/null
}

if ! has_torch; then
    say "Installing $torch (once; a few hundred megabytes) ..."
    if [ -n "$TORCH_INDEX" ]; then
        pip_install --no-deps --index-url "$TORCH_INDEX" "$torch"
    elif nvidia-smi -L >/dev/null 2>&1 || [ "$(uname -sm)" != "Linux x86_64" ] || finds_cpu_build; then
        pip_install -c constraints.txt "$torch"
    elif ! pip_install --no-deps --retries 1 --timeout 20 --index-url "$CPU_INDEX" "$torch" 2>/dev/null; then
        say "No CPU build of torch is to be had: installing the one with CUDA, which is much larger."
        pip_install -c constraints.txt "$torch"
    fi
fi

pins="-c constraints.txt"
if "$VENV/bin/python" -c 'import sys; from importlib.metadata import version; sys.exit("+cpu" not in version("torch"))'; then
    pins="$pins -c constraints-cpu.txt" # a CUDA build pins NVIDIA's packages itself
fi

say "Installing what $project needs ..."
[ "$INSTALLER" != uv ] || pip_install "$UV_PIN"
case $project in
    .*) set -- -e "$project" ;; # this folder stays where the code is
    *) set -- "$project" ;;     # a wheel
esac
# shellcheck disable=SC2086 # several words are meant
install $pins "$@"
