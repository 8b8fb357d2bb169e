//! The handshake: hello, challenge, proof, welcome (or refused).
//!
//! Both ends prove that they know the key when there is one. Each proof is over everything said so
//! far, both nonces included. So neither a recorded handshake nor a false server gets anywhere. The
//! server proves it first: what a client says before, in its hello, is no secret. Further methods
//! of authentication take further numbers in [`Auth`].
//!
//! A later version appends fields to these messages: bytes behind those known are skipped.
//! The first four bytes of a hello, the versions, stay what they are for ever.

use dray_core::{FsInfo, NodeId};

use crate::wire::codec::{AppendedField, Input, Malformed, Wire, wire_struct};
use crate::wire::head::Kind;

/// How the ends prove who they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auth {
    /// Not at all.
    None,
    /// By a shared key: see [`crate::auth`].
    Psk,
    /// A method of a later version.
    Other(u8),
}

impl<'a> Wire<'a> for Auth {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(match self {
            Auth::None => 0,
            Auth::Psk => 1,
            Auth::Other(number) => *number,
        });
    }
    fn get(input: &mut Input<'a>) -> Result<Auth, Malformed> {
        Ok(match input.get::<u8>()? {
            0 => Auth::None,
            1 => Auth::Psk,
            number => Auth::Other(number),
        })
    }
}

wire_struct! {
    /// The client's first message.
    Hello {
        /// Oldest version that it speaks.
        version_min: u16,
        /// Newest version that it speaks.
        version_max: u16,
        /// Optional features that it knows: [`crate::wire::FEATURES`].
        features: u64,
        /// The method that it will use.
        auth: Auth,
        /// Fresh random bytes.
        nonce: [u8; 32],
        /// The export that the client wants.
        export: String,
        /// The client's node, chosen at random by its mount.
        node: NodeId,
        /// Host name, for people; at most [`Hello::HOST_MAX_BYTES`].
        host: String,
        /// Version of the software, for people.
        software: String,
    }
}

wire_struct! {
    /// The server's answer.
    Challenge {
        /// Version that both will use.
        version: u16,
        /// Features that both will use.
        features: u64,
        /// Fresh random bytes.
        nonce: [u8; 32],
        /// The client's proof; zeros without authentication.
        proof: [u8; 32],
    }
}

wire_struct! {
    /// The client's proof, and what it wants to go on with. A server that has not proven
    /// itself does not get to see this.
    Proof {
        /// The proof of the key, see [`crate::auth`]; zeros without authentication.
        proof: [u8; 32],
        /// Session to go on with, 0 for a new one.
        session: u64,
        /// The proof of the secret that came with the session. The secret itself is not sent again.
        /// Zeros for a new session.
        session_proof: [u8; 32],
        /// Connection of this client that this one takes the place of, 0 for none. The bytes of
        /// that connection that the server has not read by now will never be read.
        replaces: u64;
        /// Fingerprint of the definition of the projection by which it places files; 0: it knows
        /// of none.
        appended definition: u64,
    }
}

impl Proof {
    /// The part of this message that the proofs cover beside the earlier messages.
    pub fn wish(&self) -> Vec<u8> {
        let mut wish = Vec::new();
        (self.session, self.replaces).put(&mut wish);
        self.definition.put_at_end(&mut wish);
        wish
    }
}

wire_struct! {
    /// The connection serves from here on.
    Welcome {
        /// The session, new or gone on with.
        session: u64,
        /// Going on with the session takes a proof of it.
        secret: [u8; 16],
        /// The session was known, and so is everything that it had open.
        resumed: bool,
        /// Number of this connection at the server.
        connection: u64,
        /// Changes whenever the server process starts.
        instance: u64,
        /// Changes whenever the server's machine starts: what was not synced may be lost.
        boot: u128,
        /// Calls that may be under way at once on this connection.
        calls_max: u32,
        /// Replay slots of the session.
        slots: u32,
        /// How long the session outlives its last connection, milliseconds.
        lease_ms: u32,
        /// The export.
        info: FsInfo;
        /// The term of leases, milliseconds. A client believes what is leased so long after it sent
        /// the last call that was answered. 0: nothing is leased.
        appended lease_term_ms: u32,
        /// Counted up when all leases of the session have ended. A client that knows another number
        /// has none any more.
        appended lease_epoch: u32,
    }
}

wire_struct! {
    /// The server will not serve. The connection ends.
    Refused {
        /// The errors are `EPROTONOSUPPORT`, `EKEYREJECTED`, `ENOENT` (no such export), `EACCES`,
        /// `EAGAIN` (too many clients), `ESHUTDOWN` (evicted: mount anew) and the like. With
        /// `EREMCHG` the client places by another definition than the server.
        errno: u16,
        /// Advice for people.
        message: String;
        /// With `EREMCHG`, the definition of the projection to place by, in its canonical form;
        /// empty: the export is no projection.
        appended definition: String,
    }
}

macro_rules! handshake_messages {
    ($($name:ident = $number:literal),*) => {$(
        impl $name {
            /// The whole message.
            pub fn message(&self) -> Vec<u8> {
                let mut out = Vec::new();
                Kind::Handshake.put(&mut out);
                out.push($number);
                self.put(&mut out);
                out
            }

            /// Reads the whole message. Where the server refused, that is the error.
            pub fn from_message(head: &[u8]) -> Result<$name, HandshakeError> {
                let mut input = Input(head);
                if input.get::<Kind>()? != Kind::Handshake {
                    return Err(Malformed("not a handshake").into());
                }
                match input.get::<u8>()? {
                    $number => Ok(input.get()?), // what is behind it is of a later version
                    REFUSED => Err(HandshakeError::Refused(input.get()?)),
                    _ => Err(Malformed("a handshake out of order").into()),
                }
            }
        }
    )*};
}

pub(super) use handshake_messages;

pub(super) const REFUSED: u8 = 0;
const HELLO: u8 = 1;

impl Hello {
    /// Longest host name.
    pub const HOST_MAX_BYTES: usize = 255;

    /// The oldest and the newest version that its sender speaks: what every version of the
    /// protocol can read of it.
    pub fn versions(head: &[u8]) -> Result<(u16, u16), Malformed> {
        let mut input = Input(head);
        if (input.get::<Kind>()?, input.get::<u8>()?) != (Kind::Handshake, HELLO) {
            return Err(Malformed("not a hello"));
        }
        input.get()
    }
}

impl Proof {
    /// In `replaces`: every connection of the session, whatever their numbers.
    pub const REPLACES_ALL: u64 = u64::MAX;
}

/// A handshake that came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    /// The other end does not speak our protocol.
    Malformed(Malformed),
    /// The other end refused, and said why.
    Refused(Refused),
}

impl From<Malformed> for HandshakeError {
    fn from(malformed: Malformed) -> HandshakeError {
        HandshakeError::Malformed(malformed)
    }
}

handshake_messages!(Hello = 1, Challenge = 2, Proof = 3, Welcome = 4);

/// As much of what a server says is passed on to people.
const SHOWN_MAX_CHARS: usize = 1000;

impl Refused {
    /// The advice as text and no more: a terminal or a log shall not obey it.
    pub fn shown(&self) -> String {
        let plain = |letter: char| if letter.is_control() { '?' } else { letter };
        self.message.chars().take(SHOWN_MAX_CHARS).map(plain).collect()
    }

    /// The message as [`Hello::from_message`] and the others recognise it.
    pub fn refusal(&self) -> Vec<u8> {
        let mut out = Vec::new();
        Kind::Handshake.put(&mut out);
        out.push(REFUSED);
        self.put(&mut out);
        out
    }
}
