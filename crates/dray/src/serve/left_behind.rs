//! Former servers of which a thread still hangs in a file system.
//!
//! A thread that was left behind makes its change when the file system goes on. The export's interrupted changes can be
//! settled only after that.
//!
//! A file in the state directory has a line for each export of each such process. The line has the
//! machine's boot id, process, time of its start, export.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::serve::state::boot_id;

/// Lines that are read: a file system that hangs over more restarts is beyond help.
const LINES_MAX: usize = 1000;

fn file_in(state: &Path) -> PathBuf {
    state.join("left-behind")
}

/// Notes that this process ends with calls under way to the file system of `export`. Errors:
/// those of writing a file.
pub fn note(state: &Path, export: &str) -> io::Result<()> {
    let pid = std::process::id();
    let start = start_of(pid).ok_or(io::ErrorKind::NotFound)?;
    let line = format!("{:032x} {pid} {start} {export}\n", boot_id());
    let mut file = OpenOptions::new().create(true).append(true).open(file_in(state))?;
    file.write_all(line.as_bytes())
}

/// A former server of `export` that is still in its file system.
pub fn of(state: &Path, export: &str) -> Option<u32> {
    let text = fs::read_to_string(file_in(state)).unwrap_or_default();
    text.lines().take(LINES_MAX).filter_map(|line| there(line, Some(export))).next()
}

/// Forgets those that are gone.
pub fn forget_ended(state: &Path) {
    let path = file_in(state);
    let Ok(text) = fs::read_to_string(&path) else { return };
    if !text.lines().take(LINES_MAX).any(|line| there(line, None).is_some()) {
        let _ = fs::remove_file(path); // one that stays names nobody
    }
}

/// The process of a line, if it is there, and the export's if that is wanted.
fn there(line: &str, export: Option<&str>) -> Option<u32> {
    let mut words = line.splitn(4, ' ');
    let same_boot = u128::from_str_radix(words.next()?, 16) == Ok(boot_id());
    let pid: u32 = words.next()?.parse().ok()?;
    let start: u64 = words.next()?.parse().ok()?;
    let name = words.next()?;
    let wanted = export.is_none_or(|export| export == name);
    (same_boot && wanted && start_of(pid) == Some(start) && has_threads(pid)).then_some(pid)
}

/// When a process began, in ticks since the machine did (proc(5), field 22 of `stat`).
fn start_of(pid: u32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit(')').next()?.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Whether anything of it is left but its exit status, which nobody may ever ask for.
fn has_threads(pid: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else { return false };
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    threads.count() > 1 || !status.contains("\nState:\tZ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    // proves: P111
    #[test]
    fn who_is_left_behind_is_known_until_it_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path();
        note(state, "a b").unwrap();
        let own = std::process::id();
        assert_eq!((of(state, "a b"), of(state, "a")), (Some(own), None));
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        let start = start_of(child.id()).unwrap();
        let line = |boot: u128, start: u64| format!("{boot:032x} {} {start} x\n", child.id());
        fs::write(file_in(state), line(boot_id(), start)).unwrap();
        assert_eq!(of(state, "x"), Some(child.id()));
        forget_ended(state);
        assert_eq!(of(state, "x"), Some(child.id()));
        for other in [line(boot_id() ^ 1, start), line(boot_id(), start + 1), "x\ny z".into()] {
            fs::write(file_in(state), &other).unwrap();
            assert_eq!(of(state, "x"), None, "{other}");
        }
        fs::write(file_in(state), line(boot_id(), start)).unwrap();
        // SAFETY: no memory is passed; the child has not been waited for.
        unsafe { libc::kill(child.id() as libc::pid_t, libc::SIGKILL) };
        while of(state, "x").is_some() {
            std::thread::sleep(std::time::Duration::from_millis(5)); // until only its status is left
        }
        child.wait().unwrap();
        forget_ended(state);
        assert!(!file_in(state).exists());
    }
}
