#!/usr/bin/env bash
# Installs what the application needs into a virtual environment, and the `outrider` command; not the application.
# Usage, in the application's folder: install.sh VENV VARIANT [EXTRA_INDEX]; VARIANT is cpu or cuda.
set -euo pipefail

venv=$1
variant=$2
index=${3:-}

case $variant in
  cpu)
    extras=(traces)
    cp constraints.txt "${TMPDIR:-/tmp}/constraints.txt"
    ;;
  cuda)
    # vLLM pins much of what it uses; held to our versions is what both sides of an actor boundary must share.
    extras=(vllm traces)
    grep -E '^(ray|torch|transformers|numpy|pydantic|pydantic_core)==' constraints.txt > "${TMPDIR:-/tmp}/constraints.txt"
    ;;
  *)
    echo "install.sh: VARIANT is cpu or cuda, not '$variant'" >&2
    exit 2
    ;;
esac

python3 -m venv "$venv"
"$venv/bin/python" k8s/image/requirements.py pyproject.toml "${extras[@]}" > "${TMPDIR:-/tmp}/requirements.txt"
"$venv/bin/pip" install --quiet ${index:+--extra-index-url "$index"} \
  -c "${TMPDIR:-/tmp}/constraints.txt" -r "${TMPDIR:-/tmp}/requirements.txt"
"$venv/bin/pip" check

cat > "$venv/bin/outrider" <<EOF
#!$venv/bin/python
from deployments.cli.main import main

main()
EOF
chmod +x "$venv/bin/outrider"
