//! Changes outside dray are noticed: fanotify(7) reports each change on the file system of the export.
//!
//! The kernel reports the export's own changes, too, by the thread that made them. Threads that work for an export
//! are known ([`ExportWatch`]), and work for no other one. So a change that another export of this process makes
//! counts as one from outside.
//!
//! A thread reads what there is, and rests for [`PAUSE_MS`]. What happens to one file within a rest is one event,
//! and nothing wakes the thread as long as nothing changes.

mod events;

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dray_core::{Errno, FileId, IdMap, LeaseKinds, OnOutsideChanges, OutsideChange};

use self::events::{OutsideEvent, OutsideEvents};
use super::PosixFs;
use super::core::{Core, Ids};
use super::handle::HandleCodec;
use super::sys;
use super::watch::ExportWatch;

/// How long the thread rests between two reads.
const PAUSE_MS: i32 = 50;
/// Read at once. An event takes some 60 bytes.
const BUFFER_BYTES: usize = 64 << 10;

/// Whether changes outside dray are noticed.
#[derive(Debug, Default)]
pub(super) struct OutsideWatch(Mutex<WatchState>);

#[derive(Debug, Default)]
enum WatchState {
    /// Nobody has asked.
    #[default]
    Off,
    /// The thread ends when this end of a pipe is closed.
    On(#[expect(dead_code, reason = "it is held, and closed in the end")] OwnedFd),
    /// The kernel does not report them, for this reason.
    Failed(String),
}

impl OutsideWatch {
    fn state(&self) -> MutexGuard<'_, WatchState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the thread.
    pub(super) fn end(&self) {
        *self.state() = WatchState::Off;
    }
}

impl PosixFs {
    /// As `Backend::watch_outside`.
    pub fn watch_outside(&self, on_changes: Arc<dyn OnOutsideChanges>) -> Result<(), String> {
        if !self.core.options.watches_outside {
            return Ok(());
        }
        let begun = self.core.begin_to_watch(on_changes);
        *self.core.outside.state() = match &begun {
            Ok(()) => return Ok(()),
            Err(why) => WatchState::Failed(why.clone()),
        };
        begun
    }

    /// As `Backend::outside_unnoticed`.
    pub fn outside_unnoticed(&self) -> Option<String> {
        match &*self.core.outside.state() {
            WatchState::Off => Some("`watch_outside` is off".to_owned()),
            WatchState::On(_) => None,
            WatchState::Failed(why) => Some(why.clone()),
        }
    }
}

impl Core {
    fn begin_to_watch(
        self: &Arc<Core>,
        on_changes: Arc<dyn OnOutsideChanges>,
    ) -> Result<(), String> {
        let kind = &self.below.kind;
        let Ids::Native(codec) = &self.ids else {
            return Err(format!("{kind} has no handles of files that last"));
        };
        let group = super::as_server(|| sys::watch_changes(self.mount_fd()));
        let group =
            group.map_err(|error| error.to_string())?.map_err(|errno| why_not(errno, kind))?;
        let (ended, end) = std::io::pipe().map_err(|error| format!("there is no pipe: {error}"))?;
        let (ended, end) = (OwnedFd::from(ended), OwnedFd::from(end));
        let watch = self.watch;
        let follower = Follower { group, ended, codec: *codec, watch, on_changes };
        *self.outside.state() = WatchState::On(end);
        let core = Arc::downgrade(self);
        let follow = move || {
            let Err(errno) = follower.follow() else { return };
            let why = format!("the kernel reports no more changes: {errno}");
            log::error!("changes beside dray are no longer noticed: {why}");
            if let Some(core) = core.upgrade() {
                *core.outside.state() = WatchState::Failed(why);
            }
        };
        let thread = std::thread::Builder::new().name("dray-outside".to_owned()).spawn(follow);
        thread.map(drop).map_err(|error| format!("there is no thread for it: {error}"))
    }
}

/// Why the kernel does not report changes.
fn why_not(errno: Errno, kind: &str) -> String {
    let why = match errno.raw() {
        libc::EPERM => "the server has no CAP_SYS_ADMIN".to_owned(),
        libc::EOPNOTSUPP | libc::ENODEV => format!("the kernel does not report files of {kind}"),
        libc::EXDEV => {
            format!("the export is on a part of a file system, such as a subvolume of {kind}")
        }
        libc::ENFILE => {
            "fs.fanotify.max_user_groups, or the limit of open files, is reached".to_owned()
        }
        libc::ENOSYS | libc::EINVAL => "it takes Linux 5.1, with fanotify".to_owned(),
        _ => return format!("fanotify: {errno}"),
    };
    format!("{why} (fanotify: {errno})")
}

/// The thread.
struct Follower {
    group: OwnedFd,
    /// Has an end when the thread is to end.
    ended: OwnedFd,
    codec: HandleCodec,
    watch: ExportWatch,
    on_changes: Arc<dyn OnOutsideChanges>,
}

impl Follower {
    /// Until it is to end. Errors: those of poll(2) and read(2); then anything may have been changed.
    fn follow(&self) -> Result<(), Errno> {
        let mut buffer = vec![0; BUFFER_BYTES];
        let followed = self.follow_with(&mut buffer);
        if followed.is_err() {
            self.on_changes.missed();
        }
        followed
    }

    fn follow_with(&self, buffer: &mut [u8]) -> Result<(), Errno> {
        loop {
            let [_, is_over] = sys::wait_readable([self.group.as_fd(), self.ended.as_fd()], -1)?;
            if is_over {
                return Ok(());
            }
            read_all(self.group.as_fd(), buffer, |events| self.report(events))?;
            let ended = self.ended.as_fd();
            if sys::wait_readable([ended, ended], PAUSE_MS)?[0] {
                return Ok(());
            }
        }
    }

    /// Reports what others have changed.
    fn report(&self, events: OutsideEvents<'_>) {
        let changed = changes_of_others(events, &self.codec, &self.watch.threads());
        if !changed.files.is_empty() {
            let change = |(id, kinds)| OutsideChange { id, kinds };
            let changes: Vec<OutsideChange> = changed.files.into_iter().map(change).collect();
            self.on_changes.changed(&changes);
        }
        if changed.missed {
            self.on_changes.missed();
        }
    }
}

/// Reads until there is little left: what comes meanwhile is for the next time.
fn read_all(
    group: BorrowedFd<'_>,
    buffer: &mut [u8],
    report: impl Fn(OutsideEvents<'_>),
) -> Result<(), Errno> {
    loop {
        let read = match sys::read_some(group, buffer) {
            Ok(bytes) => bytes,
            Err(Errno::EAGAIN) => return Ok(()),
            Err(errno) => return Err(errno),
        };
        report(OutsideEvents::of(buffer.get(..read).unwrap_or_default()));
        if read < buffer.len() / 2 {
            return Ok(());
        }
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct OthersChanges {
    files: IdMap<FileId, LeaseKinds>,
    missed: bool,
}

/// What threads other than `own` have changed. Files of other parts of the file system have no id.
fn changes_of_others(
    events: OutsideEvents<'_>,
    codec: &HandleCodec,
    own: &HashSet<i32>,
) -> OthersChanges {
    let mut changes = OthersChanges::default();
    for event in events {
        match event {
            OutsideEvent::Missed => changes.missed = true,
            OutsideEvent::Changed { thread, .. } if own.contains(&thread) => {}
            OutsideEvent::Changed { handle, kinds, .. } => {
                if let Some(id) = codec.encode(&handle) {
                    let known = changes.files.entry(id).or_default();
                    *known = *known | kinds;
                }
            }
        }
    }
    changes
}
