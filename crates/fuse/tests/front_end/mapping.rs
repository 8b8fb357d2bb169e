//! Shared mappings of files of a mount.
//!
//! A process that serves a mount must not map its files. A page that is awaited holds the lock of
//! its address space, for which a worker waits when it asks for memory. So children map them.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;

use crate::common::{TestMount, mounted};
use dray_fuse::{Consistency, Transport};

fn on_both(test: impl Fn(&TestMount)) {
    for transport in [Transport::Classic, Transport::Uring] {
        if let Some(mount) = mounted(transport, Consistency::Strict) {
            test(&mount);
        }
    }
}

struct Mapping {
    start: *mut libc::c_void,
}

const MAPPED_BYTES: usize = 8192;

impl Mapping {
    fn new(file: &File) -> Mapping {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let (flags, fd) = (libc::MAP_SHARED, file.as_raw_fd());
        // SAFETY: no address is asked for.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), MAPPED_BYTES, protection, flags, fd, 0) };
        assert_ne!(start, libc::MAP_FAILED, "{}", io::Error::last_os_error());
        Mapping { start }
    }

    #[allow(clippy::mut_from_ref)] // one user at a time, in these tests
    fn bytes(&self) -> &mut [u8] {
        // SAFETY: mapped until we are dropped.
        unsafe { std::slice::from_raw_parts_mut(self.start.cast(), MAPPED_BYTES) }
    }

    fn sync(&self) {
        // SAFETY: the range is mapped.
        let done = unsafe { libc::msync(self.start, MAPPED_BYTES, libc::MS_SYNC) };
        assert_eq!(done, 0, "{}", io::Error::last_os_error());
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nobody uses the mapping any more.
        unsafe { libc::munmap(self.start, MAPPED_BYTES) };
    }
}

/// A process beside this one, which has an address space of its own.
struct Child(libc::pid_t);

impl Child {
    /// Starts a child that ends when `work` does; well, unless that panics.
    fn start(work: impl FnOnce()) -> Child {
        // SAFETY: the C library makes its heap usable in the child, which does nothing else of
        // this process's and ends without its destructors.
        match unsafe { libc::fork() } {
            0 => {
                let failed = catch_unwind(AssertUnwindSafe(work)).is_err();
                // SAFETY: ends the child.
                unsafe { libc::_exit(failed.into()) }
            }
            child => {
                assert!(child > 0, "{}", io::Error::last_os_error());
                Child(child)
            }
        }
    }

    fn ends_well(self) {
        let mut status = 0;
        // SAFETY: our own child, and an integer that outlives the call.
        let ended = unsafe { libc::waitpid(self.0, &mut status, 0) };
        assert_eq!((ended, status), (self.0, 0), "the child has failed");
    }
}

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).open(path).unwrap()
}

// proves: P10
#[test]
fn shared_mappings_reach_the_file_system_at_msync_and_close() {
    on_both(|mount| {
        let path = mount.path("mapped");
        fs::write(&path, vec![b'a'; MAPPED_BYTES]).unwrap();
        let child = Child::start(|| {
            let file = open(&path);
            let mapping = Mapping::new(&file);
            mapping.bytes()[0] = b'b';
            mapping.sync();
            let mut read = [0; 1];
            file.read_exact_at(&mut read, 0).unwrap();
            assert_eq!(&read, b"b");
            mapping.bytes()[5000] = b'c';
            drop(mapping);
        });
        child.ends_well();
        let content = fs::read(&path).unwrap();
        assert_eq!((content[0], content[5000]), (b'b', b'c'));
    });
}

// proves: P10
#[test]
fn stale_pages_are_dropped_at_open() {
    on_both(|mount| {
        let path = mount.path("mapped");
        fs::write(&path, vec![b'a'; MAPPED_BYTES]).unwrap();
        let (mut seen, see) = io::pipe().unwrap();
        let (go, mut going) = io::pipe().unwrap();
        let child = Child::start(|| {
            let file = open(&path);
            let mapping = Mapping::new(&file);
            assert_eq!(mapping.bytes()[0], b'a');
            (&see).write_all(b"s").unwrap();
            (&go).read_exact(&mut [0]).unwrap();
            let again = open(&path);
            assert_eq!(Mapping::new(&again).bytes()[0], b'z');
        });
        drop((see, go));
        seen.read_exact(&mut [0]).expect("the child has failed");
        mount.behind_the_kernel_s_back("mapped", b"z");
        going.write_all(b"g").unwrap();
        child.ends_well();
    });
}
