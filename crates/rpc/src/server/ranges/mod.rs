//! The ranges of files that calls use: one table, which every call of every session goes through.
//!
//! The grant of a change does three things. From the look at what is there to the note of the
//! answer, no other change of the same range is under way. Otherwise a crash in between would leave
//! open whether the change was made, and repeating it could undo a later change. File systems such
//! as ext4 and tmpfs copy page by page. So a read beside a write would see some old and some new
//! pages. And the grant has the stamp of the change: of two changes of the same bytes the later one
//! has the greater stamp. The grant of a read is shared with other reads.
//!
//! A file has two queues, because a change is under way for longer than it writes. A read waits for
//! the change that writes its bytes now, and not for all those that wait to be under way. Both
//! queues are in the order of arrival.
//!
//! Nobody waits in a circle. A change enters the queue of changes first: directories before files,
//! and two of a kind in the order of their ids. Then it enters one queue of bytes, where nobody
//! waits for anything else. The changes that wait are tasks, and have no thread. Their number is
//! bounded by the calls that connections may have under way.

mod grant;
mod queue;
mod span;
mod stamps;
mod table;

pub(crate) use grant::RangeGrant;
pub(crate) use span::Span;
pub(crate) use stamps::Stamps;
pub(crate) use table::RangeTable;
