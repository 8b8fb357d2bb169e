//! What the two servers of a slice say to each other.
//!
//! The one that serves the slice connects to its backup and says [`ReplicaHello`]. Challenge and proof
//! follow as for a client. The proof covers the whole hello, so that the proof of a client is none of a
//! server. Behind [`ReplicaWelcome`] come batches of notes, each of which is answered.

use crate::wire::codec::{Input, Malformed, Wire, wire_numbers, wire_struct};
use crate::wire::head::{Kind, expect_kind};
use crate::wire::hello::{Auth, HandshakeError, REFUSED, handshake_messages};

wire_struct! {
    /// The first message of a server that serves a slice to the other server of that slice.
    ReplicaHello {
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
        /// The name of the slice's export.
        slice: String,
        /// Version of the software, for people.
        software: String,
    }
}

wire_struct! {
    /// Batches are taken from here on.
    ReplicaWelcome {
        /// Bytes that a batch may have at most.
        batch_max_bytes: u32,
    }
}

handshake_messages!(ReplicaHello = 5, ReplicaWelcome = 6);

const REPLICA_HELLO: u8 = 5;

impl ReplicaHello {
    /// The oldest and the newest version that its sender speaks: what every version of the protocol can
    /// read of it. Errors: it is no such hello.
    pub fn versions(head: &[u8]) -> Result<(u16, u16), Malformed> {
        let mut input = Input(head);
        match (input.get::<Kind>()?, input.get::<u8>()?) {
            (Kind::Handshake, REPLICA_HELLO) => input.get(),
            _ => Err(Malformed("not the hello of a server")),
        }
    }
}

wire_struct! {
    /// In front of a batch of notes, which is the data of its frame.
    BatchHead {
        /// Of the primary that sends it.
        epoch: u64,
        /// Of the batch in this epoch, counted up.
        number: u64,
    }
}

impl BatchHead {
    /// Appends kind and head.
    pub fn put_message(&self, out: &mut Vec<u8>) {
        Kind::Batch.put(out);
        self.put(out);
    }

    /// Takes both off again.
    pub fn get_message(head: &[u8]) -> Result<BatchHead, Malformed> {
        let mut input = Input(head);
        expect_kind(&mut input, Kind::Batch)?;
        input.get() // what is behind it is of a later version
    }
}

/// What became of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchOutcome {
    /// The backup has it.
    Taken,
    /// The sender is the primary no more.
    Deposed,
    /// Notes before it are missing.
    Incomplete,
    /// The batch was not understood.
    Malformed,
    /// The batch could not be kept.
    Unkept,
}

wire_numbers!(BatchOutcome {
    BatchOutcome::Taken = 0,
    BatchOutcome::Deposed = 1,
    BatchOutcome::Incomplete = 2,
    BatchOutcome::Malformed = 3,
    BatchOutcome::Unkept = 4,
});

wire_struct! {
    /// The answer to a batch.
    BatchReply {
        /// As in the batch's head.
        epoch: u64,
        /// As in the batch's head.
        number: u64,
        /// What became of it.
        outcome: BatchOutcome,
        /// Why, if it is [`BatchOutcome::Unkept`]: an error number.
        errno: u16,
    }
}

impl BatchReply {
    /// Appends kind and reply.
    pub fn put_message(&self, out: &mut Vec<u8>) {
        Kind::BatchReply.put(out);
        self.put(out);
    }

    /// Takes both off again.
    pub fn get_message(head: &[u8]) -> Result<BatchReply, Malformed> {
        let mut input = Input(head);
        expect_kind(&mut input, Kind::BatchReply)?;
        input.get() // as above
    }
}
