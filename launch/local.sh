#!/usr/bin/env bash
# Run the server and all clients in one process, without a launcher or a network; for laptops and for debugging.
#
#   launch/local.sh CONFIG.yaml [key=value ...]
#   launch/local.sh configs/quickstart.yaml rounds=3
set -euo pipefail
[[ $# -ge 1 ]] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }

# Use fedmpi on PATH if there is one; otherwise .venv in the working directory or beside launch/.
for place in . "$(dirname "$0")/.."; do
    # shellcheck source=/dev/null
    if ! command -v fedmpi >/dev/null && [[ -f $place/.venv/bin/activate ]]; then source "$place/.venv/bin/activate"; fi
done
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec fedmpi run "$@"
