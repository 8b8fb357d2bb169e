//! A broker for tests: as much of Kafka as a producer needs, which checks all that it gets.

use std::collections::{BTreeMap, VecDeque};
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use super::batch::crc32c;
use super::protocol::{Decoder, Encoder};

pub const TOPIC: &str = "audit";

/// What the broker does with the next question to write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mishap {
    /// The broker takes the messages, and the connection breaks before the answer.
    AnswerLost,
    /// The broker refuses with this error.
    Refuses(i16),
}

/// What a test sets and sees.
#[derive(Debug, Default)]
pub struct BrokerState {
    /// By partition: keys and values.
    pub messages: Vec<Vec<(String, String)>>,
    pub mishaps: VecDeque<Mishap>,
    /// Longest batch that it takes, bytes; 0: any.
    pub batch_max_bytes: usize,
    pub batches: usize,
}

pub struct TestBroker {
    pub place: String,
    state: Arc<Mutex<BrokerState>>,
    has_ended: Arc<AtomicBool>,
}

impl TestBroker {
    /// Listens at `place`, a port of this machine.
    pub fn start(place: &str, partitions: usize) -> TestBroker {
        let listener = TcpListener::bind(place).unwrap();
        let place = listener.local_addr().unwrap().to_string();
        let messages = vec![Vec::new(); partitions];
        let state = Arc::new(Mutex::new(BrokerState { messages, ..BrokerState::default() }));
        let has_ended = Arc::new(AtomicBool::new(false));
        let broker = TestBroker { place, state: state.clone(), has_ended: has_ended.clone() };
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                if has_ended.load(Ordering::SeqCst) {
                    return;
                }
                let (state, stream) = (state.clone(), stream.unwrap());
                std::thread::spawn(move || serve(stream, &state).unwrap_err());
            }
        });
        broker
    }

    pub fn state(&self) -> MutexGuard<'_, BrokerState> {
        self.state.lock().unwrap()
    }

    pub fn address(&self) -> String {
        format!("kafka://{}/{TOPIC}", self.place)
    }

    /// The numbers of the records of each partition, in their order.
    pub fn indexes(&self) -> Vec<Vec<u64>> {
        let index = |(_, value): &(String, String)| {
            serde_json::from_str::<serde_json::Value>(value).unwrap()["index"].as_u64().unwrap()
        };
        self.state().messages.iter().map(|all| all.iter().map(index).collect()).collect()
    }
}

impl Drop for TestBroker {
    fn drop(&mut self) {
        self.has_ended.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(&self.place); // so that it looks
    }
}

