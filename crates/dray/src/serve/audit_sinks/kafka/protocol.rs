//! Numbers and texts of Kafka's protocol, and its errors (Kafka protocol guide, "Protocol Primitive Types").

use std::fmt;
use std::io;

/// Writes values, most significant byte first.
#[derive(Debug, Default)]
pub struct Encoder(pub Vec<u8>);

impl Encoder {
    pub fn i8(&mut self, value: i8) {
        self.0.push(value as u8);
    }

    pub fn i16(&mut self, value: i16) {
        self.0.extend_from_slice(&value.to_be_bytes());
    }

    pub fn i32(&mut self, value: i32) {
        self.0.extend_from_slice(&value.to_be_bytes());
    }

    pub fn i64(&mut self, value: i64) {
        self.0.extend_from_slice(&value.to_be_bytes());
    }

    /// At most 32,767 bytes: names of the configuration, which are checked there.
    pub fn string(&mut self, text: &str) {
        self.i16(text.len() as i16);
        self.0.extend_from_slice(text.as_bytes());
    }

    pub fn null_string(&mut self) {
        self.i16(-1);
    }

    pub fn bytes(&mut self, bytes: &[u8]) {
        self.i32(bytes.len() as i32);
        self.0.extend_from_slice(bytes);
    }

    /// Zigzag, then seven bits a byte, the lowest ones first.
    pub fn varint(&mut self, value: i64) {
        let mut rest = (value << 1 ^ value >> 63) as u64;
        while rest >= 0x80 {
            self.0.push(rest as u8 | 0x80);
            rest >>= 7;
        }
        self.0.push(rest as u8);
    }

    pub fn varint_bytes(&mut self, bytes: &[u8]) {
        self.varint(bytes.len() as i64);
        self.0.extend_from_slice(bytes);
    }
}

/// Reads values of a message from the network.
pub struct Decoder<'a>(pub &'a [u8]);

impl<'a> Decoder<'a> {
    /// Errors: there is less.
    pub fn take(&mut self, count: usize) -> io::Result<&'a [u8]> {
        let cut = || io::Error::new(io::ErrorKind::InvalidData, "a message of Kafka is cut short");
        let (taken, rest) = self.0.split_at_checked(count).ok_or_else(cut)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        bytes.copy_from_slice(self.take(N)?);
        Ok(bytes)
    }

    pub fn bool(&mut self) -> io::Result<bool> {
        Ok(self.array::<1>()? != [0])
    }

    pub fn i16(&mut self) -> io::Result<i16> {
        self.array().map(i16::from_be_bytes)
    }

    pub fn i32(&mut self) -> io::Result<i32> {
        self.array().map(i32::from_be_bytes)
    }

    pub fn i64(&mut self) -> io::Result<i64> {
        self.array().map(i64::from_be_bytes)
    }

    /// A text; none is an empty one.
    pub fn string(&mut self) -> io::Result<String> {
        let len = usize::try_from(self.i16()?).unwrap_or(0);
        Ok(String::from_utf8_lossy(self.take(len)?).into_owned())
    }

    /// Reads each element of an array; none has no elements.
    pub fn each<T>(
        &mut self,
        mut read: impl FnMut(&mut Self) -> io::Result<T>,
    ) -> io::Result<Vec<T>> {
        let count = self.i32()?;
        let mut all = Vec::new(); // a count may say anything
        for _ in 0..count {
            all.push(read(self)?);
        }
        Ok(all)
    }
}

/// What a broker answers instead (Kafka protocol guide, "Error Codes"); 0 is no error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ErrorCode(pub i16);

impl ErrorCode {
    pub const NONE: ErrorCode = ErrorCode(0);
    pub const UNKNOWN_TOPIC: ErrorCode = ErrorCode(3);
    pub const MESSAGE_TOO_LARGE: ErrorCode = ErrorCode(10);
    pub const BATCH_TOO_LARGE: ErrorCode = ErrorCode(18);

    fn words(self) -> Option<&'static str> {
        Some(match self.0 {
            2 => "the batch was damaged on the way",
            3 => "there is no such topic",
            5 | 6 => "the leader of a partition changes",
            7 | 20 => "too few replicas had the messages in time",
            8 | 13 => "a broker is away",
            10 | 18 => "a batch is too large",
            17 => "that is no name of a topic",
            19 => "too few replicas are in step (`min.insync.replicas`)",
            29 => "this client may not write to the topic: allow it with an access control list",
            31 => "this client may do nothing there: allow it with an access control list",
            35 => "it does not know the version",
            56 => "its disk fails",
            87 => "the topic refuses the records",
            _ => return None,
        })
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.words() {
            Some(words) => write!(f, "{words} (error {} of Kafka)", self.0),
            None => write!(f, "error {} of Kafka", self.0),
        }
    }
}
