//! A file system behind FUSE with two files of two names each, which have the same number and
//! attributes. `struct`s are those of linux/fuse.h, version 7.31.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::thread::JoinHandle;

const ROOT: u64 = 1;
const ONE: u64 = 2;
const TWO: u64 = 3;

/// Served until it is dropped.
pub struct Twins {
    at: std::ffi::CString,
    thread: Option<JoinHandle<()>>,
}

impl Twins {
    /// Mounts it there, in the mount namespace of this thread.
    pub fn serve(at: &Path) -> Twins {
        let mut options = std::fs::OpenOptions::new();
        let mut device = options.read(true).write(true).open("/dev/fuse").expect("/dev/fuse");
        let data =
            format!("fd={},rootmode=40000,user_id=0,group_id=0,allow_other", device.as_raw_fd());
        let data = std::ffi::CString::new(data).unwrap();
        let at = std::ffi::CString::new(at.to_str().unwrap()).unwrap();
        let (none, kind) = (c"twins".as_ptr(), c"fuse".as_ptr());
        // SAFETY: all strings outlive the call.
        let mounted = unsafe { libc::mount(none, at.as_ptr(), kind, 0, data.as_ptr().cast()) };
        assert_eq!(mounted, 0, "{}", std::io::Error::last_os_error());
        let thread = std::thread::spawn(move || {
            let mut request = vec![0; 1 << 18];
            // The loop ends with the mount.
            while let Ok(bytes) = device.read(&mut request) {
                answer(&mut device, &request[..bytes]);
            }
        });
        Twins { at, thread: Some(thread) }
    }
}

impl Drop for Twins {
    fn drop(&mut self) {
        // SAFETY: the path outlives the call.
        unsafe { libc::umount2(self.at.as_ptr(), libc::MNT_DETACH) };
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn answer(device: &mut File, request: &[u8]) {
    let word = |at: usize| u32::from_ne_bytes(request[at..at + 4].try_into().unwrap());
    let long = |at: usize| u64::from_ne_bytes(request[at..at + 8].try_into().unwrap());
    let (code, unique, node) = (word(4), long(8), long(16));
    let name = request[40..].split(|byte| *byte == 0).next().unwrap_or_default();
    let said = match code {
        2 | 42 => return, // FORGET, BATCH_FORGET
        1 => match name {
            b"one" | b"one-link" => Ok(entry(ONE)),
            b"two" | b"two-link" => Ok(entry(TWO)),
            _ => Err(libc::ENOENT),
        },
        3 => Ok([vec![0; 16], attr(node)].concat()), // GETATTR
        14 | 27 => Ok(vec![0; 16]),                  // OPEN, OPENDIR
        17 => Ok(vec![0; 80]),                       // STATFS
        15 if long(48) > 0 => Ok(Vec::new()),        // READ
        15 => Ok(if node == ONE { b"one".to_vec() } else { b"two".to_vec() }),
        18 | 25 | 29 => Ok(Vec::new()), // RELEASE, FLUSH, RELEASEDIR
        26 => Ok([7u32, 31, 0, 0, 0, 1 << 16].iter().flat_map(|n| n.to_ne_bytes()).collect()),
        _ => Err(libc::ENOSYS),
    };
    let (error, mut body) = match said {
        Ok(body) => (0, body),
        Err(errno) => (-errno, Vec::new()),
    };
    if code == 26 {
        body.resize(64, 0);
    }
    let mut out = (16 + body.len() as u32).to_ne_bytes().to_vec();
    out.extend_from_slice(&error.to_ne_bytes());
    out.extend_from_slice(&unique.to_ne_bytes());
    out.extend_from_slice(&body);
    let _ = device.write_all(&out); // a request may be given up meanwhile
}

fn entry(node: u64) -> Vec<u8> {
    let mut out = [node, 1].map(u64::to_ne_bytes).concat();
    out.resize(40, 0);
    out.extend(attr(node));
    out
}

fn attr(node: u64) -> Vec<u8> {
    let (ino, mode, links): (u64, u32, u32) = match node {
        ROOT => (1, libc::S_IFDIR | 0o755, 2),
        _ => (7, libc::S_IFREG | 0o644, 2),
    };
    let mut out = [ino, 3, 1, 5, 5, 5].map(u64::to_ne_bytes).concat();
    out.extend([0, 0, 0, mode, links, 0, 0, 0, 4096, 0].map(u32::to_ne_bytes).concat());
    out
}
