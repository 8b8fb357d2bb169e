//! libnfs, loaded at run time if it is there: an NFSv3 client inside the application.
//!
//! Only `script/bench peers` needs it, so nothing here is linked. The order of arguments
//! of its pread and pwrite changed with its version 6, which the soname tells.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io;
use std::rc::Rc;
use std::sync::OnceLock;

use crate::target::{FileCalls, LoadedFile, OpenKind};

/// Libraries looked for, and whether the buffer comes before the length.
const LIBRARIES: [(&CStr, bool); 5] = [
    (c"libnfs.so.13", false),
    (c"libnfs.so.14", false),
    (c"libnfs.so.15", false),
    (c"libnfs.so.16", true),
    (c"libnfs.so.17", true),
];

type Nfs = *mut c_void;
type Handle = *mut c_void;

/// The functions used, as libnfs.h declares them.
struct Library {
    buffer_first: bool,
    init_context: unsafe extern "C" fn() -> Nfs,
    destroy_context: unsafe extern "C" fn(Nfs),
    get_error: unsafe extern "C" fn(Nfs) -> *const c_char,
    parse_url_dir: unsafe extern "C" fn(Nfs, *const c_char) -> *mut Url,
    mount: unsafe extern "C" fn(Nfs, *const c_char, *const c_char) -> c_int,
    open: unsafe extern "C" fn(Nfs, *const c_char, c_int, *mut Handle) -> c_int,
    create: unsafe extern "C" fn(Nfs, *const c_char, c_int, c_int, *mut Handle) -> c_int,
    close: unsafe extern "C" fn(Nfs, Handle) -> c_int,
    fsync: unsafe extern "C" fn(Nfs, Handle) -> c_int,
    pread: *mut c_void,
    pwrite: *mut c_void,
    stat64: unsafe extern "C" fn(Nfs, *const c_char, *mut [u64; 17]) -> c_int,
    unlink: unsafe extern "C" fn(Nfs, *const c_char) -> c_int,
}

// SAFETY: addresses of functions, which any thread may call (each on its own context).
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

#[repr(C)]
struct Url {
    server: *const c_char,
    path: *const c_char,
    file: *const c_char,
}

fn libnfs() -> io::Result<&'static Library> {
    static LIBRARY: OnceLock<Option<Library>> = OnceLock::new();
    let missing = || io::Error::new(io::ErrorKind::NotFound, "libnfs is not installed");
    LIBRARY
        .get_or_init(|| LIBRARIES.iter().find_map(|known| load(*known)))
        .as_ref()
        .ok_or_else(missing)
}

/// An address as a function.
///
/// # Safety
/// There is a function of the type `F` at `address`.
unsafe fn function<F: Copy>(address: *mut c_void) -> F {
    assert!(size_of::<F>() == size_of::<*mut c_void>(), "F is a pointer to a function");
    // SAFETY: both are pointers, and the caller vouches for what is there.
    unsafe { std::mem::transmute_copy(&address) }
}

fn load((soname, buffer_first): (&CStr, bool)) -> Option<Library> {
    // SAFETY: loading libnfs runs no code that touches ours.
    let libnfs = unsafe { libc::dlopen(soname.as_ptr(), libc::RTLD_NOW) };
    if libnfs.is_null() {
        return None;
    }
    let symbol = |name: &CStr| {
        // SAFETY: `libnfs` is open and stays so.
        let address = unsafe { libc::dlsym(libnfs, name.as_ptr()) };
        (!address.is_null()).then_some(address)
    };
    // SAFETY: the signatures above are those of libnfs.h.
    unsafe {
        Some(Library {
            buffer_first,
            init_context: function(symbol(c"nfs_init_context")?),
            destroy_context: function(symbol(c"nfs_destroy_context")?),
            get_error: function(symbol(c"nfs_get_error")?),
            parse_url_dir: function(symbol(c"nfs_parse_url_dir")?),
            mount: function(symbol(c"nfs_mount")?),
            open: function(symbol(c"nfs_open")?),
            create: function(symbol(c"nfs_create")?),
            close: function(symbol(c"nfs_close")?),
            fsync: function(symbol(c"nfs_fsync")?),
            pread: symbol(c"nfs_pread")?,
            pwrite: symbol(c"nfs_pwrite")?,
            stat64: function(symbol(c"nfs_stat64")?),
            unlink: function(symbol(c"nfs_unlink")?),
        })
    }
}

/// One mounted export, for one thread: a connection of its own.
pub struct NfsMount(Rc<Context>);

/// Kept by the mount and by every file on it.
struct Context {
    libnfs: &'static Library,
    nfs: Nfs,
}

impl NfsMount {
    /// Mounts `nfs://SERVER/PATH?options`; libnfs(3) documents the options.
    pub fn new(url: &str) -> io::Result<NfsMount> {
        let libnfs = libnfs()?;
        let text = CString::new(url)?;
        // SAFETY: the context is new and used by this thread alone. What parse_url_dir answers
        // lives as long as the process (it is small and never freed).
        unsafe {
            let mount = Context { libnfs, nfs: (libnfs.init_context)() };
            let url = (libnfs.parse_url_dir)(mount.nfs, text.as_ptr());
            if url.is_null() {
                return Err(mount.error(-libc::EINVAL));
            }
            match (libnfs.mount)(mount.nfs, (*url).server, (*url).path) {
                0 => Ok(NfsMount(Rc::new(mount))),
                code => Err(mount.error(code)),
            }
        }
    }
}

