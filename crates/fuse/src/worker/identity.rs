//! The caller's identity: its supplementary groups, which the kernel's requests do not carry.
//!
//! The groups are read from /proc of the calling thread, from a file that is kept open. They are
//! read anew for each request whose outcome they may decide. For reading and writing open files
//! groups decide nothing, and are believed for a second, as long as that very process exists. A
//! pidfd tells, so that a process number used again cannot inherit the groups of the one before.

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Gid, IdMap, Identity, Pid, Uid};
use dray_rt::{Instant, now};

use crate::proto::Head;
use crate::proto::abi::op;

/// How long groups are believed where they decide nothing.
const BELIEVED: Duration = Duration::from_secs(1);
/// How soon behind a lookup the rest of the same system call comes.
const SAME_CALL: Duration = Duration::from_millis(5);
/// Callers remembered at a time; each costs two descriptors.
const KNOWN_MAX: usize = 256;
/// Of the descriptors that there may be they take this part at most, twice. The rest is for the
/// mount itself, which has to connect anew.
const DESCRIPTORS_SHARE: usize = 8;
/// Room for /proc/PID/status of somebody in few groups.
const STATUS_BYTES: usize = 4096;

pub(crate) struct CallerIdentities {
    /// The kernel keeps no names: each system call looks up those that it uses.
    looks_up_first: bool,
    known_max: usize,
    known: Mutex<IdMap<Pid, KnownCaller>>,
    /// Callers of whom nothing more is to be known.
    plain: Mutex<IdMap<(Uid, Gid), Arc<Identity>>>,
}

struct KnownCaller {
    who: Arc<Identity>,
    read_at: Instant,
    /// The identity has just been read for a lookup, with which nearly every system call begins
    /// that names a file. The request that follows is of the same system call.
    looks_up: bool,
    process: OwnedFd,
    status: Arc<File>,
}

/// Whether it can depend on the caller's groups what comes of a request.
fn asks_for_rights(opcode: u32) -> bool {
    !matches!(
        opcode,
        op::READ
            | op::WRITE
            | op::FLUSH
            | op::RELEASE
            | op::RELEASEDIR
            | op::FSYNC
            | op::FSYNCDIR
            | op::READDIR
            | op::READDIRPLUS
            | op::GETATTR
            | op::STATX
            | op::READLINK
            | op::STATFS
            | op::LSEEK
            | op::FALLOCATE
            | op::COPY_FILE_RANGE
            | op::COPY_FILE_RANGE_64
            | op::GETLK
            | op::SETLK
            | op::SETLKW
    )
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl CallerIdentities {
    pub(crate) fn new(looks_up_first: bool) -> CallerIdentities {
        let known_max = KNOWN_MAX.min(descriptors() / DESCRIPTORS_SHARE);
        let (known, plain) = (Mutex::default(), Mutex::default());
        CallerIdentities { looks_up_first, known_max, known, plain }
    }

    /// The caller of a request.
    pub(crate) fn of(&self, head: &Head) -> Arc<Identity> {
        // The super-user may do everything, whatever groups it is in.
        if head.uid == Uid(0) || head.pid == Pid(0) {
            return self.plain(head);
        }
        let (who, status) = match self.find(head) {
            CachedIdentity::Believed(who) => return who,
            CachedIdentity::Doubted(who, status) => (who, status),
            CachedIdentity::Nobody => return self.read(head).unwrap_or_else(|| self.plain(head)),
        };
        // Not while others wait.
        if read_status(&status).and_then(|text| groups_in(&text, head)).as_deref()
            != Some(&*who.groups)
        {
            return self.read(head).unwrap_or_else(|| self.plain(head));
        }
        if let Some(known) = lock(&self.known).get_mut(&head.pid)
            && Arc::ptr_eq(&known.who, &who)
        {
            (known.read_at, known.looks_up) = (now(), head.opcode == op::LOOKUP);
        }
        who
    }

    fn find(&self, head: &Head) -> CachedIdentity {
        let mut all = lock(&self.known);
        let Some(known) = all.get_mut(&head.pid) else { return CachedIdentity::Nobody };
        let same = known.who.uid == head.uid && known.who.gid == head.gid;
        if !same || !alive(&known.process) {
            all.remove(&head.pid);
            return CachedIdentity::Nobody;
        }
        let age = known.read_at.elapsed();
        let of_same_call = std::mem::take(&mut known.looks_up) && age < SAME_CALL;
        let of_same_call = of_same_call && self.looks_up_first && head.opcode != op::LOOKUP;
        let decides = asks_for_rights(head.opcode);
        let believed = age < BELIEVED && (of_same_call || !decides);
        match believed {
            true => CachedIdentity::Believed(known.who.clone()),
            false => CachedIdentity::Doubted(known.who.clone(), known.status.clone()),
        }
    }

    fn plain(&self, head: &Head) -> Arc<Identity> {
        let mut plain = lock(&self.plain);
        if plain.len() >= KNOWN_MAX {
            plain.clear();
        }
        let fresh = || Arc::new(Identity { uid: head.uid, gid: head.gid, ..Identity::default() });
        plain.entry((head.uid, head.gid)).or_insert_with(fresh).clone()
    }

    /// Reads /proc; none if the process is gone or is not what the request says.
    fn read(&self, head: &Head) -> Option<Arc<Identity>> {
        let file = Arc::new(File::open(format!("/proc/{}/status", head.pid)).ok()?);
        let status = read_status(&file)?;
        let process = open_process(head.pid, &status);
        let groups = groups_in(&status, head)?;
        let (uid, gid, groups) = (head.uid, head.gid, groups.into());
        let who = Arc::new(Identity { uid, gid, groups, ..Identity::default() });
        // The descriptor was made after the first look: only if the process still exists was it the
        // same one. Without one (Linux before 5.3, a filter of system calls, none left) there is
        // nothing to tell that by. It is read again each time.
        if let Some(process) = process.filter(alive) {
            let (who, looks_up) = (who.clone(), head.opcode == op::LOOKUP);
            self.remember(
                head.pid,
                KnownCaller { who, read_at: now(), looks_up, process, status: file },
            );
        }
        Some(who)
    }

    fn remember(&self, pid: Pid, caller: KnownCaller) {
        let mut known = lock(&self.known);
        if known.len() >= self.known_max {
            known.retain(|_, other| other.read_at.elapsed() < BELIEVED);
        }
        if known.len() >= self.known_max {
            known.clear();
        }
        known.insert(pid, caller);
    }
}

/// Descriptors that this process may have.
fn descriptors() -> usize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the struct outlives the call.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX)
}

