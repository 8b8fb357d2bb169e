//! The beginning of a reply.

use dray_core::{Attr, Errno, Error, Fate, FileId, Ttl};

use crate::wire::codec::{Input, Malformed, Wire, wire_numbers};
use crate::wire::head::{Kind, expect_kind};
use crate::wire::stamp::Stamp;
use crate::wire::ticket::Ticket;

wire_numbers!(Fate { Fate::Final = 0, Fate::Retry = 1, Fate::Unknown = 2 });

/// All of a reply but its results, which are there only if [`ReplyHead::errno`] is 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplyHead {
    /// The tag of the call that is answered.
    pub tag: u32,
    /// 0, or what went wrong.
    pub errno: u16,
    /// How to take a failure.
    pub fate: Fate,
    /// The server does not know the open file that the call named (it lost its state):
    /// open it again and repeat the call. It was not applied.
    pub unknown_handle: bool,
    /// Every one-way call that came on this connection before the call that is answered has
    /// been carried out.
    pub settled: bool,
    /// Whether the times of the file that was opened are past: see [`AtOpen::times_past`]. None
    /// where that is not known.
    ///
    /// [`AtOpen::times_past`]: dray_core::AtOpen::times_past
    pub times_past: Option<bool>,
    /// How long the name that a failed lookup looked for may be believed to be absent. None: the
    /// server does not say.
    pub absence: Option<Ttl>,
    /// Of a failure: see [`Error::unmet`].
    pub unmet: bool,
    /// When the change was made, or up to when changes are on media.
    pub stamp: Option<Stamp>,
    /// The ticket that the client can show to a later server process.
    pub ticket: Option<Ticket>,
    /// Files that the call has changed beside the one of its results, as they are behind the change. Their
    /// attributes are leased. At most [`ReplyHead::CHANGED_FILES_MAX`].
    pub changed_files: Vec<(FileId, Attr)>,
    /// The number of the write lease of the file that was opened. None: there is none.
    pub write_lease: Option<u64>,
}

// Bits of the flags. Stamp, ticket, absence, changed files and write lease stand between the flags' head and the
// results, in this order.
const UNKNOWN_HANDLE: u16 = 1;
const SETTLED: u16 = 2;
const STAMPED: u16 = 4;
const TICKET: u16 = 8;
const TIMES_PAST: u16 = 16;
const TIMES_YOUNG: u16 = 32;
const ABSENCE: u16 = 64;
const UNMET: u16 = 128;
const CHANGED_FILES: u16 = 256;
const WRITE_LEASE: u16 = 512;

impl ReplyHead {
    /// The most changed files of one answer: a rename has two directories.
    pub const CHANGED_FILES_MAX: usize = 2;

    /// The most that [`ReplyHead::put_message`] appends, without changed files.
    pub const BYTES_MAX: usize =
        10 + Stamp::BYTES + Ticket::BYTES + size_of::<u32>() + size_of::<u64>();

    /// The head of a successful reply.
    pub fn success(tag: u32) -> ReplyHead {
        ReplyHead {
            tag,
            errno: 0,
            fate: Fate::Final,
            unknown_handle: false,
            settled: false,
            times_past: None,
            absence: None,
            unmet: false,
            stamp: None,
            ticket: None,
            changed_files: Vec::new(),
            write_lease: None,
        }
    }

    /// The head of a failed reply.
    pub fn failure(tag: u32, error: &Error) -> ReplyHead {
        let errno = error.errno().raw() as u16;
        let (fate, absence, unmet) = (error.fate(), error.absence(), error.is_unmet());
        ReplyHead { errno, fate, absence, unmet, ..ReplyHead::success(tag) }
    }

    /// The error that it carries.
    pub fn error(&self) -> Option<Error> {
        let errno = Errno::new(i32::from(self.errno));
        match self.fate {
            _ if self.errno == 0 => None,
            Fate::Final => Some(Error::new(errno).absent_for(self.absence).unmet(self.unmet)),
            Fate::Retry => Some(Error::retry(errno)),
            Fate::Unknown => Some(Error::unknown(errno)),
        }
    }

    /// Appends kind and head.
    pub fn put_message(&self, out: &mut Vec<u8>) {
        Kind::Reply.put(out);
        self.put(out);
    }

    /// Takes both off again.
    pub fn get_message(input: &mut Input<'_>) -> Result<ReplyHead, Malformed> {
        expect_kind(input, Kind::Reply)?;
        input.get()
    }

    /// The head of a whole reply, and its encoded results.
    pub fn split(message: &[u8]) -> Result<(ReplyHead, &[u8]), Malformed> {
        let mut input = Input(message);
        let head = ReplyHead::get_message(&mut input)?;
        Ok((head, input.0))
    }

    fn flags(&self) -> u16 {
        let flag = |is: bool, flag: u16| if is { flag } else { 0 };
        flag(self.unknown_handle, UNKNOWN_HANDLE)
            | flag(self.settled, SETTLED)
            | flag(self.stamp.is_some(), STAMPED)
            | flag(self.ticket.is_some(), TICKET)
            | flag(self.times_past == Some(true), TIMES_PAST)
            | flag(self.times_past == Some(false), TIMES_YOUNG)
            | flag(self.absence.is_some(), ABSENCE)
            | flag(self.unmet, UNMET)
            | flag(!self.changed_files.is_empty(), CHANGED_FILES)
            | flag(self.write_lease.is_some(), WRITE_LEASE)
    }
}

