//! The supervisor of a mount: a small process that holds everything that must outlive the daemon.
//! It starts daemons one after the other, and ends the mount if none comes up.
//!
//! It takes no memory as time goes by, and has one thread. It asks nothing of the mount itself nor
//! of any path in it, since that could hang when nobody serves.

mod child;
mod connection;
mod control_location;
mod kept_key;
mod launch;
mod mount_descriptors;
mod note;
mod program;
mod restarts;
mod signals;

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use crate::args::MountSupervisorArgs;
use crate::control::ProcessKind;
use crate::daemonize::ReadinessPipe;
use crate::error::{EXIT_FAILED, ErrorContext, Failure};
use crate::mount::flusher;
use crate::mount::mount_table::{self, MountEntry, MountInfo};

use child::{Daemon, HelperCommand, Stage, UnmountCommand};
use note::NoteFile;
use program::Programs;
use restarts::{Death, RestartDecision, Restarts};
use signals::Signals;

pub use child::{CONNECTION, HANDED_OVER, RECLAIM, STOP, TRIED, WAITING, WAKE, ready_word};
pub use control_location::Supervisors;
pub use kept_key::{KeptKey, key_of};
pub use launch::{Launch, MountMemory, MountSettings, OWN_PROGRAM};
pub use mount_descriptors::{DESCRIPTORS_MIN, MountDescriptors, PARENT, take};
pub use note::{SupervisorReport, find_note};

/// A daemon that is not ready and says nothing for this long is stuck, and is killed.
const SILENT_MAX: Duration = Duration::from_secs(30);
/// A mount that has been aborted says so within this time.
const ABORTED_ANSWERS_MAX: Duration = Duration::from_secs(2);
/// A daemon that was asked to stop and does not is killed, which comes to the same.
const STOP_MAX: Duration = Duration::from_secs(5);

/// Nothing has to be done sooner unless something happens.
const REST_MAX: Duration = Duration::from_secs(3600);

/// How it ended.
enum End {
    /// The mount is gone.
    Unmounted,
    /// The first daemon did not get ready; it has said why.
    NeverServed(u8),
    /// The mount was ended, and why.
    GaveUp(&'static str),
}

struct Supervisor {
    args: MountSupervisorArgs,
    /// The mount, wherever it is.
    known: MountInfo,
    /// As the kernel lists it; none if it was gone at once.
    listed: Option<MountEntry>,
    held: MountDescriptors,
    /// The command in the foreground, or who watches over that, until the first daemon is ready.
    waiting: Option<ReadinessPipe>,
    signals: Signals,
    daemon: Option<Daemon>,
    /// When to start the next one.
    start_at: Instant,
    restarts: Restarts,
    programs: Programs,
    /// What is known since a daemon was ready for the first time.
    served: Option<Stage>,
    unmounting: Option<UnmountCommand>,
    waking: HelperCommand,
    reclaim: HelperCommand,
    note: Option<NoteFile>,
}

/// Supervises a mount until it ends.
pub fn run(args: MountSupervisorArgs) -> Result<(), Failure> {
    crate::signals::name_process(c"dray-supervisor");
    flusher::declare();
    let what = || "cannot supervise a mount".to_owned();
    let held = MountDescriptors::take(args.mount.clones).doing(what)?;
    let foreground = args.mount.foreground;
    let other = match take(PARENT) {
        Err(_) if foreground => None,
        taken => Some(taken.doing(what)?),
    };
    let known = MountInfo { at: args.mount.mountpoint.clone(), connection: Some(args.connection) };
    let note = NoteFile::open(&known.name()).inspect_err(|error| {
        log::warn!("`dray upgrade` will not find this mount: {}", error.message)
    });
    let mut supervisor = Supervisor {
        listed: known.place(),
        known,
        held,
        waiting: Some(ReadinessPipe::over(other, foreground)),
        signals: Signals::new().doing(what)?,
        daemon: None,
        start_at: Instant::now(),
        restarts: Restarts::default(),
        programs: Programs::new(args.program.clone()),
        served: None,
        unmounting: None,
        waking: HelperCommand::by("wake-mount"),
        reclaim: HelperCommand::by("gather-entries"),
        note: note.ok(),
        args,
    };
    let end = supervisor.until_end().doing(what);
    supervisor.finish(end)
}

impl Supervisor {
    /// Where it was mounted, as it is called in the log.
    fn at(&self) -> &Path {
        &self.known.at
    }