/// What is known of a caller.
enum CachedIdentity {
    Believed(Arc<Identity>),
    /// To be compared with what stands there now.
    Doubted(Arc<Identity>, Arc<File>),
    Nobody,
}

/// All of a file of /proc, from its beginning; none if its process is gone.
fn read_status(file: &File) -> Option<String> {
    let mut text = vec![0; STATUS_BYTES];
    let mut len = 0;
    loop {
        len += file.read_at(&mut text[len..], len as u64).ok()?;
        if len < text.len() {
            text.truncate(len);
            return String::from_utf8(text).ok();
        }
        text.resize(2 * len, 0);
    }
}

/// The groups of a caller, in order; none if the thread is not what the request says.
fn groups_in(status: &str, head: &Head) -> Option<Vec<Gid>> {
    // Real, effective, saved, of the file system. access(2) asks as the real ones, on the way to
    // the file, too. That is not to be seen here.
    let may_be_access = matches!(head.opcode, op::ACCESS | op::LOOKUP);
    let is = |name: &str, id: u32| {
        let ids: Vec<u32> = field(status, name).into_iter().flatten().collect();
        ids.get(3) == Some(&id) || may_be_access && ids.first() == Some(&id)
    };
    if !is("Uid:", head.uid.0) || !is("Gid:", head.gid.0) {
        return None;
    }
    let mut groups: Vec<Gid> = field(status, "Groups:")?.map(Gid).collect();
    groups.sort_unstable();
    groups.dedup();
    Some(groups)
}

/// The numbers of a line of /proc/PID/status.
pub(super) fn field<'a>(status: &'a str, name: &str) -> Option<impl Iterator<Item = u32> + 'a> {
    let line = status.lines().find_map(|line| line.strip_prefix(name))?;
    Some(line.split_ascii_whitespace().filter_map(|word| word.parse().ok()))
}

