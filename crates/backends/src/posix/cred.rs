//! The user that a thread has towards the file system.
//!
//! Linux keeps credentials per thread. A thread becomes the caller before it works for the caller, with
//! raw system calls (the C library's wrappers change every thread). The thread stays that user until a
//! call of another user comes, since a change costs more than most operations.
//!
//! **All file accesses of the thread after an operation happen as that user.** Code that opens files of
//! the server's own wraps itself in [`as_server`].

use std::cell::RefCell;
use std::sync::OnceLock;

use dray_core::{Errno, Error, GROUPS_MAX, Gid, Identity, Result};

const CAP_CHOWN: u32 = 0;
const CAP_DAC_OVERRIDE: u32 = 1;
const CAP_DAC_READ_SEARCH: u32 = 2;
const CAP_FOWNER: u32 = 3;
const CAP_FSETID: u32 = 4;
const CAP_SETGID: u32 = 6;
const CAP_SETUID: u32 = 7;
const CAP_LINUX_IMMUTABLE: u32 = 9;
const CAP_SYS_ADMIN: u32 = 21;
const CAP_MKNOD: u32 = 27;
const CAP_SETFCAP: u32 = 31;

/// What a thread may hold in its effective set while it serves. The first group goes and
/// comes with the file system user id by itself. `SYS_RESOURCE` is not among them, so that
/// quotas and reserved blocks hold.
const SERVING: u64 = 1 << CAP_CHOWN
    | 1 << CAP_DAC_OVERRIDE
    | 1 << CAP_DAC_READ_SEARCH
    | 1 << CAP_FOWNER
    | 1 << CAP_FSETID
    | 1 << CAP_LINUX_IMMUTABLE
    | 1 << CAP_MKNOD
    | 1 << CAP_SETUID
    | 1 << CAP_SETGID;

/// What the super-user's `security.*` and `trusted.*` attributes take.
const XATTR: u64 = 1 << CAP_SETFCAP | 1 << CAP_SYS_ADMIN;

#[derive(Default)]
struct Thread {
    /// The thread's umask is its own. A new thread shares the umask of its creator.
    alone: bool,
    /// The thread has the few capabilities that serving takes.
    prepared: bool,
    /// The thread has the server's own credentials. A new thread may have inherited a caller's.
    own: bool,
    /// The ids below are what the kernel has.
    known: bool,
    uid: u32,
    gid: u32,
    groups: Vec<u32>,
    umask: u32,
}

/// What the process was before it served anybody.
struct Own {
    groups: Vec<u32>,
    umask: u32,
}

impl Own {
    /// As the main thread is when this is first asked, before any thread becomes a caller.
    fn get() -> &'static Own {
        static OWN: OnceLock<Own> = OnceLock::new();
        OWN.get_or_init(|| {
            let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
            let value = |key: &str| status.lines().find_map(|line| line.strip_prefix(key));
            let numbers = value("Groups:").unwrap_or_default().split_ascii_whitespace();
            let umask = value("Umask:").and_then(|mask| u32::from_str_radix(mask.trim(), 8).ok());
            Own {
                groups: numbers.filter_map(|number| number.parse().ok()).collect(),
                umask: umask.unwrap_or(0o022), // Linux before 4.7 does not tell
            }
        })
    }
}

thread_local! {
    static THREAD: RefCell<Thread> = RefCell::default();
}

/// Makes this thread the caller: what it does from now on is checked against `who`. Without
/// a umask that of an earlier caller stays, which matters to nothing but making files.
/// Errors: `EPERM` if the server may not do that; then nothing must be done for the caller.
pub(crate) fn assume(who: &Identity, umask: Option<u32>) -> Result<()> {
    THREAD.with_borrow_mut(|thread| {
        thread.prepare()?;
        if let Some(umask) = umask {
            thread.set_umask(umask & 0o777);
        }
        thread.become_user(who)
    })
}

/// Users in more groups than these take a thread a while to become. The kernel sorts them in
/// setgroups(2) (`groups_sort` in kernel/groups.c), 6 us for 32 and half a millisecond for 1,024.
const QUICK_GROUPS_MAX: usize = 32;

/// Whether this thread becomes `who` soon, or is `who` already.
pub(crate) fn is_quick(who: &Identity) -> bool {
    who.groups.len() <= QUICK_GROUPS_MAX
        || THREAD.with_borrow(|thread| thread.known && thread.is(who))
}

/// Runs `call` with the super-user's file system id, then becomes the caller again.
///
/// Only for what says nothing to the caller about files it may not see. That is opening `O_PATH` by
/// handle, and opening again what the caller had opened already. Errors: `EPERM` if the way back is
/// barred; the operation must end then.
pub(crate) fn as_root<T>(call: impl FnOnce() -> T) -> Result<T> {
    let uid = THREAD.with_borrow(|thread| if thread.known { thread.uid } else { 0 });
    if uid == 0 {
        return Ok(call());
    }
    struct Back(u32);
    impl Drop for Back {
        fn drop(&mut self) {
            if set_fsuid(self.0).is_err() {
                THREAD.with_borrow_mut(|thread| thread.known = false);
            }
        }
    }
    set_fsuid(0)?;
    let back = Back(uid);
    let value = call();
    drop(back);
    if !THREAD.with_borrow(|thread| thread.known) {
        return Err(lost());
    }
    Ok(value)
}

