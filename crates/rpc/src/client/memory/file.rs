//! Memory of a session in a file, for a server that is a client itself. The server's next process
//! finds in it what the process before had. A mount has a memfd for that, which its supervisor
//! holds.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use super::{BYTES, OWN_BOOT, STRIDE_BYTES, SessionMemory};

impl SessionMemory {
    /// The memory in the file at `path`, which is made if there is none. The file belongs to this
    /// process until the process ends. `boot`: of this machine. A file of another boot may be older
    /// than later changes of the memory, so it begins anew: its session ends with its lease.
    ///
    /// The file takes 42 MB, all of them from the beginning: a full disk must not end a process
    /// that writes to its memory.
    ///
    /// Errors: another process has it (`WouldBlock`); it is none of this version (`InvalidData`);
    /// those of open(2), flock(2), fallocate(2) and mmap(2).
    pub fn open_file(path: &Path, boot: u128) -> io::Result<SessionMemory> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(libc::O_NOFOLLOW).open(path)?;
        lock(&file)?;
        if file.metadata()?.len() == 0 {
            return SessionMemory::begin_file(file, boot);
        }
        let memory = SessionMemory::from_fd(OwnedFd::from(file.try_clone()?))?;
        reserve(&file, 0)?; // one of an earlier release was shorter
        if memory.own_boot() == boot {
            return Ok(memory);
        }
        drop(memory);
        file.set_len(0)?;
        SessionMemory::begin_file(file, boot)
    }

    /// The memory of the session with this index in a file that [`SessionMemory::open_file`] has
    /// opened, likewise with all of its blocks. Errors: as there.
    pub fn from_file_at(file: OwnedFd, index: usize) -> io::Result<SessionMemory> {
        reserve(&file, index)?;
        SessionMemory::from_fd_at(file, index)
    }

    fn begin_file(file: File, boot: u128) -> io::Result<SessionMemory> {
        reserve(&file, 0)?;
        let memory = SessionMemory::map(file.into(), 0)?;
        memory.set(OWN_BOOT, boot as u64);
        memory.set(OWN_BOOT + 1, (boot >> 64) as u64);
        Ok(memory)
    }

    fn own_boot(&self) -> u128 {
        u128::from(self.get(OWN_BOOT)) | u128::from(self.get(OWN_BOOT + 1)) << 64
    }
}

/// Errors: `WouldBlock`, with words that say why.
fn lock(file: &File) -> io::Result<()> {
    // SAFETY: no memory is passed.
    if unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) } == 0 {
        return Ok(());
    }
    let error = io::Error::last_os_error();
    Err(match error.kind() {
        io::ErrorKind::WouldBlock => {
            io::Error::new(error.kind(), "another process has this session: one of them must end")
        }
        _ => error,
    })
}

/// Has the file system give all blocks of the session with this index.
fn reserve(file: &impl AsRawFd, index: usize) -> io::Result<()> {
    let (begin, len_bytes) = ((index * STRIDE_BYTES) as libc::off_t, BYTES as libc::off_t);
    // SAFETY: no memory is passed.
    match unsafe { libc::fallocate(file.as_raw_fd(), 0, begin, len_bytes) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use dray_core::{NodeId, Origin, RequestId};

    /// A file in a directory of its own, which goes with it.
    struct Scratch(std::path::PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let dir = std::env::temp_dir().join(format!("dray-{name}-{}", std::process::id()));
            std::fs::create_dir_all(&dir).unwrap();
            Scratch(dir)
        }

        fn file(&self) -> std::path::PathBuf {
            self.0.join("session")
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn only_the_next_process_of_the_mount_finds_the_session() {
        let scratch = Scratch::new("session-memory");
        let memory = SessionMemory::open_file(&scratch.file(), 7).unwrap();
        let origin = Origin { node: NodeId(5), request: RequestId(6) };
        assert_eq!(memory.begin_process(), 0);
        memory.set_session(9, &[3; 16], 4);
        memory.set_slots(1);
        memory.take_slot(0, 2, origin);
        let second = SessionMemory::open_file(&scratch.file(), 7).err().unwrap();
        assert_eq!(second.kind(), io::ErrorKind::WouldBlock);
        drop(memory);
        let next = SessionMemory::open_file(&scratch.file(), 7).unwrap();
        assert_eq!(next.session(), Some((9, [3; 16], 4)));
        assert_eq!((next.slots()[0].origin, next.slots()[0].sequence), (origin, 2));
        assert_eq!(next.begin_process(), 1);
    }

    #[test]
    fn what_another_boot_left_is_not_gone_on_with() {
        let scratch = Scratch::new("session-boot");
        let memory = SessionMemory::open_file(&scratch.file(), 7).unwrap();
        memory.set_session(9, &[3; 16], 4);
        drop(memory);
        let next = SessionMemory::open_file(&scratch.file(), 8).unwrap();
        assert_eq!((next.session(), next.own_boot()), (None, 8));
    }

    #[test]
    fn a_file_that_is_something_else_is_refused() {
        let scratch = Scratch::new("session-other");
        std::fs::write(scratch.file(), vec![1; 4096]).unwrap();
        let refused = SessionMemory::open_file(&scratch.file(), 7).err().unwrap();
        assert_eq!(refused.kind(), io::ErrorKind::InvalidData);
    }
}
