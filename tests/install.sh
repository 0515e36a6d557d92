#!/usr/bin/env bash
# Makes the virtual environment that everything in this repository runs in.
#   PYTHON=python3 WHEELS=folder install.sh VENV
# torch first and apart: PyPI's Linux build carries 3 GB of CUDA libraries, so a CPU build in WHEELS
# that fits this Python is taken when there is one.
set -euo pipefail
venv=$1
python=${PYTHON:-python3}
"$python" -c 'import sys; ok = (3, 11) <= sys.version_info[:2] <= (3, 13); sys.exit(0 if ok else
"tpinference needs Python 3.11 to 3.13, this is " + sys.version.split()[0] + "; set PYTHON=")'
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
  echo "cannot make a virtual environment: on Debian, apt-get install python3-venv" >&2
  exit 1
}
tag=$("$venv/bin/python" -c 'import sys; print(f"cp{sys.version_info[0]}{sys.version_info[1]}")')
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --quiet --progress-bar off)
torch="torch>=2.11"
for wheel in ${WHEELS:+"$WHEELS"/torch-*+cpu-"$tag"-"$tag"-*.whl}; do
  [ -f "$wheel" ] && torch=$wheel
done
echo "installing into $venv: torch from ${torch##*/}"
[ "$torch" != "torch>=2.11" ] || echo "  no CPU build of torch found: this downloads 3 GB once"
"${pip[@]}" "$torch"
[ -z "${WHEELS:-}" ] || realpath "$WHEELS" >"$venv/wheels"
echo "installing tpinference with its dev tools"
"${pip[@]}" --editable '.[dev]'
