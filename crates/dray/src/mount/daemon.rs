//! A daemon of `dray mount` serves a mount that its supervisor holds.
//!
//! All that must outlive the daemon lies in memory that the supervisor handed to it. So being killed and
//! being stopped have the same effect.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dray_client::ClientMemory;
use dray_fuse::proto::abi;
use dray_fuse::{Device, State, Transport, TransportWish};
use dray_rt::{Interest, Source};

use crate::args::MountDaemonArgs;
use crate::daemonize;
use crate::error::{ErrorContext, Failure, StartErrorContext};
use crate::mount::connection::{NotifyFn, SupervisorRequests};
use crate::mount::flusher;
use crate::mount::mount_table::MountInfo;
use crate::mount::options::MountPlan;
use crate::mount::supervisor::{
    CONNECTION, HANDED_OVER, KeptKey, MountDescriptors, PARENT, RECLAIM, STOP, TRIED, WAITING,
    WAKE, key_of, ready_word, take,
};
use crate::mount::{Mount, RunningMount};
use crate::paths;
use crate::signals::{self, EndSignals};

/// Serves the mount until it ends, or until the supervisor asks for a stop.
pub fn run(args: MountDaemonArgs) -> Result<(), Failure> {
    // Nobody reads what a successor prints at its end: the command that mounted has ended long ago.
    let unheard = args.successor && !args.mount.foreground;
    let at = args.mount.mountpoint.clone();
    serve(args).inspect_err(|failure| {
        if unheard {
            log::error!("the daemon of {} ends: {}", at.display(), failure.message);
        }
    })
}

fn serve(args: MountDaemonArgs) -> Result<(), Failure> {
    signals::name_process(c"dray-mount");
    signals::hold();
    flusher::declare();
    paths::raise_file_limit();
    paths::lift_size_limit();
    let what = || "cannot serve a mount".to_owned();
    let held = MountDescriptors::take(args.mount.clones).doing(what)?;
    let control = UnixStream::from(take(PARENT).doing(what)?);
    if args.successor && !args.mount.foreground {
        daemonize::leave_terminal()?;
    }
    let at = args.mount.mountpoint;
    let known = MountInfo { at: at.clone(), connection: connection_of_supervisor() };
    let kept = held.key.map(KeptKey::over);
    let mut key = |auth: &str| key_of(auth, kept.as_ref(), &known);
    let plan = MountPlan::parse_with(&args.mount.options, &mut key)?;
    let wants_ring = plan.transport == TransportWish::Uring;
    let mount = Mount { target: args.mount.target, known: known.clone(), plan };
    let state = State::adopt(held.state).beginning(what)?;
    let adopted = state.initialised();
    // Before anything is read, so that what a daemon before us had read comes first, and
    // finds its replay slots untouched. Until it is read, the death of its caller ends it.
    if adopted && let Err(error) = dray_fuse::resend(held.device.as_fd()) {
        log::warn!("{}: the kernel cannot send requests again: {error}", at.display());
    }
    // While the server is away the supervisor is to know that nothing is stuck here.
    let wait = adopted.then(|| saying(&control, WAITING)).transpose().beginning(what)?;
    let wishes = SupervisorRequests {
        push: saying(&control, WAKE).beginning(what)?,
        reclaim: saying(&control, RECLAIM).beginning(what)?,
    };
    let device = Device { fd: held.device, clones: held.clones, state };
    let replaceable = std::env::var_os(TRIED).is_some();
    let running =
        mount.serve(device, ClientMemory::Held(held.session), wait, replaceable, wishes)?;
    if !args.successor && !args.mount.foreground {
        daemonize::leave_terminal()?;
    }
    let stats = running.reporter().stats();
    if let Some(why) = stats.no_ring.filter(|_| !args.successor) {
        // A user who asked for a ring gets a warning; else it is normal on this machine.
        let level = if wants_ring { log::Level::Warn } else { log::Level::Info };
        log::log!(level, "{}: the classic transport is used: {why}", at.display());
    }
    let ring = stats.transport == Transport::Uring;
    let ready = ready_word(ring, can_resend(&running));
    let supervised = Arc::new(AtomicBool::new(true));
    let (heard, at_ending) = (supervised.clone(), known.clone());
    let until_the_end = supervised.clone();
    let result = running.wait(&until_the_end, async move {
        // A command that waited for this mount, or for its upgrade, may ask for its status now.
        tell(&control, ready);
        dray_rt::spawn(heed_signals(at_ending, supervised));
        if let Err(error) = heed_supervisor(control).await {
            heard.store(false, Ordering::Relaxed);
            log::warn!(
                "the supervisor of {} has ended ({error}): the mount goes on, and ends with this \
                 process",
                at.display()
            );
        }
    });
    // With a supervisor another daemon follows, or the mount is ended by that.
    if result.is_err() && !until_the_end.load(Ordering::Relaxed) {
        unmount(&known);
    }
    result
}

