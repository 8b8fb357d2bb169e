//! The descriptors of a mount that outlive its daemon. The processes of a mount agree on their numbers: the
//! parent places the descriptors, and the child takes them.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// The mounted descriptor of /dev/fuse.
const DEVICE: RawFd = 100;
/// Memory of `dray_fuse::State`.
const STATE: RawFd = 101;
/// Memory of the client's session.
const SESSION: RawFd = 102;
/// To the process that started this one: a supervisor tells the command in the foreground how
/// it went, a daemon talks to its supervisor.
pub const PARENT: RawFd = 103;
/// Memory with the mount's key, where it has one.
const KEY: RawFd = 104;
/// The first of the clones of the device.
const CLONES: RawFd = 110;
/// Descriptors are moved behind here before they are placed, so that none is in the way.
const ASIDE: RawFd = 200;
/// Room for this many clones.
const CLONES_MAX: usize = (ASIDE - CLONES) as usize;

/// The numbers above, and some for what a daemon opens.
pub const DESCRIPTORS_MIN: usize = 320;

/// What a mount needs to go on.
pub struct MountDescriptors {
    /// The mounted descriptor of /dev/fuse.
    pub device: OwnedFd,
    /// Memory of `dray_fuse::State`.
    pub state: OwnedFd,
    /// Memory of the client's session.
    pub session: OwnedFd,
    /// Clones of the device, one for each worker.
    pub clones: Vec<OwnedFd>,
    /// Memory of [`KeptKey`](super::KeptKey); none where the mount has no key, or was made by a
    /// version that did not keep it.
    pub key: Option<OwnedFd>,
}

impl MountDescriptors {
    /// Puts everything where the next program expects it, to be inherited over exec(2), and
    /// nothing else but the standard streams. `parent` goes to [`PARENT`]. What is placed
    /// stays open until exec(2) or the end of the process. Errors: those of fcntl(2) and
    /// dup2(2); `EINVAL` for more clones than there is room for.
    pub fn place(self, parent: Option<OwnedFd>) -> io::Result<()> {
        if self.clones.len() > CLONES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let mut places = vec![
            (move_aside(self.device)?, DEVICE),
            (move_aside(self.state)?, STATE),
            (move_aside(self.session)?, SESSION),
        ];
        if let Some(parent) = parent {
            places.push((move_aside(parent)?, PARENT));
        }
        if let Some(key) = self.key {
            places.push((move_aside(key)?, KEY));
        }
        for (clone, number) in self.clones.into_iter().zip(CLONES..) {
            places.push((move_aside(clone)?, number));
        }
        // SAFETY: no memory is passed. Older kernels do not know the call: there the process
        // that started us may have left something open, which costs no more than that.
        unsafe { libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
        for (fd, number) in places {
            // SAFETY: no memory is passed, and nothing of ours is at that number.
            if unsafe { libc::dup2(fd.as_raw_fd(), number) } < 0 {
                return Err(io::Error::last_os_error());
            }
        }
        Ok(())
    }

    /// What was placed by the parent of this process; closed at the next exec(2) unless
    /// [`pass_on`] is called. To be called once. Errors: `EBADF` if it was not.
    pub fn take(clones: usize) -> io::Result<MountDescriptors> {
        if clones > CLONES_MAX {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let clones = (CLONES..).take(clones).map(take).collect::<io::Result<_>>()?;
        let [device, state, session] = [take(DEVICE)?, take(STATE)?, take(SESSION)?];
        Ok(MountDescriptors { device, state, session, clones, key: take(KEY).ok() })
    }

    /// Makes clones until there are `count`, each at the number where [`MountDescriptors::take`] looks for
    /// it. Errors: those of [`dray_fuse::clone_device`] and dup3(2).
    pub fn renew_clones(&mut self, count: usize) -> io::Result<()> {
        let device = self.device.as_fd();
        for number in (CLONES..).take(count).skip(self.clones.len()) {
            self.clones.push(move_to(dray_fuse::clone_device(device)?, number)?);
        }
        Ok(())
    }

    /// Numbers of all of them.
    pub fn numbers(&self) -> Vec<RawFd> {
        let all = [&self.device, &self.state, &self.session].into_iter();
        let all = all.chain(&self.clones).chain(&self.key);
        all.map(AsRawFd::as_raw_fd).collect()
    }
}

/// Lets a descriptor survive exec(2). Only system calls: may be called after fork(2).
pub fn pass_on(number: RawFd) -> io::Result<()> {
    // SAFETY: no memory is passed.
    match unsafe { libc::fcntl(number, libc::F_SETFD, 0) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Puts `fd` to `number`, to survive exec(2). Only system calls, as above.
pub fn place_at(fd: RawFd, number: RawFd) -> io::Result<()> {
    // SAFETY: no memory is passed.
    match unsafe { libc::dup2(fd, number) } {
        0.. => pass_on(number),
        _ => Err(io::Error::last_os_error()),
    }
}

/// The descriptor that was placed at `number`. Errors: `EBADF` if there is none.
pub fn take(number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed.
    match unsafe { libc::fcntl(number, libc::F_SETFD, libc::FD_CLOEXEC) } {
        // SAFETY: it is open, and by agreement is there for us alone to take, once.
        0 => Ok(unsafe { OwnedFd::from_raw_fd(number) }),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Moves a descriptor to `number`, where nothing of this process may be.
fn move_to(fd: OwnedFd, number: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed; the answer is checked and owned by nobody else.
    unsafe {
        match libc::dup3(fd.as_raw_fd(), number, libc::O_CLOEXEC) {
            moved @ 0.. => Ok(OwnedFd::from_raw_fd(moved)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

fn move_aside(fd: OwnedFd) -> io::Result<OwnedFd> {
    // SAFETY: no memory is passed; the answer is checked and owned by nobody else.
    unsafe {
        match libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, ASIDE) {
            moved @ 0.. => Ok(OwnedFd::from_raw_fd(moved)),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A supervisor outlives upgrades of its daemon, and upgrades back.
    // proves: P137
    #[test]
    fn programs_of_two_versions_find_what_is_handed_over() {
        let numbers = [DEVICE, STATE, SESSION, PARENT, KEY, CLONES, ASIDE];
        assert_eq!(numbers, [100, 101, 102, 103, 104, 110, 200]);
    }

    /// Clones that were made anew had any number, and no successor found them.
    #[test]
    fn a_descriptor_is_moved_to_the_number_asked_for_and_not_inherited_unasked() {
        const NUMBER: RawFd = 777; // no test opens so many
        let file = std::fs::File::open("/dev/null").unwrap();
        let moved = move_to(file.into(), NUMBER).unwrap();
        assert_eq!(moved.as_raw_fd(), NUMBER);
        // SAFETY: no memory is passed.
        let flags = unsafe { libc::fcntl(NUMBER, libc::F_GETFD) };
        assert_eq!(flags, libc::FD_CLOEXEC);
        drop(moved);
        assert!(take(NUMBER).is_err());
    }
}
