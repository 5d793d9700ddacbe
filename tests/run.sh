#!/usr/bin/env sh
# Set up and run the tests: sh tests/run.sh [pytest options]. Needs Python 3.10 or later and, once, the network.
# VENV (default .venv) is made where it is not; transformers 4.57 goes into a folder of its own inside it, for the tests
# that load outputs with both versions.
set -eu
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
[ -x "$VENV/bin/python" ] || "${PYTHON:-python3}" -m venv "$VENV"
"$VENV/bin/pip" install -q -c constraints.txt -e '.[dev]'
[ -d "$VENV/transformers-4" ] || "$VENV/bin/pip" install -q --no-deps --target "$VENV/transformers-4" \
    transformers==4.57.6 tokenizers==0.22.1 huggingface_hub==0.36.0 requests==2.34.2 urllib3 idna charset-normalizer certifi
SURGERY_TRANSFORMERS_4="$(pwd)/$VENV/transformers-4"
case $VENV in /*) SURGERY_TRANSFORMERS_4="$VENV/transformers-4" ;; esac
export SURGERY_TRANSFORMERS_4
exec "$VENV/bin/pytest" -n "${WORKERS:-2}" "$@"