/// The connection that the supervisor has passed on; none if its version does not do so.
fn connection_of_supervisor() -> Option<u32> {
    std::env::var(CONNECTION).ok()?.parse().ok()
}

/// Sets the queues of a ring going again, in a process that holds nothing of the mount.
pub fn wake(at: &Path) -> Result<(), Failure> {
    dray_fuse::wake_queues(at).doing(|| format!("cannot wake the queues of {}", at.display()))
}

/// Has the entries of a ring come together, in a process that holds nothing of the mount.
pub fn reclaim_entries(at: &Path) -> Result<(), Failure> {
    dray_fuse::reclaim_entries(at)
        .doing(|| format!("cannot reclaim the ring entries of {}", at.display()))
}

/// Has the kernel drop what others have changed, for a daemon that must not wait for that. The
/// daemon writes to our standard input and reads from our standard error. The device is our
/// standard output.
pub fn invalidate() -> Result<(), Failure> {
    signals::name_process(c"dray-invalidate");
    dray_fuse::invalidate_nodes(io::stdout().as_fd(), io::stdin(), io::stderr())
        .doing(|| "cannot receive invalidations".to_owned())
}

fn can_resend(running: &RunningMount) -> bool {
    running.reporter().stats().session.has(abi::init::HAS_RESEND)
}

/// Says a word to the supervisor each time that it is called.
fn saying(control: &UnixStream, word: u8) -> io::Result<NotifyFn> {
    let control = control.try_clone()?;
    Ok(Box::new(move || tell(&control, word)))
}

/// Tells the supervisor. If it is gone, the control socket says so to the one who reads it.
fn tell(mut control: &UnixStream, word: u8) {
    let _ = control.write_all(&[word]);
}

/// Does what the supervisor asks for. Ends with an error when it is gone.
async fn heed_supervisor(control: UnixStream) -> io::Result<()> {
    control.set_nonblocking(true)?;
    let source = Source::new(control.try_clone()?.into())?;
    loop {
        let mut word = [0; 1];
        let read = source.io(Interest::Read, |_| (&control).read(&mut word)).await?;
        match (read, word[0]) {
            (0, _) => return Err(io::ErrorKind::UnexpectedEof.into()),
            // At once, as if killed. Whatever is under way is asked for again by the kernel, and is
            // known by its number in the memory that stays. Taking down the stack in good order
            // would give back replay slots that must stay taken. SAFETY: ends the process; nothing
            // is run after it.
            (_, STOP) => unsafe { libc::_exit(HANDED_OVER) },
            _ => {} // of a later version
        }
    }
}

/// Signals are for the supervisor, which gets them, too, where they are sent to a group of
/// processes. Without it one that asks for an end unmounts.
async fn heed_signals(known: MountInfo, supervised: Arc<AtomicBool>) {
    let ending = match EndSignals::new() {
        Ok(ending) => ending,
        Err(error) => return log::error!("cannot wait for signals: {error}"),
    };
    while ending.wait().await.is_ok() {
        if !supervised.load(Ordering::Relaxed) {
            unmount(&known);
        }
    }
}

fn unmount(known: &MountInfo) {
    let Some(place) = known.place() else { return };
    let at = place.at.display();
    log::info!("unmounting {at}");
    if let Err(error) = dray_fuse::unmount(&place.at, true) {
        log::error!("cannot unmount {at}: {error}");
    }
}
