#!/usr/bin/env bash
# The main job on this machine, CPU alone, 12 minutes on 2 cores after installation:
#
#   1. installs what is missing (scripts/env.sh says what before it does)
#   2. starts a gateway and a host with local desktops: Xvfb, a window manager, real applications, in namespaces
#   3. scores the tiny base policy of models/tiny_base on held-out tasks: near 0, it can point and knows no task
#   4. collects scripted demonstrations in the desktops and trains the cold start, Megatron at TP=2 on gloo
#   5. asynchronous RL: step-balanced GSPO, frontier sampling, weights published by version, lag at most 1
#   6. scores base, SFT and SFT+RL, writes runs/quickstart/{hf/rl,metrics.jsonl,wandb,report.html}, prints the table
#
#   bash recipes/quickstart.sh                      the whole tour; stopped, the same command goes on where it was
#   bash recipes/quickstart.sh --fresh              forget an earlier run
#   bash recipes/quickstart.sh --minutes 3          a short tour through the same phases
#   bash recipes/quickstart.sh seed=1 num_steps=20  any key of recipes/quickstart.yaml
set -euo pipefail
cd "$(dirname "$0")/.."
config=recipes/quickstart.yaml
run_dir=
fresh=
overrides=()
die() { printf 'quickstart: %s\n' "$*" >&2; exit 2; }
while [ $# -gt 0 ]; do
  case "$1" in
    --fresh) fresh=1 ;;
    --minutes)
      [ $# -gt 1 ] || die "--minutes needs a number"
      [[ $2 =~ ^[0-9]{1,6}$ && ! $2 =~ ^0*$ ]] || die "--minutes takes a whole number above 0, not '$2'"
      minutes=$((10#$2))
      if [ "$minutes" -lt 12 ]; then config=recipes/quickstart_tour.yaml; else overrides+=("minutes=$((minutes - 10))"); fi
      shift ;;
    run_dir=*) run_dir=${1#run_dir=} ;;
    -h|--help) sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *=*) overrides+=("$1") ;;
    *) die "unknown argument '$1'; try --help" ;;
  esac
  shift
done
run_dir=${run_dir:-runs/$(basename "$config" .yaml)}
bash scripts/env.sh
if [ -n "$fresh" ] && [ -e "$run_dir" ]; then
  [ -f "$run_dir/lock" ] && [ -d "$run_dir/logs" ] || die "$run_dir is no run directory: --fresh removes nothing else"
  flock -n "$run_dir/lock" rm -rf -- "$run_dir" || die "$run_dir stays: a run is at work in it, or it cannot be removed"
fi
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
exec .venv/bin/python -m slime_cua.train --config "$config" "run_dir=$run_dir" ${overrides[@]+"${overrides[@]}"}
