//! The identity of this process.

use std::sync::Arc;

use dray_core::{Gid, Identity, Uid};

/// This process's effective user, group and supplementary groups, and its batch job.
pub fn own_identity() -> Arc<Identity> {
    // SAFETY: neither takes memory, and neither can fail.
    let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
    let mut groups: Vec<Gid> = own_groups().into_iter().map(Gid).collect();
    groups.sort_unstable();
    groups.dedup();
    Arc::new(Identity {
        uid: Uid(uid),
        gid: Gid(gid),
        groups: groups.into(),
        job: Identity::job_in(|name| std::env::var(name).ok()),
    })
}

fn own_groups() -> Vec<libc::gid_t> {
    // SAFETY: with a length of 0 nothing is written.
    let count = unsafe { libc::getgroups(0, std::ptr::null_mut()) };
    let mut groups = vec![0; count.max(0) as usize];
    // SAFETY: the kernel writes at most groups.len() ids to it.
    let count = unsafe { libc::getgroups(groups.len() as i32, groups.as_mut_ptr()) };
    groups.truncate(count.max(0) as usize);
    groups
}
