//! A connection to one broker.

use std::io::{self, Read, Write};
use std::net::TcpStream;

use super::super::PATIENCE;
use super::super::syslog::first_of;
use super::protocol::{Decoder, Encoder, ErrorCode};

/// Longest answer that is read: that about a topic of thousands of partitions has less.
const ANSWER_MAX_BYTES: usize = 4 << 20;
const CLIENT_NAME: &str = "dray";

/// What a broker can be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiKey {
    Produce = 0,
    Metadata = 3,
    ApiVersions = 18,
}

/// Version 3 is the oldest one that has record batches of version 2. From version 9 on the encoding is another
/// one, and says nothing that is of use here.
const PRODUCE_MIN: i16 = 3;
const PRODUCE_MAX: i16 = 8;
/// The oldest one by which no topic is made that is not there.
const METADATA: i16 = 4;

pub struct Broker {
    stream: TcpStream,
    /// For people.
    place: String,
    sent: i32,
    received: i32,
    /// Of `Produce`.
    pub produce_version: i16,
}

impl Broker {
    /// Connects, and settles versions. Errors: nobody answers there, or nobody who speaks Kafka.
    pub fn connect(place: &str) -> io::Result<Broker> {
        let at = |error| at_place(place, &error);
        let address = first_of(place).map_err(at)?;
        let stream = TcpStream::connect_timeout(&address, PATIENCE).map_err(at)?;
        // A broker may itself wait for its replicas for PATIENCE.
        stream.set_read_timeout(Some(2 * PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        stream.set_nodelay(true)?;
        let place = place.to_owned();
        let mut broker =
            Broker { stream, place, sent: 0, received: 0, produce_version: PRODUCE_MIN };
        broker.agree().map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => io::Error::other(format!(
                "{} ends the connection at once: is it a listener of Kafka without TLS and SASL?",
                broker.place
            )),
            _ => at_place(&broker.place, &error),
        })?;
        Ok(broker)
    }

    fn agree(&mut self) -> io::Result<()> {
        self.send(ApiKey::ApiVersions, 0, &[])?;
        let answer = self.receive()?;
        let mut answer = Decoder(&answer);
        let code = ErrorCode(answer.i16()?);
        let ranges = answer.each(|one| Ok((one.i16()?, one.i16()?, one.i16()?)))?;
        let offers = |key: ApiKey, version: i16| {
            let mut ranges = ranges.iter().filter(|(other, ..)| *other == key as i16);
            ranges.any(|(_, oldest, newest)| (*oldest..=*newest).contains(&version))
        };
        let newest = (PRODUCE_MIN..=PRODUCE_MAX).rev().find(|one| offers(ApiKey::Produce, *one));
        let newest =
            newest.filter(|_| code == ErrorCode::NONE && offers(ApiKey::Metadata, METADATA));
        self.produce_version = newest.ok_or_else(|| {
            io::Error::other(
                "its versions of Kafka's protocol are none of those that dray speaks (Produce 3 to 8, Metadata): take a newer broker",
            )
        })?;
        Ok(())
    }

    /// Asks for a topic. It is not made if it is not there.
    pub fn metadata(&mut self, topic: &str) -> io::Result<Vec<u8>> {
        let mut body = Encoder::default();
        body.i32(1);
        body.string(topic);
        body.i8(0); // allow_auto_topic_creation
        self.send(ApiKey::Metadata, METADATA, &body.0)?;
        self.receive()
    }

    /// Sends a question; its answer is received behind those to the ones before.
    pub fn send(&mut self, key: ApiKey, version: i16, body: &[u8]) -> io::Result<()> {
        let mut message = Encoder::default();
        message.i32(0);
        message.i16(key as i16);
        message.i16(version);
        message.i32(self.sent);
        message.string(CLIENT_NAME);
        message.0.extend_from_slice(body);
        let len = (message.0.len() - 4) as i32;
        message.0[..4].copy_from_slice(&len.to_be_bytes());
        self.sent = self.sent.wrapping_add(1);
        self.stream.write_all(&message.0)
    }

    /// The next answer. Errors: there is none in time, or it is too long, or one to another question.
    pub fn receive(&mut self) -> io::Result<Vec<u8>> {
        let strange = |what| io::Error::new(io::ErrorKind::InvalidData, what);
        let mut head = [0; 8];
        self.stream.read_exact(&mut head)?;
        let mut fields = Decoder(&head);
        let (len, number) = (fields.i32()?, fields.i32()?);
        let len = usize::try_from(len).ok().and_then(|len| len.checked_sub(4));
        let len = len.filter(|len| *len <= ANSWER_MAX_BYTES);
        let len = len.ok_or_else(|| strange("it does not speak Kafka"))?;
        if number != self.received {
            return Err(strange("an answer to another question"));
        }
        self.received = self.received.wrapping_add(1);
        let mut answer = vec![0; len];
        self.stream.read_exact(&mut answer)?;
        Ok(answer)
    }

    /// An error with the place.
    pub fn named(&self, error: &io::Error) -> io::Error {
        at_place(&self.place, error)
    }
}

fn at_place(place: &str, error: &io::Error) -> io::Error {
    let what = match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => "it does not answer".to_owned(),
        _ => error.to_string(),
    };
    io::Error::new(error.kind(), format!("{place}: {what}"))
}
