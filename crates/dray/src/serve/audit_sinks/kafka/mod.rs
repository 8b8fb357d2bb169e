//! Records to a topic of Apache Kafka, as JSON.
//!
//! The key of a message is the id of the file, so that the records of one file are in one partition, in their
//! order. A partition has a message when all of its replicas in step have it (`acks=all`). Messages that a
//! broker may have had are sent again after a failure: each arrives at least once.
//!
//! The client writes and does nothing else, on the thread of the sink (ADR 0047 has why it is our own).

mod batch;
mod broker;
mod client;
mod protocol;
#[cfg(test)]
pub(super) mod test_broker;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::str::FromStr;
use std::time::Duration;

use dray_layers::audit::AuditRecord;
use dray_rt::Instant;

use super::Sink;
use crate::audit::render::json_of;
use batch::{Message, partition_of};
use client::{Delivery, TopicClient};

/// Longest batch for one partition. A broker takes 1 MiB if it is not configured otherwise (`message.max.bytes`).
const BATCH_MAX_BYTES: usize = 512 << 10;
/// Brokers close connections that rest for 10 minutes (`connections.max.idle.ms`).
const REST_MAX: Duration = Duration::from_secs(4 * 60);
/// Longest name of a topic (`org.apache.kafka.common.internals.Topic`).
const TOPIC_MAX_BYTES: usize = 249;

/// `kafka://HOST:PORT[,HOST:PORT]/TOPIC`: brokers to begin with, and the topic.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KafkaAddress {
    brokers: Vec<String>,
    topic: String,
}

impl FromStr for KafkaAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<KafkaAddress, String> {
        let wrong = || format!("a Kafka is kafka://HOST:PORT[,HOST:PORT]/TOPIC, not `{text}`");
        let rest = text.strip_prefix("kafka://").ok_or_else(wrong)?;
        let (brokers, topic) = rest.split_once('/').ok_or_else(wrong)?;
        let is_place = |broker: &str| {
            let parts = broker.rsplit_once(':');
            parts.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
        };
        if !brokers.split(',').all(is_place) {
            return Err(wrong());
        }
        let is_sound =
            |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
        if topic.is_empty() || topic.len() > TOPIC_MAX_BYTES || !topic.bytes().all(is_sound) {
            return Err(format!(
                "a topic of Kafka has letters, digits, `.`, `_` and `-`, {TOPIC_MAX_BYTES} at most, not \
                 `{topic}`"
            ));
        }
        let brokers = brokers.split(',').map(str::to_owned).collect();
        Ok(KafkaAddress { brokers, topic: topic.to_owned() })
    }
}

/// Messages by partition, in their order.
type Waiting = BTreeMap<i32, VecDeque<Message>>;

pub struct KafkaSink {
    address: KafkaAddress,
    client: TopicClient,
    used: Instant,
    export: String,
}

impl KafkaSink {
    /// Finds the topic and the leaders of its partitions. Errors: no broker answers, or there is no such
    /// topic.
    pub fn connect(address: &KafkaAddress, export: String) -> io::Result<KafkaSink> {
        let client = TopicClient::connect(&address.brokers, &address.topic)?;
        Ok(KafkaSink { address: address.clone(), client, used: dray_rt::now(), export })
    }

    fn message(&self, record: &AuditRecord) -> Message {
        let id = record.id.or(record.parent);
        Message {
            // Records of the log itself are about no file.
            key: id.map_or_else(|| self.export.clone(), |id| id.to_string()).into_bytes(),
            value: json_of(record, Some(("export", &self.export))).to_string().into_bytes(),
            time_ms: i64::try_from(record.time_us / 1000).unwrap_or(i64::MAX),
            index: record.index,
        }
    }

    /// Sends the first messages of each partition, and puts back what was too much at once.
    fn send_some(&mut self, waiting: &mut Waiting, largest: &mut usize) -> io::Result<()> {
        let batches: Vec<(i32, Vec<Message>)> = waiting
            .iter_mut()
            .map(|(partition, queue)| (*partition, first_of(queue, *largest)))
            .collect();
        let deliveries = self.client.produce(&batches)?;
        for ((partition, batch), delivery) in batches.into_iter().zip(deliveries) {
            match delivery {
                Delivery::Taken => {}
                Delivery::TooLarge if batch.len() > 1 => {
                    *largest = batch.iter().map(Message::size_bytes).sum::<usize>() / 2;
                    let queue = waiting.entry(partition).or_default();
                    batch.into_iter().rev().for_each(|message| queue.push_front(message));
                }
                Delivery::TooLarge => return Err(too_large(&self.address.topic, &batch)),
            }
        }
        waiting.retain(|_, queue| !queue.is_empty());
        Ok(())
    }
}

/// So many messages of a queue as fit into one batch; one at least.
fn first_of(queue: &mut VecDeque<Message>, largest_bytes: usize) -> Vec<Message> {
    let (mut batch, mut bytes) = (Vec::new(), 0);
    while let Some(next) = queue.front() {
        bytes += next.size_bytes();
        if !batch.is_empty() && bytes > largest_bytes {
            break;
        }
        batch.extend(queue.pop_front());
    }
    batch
}

fn too_large(topic: &str, batch: &[Message]) -> io::Error {
    let (index, bytes) = batch.first().map_or((0, 0), |one| (one.index, one.size_bytes()));
    io::Error::other(format!(
        "record {index} has {bytes} bytes, more than the brokers take: raise `max.message.bytes` of the topic \
         `{topic}`"
    ))
}

impl Sink for KafkaSink {
    fn send(&mut self, records: &[AuditRecord]) -> io::Result<()> {
        if self.used.elapsed() > REST_MAX {
            self.client = TopicClient::connect(&self.address.brokers, &self.address.topic)?;
        }
        let mut waiting = Waiting::new();
        for record in records {
            let message = self.message(record);
            let partition = partition_of(&message.key, self.client.partitions());
            waiting.entry(partition).or_default().push_back(message);
        }
        let mut largest_bytes = BATCH_MAX_BYTES;
        while !waiting.is_empty() {
            self.send_some(&mut waiting, &mut largest_bytes)?;
        }
        self.used = dray_rt::now();
        Ok(())
    }
}