/// A pidfd of the thread, or of its process where the kernel has none for threads.
fn open_process(pid: Pid, status: &str) -> Option<OwnedFd> {
    const PIDFD_THREAD: libc::c_int = libc::O_EXCL;
    pidfd_open(pid.0, PIDFD_THREAD).or_else(|| pidfd_open(field(status, "Tgid:")?.next()?, 0))
}

fn pidfd_open(pid: u32, flags: libc::c_int) -> Option<OwnedFd> {
    // SAFETY: no memory is passed; the answer is checked and owned by nobody else.
    unsafe {
        let fd = libc::syscall(libc::SYS_pidfd_open, pid as libc::pid_t, flags);
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd as i32))
    }
}

fn alive(process: &OwnedFd) -> bool {
    // SAFETY: signal 0 is only a question; the missing siginfo means a default one.
    let result = unsafe {
        let none = std::ptr::null::<libc::siginfo_t>();
        libc::syscall(libc::SYS_pidfd_send_signal, process.as_raw_fd(), 0, none, 0)
    };
    // Not being allowed to signal it shows that it is there.
    result == 0 || std::io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn head(pid: u32, uid: u32, gid: u32) -> Head {
        Head {
            len: 40,
            opcode: op::GETATTR,
            unique: 2,
            node: 1,
            uid: Uid(uid),
            gid: Gid(gid),
            pid: Pid(pid),
            extension_bytes: 0,
        }
    }

    #[test]
    fn own_groups_are_found_and_others_credentials_have_none() {
        // SAFETY: no memory is passed.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        let identities = CallerIdentities::new(true);
        let own = identities.of(&head(std::process::id(), uid, gid));
        assert_eq!((own.uid, own.gid), (Uid(uid), Gid(gid)));
        assert!(Arc::ptr_eq(&own, &identities.of(&head(std::process::id(), uid, gid))));
        let other = identities.of(&head(std::process::id(), uid + 1, gid));
        assert!(other.groups.is_empty());
    }

    /// Groups counted for nobody on kernels without pidfd_open(2), and in containers that forbid
    /// it.
    #[test]
    fn groups_are_found_where_there_is_no_pidfd() {
        let mut child = std::process::Command::new("setpriv");
        // SAFETY: no memory is passed.
        if unsafe { libc::geteuid() } != 0 {
            return eprintln!("skipped: needs root");
        }
        child.args(["--reuid=1234", "--regid=1234", "--groups=77,88", "sleep", "1000"]);
        let mut child = child.spawn().unwrap();
        let own = head(child.id(), 1234, 1234);
        let known = std::thread::spawn(move || {
            forbid_pidfds();
            assert!(pidfd_open(std::process::id(), 0).is_none());
            let identities = CallerIdentities::new(true);
            let begin = std::time::Instant::now();
            // Until setpriv(1) is done.
            while identities.of(&own).groups.is_empty() && begin.elapsed().as_secs() < 60 {
                std::thread::sleep(Duration::from_millis(5));
            }
            (identities.of(&own), lock(&identities.known).len())
        });
        let known = known.join();
        child.kill().unwrap();
        child.wait().unwrap();
        let (who, remembered) = known.unwrap();
        assert_eq!((&*who.groups, remembered), (&[Gid(77), Gid(88)][..], 0));
    }

    /// From here on pidfd_open(2) fails with EPERM for this thread (seccomp(2)).
    fn forbid_pidfds() {
        let filter = |code: u32, jt, jf, k| libc::sock_filter { code: code as u16, jt, jf, k };
        let mut filters = [
            filter(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // seccomp_data::nr
            filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 0, 1, libc::SYS_pidfd_open as u32),
            filter(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
            filter(libc::BPF_RET | libc::BPF_K, 0, 0, libc::SECCOMP_RET_ALLOW),
        ];
        let program = libc::sock_fprog { len: filters.len() as u16, filter: filters.as_mut_ptr() };
        // SAFETY: the kernel copies the program, which outlives the calls.
        unsafe {
            assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
            assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
        }
    }

    #[test]
    fn a_process_that_is_gone_has_no_groups() {
        let identities = CallerIdentities::new(true);
        assert!(identities.of(&head(0x7fff_fff0, 1000, 1000)).groups.is_empty());
        assert!(identities.of(&head(0, 1000, 1000)).groups.is_empty());
    }
}
