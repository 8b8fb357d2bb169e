//! The brokers that lead the partitions of one topic.

use std::collections::BTreeMap;
use std::io;

use super::super::PATIENCE;
use super::batch::{self, Message};
use super::broker::{ApiKey, Broker};
use super::protocol::{Decoder, Encoder, ErrorCode};

/// All replicas that are in step have the messages before the answer.
const ACKS_ALL: i16 = -1;

/// What became of the batch for a partition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// The partition has it.
    Taken,
    /// The batch has more bytes than the topic takes at once. The partition has nothing of that batch.
    TooLarge,
}

pub struct TopicClient {
    topic: String,
    /// By partition: the broker that leads it.
    leaders: Vec<i32>,
    brokers: BTreeMap<i32, Broker>,
}

/// What the brokers say of the topic.
struct TopicLayout {
    /// By number of the broker: where it is.
    places: BTreeMap<i32, String>,
    leaders: Vec<i32>,
}

impl TopicClient {
    /// Asks the first of `brokers` that answers, and connects to all leaders. Errors: none answers, or the
    /// topic is not there.
    pub fn connect(brokers: &[String], topic: &str) -> io::Result<TopicClient> {
        let mut failures = Vec::new();
        let ask = |broker: &String| {
            let mut broker = Broker::connect(broker)?;
            broker.metadata(topic).map_err(|error| broker.named(&error))
        };
        let answer = brokers
            .iter()
            .find_map(|broker| ask(broker).map_err(|error| failures.push(error.to_string())).ok());
        let answer = answer.ok_or_else(|| {
            io::Error::other(format!("no broker answers: {}", failures.join("; ")))
        })?;
        let TopicLayout { places, leaders } = layout_of(&answer, topic)?;
        let mut open = BTreeMap::new();
        for leader in &leaders {
            let lost = || io::Error::other("the brokers name a leader that is none of them");
            if !open.contains_key(leader) {
                open.insert(*leader, Broker::connect(places.get(leader).ok_or_else(lost)?)?);
            }
        }
        Ok(TopicClient { topic: topic.to_owned(), leaders, brokers: open })
    }

    /// One at least.
    pub fn partitions(&self) -> i32 {
        self.leaders.len() as i32
    }

    /// Has the partitions take these batches, each of another one. What became of each, in their order. Errors:
    /// some have not been taken, or it is not known.
    pub fn produce(&mut self, batches: &[(i32, Vec<Message>)]) -> io::Result<Vec<Delivery>> {
        let mut by_leader: BTreeMap<i32, Vec<(i32, &[Message])>> = BTreeMap::new();
        for (partition, batch) in batches {
            let leader = usize::try_from(*partition).ok().and_then(|at| self.leaders.get(at));
            let leader = *leader.ok_or(io::ErrorKind::NotFound)?;
            by_leader.entry(leader).or_default().push((*partition, batch));
        }
        // All brokers work at the same time.
        for (leader, batches) in &by_leader {
            let body = produce_body(&self.topic, batches);
            let broker = self.brokers.get_mut(leader).ok_or(io::ErrorKind::NotFound)?;
            let sent = broker.send(ApiKey::Produce, broker.produce_version, &body);
            sent.map_err(|error| broker.named(&error))?;
        }
        let mut delivered = BTreeMap::new();
        let mut failure = None;
        for leader in by_leader.keys() {
            let broker = self.brokers.get_mut(leader).ok_or(io::ErrorKind::NotFound)?;
            let answer = broker.receive().map_err(|error| broker.named(&error))?;
            for (partition, code, words) in answers_in(&answer, broker.produce_version)? {
                match code {
                    ErrorCode::NONE => delivered.insert(partition, Delivery::Taken),
                    ErrorCode::MESSAGE_TOO_LARGE | ErrorCode::BATCH_TOO_LARGE => {
                        delivered.insert(partition, Delivery::TooLarge)
                    }
                    code => {
                        failure = Some(refused(&self.topic, partition, code, &words));
                        None
                    }
                };
            }
        }
        let of = |partition: &i32| delivered.get(partition).copied();
        let all: Option<Vec<Delivery>> =
            batches.iter().map(|(partition, _)| of(partition)).collect();
        let missing = || io::Error::other("a broker has not answered for a partition");
        all.ok_or_else(|| failure.unwrap_or_else(missing))
    }
}

