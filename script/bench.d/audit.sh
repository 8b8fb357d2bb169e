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
    declare -A servers daemons
    for arm in plain audited; do
        mkdir -p "$STORE/$arm"
        port=$(free_port $((7450 + ${#arm})))
        start "audit-$arm" "$DRAY" serve --listen "tcp://127.0.0.1:$port" --state "$WORK/state-$arm" \
            --export "data=$STORE/$arm,squash=none$([ $arm = plain ] || echo ,audit)"
        servers[$arm]=$STARTED
        wait_for 10 listens "$port"
        mount_dray "$port" "$WORK/$arm" transport=classic
        daemons[$arm]=$STARTED
    done
    for round in $(seq "$ROUNDS"); do
        # What comes second finds another machine.
        for arm in $([ $((round % 2)) = 0 ] && echo plain audited || echo audited plain); do
            "$BENCH" load --bench audit --arm $arm --round "$round" --secs "$SECS" --names "$NAMES" \
                --dir "$WORK/$arm" --server "$(pids_of "${servers[$arm]}")" \
                --client "$(pids_of "${daemons[$arm]}")" create unlink create_write_close unlink >>"$RAW"
        done
    done
    audit_costs | tee -a "$RAW"
}

# The median over rounds of what creates lose of their rate, and of what they cost more: CPU of the server, and of all.
audit_costs() {
    python3 - "$RAW" <<'PYTHON'
import json, statistics, sys

seen = {}
for line in open(sys.argv[1]):
    one = json.loads(line)
    if one["arm"] in ("plain", "audited") and one["metric"].startswith("create"):
        seen.setdefault(one["metric"], {}).setdefault(one["round"], {})[one["arm"]] = one["value"]

def put(name, value, unit):
    print(json.dumps({"bench": "audit", "arm": "audited", "metric": name,
                      "value": round(value, 4), "unit": unit, "round": 0}))

for metric, rounds in seen.items():
    load, field = metric.split(".", 1)
    both = [one for one in rounds.values() if len(one) == 2]
    if field == "per_s":
        put(f"audit_{load}_cost", statistics.median(1 - one["audited"] / one["plain"] for one in both), "share")
    if field in ("cpu_us", "cpu_server_us"):
        put(f"audit_{load}_{field}", statistics.median(one["audited"] - one["plain"] for one in both), "us")
        put(f"audit_{load}_{field}_plain", statistics.median(one["plain"] for one in both), "us")
PYTHON
}