/// Runs `call` with the capabilities for security and trusted attributes. Only for a caller that is
/// the super-user after squashing.
pub(crate) fn with_xattr_rights<T>(call: impl FnOnce() -> T) -> Result<T> {
    struct Lower(u64);
    impl Drop for Lower {
        fn drop(&mut self) {
            if set_effective(self.0).is_err() {
                // The next caller's `assume` prepares the thread anew or fails.
                THREAD.with_borrow_mut(|thread| thread.prepared = false);
            }
        }
    }
    let caps = capabilities()?;
    let _lower = Lower(caps.effective);
    set_effective(caps.effective | (XATTR & caps.permitted))?;
    Ok(call())
}

/// Gives this thread back the server's own credentials, capabilities and umask.
pub fn release() -> Result<()> {
    THREAD.with_borrow_mut(Thread::be_own)
}

/// Runs `call` with the server's own credentials. The thread becomes a caller again when
/// the next operation on it needs that.
pub fn as_server<T>(call: impl FnOnce() -> T) -> Result<T> {
    release()?;
    Ok(call())
}

impl Thread {
    fn prepare(&mut self) -> Result<()> {
        if self.prepared {
            return Ok(());
        }
        Own::get(); // while it can be read
        self.begin_anew()?;
        // A thread inherits the ids of its creator: begin at a known state.
        set_fsuid(0)?;
        set_effective(capabilities()?.permitted & SERVING)?;
        self.prepared = true;
        Ok(())
    }

    /// Becomes the server itself.
    fn be_own(&mut self) -> Result<()> {
        if self.own {
            return Ok(());
        }
        let own = Own::get();
        self.begin_anew()?;
        // SAFETY: these calls cannot fail.
        let (uid, gid) = unsafe { (libc::geteuid(), libc::getegid()) };
        set_fsuid(uid)?;
        set_fsgid(gid)?;
        if groups()? != own.groups {
            set_groups(&own.groups)?;
        }
        set_effective(capabilities()?.permitted)?;
        self.set_umask(own.umask);
        self.own = true;
        Ok(())
    }

    /// Nothing is known of the thread but its umask, which is its own from now on.
    fn begin_anew(&mut self) -> Result<()> {
        (self.prepared, self.own, self.known) = (false, false, false);
        if !self.alone {
            // SAFETY: no memory is involved.
            if unsafe { libc::unshare(libc::CLONE_FS) } != 0 {
                return Err(
                    Error::from(Errno::last()).because("the thread cannot get a umask of its own")
                );
            }
            // SAFETY: umask cannot fail.
            unsafe { libc::umask(0) };
            (self.umask, self.alone) = (0, true);
        }
        Ok(())
    }

    fn set_umask(&mut self, umask: u32) {
        if self.umask != umask {
            // SAFETY: umask cannot fail.
            unsafe { libc::umask(umask) };
            self.umask = umask;
        }
    }

    fn become_user(&mut self, who: &Identity) -> Result<()> {
        if self.known && self.is(who) {
            return Ok(());
        }
        if who.groups.len() > GROUPS_MAX {
            return Err(Error::new(Errno::E2BIG).because("the caller is in more than 1,024 groups"));
        }
        let known = std::mem::replace(&mut self.known, false);
        if !known || !same_groups(&self.groups, &who.groups) {
            self.groups.clear();
            self.groups.extend(who.groups.iter().map(|gid| gid.0));
            set_groups(&self.groups)?;
        }
        if !known || self.gid != who.gid.0 {
            set_fsgid(who.gid.0)?;
            self.gid = who.gid.0;
        }
        if !known || self.uid != who.uid.0 {
            set_fsuid(who.uid.0)?;
            self.uid = who.uid.0;
        }
        self.known = true;
        Ok(())
    }

    fn is(&self, who: &Identity) -> bool {
        self.uid == who.uid.0 && self.gid == who.gid.0 && same_groups(&self.groups, &who.groups)
    }
}

fn same_groups(ours: &[u32], theirs: &[Gid]) -> bool {
    ours.len() == theirs.len() && ours.iter().zip(theirs).all(|(ours, theirs)| *ours == theirs.0)
}

fn lost() -> Error {
    Error::new(Errno::EPERM).because("the server cannot take its caller's identity")
}

/// setfsuid(2) tells no error: it answers the old id, so a second call that changes
/// nothing tells what the id has become.
fn set_fsuid(uid: u32) -> Result<()> {
    // SAFETY: numbers only.
    let now = unsafe {
        libc::syscall(libc::SYS_setfsuid, uid);
        libc::syscall(libc::SYS_setfsuid, u32::MAX)
    };
    if now as u32 == uid { Ok(()) } else { Err(lost()) }
}

