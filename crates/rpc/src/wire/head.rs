//! The beginning of every message after the handshake.

use dray_core::{Op, Pid, RequestId};

use crate::wire::codec::{Input, Malformed, Wire, wire_numbers, wire_struct};

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Asks for something; a reply with the same tag follows.
    Call = 1,
    /// Answers a call.
    Reply = 2,
    /// Says something; no answer follows.
    Notify = 3,
    /// Defines who an identity number stands for, on this connection.
    Identity = 4,
    /// A step of the handshake.
    Handshake = 5,
    /// Notes of a slice's journal, from its primary to its backup.
    Batch = 6,
    /// Answers a batch.
    BatchReply = 7,
    /// Asks for the audit of an export.
    AuditCall = 8,
    /// Answers that.
    AuditReply = 9,
}

wire_numbers!(Kind {
    Kind::Call = 1,
    Kind::Reply = 2,
    Kind::Notify = 3,
    Kind::Identity = 4,
    Kind::Handshake = 5,
    Kind::Batch = 6,
    Kind::BatchReply = 7,
    Kind::AuditCall = 8,
    Kind::AuditReply = 9,
});

/// The kind of a message.
pub fn peek_kind(head: &[u8]) -> Result<Kind, Malformed> {
    Input(head).get()
}

/// The tag of a call or a reply, which stands in the same place in both.
pub fn peek_tag(head: &[u8]) -> Result<u32, Malformed> {
    let mut input = Input(head);
    input.take(4)?;
    input.get()
}

/// The tag of a call whose operation this version does not know. The call is answered `EOPNOTSUPP`,
/// so that a client of a later version goes on without the operation.
pub fn peek_unknown_op(head: &[u8]) -> Option<u32> {
    let known = match head {
        [kind, op, ..] if *kind == Kind::Call as u8 => (*op as usize) < Op::ALL.len(),
        _ => return None,
    };
    if known { None } else { peek_tag(head).ok() }
}

/// `slot` of a call that may be applied more than once without harm. A server refuses changes with
/// it.
pub const NO_SLOT: u32 = u32::MAX;

wire_struct! {
    /// In front of a call's arguments.
    CallHead {
        /// Which operation.
        op: Op,
        /// Bits of [`CallHead::ONE_WAY`], [`CallHead::RECOVERY`], [`CallHead::SPLIT_READ`],
        /// [`CallHead::REST`], [`CallHead::BACKGROUND`], [`CallHead::WANTS_ATTRIBUTES`],
        /// [`CallHead::WANTS_ABSENCES`] and later ones.
        flags: u16,
        /// Number of the call among those under way on its connection.
        tag: u32,
        /// Replay slot of the session, or [`NO_SLOT`].
        slot: u32,
        /// Number of the call in its slot, counted up.
        sequence: u32,
        /// The caller: a number defined before on this connection.
        identity: u32,
        /// The asking thread on its node.
        pid: Pid,
        /// Umask of the asking process.
        umask: u32,
        /// Number of the request on its node.
        request: RequestId,
    }
}

impl CallHead {
    /// The sender waits for no answer, and none comes; `tag` says nothing. Only a close may be a
    /// one-way call: it changes nothing when it comes again. The sender keeps it until an answer
    /// with [`ReplyHead::settled`](crate::wire::ReplyHead::settled).
    pub const ONE_WAY: u16 = 1;
    /// One-way calls that a client may have sent and not yet heard of, and a server have
    /// under way on one connection.
    pub const ONE_WAY_MAX: usize = 64;
    /// Part of a recovery: it does not wait for the end of it.
    pub const RECOVERY: u16 = 2;
    /// The read is one half of a split read; the other half comes on another connection. The answer
    /// is stamped with the version of the file that was read; not if it changed meanwhile.
    pub const SPLIT_READ: u16 = 4;
    /// With [`CallHead::SPLIT_READ`]: the second part, which is not counted as another read.
    pub const REST: u16 = 8;
    /// No process waits for the call: it yields to those of others where bandwidth is shared (ADR 0048).
    pub const BACKGROUND: u16 = 16;

    /// The sender wants the attributes of the open file that the call writes with the answer, if they can be
    /// leased: [`ReplyHead::changed_files`](crate::wire::ReplyHead).
    pub const WANTS_ATTRIBUTES: u16 = 32;

    /// The sender of a `readdir` with attributes wants to know which extended attributes the files do not have,
    /// too ([`AbsentXattrs`](crate::wire::AbsentXattrs)). A server of the version before does not say it.
    pub const WANTS_ABSENCES: u16 = 64;

    /// Where `identity` stands in a message: its number differs between connections, so
    /// a call that is sent again gets another.
    pub const IDENTITY_AT: usize = 16;

    /// Appends kind and head.
    pub fn put_message(&self, out: &mut Vec<u8>) {
        Kind::Call.put(out);
        self.put(out);
    }

    /// Takes both off again.
    pub fn get_message(input: &mut Input<'_>) -> Result<CallHead, Malformed> {
        expect_kind(input, Kind::Call)?;
        input.get()
    }
}

