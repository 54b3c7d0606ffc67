#!/bin/sh
# Looks for bad addresses (memcheck) and for races in shared memory (racecheck) in the kernels whose threads hand
# numbers to each other: compute-sanitizer over small cases of their tests, all files at once. Needs an NVIDIA GPU,
# compute-sanitizer, and a Python with torch, cupy and pytest.
#
#   PYTHON=python3 LIMIT_S=120 sh scripts/sanitize.sh [memcheck] [racecheck]
#
# Ends with 1 if a run found something, failed, or took longer than LIMIT_S.
set -u
PYTHON=${PYTHON:-python3}
LIMIT_S=${LIMIT_S:-120}
[ $# -gt 0 ] || set -- memcheck racecheck
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 # a tensor is an allocation of its own: its end is known
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT

check() { # file, which of its tests
    log=$logs/$tool-$1
    # api errors: the loader asks for a kernel's parameters until there are no more
    timeout "$LIMIT_S" compute-sanitizer --tool "$tool" --error-exitcode 9 --report-api-errors no \
        --kernel-name-exclude kns=at6native \
        "$PYTHON" -m pytest "tests/cuda/$1" -m gpu -k "$2" -q -x -p no:cacheprovider >"$log" 2>&1
    code=$?
    result=$(grep -E '(passed|failed|error)[^=]* in |SUMMARY' "$log" | tr -s '=\n' '  ')
    echo "$tool $1: exit $code $result"
    [ $code -eq 0 ] && return
    touch "$logs/failed"
    grep -v '^=========     Host Frame' "$log" | tail -40
}

for tool; do
    # A barrier's arrival counts for the thread that arrives, by racecheck. In thin_stream.cuh a lane arrives for its warp,
    # behind __syncwarp: every sum that another warp wrote would be a race. So there the rings are looked at alone
    thin="test_append or a_row_is_the_same"
    [ "$tool" = racecheck ] && thin="($thin) and not True"
    check test_paged_decode.py "every_grid or (every_group_size and (9-3-64 or 16-2-128)) or (every_shape and few)" &
    check test_paged_prefill.py "chosen and (many_tiles or few_long_items and 64-chunks1)" &
    check test_shared_prefix.py "(groups_and_single and 9-3) or a_long_prefix" &
    check test_thin_linear.py "$thin" &
    check test_batch_linear.py "bfloat16 and bias and (9-264-200 or 48-17000-264 or 80-9000-584 or 128-264-328)" &
    check test_sample.py "ties_at_the_edge or all_logits_equal or one_block_only or greedy_takes" &
    check test_adjust.py "adjusted_rows or more_rows" &
    check test_log_probs.py "sampled_tokens or adjusted_logits" &
    check test_scatter.py "step" &
    wait
done
[ ! -e "$logs/failed" ]