fn refused(topic: &str, partition: i32, code: ErrorCode, words: &str) -> io::Error {
    let more = if words.is_empty() { String::new() } else { format!(": {words}") };
    io::Error::other(format!(
        "partition {partition} of topic `{topic}` takes nothing: {code}{more}"
    ))
}

/// Metadata response, version 4.
fn layout_of(answer: &[u8], wanted: &str) -> io::Result<TopicLayout> {
    let mut answer = Decoder(answer);
    answer.i32()?; // throttle time
    let brokers = answer.each(|one| {
        let (number, host, port) = (one.i32()?, one.string()?, one.i32()?);
        one.string()?; // rack
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Ok((number, format!("{host}:{port}")))
    })?;
    answer.string()?; // cluster
    answer.i32()?; // controller
    let topics = answer.each(|one| {
        let (code, name) = (ErrorCode(one.i16()?), one.string()?);
        one.bool()?; // is it internal
        Ok((code, name, one.each(partition_in)?))
    })?;
    let found = topics.into_iter().find(|(_, name, _)| name == wanted);
    let (code, _, mut partitions) =
        found.unwrap_or((ErrorCode::UNKNOWN_TOPIC, String::new(), Vec::new()));
    match code {
        ErrorCode::NONE => {}
        ErrorCode::UNKNOWN_TOPIC => {
            return Err(io::Error::other(format!(
                "the brokers have no topic `{wanted}`: create it there"
            )));
        }
        code => return Err(io::Error::other(format!("topic `{wanted}`: {code}"))),
    }
    partitions.sort_unstable();
    let is_whole = partitions.iter().enumerate().all(|(at, (number, _))| *number == at as i32);
    if partitions.is_empty() || !is_whole {
        return Err(io::Error::other(format!(
            "the brokers do not know all partitions of topic `{wanted}`"
        )));
    }
    if let Some((number, _)) = partitions.iter().find(|(_, leader)| *leader < 0) {
        return Err(io::Error::other(format!(
            "partition {number} of topic `{wanted}` has no leader"
        )));
    }
    let leaders = partitions.into_iter().map(|(_, leader)| leader).collect();
    Ok(TopicLayout { places: brokers.into_iter().collect(), leaders })
}

/// The number of a partition, and its leader; -1: there is none.
fn partition_in(one: &mut Decoder<'_>) -> io::Result<(i32, i32)> {
    one.i16()?; // a replica that is away is an error here, too
    let (number, leader) = (one.i32()?, one.i32()?);
    one.each(Decoder::i32)?; // replicas
    one.each(Decoder::i32)?; // those in step
    Ok((number, leader))
}

/// Produce request, versions 3 to 8.
fn produce_body(topic: &str, batches: &[(i32, &[Message])]) -> Vec<u8> {
    let mut body = Encoder::default();
    body.null_string(); // no transaction
    body.i16(ACKS_ALL);
    body.i32(PATIENCE.as_millis() as i32);
    body.i32(1);
    body.string(topic);
    body.i32(batches.len() as i32);
    for (partition, messages) in batches {
        body.i32(*partition);
        body.bytes(&batch::encode(messages));
    }
    body.0
}

/// Produce response, versions 3 to 8: partitions, and what became of each, with words of the broker.
fn answers_in(answer: &[u8], version: i16) -> io::Result<Vec<(i32, ErrorCode, String)>> {
    let topics = Decoder(answer).each(|topic| {
        topic.string()?;
        topic.each(|one| {
            let (partition, code) = (one.i32()?, ErrorCode(one.i16()?));
            one.i64()?; // offset of the first message
            one.i64()?; // time that it was given
            if version >= 5 {
                one.i64()?; // offset of the oldest message
            }
            let mut words = String::new();
            if version >= 8 {
                one.each(|record| {
                    record.i32()?;
                    record.string()
                })?;
                words = one.string()?;
            }
            Ok((partition, code, words))
        })
    })?;
    Ok(topics.into_iter().flatten().collect())
}

/// Reads answers that may be anything.
#[cfg(test)]
pub fn hostile(bytes: &[u8]) {
    assert!(layout_of(bytes, "audit").is_err());
    for version in 3..=8 {
        let _ = answers_in(bytes, version);
    }
}