pub(super) fn expect_kind(input: &mut Input<'_>, kind: Kind) -> Result<(), Malformed> {
    if input.get::<Kind>()? == kind { Ok(()) } else { Err(Malformed("not the kind expected")) }
}

impl<'a> Wire<'a> for Op {
    fn put(&self, out: &mut Vec<u8>) {
        out.push(*self as u8);
    }
    fn get(input: &mut Input<'a>) -> Result<Op, Malformed> {
        let number = input.get::<u8>()? as usize;
        Op::ALL.get(number).copied().ok_or(Malformed("unknown operation"))
    }
}

wire_struct! {
    /// A message without an answer.
    NotifyHead {
        /// The kind of the notice: one of the constants below.
        what: u8,
        /// Room for flags; zero.
        flags: u16,
        /// Argument.
        tag: u32,
    }
}

impl NotifyHead {
    /// The caller of the call `tag` gave up; answer it soon.
    pub const CANCEL: u8 = 1;
    /// From the server: this session was ended by its administrator.
    pub const EVICTED: u8 = 2;
    /// From the client: it unmounts; give everything back now.
    pub const GOODBYE: u8 = 3;

    /// From the client: it has reclaimed all its locks.
    pub const RECLAIM_COMPLETE: u8 = 4;
    /// From the client: the replay slots with the numbers that follow have no change under way. The
    /// argument says how many follow. Changes in them that a server's death cut short are
    /// abandoned.
    pub const IDLE: u8 = 5;
    /// From the client: it has reopened its files, and has the answers that it waited for when the
    /// server returned.
    pub const RECOVERY_COMPLETE: u8 = 6;

    /// From the server: every change up to the stamp that follows the head, eight bytes, is
    /// on media. Behind that its [`Ticket`](crate::wire::Ticket).
    pub const STABLE: u8 = 7;

    /// From the server: to which batch jobs do these callers belong? Callers follow, as
    /// [`put_callers`](super::put_callers) writes them; the argument numbers the question.
    pub const JOB_QUERY: u8 = 8;
    /// From the client: the answer, [`put_jobs`](super::put_jobs), to the question of this number.
    pub const JOBS: u8 = 9;
    /// From the server: others changed these files, which the client has open; as many follow as
    /// the argument says ([`put_changed`](super::put_changed)).
    pub const CHANGED: u8 = 10;
    /// From the client: programs store into a shared mapping of a file; its id follows.
    pub const MAPPED: u8 = 11;
    /// A client releases files that an earlier process of it had open. The server closes the files
    /// with numbers in this range, from and to, and releases locks taken through them.
    pub const RELEASED: u8 = 12;
    /// From the server: leases are asked back. A [`RecallMessage`](super::RecallMessage) follows, with as many
    /// items as the argument says.
    pub const RECALL: u8 = 13;
    /// From the client: it has dropped all that the recall with the number that follows, eight
    /// bytes, asked back.
    pub const RECALLED: u8 = 14;
    /// From the client: is the server there? It answers with [`NotifyHead::PRESENT`]. That takes no tag, since
    /// all may be taken by calls that a file system does not answer.
    pub const PROBE: u8 = 15;
    /// From the server: the answer to [`NotifyHead::PROBE`].
    pub const PRESENT: u8 = 16;
    /// From the client: it has written what it had kept under write leases when the server returned.
    pub const WRITTEN_BACK: u8 = 17;
    /// From the server of a slice: a server of the projection is gone. The client asks all servers that it has
    /// sessions with whether they are there. Those that it waits for nothing from may be silent without its knowledge.
    pub const SERVER_GONE: u8 = 18;

    /// Appends kind and head.
    pub fn put_message(&self, out: &mut Vec<u8>) {
        Kind::Notify.put(out);
        self.put(out);
    }

    /// Takes both off again.
    pub fn get_message(input: &mut Input<'_>) -> Result<NotifyHead, Malformed> {
        expect_kind(input, Kind::Notify)?;
        input.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::ReplyHead;
    use dray_core::{Errno, Error};

    #[test]
    fn the_tag_stands_in_the_same_place_in_calls_and_replies() {
        let mut call = Vec::new();
        CallHead {
            op: Op::Read,
            flags: 0,
            tag: 77,
            slot: NO_SLOT,
            sequence: 0,
            identity: 1,
            pid: Pid(2),
            umask: 0o22,
            request: RequestId(3),
        }
        .put_message(&mut call);
        let mut reply = Vec::new();
        ReplyHead::failure(78, &Error::retry(Errno::EAGAIN)).put_message(&mut reply);
        assert_eq!((peek_tag(&call), peek_tag(&reply)), (Ok(77), Ok(78)));
        assert_eq!(call[CallHead::IDENTITY_AT..][..4], 1u32.to_le_bytes());
        assert_eq!((peek_kind(&call), peek_kind(&reply)), (Ok(Kind::Call), Ok(Kind::Reply)));
    }
}
