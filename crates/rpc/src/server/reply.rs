//! Answers to calls. They are typed until they are sent, or remembered for their slot.

use std::cell::Cell;
use std::io;

use dray_core::{Attr, Buf, Errno, Error, FileId, Ttl};
use dray_fabric::{Charge, Connection};

use crate::wire::{ReplyHead, Results, Stamp, Ticket};

/// An answer, complete but for its tag.
#[derive(Debug)]
pub(crate) struct Reply {
    head: ReplyHead,
    results: Results,
    data: Option<Buf>,
}

thread_local! {
    /// The memory of the last encoded reply, for the next.
    static SPARE: Cell<Vec<u8>> = const { Cell::new(Vec::new()) };
}

/// Memory of an encoded reply that is kept for the next, bytes. Nearly all are shorter.
const SPARE_MAX_BYTES: usize = 512;

impl Reply {
    pub(super) fn success(results: impl Into<Results>) -> Reply {
        Reply { head: ReplyHead::success(0), results: results.into(), data: None }
    }

    pub(super) fn with_data(data: Buf) -> Reply {
        Reply { data: Some(data), ..Reply::success(()) }
    }

    /// Adds data, which go behind the results.
    pub(super) fn add_data(&mut self, data: Buf) {
        self.data = Some(data);
    }

    pub(super) fn failure(error: &Error) -> Reply {
        Reply { head: ReplyHead::failure(0, error), ..Reply::success(()) }
    }

    /// The reply to a call that the protocol does not allow.
    pub(super) fn malformed(why: &'static str) -> Reply {
        Reply::failure(&Error::new(Errno::EPROTO).because(why))
    }

    pub(super) fn unknown_handle() -> Reply {
        let head = ReplyHead::failure(0, &Error::retry(Errno::EBADF));
        Reply { head: ReplyHead { unknown_handle: true, ..head }, ..Reply::success(()) }
    }

    /// A reply that was remembered ([`Reply::put`]). Damaged bytes, as a failing journal disk
    /// leaves them, give a reply of unknown outcome.
    pub(super) fn remembered(encoded: &[u8]) -> Reply {
        match ReplyHead::split(encoded) {
            Ok((head, results)) => {
                Reply { head, results: Results::Encoded(results.to_vec()), data: None }
            }
            Err(_) => Reply::failure(&Error::unknown(Errno::EIO)),
        }
    }

    /// The reply counts until it has been sent.
    pub(super) fn counted(self, charge: Charge) -> Reply {
        Reply { data: Some(charge.beside().freeze()), ..self }
    }

    /// The reply with the ticket that its client can show to a later server epoch.
    pub(super) fn with_ticket(mut self, ticket: Option<Ticket>) -> Reply {
        self.head.ticket = ticket;
        self
    }

    /// The reply to an opening, with `past` in its head.
    pub(super) fn with_times_past(mut self, past: Option<bool>) -> Reply {
        self.head.times_past = past;
        self
    }

    /// Adds a stamp.
    pub(super) fn stamp(&mut self, stamp: Stamp) {
        self.head.stamp = Some(stamp);
    }

    /// The stamp of the reply.
    pub(super) fn stamped(&self) -> Option<&Stamp> {
        self.head.stamp.as_ref()
    }

    /// The error number of a failure.
    pub(super) fn errno(&self) -> Option<Errno> {
        (!self.is_success()).then(|| Errno::new(i32::from(self.head.errno)))
    }

    /// What a success answers.
    pub(super) fn results_mut(&mut self) -> &mut Results {
        &mut self.results
    }

    /// Says how long a name that was not found is absent, if the file system has not said it.
    pub(super) fn absent_for(&mut self, ttl: Option<Ttl>) {
        self.head.absence = self.head.absence.or(ttl);
    }

    /// Takes out how long a name that was not found is absent.
    pub(super) fn take_absence(&mut self) -> Option<Ttl> {
        self.head.absence.take()
    }

