//! What a command that reads the audit of an export says to the server, and what the server answers.
//!
//! The command says [`AuditHello`]. Challenge and proof follow as for a client. The proof covers the
//! whole hello, so that the proof of a client is none of a reader. Behind [`AuditWelcome`] the reader
//! asks one thing at a time. A server sends nothing that was not asked for, so a reader that is slow
//! takes no memory of it.
//!
//! Records travel as the data of a frame. What encodes them is no affair of this crate.

use crate::wire::codec::{Input, Malformed, Wire, wire_struct};
use crate::wire::head::{Kind, expect_kind};
use crate::wire::hello::{Auth, HandshakeError, REFUSED, handshake_messages};

/// Consumers in one answer, at most: as many as a log has.
const CONSUMERS_MAX: u32 = 256;

wire_struct! {
    /// The first message of a reader.
    AuditHello {
        /// Oldest version that it speaks.
        version_min: u16,
        /// Newest version that it speaks.
        version_max: u16,
        /// Optional features that it knows; there are none so far.
        features: u64,
        /// The method that it will use.
        auth: Auth,
        /// Fresh random bytes.
        nonce: [u8; 32],
        /// The export whose audit is read.
        export: String,
        /// Version of the software, for people.
        software: String,
    }
}

wire_struct! {
    /// Questions are answered from here on.
    AuditWelcome {
        /// Features that both use; there are none so far.
        features: u64,
    }
}

handshake_messages!(AuditHello = 7, AuditWelcome = 8);

const AUDIT_HELLO: u8 = 7;

impl AuditHello {
    /// The oldest and the newest version that its sender speaks: what every version of the protocol can
    /// read of it. Errors: it is no such hello.
    pub fn versions(head: &[u8]) -> Result<(u16, u16), Malformed> {
        let mut input = Input(head);
        match (input.get::<Kind>()?, input.get::<u8>()?) {
            (Kind::Handshake, AUDIT_HELLO) => input.get(),
            _ => Err(Malformed("not the hello of a reader of an audit")),
        }
    }
}

wire_struct! {
    /// Which records are wanted. What is none is not asked for.
    AuditWanted {
        /// Names of kinds with `+` between them; empty: all.
        kinds: String,
        /// This user's.
        uid: Option<u32>,
        /// This job's.
        job: Option<String>,
        /// At this path or beneath it.
        path: Option<Vec<u8>>,
        /// From this time on, microseconds since 1970.
        from_us: Option<u64>,
        /// Before this time.
        to_us: Option<u64>,
        /// Denied accesses only.
        denied: bool,
    }
}

wire_struct! {
    /// A consumer of the log.
    AuditConsumer {
        /// The name.
        name: String,
        /// The log of the bookmark; empty until it has read something.
        log: String,
        /// The number of the next record that it has not seen.
        bookmark: u64,
        /// Names of kinds with `+` between them; empty: all.
        kinds: String,
        /// This user's records only.
        uid: Option<u32>,
        /// This job's records only.
        job: Option<String>,
        /// Records at this path or beneath it only.
        path: Option<String>,
        /// When the bookmark moved last, microseconds since 1970.
        moved_us: u64,
        /// Without a move for so long it keeps no records, seconds.
        idle_max_s: Option<u64>,
        /// Why it does not get on, where the server passes records on to it; empty: it does.
        trouble: String,
        /// Since when it does not, microseconds since 1970.
        trouble_us: u64,
    }
}

wire_struct! {
    /// What there is of a log.
    AuditSummary {
        /// Which log it is; none: it is empty.
        log: Option<u128>,
        /// The segments of the log.
        segments: u64,
        /// Bytes of them.
        bytes: u64,
        /// The number of the oldest record.
        first_index: u64,
        /// The number that the next record will have.
        next_index: u64,
        /// The consumers, by name; 256 at most.
        consumers: Vec<AuditConsumer>,
    }
}

impl<'a> Wire<'a> for Vec<AuditConsumer> {
    fn put(&self, out: &mut Vec<u8>) {
        (self.len() as u32).put(out);
        self.iter().for_each(|one| one.put(out));
    }
    fn get(input: &mut Input<'a>) -> Result<Self, Malformed> {
        let count = input.get::<u32>()?;
        if count > CONSUMERS_MAX {
            return Err(Malformed("more consumers than a log has"));
        }
        (0..count).map(|_| input.get()).collect()
    }
}