    /// Where it is now. Of a connection that has ended it may be where another one is that got its
    /// number.
    fn place(&self) -> Option<MountEntry> {
        let place = self.known.place()?;
        let is_ours =
            |listed: &MountEntry| (&listed.source, listed.user) == (&place.source, place.user);
        self.listed.as_ref().is_none_or(is_ours).then_some(place)
    }

    fn until_end(&mut self) -> io::Result<End> {
        loop {
            if let Some(end) = self.step()? {
                return Ok(end);
            }
        }
    }

    /// Does what is due, then waits for the next thing to happen.
    fn step(&mut self) -> io::Result<Option<End>> {
        let now = Instant::now();
        if self.daemon.is_none()
            && now >= self.start_at
            && let Some(end) = self.start()
        {
            return Ok(Some(end));
        }
        if self.waking.again_at().is_some_and(|at| now >= at) {
            self.wake();
        }
        let due = self.due(now).min(self.waking.again_at().unwrap_or(now + REST_MAX));
        let (signalled, spoken, gone) = self.wait(due.saturating_duration_since(now))?;
        if gone {
            return Ok(Some(End::Unmounted));
        }
        if spoken && let Some(daemon) = &mut self.daemon {
            let ready = daemon.hear();
            let push = std::mem::take(&mut daemon.wants_push);
            let reclaims = std::mem::take(&mut daemon.wants_reclaim);
            if ready {
                self.ready()?;
            }
            if push {
                self.wake();
            }
            if reclaims {
                self.reclaim_entries();
            }
        }
        if signalled {
            for signal in self.signals.read()? {
                self.signalled(signal);
            }
            self.waking.reap();
            self.reclaim.reap();
        }
        if let Some(unmounting) = &mut self.unmounting
            && unmounting.is_over()
        {
            self.unmounting = None;
        }
        let ended = match &mut self.daemon {
            Some(daemon) => daemon.ended(),
            None => None,
        };
        if let Some(status) = ended {
            return Ok(self.died(status));
        }
        let now = Instant::now();
        let due = self.due(now); // it may have said something
        if let Some(daemon) = &mut self.daemon
            && now >= due
        {
            log::error!("the daemon of {} is stuck", self.args.mount.mountpoint.display());
            daemon.kill();
        }
        Ok(None)
    }

    /// When something has to be done even if nothing happens.
    fn due(&self, now: Instant) -> Instant {
        match &self.daemon {
            None => self.start_at,
            Some(daemon) => match (daemon.stopping, daemon.stage) {
                (Some(since), _) => since + STOP_MAX,
                (None, Stage::Starting) => daemon.heard_at + SILENT_MAX,
                (None, _) => now + REST_MAX,
            },
        }
    }