impl<'a> Wire<'a> for ReplyHead {
    fn put(&self, out: &mut Vec<u8>) {
        ((self.fate, self.flags()), (self.tag, self.errno)).put(out);
        if let Some(stamp) = &self.stamp {
            stamp.put(out);
        }
        if let Some(ticket) = self.ticket {
            ticket.put(out);
        }
        if self.absence.is_some() {
            Ttl::to_number(self.absence).put(out);
        }
        put_changed_files(&self.changed_files, out);
        if let Some(number) = self.write_lease {
            number.put(out);
        }
    }

    fn get(input: &mut Input<'a>) -> Result<ReplyHead, Malformed> {
        let ((fate, flags), (tag, errno)): ((Fate, u16), (u32, u16)) = input.get()?;
        let has = |flag: u16| flags & flag != 0; // bits of later versions say nothing
        let stamp = if has(STAMPED) { Some(input.get()?) } else { None };
        let ticket = if has(TICKET) { Some(input.get()?) } else { None };
        let absence = if has(ABSENCE) { Ttl::from_number(input.get()?) } else { None };
        let changed_files = if has(CHANGED_FILES) { get_changed_files(input)? } else { Vec::new() };
        let write_lease = if has(WRITE_LEASE) { Some(input.get()?) } else { None };
        let times_known = has(TIMES_PAST) || has(TIMES_YOUNG);
        Ok(ReplyHead {
            tag,
            errno,
            fate,
            unknown_handle: has(UNKNOWN_HANDLE),
            settled: has(SETTLED),
            times_past: times_known.then_some(!has(TIMES_YOUNG)),
            absence,
            unmet: has(UNMET),
            stamp,
            ticket,
            changed_files,
            write_lease,
        })
    }
}

/// Appends nothing for no files: then no flag says that there are any.
fn put_changed_files(files: &[(FileId, Attr)], out: &mut Vec<u8>) {
    assert!(files.len() <= ReplyHead::CHANGED_FILES_MAX, "more files than a call changes");
    if !files.is_empty() {
        (files.len() as u8).put(out);
        files.iter().for_each(|file| file.put(out));
    }
}

fn get_changed_files(input: &mut Input<'_>) -> Result<Vec<(FileId, Attr)>, Malformed> {
    let count = input.get::<u8>()?;
    if count == 0 || usize::from(count) > ReplyHead::CHANGED_FILES_MAX {
        return Err(Malformed("another number of changed files than a call changes"));
    }
    (0..count).map(|_| input.get()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn again(head: &ReplyHead) -> ReplyHead {
        let mut message = Vec::new();
        head.put_message(&mut message);
        assert!(message.len() <= ReplyHead::BYTES_MAX, "{head:?}");
        77u32.put(&mut message);
        let mut input = Input(&message);
        let again = ReplyHead::get_message(&mut input).unwrap();
        assert_eq!(Input::whole::<u32>(input.0), Ok(77), "the results follow");
        again
    }

    #[test]
    fn a_reply_comes_back_as_it_went() {
        let stamp = Some(Stamp { number: 5, at: 4096 });
        let ticket = Some(Ticket([9; 16]));
        for bits in 0..16u8 {
            let is = |bit: u8| bits & bit != 0;
            for times_past in [None, Some(true), Some(false)] {
                let head = ReplyHead {
                    unknown_handle: is(1),
                    settled: is(2),
                    times_past,
                    stamp: stamp.clone().filter(|_| is(4)),
                    ticket: ticket.filter(|_| is(8)),
                    ..ReplyHead::success(9)
                };
                assert_eq!(again(&head), head);
            }
        }
        for error in [
            Error::new(Errno::EIO),
            Error::new(Errno::ESTALE).unmet(true),
            Error::retry(Errno::EAGAIN),
            Error::unknown(Errno::EIO),
        ] {
            let head = again(&ReplyHead::failure(9, &error));
            let came = head.error().unwrap();
            assert_eq!((came.errno(), came.fate()), (error.errno(), error.fate()));
            assert_eq!(came.is_unmet(), error.is_unmet());
        }
    }

    #[test]
    fn changed_files_come_back_and_not_more_than_a_call_changes() {
        let file = |ino| (FileId { ino, generation: 1 }, Attr { ino, ..Attr::default() });
        for count in 1..=2 {
            let changed_files = (0..count).map(file).collect();
            let head = ReplyHead { changed_files, ..ReplyHead::success(9) };
            let mut message = Vec::new();
            head.put_message(&mut message);
            77u32.put(&mut message);
            let (again, results) = ReplyHead::split(&message).unwrap();
            assert_eq!((again, Input::whole::<u32>(results)), (head, Ok(77)));
            for wrong in [0, 3, 255] {
                message[10] = wrong;
                assert!(ReplyHead::get_message(&mut Input(&message)).is_err(), "{wrong}");
            }
        }
    }

    #[test]
    fn a_reply_that_is_cut_short_is_malformed() {
        let stamp = Some(Stamp { number: 5, at: 4096 });
        let (ticket, write_lease) = (Some(Ticket([9; 16])), Some(7));
        let head = ReplyHead { stamp, ticket, write_lease, ..ReplyHead::success(9) };
        assert_eq!(again(&head), head);
        let mut message = Vec::new();
        head.put_message(&mut message);
        for length in 0..message.len() {
            assert!(ReplyHead::get_message(&mut Input(&message[..length])).is_err(), "{length}");
        }
    }
}
