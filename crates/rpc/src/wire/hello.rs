//! The handshake: hello, challenge, proof, welcome (or refused).
//!
//! Both ends prove that they know the key when there is one, each over the other's
//! nonce, so that neither a recorded handshake nor a false server gets anywhere. Further
//! methods of authentication take further numbers in [`Auth`].

use dray_core::{FsInfo, NodeId};

use crate::wire::codec::{Input, Malformed, Wire, wire_numbers, wire_struct};
use crate::wire::head::Kind;

/// How the ends prove who they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Auth {
    /// Not at all.
    None,
    /// By a shared key: HMAC-SHA-256 over both nonces.
    Psk,
}

wire_numbers!(Auth { Auth::None = 0, Auth::Psk = 1 });

wire_struct! {
    /// The client's first message.
    Hello {
        /// Oldest version that it speaks.
        version_min: u16,
        /// Newest version that it speaks.
        version_max: u16,
        /// Optional features that it knows; none are defined yet.
        features: u64,
        /// The method that it will use.
        auth: Auth,
        /// Fresh random bytes.
        nonce: [u8; 32],
        /// Which export it wants.
        export: String,
        /// The client's node, chosen at random by its mount.
        node: NodeId,
        /// Session to go on with, 0 for a new one.
        session: u64,
        /// The secret that came with the session, else zeros.
        secret: [u8; 16],
        /// Connection of this client that this one takes the place of, 0 for none. What
        /// it has not read of that one by now will never be read.
        replaces: u64,
        /// Host name, for people.
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
        /// Its proof; zeros without authentication.
        proof: [u8; 32],
    }
}

wire_struct! {
    /// The client's proof; zeros without authentication.
    Proof {
        /// See [`crate::auth`].
        proof: [u8; 32],
    }
}

wire_struct! {
    /// The connection serves from here on.
    Welcome {
        /// The session, new or gone on with.
        session: u64,
        /// To be shown when going on with the session.
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
        info: FsInfo,
    }
}

wire_struct! {
    /// The server will not serve. The connection ends.
    Refused {
        /// `EPROTONOSUPPORT`, `EKEYREJECTED`, `ENOENT` (no such export), `EACCES`, `ESTALE` (no
        /// such session) and the like.
        errno: u16,
        /// What to do about it, for people.
        message: String,
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
                    $number => Ok(Input::whole(input.0)?),
                    REFUSED => Err(HandshakeError::Refused(Input::whole(input.0)?)),
                    _ => Err(Malformed("a handshake out of order").into()),
                }
            }
        }
    )*};
}

const REFUSED: u8 = 0;

impl Hello {
    /// In `replaces`: every connection of the session, whatever their numbers.
    pub const REPLACES_ALL: u64 = u64::MAX;
}

/// A handshake that came to nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HandshakeError {
    /// The other end does not speak our protocol.
    Malformed(Malformed),
    /// It said why.
    Refused(Refused),
}

impl From<Malformed> for HandshakeError {
    fn from(malformed: Malformed) -> HandshakeError {
        HandshakeError::Malformed(malformed)
    }
}

handshake_messages!(Hello = 1, Challenge = 2, Proof = 3, Welcome = 4);

impl Refused {
    /// The message as [`Hello::from_message`] and the others recognise it.
    pub fn refusal(&self) -> Vec<u8> {
        let mut out = Vec::new();
        Kind::Handshake.put(&mut out);
        out.push(REFUSED);
        self.put(&mut out);
        out
    }
}
