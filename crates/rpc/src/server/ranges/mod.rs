//! The ranges of files that calls use: one table, which every call of every session goes through.
//!
//! The grant of a change does three things. From the look at what is there to the note of the
//! answer, no other change of the same range is under way. Otherwise a crash in between would leave
//! open whether the change was made, and repeating it could undo a later change. While the change
//! writes, nobody else reads or writes the same bytes: ext4, tmpfs and others copy page by page, so
//! that a read beside a write would see some old and some new pages. And the grant has the stamp of
//! the change: of two changes of the same bytes the later one has the greater stamp. The grant of a
//! read is shared with other reads.
//!
//! A file has two queues, because a change is under way for longer than it writes. A read waits for
//! the change that writes its bytes now, and not for all those that wait to be under way. Both queues
//! are in the order of arrival.
//!
//! Nobody waits in a circle: a change enters the queue of changes first, of directories before files
//! and of two of a kind in the order of their ids, and then one queue of bytes, where nobody waits for
//! anything else. Those that wait are tasks, and have no thread. Their number is bounded by the calls
//! that connections may have under way.

mod grant;
mod queue;
mod span;
mod stamps;
mod table;

pub(crate) use grant::RangeGrant;
pub(crate) use span::Span;
pub(crate) use stamps::Stamps;
pub(crate) use table::RangeTable;
