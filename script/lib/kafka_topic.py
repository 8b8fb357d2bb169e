"""A topic of Kafka, as another program sees it.

kafka_topic.py make BROKER TOPIC             makes the topic, with three partitions
kafka_topic.py await BROKER TOPIC INDICES    waits until there is a message for each record of these numbers; checks
                                             that each is JSON, and that records of one file are in order
"""

import collections
import json
import sys
import time

from kafka import KafkaConsumer
from kafka.admin import KafkaAdminClient, NewTopic

WAIT_S = 60


def make(broker, topic):
    admin = KafkaAdminClient(bootstrap_servers=broker)
    admin.create_topics([NewTopic(topic, num_partitions=3, replication_factor=1)])


def await_records(broker, topic, indices):
    wanted = {int(index) for index in indices.split()}
    consumer = KafkaConsumer(topic, bootstrap_servers=broker, auto_offset_reset="earliest", consumer_timeout_ms=1000)
    got, of_file, deadline = set(), collections.defaultdict(list), time.monotonic() + WAIT_S
    while not wanted <= got and time.monotonic() < deadline:
        for message in consumer:
            record = json.loads(message.value)
            got.add(record["index"])
            of_file[message.key].append((message.partition, record["index"]))
    for key, places in of_file.items():
        if len({partition for partition, _ in places}) > 1:
            sys.exit(f"records of {key} lie in several partitions")
        first = list(dict.fromkeys(index for _, index in places))
        if first != sorted(first):
            sys.exit(f"records of {key} are out of order: {first}")
    if not wanted or not wanted <= got:
        sys.exit(f"{len(wanted - got)} of {len(wanted)} records have not arrived within {WAIT_S} s")
    print(f"{len(wanted)} records, {len(of_file)} keys")


if sys.argv[1] == "make":
    make(*sys.argv[2:4])
else:
    await_records(*sys.argv[2:5])
