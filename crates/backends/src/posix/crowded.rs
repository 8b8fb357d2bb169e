//! Threads for users in many groups.
//!
//! A thread that becomes another user in many groups is at it for a while: setgroups(2) sorts them
//! (`groups_sort` in kernel/groups.c), 6 us for 32 and half a millisecond for 1,024. On a thread that
//! serves connections everybody else would wait for that, each time that such a user and another
//! take turns. Here whoever causes it does: calls of one client have one thread.

use dray_core::Identity;
use dray_rt::Pool;

use super::cred;

/// Users in more groups than these are not become by a thread that serves connections, unless it
/// is that user already.
const GROUPS_MAX: usize = 32;
/// Threads for them, of an export: so much of the machine do all of them get at most.
const THREADS: usize = 4;

/// The threads, by client.
pub(crate) struct Crowded([Pool; THREADS]);

impl Crowded {
    /// Threads with room for `queue_max` calls each; they start with the first call.
    pub(crate) fn new(queue_max: usize) -> Crowded {
        Crowded(std::array::from_fn(|_| Pool::new("dray-groups", 1, queue_max)))
    }

    /// Where a call of `client` for `who` belongs; none: it may be made here.
    pub(crate) fn thread_for(&self, client: u64, who: &Identity) -> Option<&Pool> {
        let here = who.groups.len() <= GROUPS_MAX || cred::is(who);
        (!here).then(|| &self.0[client as usize % THREADS])
    }

    /// Calls that wait for these threads.
    pub(crate) fn waiting(&self) -> usize {
        self.0.iter().map(Pool::waiting).sum()
    }
}
