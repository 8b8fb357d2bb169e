//! Watches mounts and unmounts (proc_pid_mountinfo(5), poll(2)). Each change has the exports checked that
//! it may concern.

use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crate::mount::mount_table;
use crate::serve::export_state::ExportState;

/// Of the thread that opens exports, and of this one: all threads of a server have the same mounts.
const TABLE: &str = "/proc/self/mountinfo";

/// After a change the table is read once in this time at most: where containers come and go it
/// changes all the time.
const COALESCE_TIME: Duration = Duration::from_millis(50);

/// Starts the thread that does so for ever. Where it cannot, exports are looked at now and then.
pub fn watch(exports: Vec<Arc<ExportState>>) {
    let watching = File::open(TABLE).and_then(|table| {
        let name = "dray-mounts".into();
        std::thread::Builder::new().name(name).spawn(move || follow(table, &exports))
    });
    if let Err(error) = watching {
        log::warn!("unmounted exports are noticed some seconds late: {error}");
    }
}

fn follow(mut table: File, exports: &[Arc<ExportState>]) {
    // What happened before this began nobody has seen.
    let mut known: Vec<Option<Vec<u8>>> = vec![None; exports.len()];
    loop {
        match read(&mut table) {
            Ok(text) => {
                for (export, known) in exports.iter().zip(&mut known) {
                    let now = Some(around(&text, &export.path()));
                    if *known != now {
                        *known = now;
                        export.stir();
                    }
                }
            }
            Err(error) => {
                return log::warn!("unmounted exports are noticed some seconds late: {error}");
            }
        }
        wait_for_change(&table);
        std::thread::sleep(COALESCE_TIME);
    }
}

fn read(table: &mut File) -> io::Result<Vec<u8>> {
    let mut text = Vec::new();
    table.rewind()?;
    table.read_to_end(&mut text)?;
    Ok(text)
}

/// Waits until anything has been mounted or unmounted since this was called before, or the table was
/// opened.
fn wait_for_change(table: &File) {
    let mut poll = libc::pollfd { fd: table.as_raw_fd(), events: libc::POLLPRI, revents: 0 };
    // SAFETY: one entry, which outlives the call. After an error the table is read once too often.
    unsafe { libc::poll(&raw mut poll, 1, -1) };
}

/// The mounts on the way to `path`, as the table has them.
fn around(table: &[u8], path: &Path) -> Vec<u8> {
    let lines = table.split(|byte| *byte == b'\n');
    let on_the_way =
        lines.filter(|line| mount_table::place_of(line).is_some_and(|at| path.starts_with(at)));
    on_the_way.flat_map(|line| [line, b"\n"]).flatten().copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_elsewhere_concern_no_export() {
        let table = b"20 1 8:1 / / rw - ext4 /dev/x rw\n21 20 0:5 / /srv/a\\040b rw - nfs n:/ rw\n\
            22 20 0:6 / /srv/c rw - tmpfs none rw\n23 21 0:7 / /srv/a\\040b/below rw - tmpfs none rw\n";
        let numbers = |path: &str| -> Vec<Vec<u8>> {
            let text = around(table, Path::new(path));
            let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
            lines.map(|line| line[..2].to_vec()).collect()
        };
        assert_eq!(numbers("/srv/a b"), [b"20", b"21"]);
        assert_eq!(numbers("/srv/a b/dir"), [b"20", b"21"]);
        assert_eq!(numbers("/srv/cc"), [b"20"]);
    }
}