    /// Waits for a signal, a word of the daemon, or the end of a mount that no daemon serves yet. A
    /// daemon that serves sees that end by itself.
    fn wait(&self, time: Duration) -> io::Result<(bool, bool, bool)> {
        let serving = self.daemon.as_ref().is_some_and(|daemon| daemon.stage != Stage::Starting);
        let poll = |fd, events| libc::pollfd { fd, events, revents: 0 };
        // Negative numbers are left out.
        let control = self.daemon.as_ref().and_then(Daemon::control);
        let device = if serving { -1 } else { self.held.device.as_raw_fd() };
        let mut fds = [
            poll(self.signals.as_fd().as_raw_fd(), libc::POLLIN),
            poll(control.map_or(-1, |fd| fd.as_raw_fd()), libc::POLLIN),
            poll(device, 0), // errors are always reported
        ];
        let milliseconds = i32::try_from(time.as_micros().div_ceil(1000)).unwrap_or(i32::MAX);
        // SAFETY: the kernel reads and writes the array, which outlives the call.
        if unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as _, milliseconds) } < 0 {
            let error = io::Error::last_os_error();
            if error.kind() != io::ErrorKind::Interrupted {
                return Err(error);
            }
        }
        let [signals, control, device] = fds.map(|fd| fd.revents);
        Ok((signals != 0, control != 0, device & libc::POLLERR != 0))
    }

    fn start(&mut self) -> Option<End> {
        if self.served.is_some_and(|stage| stage == Stage::ServingWithoutResend) {
            self.renew_clones();
        }
        let mut words = self.args.mount.words();
        if self.served.is_some() {
            words.push("--successor".into());
        }
        let program = self.programs.next();
        let tried = self.programs.is_tried();
        match Daemon::start(&program, &words, self.args.connection, tried, &self.held) {
            Ok(daemon) => self.daemon = Some(daemon),
            Err(error) => {
                log::error!("cannot start {}: {error}", program.display());
                return self.after(Death::of_unborn(&error), EXIT_FAILED);
            }
        }
        None
    }

    /// The kernel cannot send requests again. The requests that the dead daemon had read must be
    /// ended lest they hang. Closing the clones that they were read from did that.
    fn renew_clones(&mut self) {
        if let Err(error) = self.held.renew_clones(self.args.mount.clones) {
            log::error!("cannot clone the descriptor of the mount: {error}");
        }
    }

    /// A daemon serves.
    fn ready(&mut self) -> io::Result<()> {
        let Some(daemon) = &self.daemon else { return Ok(()) };
        let (stage, pid) = (daemon.stage, daemon.pid());
        self.restarts.ready();
        if self.served.is_some() && stage == Stage::ServingRing {
            self.wake();
        }
        self.served = Some(stage);
        if stage == Stage::ServingWithoutResend {
            self.held.clones.clear();
        }
        self.programs.serves(pid);
        if self.note.as_ref().is_none_or(|note| !note.is_there()) {
            self.note = None;
            self.note = NoteFile::open(&self.known.name()).ok(); // why not was said at first
        }
        if let Some(note) = &mut self.note {
            note.tell(pid, self.programs.is_former(), self.programs.heeded());
        }
        match self.waiting.take() {
            Some(waiting) => waiting.ready().map_err(|failure| io::Error::other(failure.message)),
            None => Ok(()),
        }
    }

    /// Has requests served that wait in queues of a ring while there are entries.
    fn wake(&mut self) {
        if let Err(error) = self.waking.start(&self.known.now_at()) {
            log::error!("cannot wake {}: {error}", self.at().display());
        }
    }

    /// Has the entries of a ring come together. A daemon that this did not help asks again.
    fn reclaim_entries(&mut self) {
        if let Err(error) = self.reclaim.start(&self.known.now_at()) {
            log::debug!("cannot have the payloads of {} reclaimed: {error}", self.at().display());
        }
    }

    fn signalled(&mut self, signal: i32) {
        let at = self.at().display();
        match signal {
            libc::SIGHUP => {
                log::info!("{at}: upgrading to {}", self.args.program.display());
                self.programs.upgrade();
                if let Some(daemon) = &mut self.daemon {
                    daemon.stop();
                }
            }
            libc::SIGTERM | libc::SIGINT => self.unmount(),
            _ => {}
        }
    }

    /// Unmounts: a user or a signal wants the mount to end.
    fn unmount(&mut self) {
        // The mount is unmounted already: the daemon is about to end by itself.
        if self.unmounting.is_some() || self.connection_ended() {
            return;
        }
        let at = self.at().display();
        let Some(place) = self.place() else {
            // Taken out of the tree while it was in use, or there in another namespace only: no
            // unmounting reaches it.
            log::warn!(
                "the mount on {at} is unmounted but still in use: dray aborts its connection"
            );
            return self.abort();
        };
        log::info!("unmounting {}", place.at.display());
        self.unmounting = UnmountCommand::start(&place.at)
            .inspect_err(|error| log::error!("cannot unmount {at}: {error}"))
            .ok();
    }

    fn died(&mut self, status: ExitStatus) -> Option<End> {
        let daemon = self.daemon.take()?;
        let at = self.at().display();
        match status.code() {
            Some(0) => return Some(End::Unmounted),
            Some(HANDED_OVER) => {
                self.start_at = Instant::now();
                return None;
            }
            _ if daemon.stopping.is_some() => {
                self.start_at = Instant::now();
                return None; // it was killed because it did not stop in time, or anyhow
            }
            _ => {}
        }
        if self.served.is_some() {
            log::warn!("the daemon of {at} ended ({status}); requests wait for another one");
        }
        let death = Death::of(status);
        let code = status.code().and_then(|code| u8::try_from(code).ok());
        // What is short is for us alone.
        let code = code.filter(|_| death == Death::Failed).unwrap_or(EXIT_FAILED);
        self.after(death, code)
    }

    /// What follows a death; `code` is reported as the first daemon's.
    fn after(&mut self, death: Death, code: u8) -> Option<End> {
        if self.served.is_none() {
            return Some(End::NeverServed(code));
        }
        let tried = self.programs.is_tried();
        if self.programs.died(death) {
            log::error!(
                "{} failed: the mount keeps the former program",
                self.args.program.display()
            );
        }
        // An administrator asked for the upgrade, each time, and nothing is wrong with the program
        // that goes on.
        if tried {
            self.start_at = Instant::now();
            return None;
        }
        match self.restarts.died(Instant::now(), death) {
            RestartDecision::GiveUp(why) => Some(End::GaveUp(why)),
            RestartDecision::Restart(wait) => {
                self.start_at = Instant::now() + wait;
                None
            }
        }
    }

    fn finish(mut self, end: Result<End, Failure>) -> Result<(), Failure> {
        if let Some(mut daemon) = self.daemon.take() {
            daemon.kill();
        }
        let why = match end {
            Ok(End::Unmounted) => {
                self.remove_mount();
                self.remove_files();
                return Ok(());
            }
            Ok(End::NeverServed(code)) => {
                self.end_mount();
                self.remove_files();
                std::process::exit(i32::from(code));
            }
            Ok(End::GaveUp(why)) => why.to_owned(),
            Err(failure) => failure.message,
        };
        let message = format!("the mount on {} is ended: {why}", self.known.now_at().display());
        log::error!("{message}");
        self.end_mount();
        self.remove_files();
        Err(Failure::new(message))
    }

    /// Whatever was to be found by other commands.
    fn remove_files(&mut self) {
        self.note = None;
        ProcessKind::Mount.remove_dead(&self.known.name()); // a daemon that was killed has left its own
    }

    /// Every request fails, so that nobody waits for a daemon that will never be. Where the
    /// kernel's way is barred, the end of this process closes the last descriptors, which
    /// comes to the same.
    fn abort(&self) {
        // A connection that has ended may have left its number to another user's mount.
        if self.connection_ended() {
            return;
        }
        if let Err(error) = connection::abort(self.args.connection)
            && error.kind() != io::ErrorKind::NotFound
        {
            log::warn!("cannot abort the connection of {}: {error}", self.at().display());
        }
    }

    fn connection_ended(&self) -> bool {
        let mut fds = [libc::pollfd { fd: self.held.device.as_raw_fd(), events: 0, revents: 0 }];
        // SAFETY: the kernel reads and writes the array, which outlives the call.
        unsafe { libc::poll(fds.as_mut_ptr(), 1, 0) };
        fds[0].revents & libc::POLLERR != 0
    }

    /// Whether our connection has ended and left its number to what is at `place`. A process that
    /// mounts right after an unmounting gets the same number, as a rule. What else is there has
    /// been aborted.
    fn number_is_another_s(&self, place: &MountEntry) -> bool {
        self.connection_ended() && !dray_fuse::is_aborted(&place.at, ABORTED_ANSWERS_MAX)
    }

    /// Aborts the mount and takes it out of the tree.
    fn end_mount(&self) {
        // As long as it exists its number is nobody else's, and nobody has to be asked.
        let ours = self.place().filter(|_| !self.connection_ended());
        self.abort();
        match ours {
            Some(place) => unmount_lazily(&place),
            None => self.remove_mount(),
        }
    }

    /// Takes the mount out of the tree if it is still there.
    fn remove_mount(&self) {
        if let Some(place) = self.place().filter(|place| !self.number_is_another_s(place)) {
            log::warn!("the mount on {} had been aborted", place.at.display());
            unmount_lazily(&place);
        }
    }
}

fn unmount_lazily(place: &MountEntry) {
    let at = place.at.display();
    if !mount_table::is_on_top(place) {
        return log::error!("cannot unmount {at}: something else is mounted over it");
    }
    if let Err(error) = dray_fuse::unmount(&place.at, true) {
        log::error!("cannot unmount {at}: {error}");
    }
}
