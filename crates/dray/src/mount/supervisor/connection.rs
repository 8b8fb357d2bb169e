//! Ends a connection to the kernel from outside, once no daemon serves it.

use std::ffi::CStr;
use std::io;

/// Where the kernel lists its FUSE connections.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";
const CONNECTIONS_C: &CStr = c"/sys/fs/fuse/connections";

/// Aborts connection `number`: every request under way fails, and processes that waited
/// for one can end. Mounts the control file system if need be and possible. Errors: those
/// of open(2) and write(2); `ENOENT` for a connection that has ended.
pub fn abort(number: u32) -> io::Result<()> {
    let file = format!("{CONNECTIONS}/{number}/abort");
    match std::fs::write(&file, "1") {
        Err(error) if error.kind() == io::ErrorKind::NotFound && !is_mounted() => {
            mount_control()?;
            std::fs::write(&file, "1")
        }
        result => result,
    }
}

/// The directory is never empty where the file system is mounted and there is a connection.
fn is_mounted() -> bool {
    std::fs::read_dir(CONNECTIONS).is_ok_and(|mut entries| entries.next().is_some())
}

fn mount_control() -> io::Result<()> {
    let kind = c"fusectl".as_ptr();
    // SAFETY: the C strings live for ever.
    match unsafe { libc::mount(kind, CONNECTIONS_C.as_ptr(), kind, 0, std::ptr::null()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