/// What a reader asks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditCall {
    /// For records.
    Read {
        /// The number of the first one.
        from: u64,
        /// Which of them.
        wanted: AuditWanted,
        /// Where there are none, the server waits so long for some, milliseconds.
        wait_ms: u32,
    },
    /// What there is.
    Summary,
    /// To add a consumer, or to change what one wants. Its bookmark stays what it was.
    Register {
        /// The consumer. Its log and bookmark say nothing.
        consumer: AuditConsumer,
        /// A new one begins with the oldest record, not with the next one.
        oldest: bool,
    },
    /// To remove a consumer.
    Deregister {
        /// The name of the consumer.
        name: String,
    },
    /// To move a bookmark on.
    Advance {
        /// The consumer.
        name: String,
        /// The log that was read; none: nothing was read.
        log: Option<u128>,
        /// The next record that it has not seen; none: the next one of all.
        to: Option<u64>,
    },
}

impl<'a> Wire<'a> for AuditCall {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            AuditCall::Read { from, wanted, wait_ms } => {
                out.push(1);
                (*from, *wait_ms).put(out);
                wanted.put(out);
            }
            AuditCall::Summary => out.push(2),
            AuditCall::Register { consumer, oldest } => {
                out.push(3);
                consumer.put(out);
                oldest.put(out);
            }
            AuditCall::Deregister { name } => {
                out.push(4);
                name.put(out);
            }
            AuditCall::Advance { name, log, to } => {
                out.push(5);
                name.put(out);
                (*log, *to).put(out);
            }
        }
    }

    fn get(input: &mut Input<'a>) -> Result<AuditCall, Malformed> {
        Ok(match input.get::<u8>()? {
            1 => {
                let (from, wait_ms) = input.get()?;
                AuditCall::Read { from, wanted: input.get()?, wait_ms }
            }
            2 => AuditCall::Summary,
            3 => AuditCall::Register { consumer: input.get()?, oldest: input.get()? },
            4 => AuditCall::Deregister { name: input.get()? },
            5 => {
                let name = input.get()?;
                let (log, to) = input.get()?;
                AuditCall::Advance { name, log, to }
            }
            _ => return Err(Malformed("a question that is not known")),
        })
    }
}

impl AuditCall {
    /// Appends kind and question.
    pub fn put_message(&self, out: &mut Vec<u8>) {
        Kind::AuditCall.put(out);
        self.put(out);
    }

    /// Takes both off again.
    pub fn get_message(head: &[u8]) -> Result<AuditCall, Malformed> {
        let mut input = Input(head);
        expect_kind(&mut input, Kind::AuditCall)?;
        input.get() // what is behind it is of a later version
    }
}

wire_struct! {
    /// How far a log was read. The records are the data of the frame.
    AuditPart {
        /// The number of the next record.
        next_index: u64,
        /// The log that was read; none: it is empty.
        log: Option<u128>,
        /// There is more to be had at once.
        more: bool,
        /// All records of this server up to this time have been sent, microseconds since 1970 by the
        /// server's clock; 0: that is not known.
        complete_us: u64,
        /// Bytes of the log that were read since the connection began.
        read_bytes: u64,
    }
}

/// What a server answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AuditReply {
    /// The question cannot be answered.
    Failed {
        /// An error number.
        errno: u16,
        /// For people.
        message: String,
    },
    /// Records.
    Part(AuditPart),
    /// What there is.
    Summary(AuditSummary),
    /// What was asked for is done.
    Done {
        /// The consumer's bookmark now; 0 if it has been removed.
        bookmark: u64,
    },
}

impl<'a> Wire<'a> for AuditReply {
    fn put(&self, out: &mut Vec<u8>) {
        match self {
            AuditReply::Failed { errno, message } => {
                out.push(0);
                errno.put(out);
                message.put(out);
            }
            AuditReply::Part(part) => {
                out.push(1);
                part.put(out);
            }
            AuditReply::Summary(summary) => {
                out.push(2);
                summary.put(out);
            }
            AuditReply::Done { bookmark } => {
                out.push(3);
                bookmark.put(out);
            }
        }
    }

    fn get(input: &mut Input<'a>) -> Result<AuditReply, Malformed> {
        Ok(match input.get::<u8>()? {
            0 => AuditReply::Failed { errno: input.get()?, message: input.get()? },
            1 => AuditReply::Part(input.get()?),
            2 => AuditReply::Summary(input.get()?),
            3 => AuditReply::Done { bookmark: input.get()? },
            _ => return Err(Malformed("an answer that is not known")),
        })
    }
}

impl AuditReply {
    /// Appends kind and answer.
    pub fn put_message(&self, out: &mut Vec<u8>) {
        Kind::AuditReply.put(out);
        self.put(out);
    }

    /// Takes both off again.
    pub fn get_message(head: &[u8]) -> Result<AuditReply, Malformed> {
        let mut input = Input(head);
        expect_kind(&mut input, Kind::AuditReply)?;
        input.get() // as above
    }
}
