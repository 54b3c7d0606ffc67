#!/bin/sh
# Build the wheel and the source distribution into dist/, install the wheel with an extra into a clean venv, and try it there:
# its version, its kernels, and a generation (pagewalk check).
#
#   PYTHON=python3 EXTRA=cuda sh scripts/release.sh
set -eu

PYTHON=${PYTHON:-python3}
EXTRA=${EXTRA:-cuda}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$PYTHON" -m venv "$work/build"
"$work/build/bin/pip" install -q build
rm -rf dist build
"$work/build/bin/python" -m build -o dist .

# The source distribution builds the same wheel: nothing that the wheel needs is missing there.
mkdir "$work/source"
tar -xzf dist/pagewalk-*.tar.gz -C "$work/source" --strip-components=1
"$work/build/bin/python" -m build -q --wheel -o "$work/again" "$work/source"
unzip -Z1 dist/pagewalk-*.whl | sort >"$work/first"
unzip -Z1 "$work"/again/pagewalk-*.whl | sort >"$work/second"
diff "$work/first" "$work/second"

# torch as the project's own installer chooses it: the CPU build where there is no GPU.
VENV="$work/venv" PYTHON="$PYTHON" sh scripts/install.sh "$(ls "$PWD"/dist/pagewalk-*.whl)[$EXTRA]"
cd "$work" # not in the sources
"$work/venv/bin/pagewalk" --version
"$work/venv/bin/python" -c "
from pathlib import Path
import cuda.compile, service
root = Path(cuda.compile.__file__).parent
assert 'site-packages' in str(root), root
print(len(list((root / 'kernels').glob('*.cu'))), 'kernels in', root)
"
"$work/venv/bin/pagewalk" check