    /// The attributes that its results have.
    pub(super) fn attr_mut(&mut self) -> Option<&mut Attr> {
        match &mut self.results {
            Results::Entry(entry) | Results::FlaggedEntry((entry, _)) => Some(&mut entry.attr),
            Results::Attr(attr) => Some(attr),
            Results::Opened(at_open) => at_open.as_mut().map(|at_open| &mut at_open.attr),
            Results::Encoded(_)
            | Results::Done(())
            | Results::File(_)
            | Results::Statfs(_)
            | Results::Bytes(_)
            | Results::Number(_)
            | Results::Offset(_)
            | Results::Lock(_)
            | Results::Xflags(_) => None,
        }
    }

    /// Adds the attributes of files that the call has changed. A reply that is remembered has none: they
    /// may have changed when it is sent again.
    pub(super) fn add_changed_files(&mut self, files: Vec<(FileId, Attr)>) {
        self.head.changed_files = files;
    }

    /// The files that the call has changed beside that of its results.
    pub(super) fn changed_files_mut(&mut self) -> &mut Vec<(FileId, Attr)> {
        &mut self.head.changed_files
    }

    /// Says the number of a write lease that is given with it.
    pub(super) fn lease_writing(&mut self, number: Option<u64>) {
        self.head.write_lease = number;
    }

    /// Whether the call was carried out.
    pub(super) fn is_success(&self) -> bool {
        self.head.errno == 0
    }

    /// The error that it carries.
    pub(super) fn error(&self) -> Option<Error> {
        self.head.error()
    }

    pub(super) fn ticket(&self) -> Option<Ticket> {
        self.head.ticket
    }

    /// The file that its results begin with, of a success.
    pub(super) fn file(&self) -> Option<FileId> {
        if self.is_success() { self.results.file() } else { None }
    }

    /// Appends it as it is remembered: without data, which no change answers, and with no tag.
    pub(super) fn put(&self, out: &mut Vec<u8>) {
        self.head.put_message(out);
        self.results.put(out);
    }

    /// Sends it as the answer to the call of this tag; `settled` as in [`ReplyHead`]. Its data go with
    /// it. Errors: those of the connection; `EMSGSIZE`, it is longer than a message.
    pub(super) fn send(
        &mut self,
        connection: &dyn Connection,
        tag: u32,
        settled: bool,
    ) -> io::Result<()> {
        (self.head.tag, self.head.settled) = (tag, settled);
        let mut message = SPARE.take();
        message.clear();
        self.put(&mut message);
        let sent = connection.send(&message, self.data.take());
        if message.capacity() <= SPARE_MAX_BYTES {
            let _ = SPARE.try_with(|spare| spare.set(message)); // the thread may be ending
        }
        sent
    }

    /// Takes the ticket out, for a client that does not know tickets.
    pub(super) fn take_ticket(&mut self) {
        self.head.ticket = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::{Attr, Entry, Fate};

    #[test]
    fn what_was_remembered_is_the_same_but_for_its_tag() {
        let id = FileId { ino: 27, generation: 3 };
        let entry = Entry { id, attr: Attr::default() };
        let mut reply = Reply::success((entry, true)).with_ticket(Some(Ticket([7; 16])));
        reply.stamp(Stamp { number: 5, at: Stamp::NOWHERE });
        let mut encoded = Vec::new();
        reply.put(&mut encoded);
        let again = Reply::remembered(&encoded);
        assert_eq!((&again.head, again.file()), (&reply.head, Some(id)));
        let mut once_more = Vec::new();
        again.put(&mut once_more);
        assert_eq!(once_more, encoded);
    }

    #[test]
    fn what_is_remembered_and_is_no_reply_is_of_unknown_fate() {
        for bytes in [&b""[..], b"x", &[2, 0, 4, 0, 0, 0, 0, 0, 0, 0]] {
            let error = Reply::remembered(bytes).error().unwrap();
            assert_eq!((error.errno(), error.fate()), (Errno::EIO, Fate::Unknown));
        }
    }
}
