#!/usr/bin/env bash
# Installs what is missing, then lint, types, unit, contract, numerics and a short end-to-end run.
#   bash scripts/test.sh                  everything (about 20 minutes on 2 cores, the installation included)
#   bash scripts/test.sh tests/unit -k x  the same set-up, then pytest with these arguments only
#
# Parts run beside each other, each a pytest process; what a part says is shown whole when it ends. Why they do not disturb
# each other:
# - Time. Types, numerics, killed runs and main jobs compute, and no deadline of theirs is shorter than a minute: they run at low
#   priority, in what the others leave. Those have deadlines and wait most of the time. Unit and contract, which have short ones,
#   have no other neighbour; nor has the replay that is held against the clock, which is their first test.
# - Places. Ports are free ones, asked of the kernel or drawn (slime_cua/core/ports.py). Desktops are display :0 in namespaces of
#   their own and claim their host user (providers/users.py). Folders are pytest's temporary ones. Of mounts, which the tests of
#   local desktops compare, other parts make one, whose name those leave out.
# - Processes. All are ended by pid or by a mark that is drawn for each test. Each Ray has a folder and ports of its own.
# - Memory. Trainers of the numerics and the main job's are not there at the same time.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/env.sh
triton_pin=triton==3.6.0
if ! .venv/bin/python -c 'import triton' 2>/dev/null && [ ! -d .venvs/triton/triton ]; then
  echo "[test] installing $triton_pin beside .venv: the GPU kernels run in its interpreter (about 200 MB to download)"
  .venv/bin/python -m pip --disable-pip-version-check install -q --no-deps --target .venvs/triton "$triton_pin" 2>.venv/triton.log ||
    echo "[test] no $triton_pin for this machine: those tests are skipped"
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONUNBUFFERED=1 PYTHONPATH="$PWD"
pytest=(.venv/bin/python -m pytest -q)
if [ $# -gt 0 ]; then exec "${pytest[@]}" "$@"; fi

said=$(mktemp -d)
declare -A part_of=()
timed() { # NAME COMMAND...: notes how long it took and how it ended
  local began=$SECONDS code=0
  "${@:2}" || code=$?
  printf '%6d s  %s%s\n' $((SECONDS - began)) "$1" "$([ "$code" = 0 ] || echo ": FAILED ($code)")" >>"$said/times"
  return "$code"
}
start() { # NAME COMMAND...: beside what runs already
  echo "== $1 ($SECONDS s): to watch it, tail -f $said/${1// /_}"
  "${@:2}" >"$said/${1// /_}" 2>&1 </dev/null &
  part_of[$!]=$1
}
finish() { # [NAME]: waits until that part, or every one, has ended, and shows what ends
  local pid
  while [ ${#part_of[@]} -gt 0 ] && { [ $# = 0 ] || [[ " ${part_of[*]/#/:} " == *" :$1 "* ]]; }; do
    wait -n -p pid "${!part_of[@]}" || is_good=
    printf '\n== %s has ended (%s s)\n' "${part_of[$pid]}" "$SECONDS"
    cat "$said/${part_of[$pid]// /_}"
    unset "part_of[$pid]"
  done
}
end() { # Ctrl-C or an error: the parts hear Ctrl-C, too, and have a moment to clean up
  local pid
  for pid in "${!part_of[@]}"; do kill -INT -- "-$pid" 2>/dev/null || true; done
  for pid in "${!part_of[@]}"; do
    wait "$pid" || true
    printf '\n== %s was interrupted\n' "${part_of[$pid]}"
    tail -n 30 "$said/${part_of[$pid]// /_}"
  done
  part_of=()
  rm -rf "$said"
}
trap end EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
set -m # a part is a process group with Ctrl-C in force: in the background without this it would be ignored, by tests' children as well

is_good=yes
tests=("${pytest[@]}" -p no:cacheprovider -m "not gpu" --durations=15)
replay=tests/e2e/test_replay_live.py kills=tests/e2e/test_kill_anywhere.py
main_jobs=(tests/e2e/test_{main_job,lost_parts,bad_input}.py) interrupts=tests/e2e/test_interrupts.py
elsewhere=("$replay" "$kills" "$interrupts" "${main_jobs[@]}")
lint() { .venv/bin/ruff check . && .venv/bin/ruff format --check -q .; }
types_and_numerics() {
  local code=0
  trap 'exit 130' INT
  timed "types" nice -n 10 .venv/bin/mypy slime_cua rollout sandbox_cluster megatron_patches || code=1
  timed "numerics" nice -n 10 "${tests[@]}" tests/numerics || code=1
  return "$code"
}

timed "lint" lint
start "types and numerics" types_and_numerics
start "unit and contract" timed "unit and contract" "${tests[@]}" "$replay" tests/unit tests/contract
finish "types and numerics"
start "killed runs" timed "killed runs" nice -n 10 "${tests[@]}" "$kills"
finish "killed runs"
start "main jobs" timed "main jobs" nice -n 10 "${tests[@]}" "${main_jobs[@]}"
finish "unit and contract"
start "interrupts" timed "interrupts" "${tests[@]}" "$interrupts" # a start waits for one process after the other: two jobs fill two cores
start "desktops" timed "desktops" "${tests[@]}" tests/e2e "${elsewhere[@]/#/--ignore=}"
finish
printf '\n== seconds of each part\n'
cat "$said/times"
printf '%6d s  in all\n' "$SECONDS"
[ "$is_good" ]
