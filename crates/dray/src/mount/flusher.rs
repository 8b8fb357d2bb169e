//! Marks a mount's processes as flushers, which matters when memory is short.
//!
//! A program that stores into a mapping dirties pages. A process that needs memory waits until these are written.
//! If that process is the daemon that would write them, both wait for ever. A flusher (prctl(2),
//! `PR_SET_IO_FLUSHER`) does not wait for files when it needs memory. The limit of a memory control group
//! stops only processes of that group, so processes of different groups do not wait for each other.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

/// Of include/uapi/linux/prctl.h; libc has no name for it.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Threads and children of this process are flushers, too.
static DECLARED: AtomicBool = AtomicBool::new(false);

/// Makes this process one, where it may (CAP_SYS_RESOURCE; Linux 5.6); to be called before any thread is
/// started.
pub fn declare() {
    // SAFETY: no memory is passed.
    let done = unsafe { libc::prctl(PR_SET_IO_FLUSHER, 1, 0, 0, 0) } == 0;
    DECLARED.store(done, Ordering::Relaxed);
}

/// Whether this process has become one.
pub fn is_declared() -> bool {
    DECLARED.load(Ordering::Relaxed)
}

/// How many bytes of memory this process may have together with the others of its memory control
/// group, or of one around it. None: as many as the machine has. In groups of version 2 nobody
/// waits for files that are being written (`writeback_throttling_sane` in mm/vmscan.c): their
/// limits do not count.
pub fn group_limit_bytes() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let limit_of = |dir: &Path| {
        let text = std::fs::read_to_string(dir.join("memory.limit_in_bytes")).ok()?;
        text.trim().parse().ok().filter(|limit| *limit < NO_LIMIT_BYTES)
    };
    let group = group_within(&groups, Path::new(TOP))?;
    group.ancestors().take_while(|dir| dir.starts_with(TOP)).filter_map(limit_of).min()
}

/// Where the groups are. In a container its own group may be there, whatever it is called outside.
const TOP: &str = "/sys/fs/cgroup/memory";
/// What is there for no limit is the largest number of pages that a number of 63 bits takes.
const NO_LIMIT_BYTES: u64 = 1 << 62;

/// The memory control group of version 1, by what /proc/self/cgroup says (cgroups(7)).
fn group_within(groups: &str, top: &Path) -> Option<PathBuf> {
    groups.lines().find_map(|line| {
        let mut fields = line.splitn(3, ':').skip(1);
        let (controllers, own) = (fields.next()?, fields.next()?);
        let is_of_memory = controllers.split(',').any(|one| one == "memory");
        is_of_memory.then(|| top.join(own.trim_start_matches('/')))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_group_is_that_of_the_controller_of_memory() {
        let found = |groups| group_within(groups, Path::new("/top"));
        assert_eq!(found("1:cpu:/c\n4:memory:/a/b:c\n0::/d\n"), Some("/top/a/b:c".into()));
        assert_eq!(found("7:cpu,memory:/\n"), Some("/top/".into()));
        assert!(found("0::/\n").is_none() && found("nonsense\n3:\n").is_none());
    }
}