/// Answers until the connection ends.
fn serve(
    mut stream: TcpStream,
    state: &Mutex<BrokerState>,
) -> io::Result<std::convert::Infallible> {
    let own = stream.local_addr()?;
    loop {
        let mut len = [0; 4];
        stream.read_exact(&mut len)?;
        let mut message = vec![0; i32::from_be_bytes(len) as usize];
        stream.read_exact(&mut message)?;
        let mut message = Decoder(&message);
        let (key, version, number) = (message.i16()?, message.i16()?, message.i32()?);
        assert_eq!(message.string()?, "dray");
        let mut answer = Encoder::default();
        answer.i32(0);
        answer.i32(number);
        match (key, version) {
            (18, 0) => put_versions(&mut answer),
            (3, 4) => {
                assert_eq!(message.each(Decoder::string)?, [TOPIC]);
                assert!(!message.bool()?, "it would make the topic");
                let partitions = state.lock().unwrap().messages.len();
                put_metadata(&mut answer, own.port(), partitions);
            }
            (0, 8) => {
                let mishap = state.lock().unwrap().mishaps.pop_front();
                produce(&mut message, &mut state.lock().unwrap(), &mut answer, mishap)?;
                if mishap == Some(Mishap::AnswerLost) {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
            }
            other => panic!("a question of another version: {other:?}"),
        }
        assert_eq!(message.0, b"", "there is more than the question");
        let len = (answer.0.len() - 4) as i32;
        answer.0[..4].copy_from_slice(&len.to_be_bytes());
        stream.write_all(&answer.0)?;
    }
}

fn put_versions(answer: &mut Encoder) {
    answer.i16(0);
    answer.i32(3);
    for (key, oldest, newest) in [(0, 3, 13), (3, 0, 13), (18, 0, 4)] {
        answer.i16(key);
        answer.i16(oldest);
        answer.i16(newest);
    }
}

fn put_metadata(answer: &mut Encoder, port: u16, partitions: usize) {
    answer.i32(0);
    answer.i32(1);
    answer.i32(7);
    answer.string("127.0.0.1");
    answer.i32(i32::from(port));
    answer.null_string();
    answer.string("cluster");
    answer.i32(7);
    answer.i32(1);
    answer.i16(if partitions == 0 { 3 } else { 0 });
    answer.string(TOPIC);
    answer.i8(0);
    answer.i32(partitions as i32);
    for number in (0..partitions as i32).rev() {
        answer.i16(0);
        answer.i32(number);
        answer.i32(7);
        for _ in 0..2 {
            answer.i32(1);
            answer.i32(7);
        }
    }
}

fn produce(
    message: &mut Decoder<'_>,
    state: &mut BrokerState,
    answer: &mut Encoder,
    mishap: Option<Mishap>,
) -> io::Result<()> {
    assert_eq!(message.string()?, "", "a transaction");
    assert_eq!((message.i16()?, message.i32()?), (-1, 10_000), "acks and time");
    assert_eq!((message.i32()?, message.string()?.as_str()), (1, TOPIC));
    let taken = message.each(|one| {
        let (partition, len) = (one.i32()?, one.i32()? as usize);
        let batch = one.take(len)?;
        let error = match mishap {
            Some(Mishap::Refuses(error)) => error,
            _ if state.batch_max_bytes > 0 && len > state.batch_max_bytes => 10,
            _ => {
                state.messages[partition as usize].extend(messages_in(batch)?);
                state.batches += 1;
                0
            }
        };
        Ok((partition, error))
    })?;
    answer.i32(1);
    answer.string(TOPIC);
    answer.i32(taken.len() as i32);
    for (partition, error) in taken {
        answer.i32(partition);
        answer.i16(error);
        (0..3).for_each(|_| answer.i64(0));
        answer.i32(0);
        answer.null_string();
    }
    answer.i32(0);
    Ok(())
}

/// Record batch, version 2.
fn messages_in(batch: &[u8]) -> io::Result<Vec<(String, String)>> {
    let mut batch = Decoder(batch);
    batch.i64()?;
    assert_eq!(batch.i32()? as usize, batch.0.len(), "the length of the batch");
    batch.i32()?;
    assert_eq!(batch.take(1)?, [2], "the version of the batch");
    assert_eq!(batch.i32()? as u32, crc32c(batch.0), "the checksum");
    let (attributes, last) = (batch.i16()?, batch.i32()?);
    let (first_ms, last_ms) = (batch.i64()?, batch.i64()?);
    assert!(attributes == 0 && first_ms <= last_ms);
    assert_eq!((batch.i64()?, batch.i16()?, batch.i32()?), (-1, -1, -1), "a producer");
    let count = batch.i32()?;
    assert_eq!(count, last + 1);
    let mut all = Vec::new();
    for number in 0..i64::from(count) {
        let len = varint(&mut batch)? as usize;
        let mut record = Decoder(batch.take(len)?);
        assert_eq!(record.take(1)?, [0]);
        assert!((0..=last_ms - first_ms).contains(&varint(&mut record)?));
        assert_eq!(varint(&mut record)?, number);
        let mut text = || {
            let len = varint(&mut record)? as usize;
            Ok::<_, io::Error>(String::from_utf8(record.take(len)?.to_vec()).unwrap())
        };
        all.push((text()?, text()?));
        assert_eq!((varint(&mut record)?, record.0), (0, &[][..]), "headers");
    }
    assert_eq!(batch.0, b"");
    Ok(all)
}

fn varint(input: &mut Decoder<'_>) -> io::Result<i64> {
    let (mut value, mut shift) = (0_u64, 0);
    loop {
        let byte = input.take(1)?[0];
        value |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte & 0x80 == 0 {
            return Ok((value >> 1) as i64 ^ -((value & 1) as i64));
        }
    }
}

/// The key of each message that is in some partition, and which one.
pub fn partitions_by_key(state: &BrokerState) -> BTreeMap<String, Vec<usize>> {
    let mut by_key: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    for (partition, all) in state.messages.iter().enumerate() {
        for (key, _) in all {
            let places = by_key.entry(key.clone()).or_default();
            if !places.contains(&partition) {
                places.push(partition);
            }
        }
    }
    by_key
}
