//! `dray upgrade`.

use std::time::{Duration, Instant};

use crate::args::UpgradeArgs;
use crate::error::{ErrorContext, Failure};
use crate::mount::mount_table::{self, MountEntry};
use crate::mount::supervisor::{SupervisorReport, Supervisors, find_note};
use crate::{output, paths};

/// A new daemon that does not serve within this time is no longer waited for.
const PATIENCE: Duration = Duration::from_secs(60);
/// Nor are those who set its queues going, who take milliseconds.
const PATIENCE_WAKING: Duration = Duration::from_secs(5);
/// How often is looked.
const LOOK_TIME: Duration = Duration::from_millis(20);

/// Has mounts served by the program as it is installed now.
pub fn run(args: &UpgradeArgs) -> Result<(), Failure> {
    let Some(mountpoint) = &args.mountpoint else { return all() };
    let what = || format!("cannot upgrade {}", mountpoint.display());
    let mount = mount_table::follow(mountpoint).doing(what)?.mounted_there();
    let mount = mount
        .ok_or_else(|| Failure::new(format!("{} is not a mount of dray", mountpoint.display())))?;
    if mount.user != paths::effective_uid() && !paths::is_root() {
        return Err(Failure::new(format!(
            "{}: only root and user {}, who mounted it, can upgrade it",
            what(),
            mount.user
        )));
    }
    upgrade(&mount)
}

/// All mounts of this user whose supervisors can be found.
fn all() -> Result<(), Failure> {
    let mut failed = 0;
    let mut ours = mount_table::list();
    ours.retain(|entry| entry.user == paths::effective_uid());
    ours.sort_by_key(|entry| entry.connection); // once each, in however many places it is
    ours.dedup_by_key(|entry| entry.connection);
    for entry in ours.into_iter().filter(|entry| find_note(entry).is_some()) {
        match upgrade(&entry) {
            Ok(()) => output::print_line(format_args!("upgraded {}", entry.at.display()))?,
            Err(failure) => {
                output::complain(failure.message);
                failed += 1;
            }
        }
    }
    match failed {
        0 => Ok(()),
        _ => Err(Failure::new(format!("{failed} mount(s) were not upgraded"))),
    }
}

/// Asks the supervisor of a mount for an upgrade and waits for its outcome.
fn upgrade(mount: &MountEntry) -> Result<(), Failure> {
    let shown = mount.at.display();
    let lost = || match Supervisors::look().process_of(mount) {
        Some(process) => Failure::new(format!(
            "the supervisor of the mount on {shown} is not to be found in its run directory: \
             `kill -HUP {process}` has it upgrade, and be found again where that can be written to"
        )),
        None => Failure::new(format!(
            "the mount on {shown} has no supervisor that could be found: it is in another container, \
             or has died; unmount and mount again to have the new program"
        )),
    };
    let note = find_note(mount).ok_or_else(lost)?;
    let before = note.read().ok_or_else(lost)?;
    let pid = i32::try_from(before.supervisor).map_err(Failure::new)?;
    // SAFETY: takes no memory.
    if unsafe { libc::kill(pid, libc::SIGHUP) } != 0 {
        let error = std::io::Error::last_os_error();
        return Err(Failure::new(format!("cannot signal the supervisor of {shown}: {error}")));
    }
    let begin = Instant::now();
    while begin.elapsed() < PATIENCE {
        std::thread::sleep(LOOK_TIME);
        match note.read() {
            None => return Err(Failure::new(format!("the mount on {shown} has ended"))),
            Some(report) if report.answers_since(&before) => {
                while begin.elapsed() < PATIENCE_WAKING && is_waking(before.supervisor) {
                    std::thread::sleep(LOOK_TIME);
                }
                return outcome(&report);
            }
            Some(_) => {}
        }
    }
    Err(Failure::new(format!(
        "no new daemon serves {shown} so far; the log of the supervisor (process {}) says why",
        before.supervisor
    )))
}

/// Whether the queues of a ring are being set going again, which uses the mount: it could not
/// be unmounted.
fn is_waking(supervisor: u32) -> bool {
    let children = format!("/proc/{supervisor}/task/{supervisor}/children");
    let children = std::fs::read_to_string(children).unwrap_or_default();
    let wakes = |pid: &str| {
        let words = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        words.split(|byte| *byte == 0).nth(1) == Some(b"wake-mount")
    };
    children.split_ascii_whitespace().any(wakes)
}

fn outcome(report: &SupervisorReport) -> Result<(), Failure> {
    match report.former_program {
        false => Ok(()),
        true => Err(Failure::new(
            "the installed program does not start: the mount keeps the former program",
        )),
    }
}