fn set_fsgid(gid: u32) -> Result<()> {
    // SAFETY: numbers only.
    let now = unsafe {
        libc::syscall(libc::SYS_setfsgid, gid);
        libc::syscall(libc::SYS_setfsgid, u32::MAX)
    };
    if now as u32 == gid { Ok(()) } else { Err(lost()) }
}

fn set_groups(groups: &[u32]) -> Result<()> {
    // SAFETY: the kernel reads groups.len() numbers.
    let set = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    if set == 0 { Ok(()) } else { Err(lost()) }
}

fn groups() -> Result<Vec<u32>> {
    // SAFETY: with a length of 0 nothing is written.
    let count = unsafe { libc::getgroups(0, std::ptr::null_mut()) };
    let mut groups = vec![0; usize::try_from(count).map_err(|_| Errno::last())?];
    // SAFETY: the kernel writes at most `count` numbers.
    let count = unsafe { libc::getgroups(count, groups.as_mut_ptr()) };
    groups.truncate(usize::try_from(count).map_err(|_| Errno::last())?);
    Ok(groups)
}

struct Capabilities {
    effective: u64,
    permitted: u64,
    inheritable: u64,
}

#[repr(C)]
struct CapHeader {
    version: u32,
    pid: i32,
}

const CAP_VERSION: u32 = 0x2008_0522; // _LINUX_CAPABILITY_VERSION_3

fn capabilities() -> Result<Capabilities> {
    let mut header = CapHeader { version: CAP_VERSION, pid: 0 };
    let mut raw = [[0u32; 3]; 2];
    // SAFETY: version 3 writes two structs of three numbers.
    if unsafe { libc::syscall(libc::SYS_capget, &raw mut header, raw.as_mut_ptr()) } != 0 {
        return Err(Errno::last().into());
    }
    let join = |index: usize| u64::from(raw[0][index]) | u64::from(raw[1][index]) << 32;
    Ok(Capabilities { effective: join(0), permitted: join(1), inheritable: join(2) })
}

fn set_effective(effective: u64) -> Result<()> {
    let caps = capabilities()?;
    let mut header = CapHeader { version: CAP_VERSION, pid: 0 };
    let half =
        |shift: u32| [effective, caps.permitted, caps.inheritable].map(|set| (set >> shift) as u32);
    let raw = [half(0), half(32)];
    // SAFETY: version 3 reads two structs of three numbers.
    if unsafe { libc::syscall(libc::SYS_capset, &raw mut header, raw.as_ptr()) } != 0 {
        return Err(Errno::last().into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::thread::spawn;

    use dray_core::Uid;

    use super::*;

    fn line_of_status(key: &str) -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find(|line| line.starts_with(key)).unwrap();
        line.split_whitespace().collect::<Vec<_>>().join(" ")
    }

    /// The owner of a new file of this thread, and the thread's groups and umask.
    fn self_image() -> (u32, u32, u32, [String; 2]) {
        let path = std::env::temp_dir().join(format!("dray-cred-{:x}", dray_rt::random_u64()));
        let meta = std::fs::File::create(&path).and_then(|file| file.metadata()).unwrap();
        std::fs::remove_file(path).unwrap();
        let known = ["Groups:", "CapEff:"].map(line_of_status);
        (meta.uid(), meta.gid(), meta.mode(), known)
    }

    fn caller() -> Identity {
        let groups = [Gid(77), Gid(78)].into();
        Identity { uid: Uid(1234), gid: Gid(1235), groups, ..Identity::default() }
    }

    /// A thread inherits the identity of its creator. Threads of the pool are created by threads
    /// that act as a caller at that time. The server's own files were made as that caller, and with
    /// the groups and umask of one.
    #[test]
    fn a_thread_that_a_caller_started_is_the_server_when_it_works_for_the_server() {
        let own = spawn(self_image).join().unwrap();
        let inherited = spawn(|| {
            assume(&caller(), Some(0o077)).unwrap();
            spawn(|| {
                let fresh = as_server(self_image).unwrap();
                assume(&caller(), Some(0o077)).unwrap();
                let again = as_server(self_image).unwrap();
                [fresh, again]
            })
            .join()
        });
        assert_eq!(inherited.join().unwrap().unwrap(), [own.clone(), own]);
    }

    #[test]
    fn a_thread_that_a_caller_started_is_another_caller_when_it_works_for_that() {
        let other = Identity { uid: Uid(4321), gid: Gid(4322), ..Identity::default() };
        let inherited = spawn(move || {
            assume(&caller(), Some(0o077)).unwrap();
            spawn(move || {
                assume(&other, Some(0o022)).unwrap();
                self_image()
            })
            .join()
        });
        let (uid, gid, mode, [groups, _]) = inherited.join().unwrap().unwrap();
        assert_eq!((uid, gid, mode & 0o777, groups.as_str()), (4321, 4322, 0o644, "Groups:"));
    }
}
