#!/bin/bash
# Audit records in a real Apache Kafka, over kills of the server and of the broker: kafka.sh [classic|uring]
# takes: 2 min
. "$(dirname "$0")/../lib/common.sh"
. "$(dirname "$0")/../lib/mounts.sh"
. "$(dirname "$0")/../lib/long.sh"
transport=${1:-classic}
begin kafka

broker_version=4.1.2
client_version=2.2.15

# get_broker: the broker's jars, by Maven, and a client from PyPI. Kept in target/, since they do not change.
get_broker() {
    need openjdk-17-jre-headless maven python3-venv || return 1
    jars=$target/tools/kafka-$broker_version
    if [ ! -e "$jars/complete" ]; then
        mkdir -p "$jars"
        cat >"$jars/pom.xml" <<XML
<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>dray</groupId><artifactId>broker</artifactId><version>1</version><dependencies>
<dependency><groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId>
<version>$broker_version</version></dependency></dependencies></project>
XML
        mvn -q -B -f "$jars/pom.xml" dependency:copy-dependencies -DoutputDirectory="$jars/lib" >&2 || return 1
        touch "$jars/complete"
    fi
    client=$target/tools/kafka-client
    [ -x "$client/bin/python" ] || python3 -m venv "$client" || return 1
    "$client/bin/pip" install -q "kafka-python==$client_version" >&2
}

get_broker || { skip kafka "a broker of Apache Kafka, or a client, is not to be had here"; exit 0; }
broker_port=$(free_port)
controller_port=$(free_port)
cat >"$scratch/broker.properties" <<PROPERTIES
process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:$controller_port
listeners=PLAINTEXT://127.0.0.1:$broker_port,CONTROLLER://127.0.0.1:$controller_port
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,PLAINTEXT:PLAINTEXT
log.dirs=$scratch/broker
offsets.topic.replication.factor=1
PROPERTIES

java_at() { java -Xmx512m -cp "$jars/lib/*" "$@"; }

start_broker() {
    # Not by a function: its process would be a shell's.
    java -Xmx512m -cp "$jars/lib/*" kafka.Kafka "$scratch/broker.properties" \
        >>"$scratch/broker.log" 2>&1 7>&- 8>&- 9>&- &
    broker=$!
    echo "$broker" >"$scratch/broker.pid"
    remember "$broker"
    for _ in $(seq 600); do
        (exec 3<>"/dev/tcp/127.0.0.1/$broker_port") 2>/dev/null && return
        kill -0 "$broker" 2>/dev/null || break
        sleep 0.1
    done
    cat "$scratch/broker.log" >&2
    die "the broker does not start"
}

java_at kafka.tools.StorageTool format --standalone -t "$(java_at kafka.tools.StorageTool random-uuid)" \
    -c "$scratch/broker.properties" >"$scratch/broker.log" 2>&1 || { cat "$scratch/broker.log" >&2; die "no storage"; }
start_broker
"$client/bin/python" "$root/script/lib/kafka_topic.py" make "127.0.0.1:$broker_port" dray-audit

store 500
cat >"$scratch/server.toml" <<TOML
[audit.sink.bus]
type = "kafka"
address = "kafka://127.0.0.1:$broker_port/dray-audit"
TOML
export_options=,audit=change
serve --config "$scratch/server.toml"
mount_at client

# make NAME: fifty files through the mount.
make() {
    local number
    for number in $(seq 50); do echo x >"$scratch/client/$1-$number"; done
}

kill_server() {
    kill -KILL "$(cat "$scratch/server.pid")"
    serve --config "$scratch/server.toml"
}

kill_broker() {
    kill -KILL "$(cat "$scratch/broker.pid")"
    while kill -0 "$(cat "$scratch/broker.pid")" 2>/dev/null; do sleep 0.1; done
}

# audited: the indices of all changes in the log.
audited() {
    "$DRAY" audit search test --json --state "$scratch/state" |
        python3 -c 'import json, sys
print(*sorted({r["index"] for r in map(json.loads, sys.stdin) if r["kind"] != "start"}))'
}

# arrived: all of them are in the topic, within a minute.
arrived() {
    "$client/bin/python" "$root/script/lib/kafka_topic.py" await "127.0.0.1:$broker_port" dray-audit \
        "$(audited)"
}

all_arrive() {
    make first
    arrived
}
check records-arrive all_arrive

arrive_over_a_kill() {
    make second &
    local files=$!
    sleep 0.1
    kill_server
    wait "$files"
    arrived
}
check over-a-kill-of-the-server arrive_over_a_kill

# The records of a time without a broker wait, and `stat` says why.
waits_and_goes_on() {
    kill_broker
    make third
    sleep 2
    "$DRAY" audit stat test --state "$scratch/state" | tee /dev/stderr | grep -q "127.0.0.1:$broker_port"
    start_broker
    arrived
}
check over-a-kill-of-the-broker waits_and_goes_on
finish