impl Context {
    fn error(&self, code: c_int) -> io::Error {
        // SAFETY: answers null or text that lives until the next call on this context.
        let text = unsafe {
            let text = (self.libnfs.get_error)(self.nfs);
            if text.is_null() { c"libnfs" } else { CStr::from_ptr(text) }
        };
        io::Error::new(io::Error::from_raw_os_error(-code).kind(), text.to_string_lossy())
    }

    fn checked(&self, code: c_int) -> io::Result<usize> {
        usize::try_from(code).map_err(|_| self.error(code))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: nobody holds it any more.
        unsafe { (self.libnfs.destroy_context)(self.nfs) }
    }
}

struct NfsFile {
    context: Rc<Context>,
    handle: Handle,
}

impl FileCalls for NfsMount {
    fn path(&self, name: &str) -> CString {
        CString::new(format!("/{name}")).unwrap_or_default() // names are ours: no NUL
    }

    fn open(&self, path: &CStr, how: OpenKind) -> io::Result<Box<dyn LoadedFile>> {
        let mut handle = std::ptr::null_mut();
        // SAFETY: `path` ends with NUL, `handle` is ours to be written.
        let code = unsafe {
            let exclusive = libc::O_WRONLY | libc::O_CREAT | libc::O_EXCL;
            match how {
                OpenKind::Read | OpenKind::ReadDirect => {
                    (self.0.libnfs.open)(self.0.nfs, path.as_ptr(), libc::O_RDONLY, &mut handle)
                }
                OpenKind::WriteDirect => {
                    (self.0.libnfs.open)(self.0.nfs, path.as_ptr(), libc::O_RDWR, &mut handle)
                }
                OpenKind::WriteSync => {
                    let flags = libc::O_RDWR | libc::O_SYNC;
                    (self.0.libnfs.open)(self.0.nfs, path.as_ptr(), flags, &mut handle)
                }
                OpenKind::Create => {
                    (self.0.libnfs.create)(self.0.nfs, path.as_ptr(), exclusive, 0o644, &mut handle)
                }
                OpenKind::Fill => {
                    let flags = libc::O_WRONLY | libc::O_CREAT;
                    (self.0.libnfs.create)(self.0.nfs, path.as_ptr(), flags, 0o644, &mut handle)
                }
            }
        };
        self.0.checked(code)?;
        Ok(Box::new(NfsFile { context: self.0.clone(), handle }))
    }

    fn stat(&self, path: &CStr) -> io::Result<u64> {
        let mut stat = [0; 17];
        // SAFETY: nfs_stat_64 has 16 or 17 fields of 64 bits.
        self.0.checked(unsafe { (self.0.libnfs.stat64)(self.0.nfs, path.as_ptr(), &mut stat) })?;
        Ok(stat[7])
    }

    fn unlink(&self, path: &CStr) -> io::Result<()> {
        // SAFETY: `path` ends with NUL.
        self.0.checked(unsafe { (self.0.libnfs.unlink)(self.0.nfs, path.as_ptr()) }).map(drop)
    }
}

type OffsetFirst = unsafe extern "C" fn(Nfs, Handle, u64, u64, *mut c_void) -> c_int;
type BufferFirst = unsafe extern "C" fn(Nfs, Handle, *mut c_void, usize, u64) -> c_int;

impl NfsFile {
    /// # Safety
    /// `address` is that of pread or pwrite, and `buffer` valid for it.
    unsafe fn transfer(
        &self,
        address: *mut c_void,
        buffer: *mut c_void,
        bytes: usize,
        at: u64,
    ) -> io::Result<usize> {
        // SAFETY: the caller's promise; the order of arguments is that of this version.
        let code = unsafe {
            if self.context.libnfs.buffer_first {
                let transfer: BufferFirst = function(address);
                transfer(self.context.nfs, self.handle, buffer, bytes, at)
            } else {
                let transfer: OffsetFirst = function(address);
                transfer(self.context.nfs, self.handle, at, bytes as u64, buffer)
            }
        };
        usize::try_from(code).map_err(|_| io::Error::from_raw_os_error(-code))
    }
}

impl LoadedFile for NfsFile {
    fn read_at(&self, into: &mut [u8], at: u64) -> io::Result<usize> {
        // SAFETY: `into` is ours to be written.
        unsafe {
            self.transfer(self.context.libnfs.pread, into.as_mut_ptr().cast(), into.len(), at)
        }
    }

    fn write_at(&self, from: &[u8], at: u64) -> io::Result<usize> {
        // SAFETY: pwrite only reads the buffer.
        unsafe {
            self.transfer(
                self.context.libnfs.pwrite,
                from.as_ptr().cast_mut().cast(),
                from.len(),
                at,
            )
        }
    }

    fn sync(&self) -> io::Result<()> {
        // SAFETY: the handle is open.
        match unsafe { (self.context.libnfs.fsync)(self.context.nfs, self.handle) } {
            0 => Ok(()),
            code => Err(self.context.error(code)),
        }
    }
}

impl Drop for NfsFile {
    fn drop(&mut self) {
        // SAFETY: the handle is open, and not used again.
        unsafe { (self.context.libnfs.close)(self.context.nfs, self.handle) };
    }
}
