# What an audit costs: the log by itself (dray-bench audit), and creates through mounts of two servers that
# differ in nothing else. The arms take turns; ratios are taken within a round.
#
# shellcheck disable=SC2086 # lists of loads are words

ROUNDS=${ROUNDS:-5}
AUDIT_RECORDS=${AUDIT_RECORDS:-2000000}

# bench_audit [micro]
bench_audit() {
    build_all
    install_packages python3
    scratch
    RAW=$OUT/audit.jsonl
    : >"$RAW"
    "$BENCH" audit --dir "$STORE" --records "$AUDIT_RECORDS" | tee -a "$RAW"
    [ "${1:-}" != micro ] || return 0
    local arm port round
    for arm in plain audited; do
        mkdir -p "$STORE/$arm"
        port=$(free_port $((7450 + ${#arm})))
        start "audit-$arm" "$DRAY" serve --listen "tcp://127.0.0.1:$port" --state "$WORK/state-$arm" \
            --export "data=$STORE/$arm,squash=none$([ $arm = plain ] || echo ,audit)"
        wait_for 10 listens "$port"
        mount_dray "$port" "$WORK/$arm" transport=classic
    done
    for round in $(seq "$ROUNDS"); do
        for arm in plain audited; do
            "$BENCH" load --bench audit --arm $arm --round "$round" --secs "$SECS" --names "$NAMES" \
                --dir "$WORK/$arm" create create_write_close >>"$RAW"
        done
    done
    audit_costs | tee -a "$RAW"
}

# The median over rounds of what creates lose.
audit_costs() {
    python3 - "$RAW" <<'PYTHON'
import json, statistics, sys

rates = {}
for line in open(sys.argv[1]):
    one = json.loads(line)
    if one["metric"].endswith(".per_s") and one["arm"] in ("plain", "audited"):
        rates.setdefault(one["metric"], {}).setdefault(one["round"], {})[one["arm"]] = one["value"]
for metric, rounds in rates.items():
    costs = [1 - both["audited"] / both["plain"] for both in rounds.values() if len(both) == 2]
    name = "audit_" + metric.removesuffix(".per_s") + "_cost"
    print(json.dumps({"bench": "audit", "arm": "audited", "metric": name,
                      "value": statistics.median(costs), "unit": "share", "round": 0}))
PYTHON
}
