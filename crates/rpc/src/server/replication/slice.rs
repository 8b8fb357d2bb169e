//! One slice at one server: serves it as its primary, or is ready to as its backup.

use std::future::poll_fn;
use std::io;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use dray_core::{FileSystem, Fut};
use dray_rt::{Instant, sleep, timeout};

use super::hand_over::HandOverRequests;
use super::journal::ReplicatedJournal;
use super::membership::{Membership, PageCacheId, Revision, ServerNumber, SliceChange, SliceState};
use super::replica::{JournalReplica, ReplicaRefusal};
use super::stream::JournalStream;
use crate::server::export::Export;
use crate::server::journal::{Journal, MemoryJournal};
use crate::server::log_throttle::LogThrottle;
use crate::server::options::{ServerOptions, StateLoss};
use crate::server::sabotage::Sabotage;
use crate::server::service::Server;
use crate::server::withdrawal::{ExportLost, LeftOpen, WithdrawnExport};

/// How often a server looks at the membership while nothing happens.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(100);
/// A backup that does not take a batch within this time is taken out of step.
const SHIP_MAX: Duration = Duration::from_millis(500);
/// Until a backup that failed is tried again.
const COPY_AGAIN_AFTER: Duration = Duration::from_millis(200);

/// How long files without a name stay open for the clients that go on at the other server.
const LEFT_OPEN_MAX: Duration = Duration::from_secs(60);

/// How notes get to the other server of a slice.
pub trait ReplicaLink: Send + Sync + 'static {
    /// Has the backup take batch `number` of the primary of `epoch`; see [`JournalReplica::take`].
    /// Errors: the backup refuses it, or is out of reach (`Io`).
    fn ship<'a>(
        &'a self,
        epoch: u64,
        number: u64,
        batch: Vec<u8>,
    ) -> Fut<'a, Result<(), ReplicaRefusal>>;
}

/// What a slice needs of its server.
pub struct SliceOptions {
    /// The export's name, which is the slice's.
    pub name: String,
    /// The other server that can serve it.
    pub other: ServerNumber,
    /// Whether this server is the slice's home, which serves it first.
    pub is_home: bool,
    /// How its server behaves. `boot` says nothing: the number of the slice's losses stands for it.
    pub options: ServerOptions,
    /// Makes the export anew, each time that this server begins to serve it.
    pub export: Box<dyn Fn() -> Export + Send + Sync>,
    /// Outlives this process, and has what the process before it noted.
    pub journal: Arc<dyn Journal>,
    /// What the machine has lost since that process ended.
    pub loss: StateLoss,
    /// Where that is which this server writes and does not sync.
    pub page_cache: PageCacheId,
    /// What all servers agree on.
    pub membership: Arc<dyn Membership>,
    /// The way to the other server.
    pub link: Arc<dyn ReplicaLink>,
}

/// A slice at one of its two servers.
pub struct SliceServer {
    pub(super) slice: SliceOptions,
    replica: JournalReplica,
    state: Mutex<State>,
    pub(super) hand_overs: HandOverRequests,
    not_in_step: LogThrottle,
    pub(super) not_quiet: LogThrottle,
}

pub(super) struct State {
    /// Serves the slice, or tells clients to come again.
    server: Server,
    pub(super) serves: bool,
    /// What this process served before.
    withdrawn: Option<WithdrawnExport>,
    /// This process has begun from its own journal.
    began: bool,
    /// Since when the backup has been in step, and since when clients have had nothing to send again.
    in_step_since: Option<Instant>,
    recovered_since: Option<Instant>,
    /// Nothing of the slice is under way here, for an administrator who asked for that.
    pub(super) quiet: Option<Revision>,
}

/// This server is not the primary any more, or has to begin anew.
#[derive(Debug)]
pub(super) struct Deposed;

/// What a primary has while it is one.
pub(super) struct Leading {
    pub(super) state: SliceState,
    /// Sessions of clients may be gone with the journal.
    sessions_lost: bool,
    pub(super) stream: Arc<JournalStream>,
    journal: Arc<ReplicatedJournal>,
    pub(super) server: Server,
    /// What the export is made of.
    pub(super) fs: Mutex<Option<Arc<dyn FileSystem>>>,
}

impl SliceServer {
    /// One that serves nobody before it [runs](SliceServer::run).
    pub fn new(slice: SliceOptions) -> SliceServer {
        let broken = slice.options.broken();
        let replica = JournalReplica::new(slice.journal.clone()).that_is(broken);
        let replica = replica.that_awaits_its_primary();
        let server = refusing(&slice);
        let state = State {
            server,
            serves: false,
            withdrawn: None,
            began: false,
            in_step_since: None,
            recovered_since: None,
            quiet: None,
        };
        let hand_overs = HandOverRequests::default();
        let not_in_step = LogThrottle::default();
        let not_quiet = LogThrottle::default();
        SliceServer { slice, replica, state: Mutex::new(state), hand_overs, not_in_step, not_quiet }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What clients of the slice are to be given to. While this server does not serve the slice, that
    /// tells them to come again.
    pub fn server(&self) -> Server {
        self.lock().server.clone()
    }

    /// Whether this server serves the slice.
    pub fn is_primary(&self) -> bool {
        self.lock().serves
    }

    fn is_broken(&self, what: Sabotage) -> bool {
        self.slice.options.broken().is(what)
    }

    /// Whether this process has come so far that what its machine had lost before stands in the
    /// membership, or does not matter any more.
    pub fn has_begun(&self) -> bool {
        self.lock().began
    }

    /// The name of the slice's export.
    pub fn name(&self) -> &str {
        &self.slice.name
    }

    /// Whether this server is the slice's home.
    pub fn is_home(&self) -> bool {
        self.slice.is_home
    }

    /// For how long [`SliceServer::hand_over`] could have been carried out. This server serves the slice,
    /// the other one has been in step, and clients have nothing to send again. None: it could not.
    pub fn ready_to_hand_over(&self) -> Option<Duration> {
        let state = self.lock();
        let since = state.in_step_since?.max(state.recovered_since?);
        state.serves.then(|| since.elapsed())
    }

    /// What takes the notes of the other server.
    pub fn replica(&self) -> &JournalReplica {
        &self.replica
    }

    /// Serves the slice whenever that is this server's part. Runs for ever.
    pub async fn run(&self) {
        loop {
            let seen = self.slice.membership.slice(&self.slice.name).await;
            self.note_quiet(&seen);
            let at_once = match seen {
                Ok(None) => self.begin_slice().await,
                Ok(Some((state, revision))) if state.primary == self.slice.membership.me() => {
                    if self.slice.membership.lease().holds() {
                        self.lead(state, revision).await;
                    }
                    false
                }
                Ok(Some((state, revision))) => self.follow(state, revision).await,
                Err(_) => false, // asked again
            };
            if !at_once {
                sleep(LOOK_EVERY).await;
            }
        }
    }

    /// Nobody has served it so far. Its home does so first, unless that is not there. True: this server
    /// is its primary now.
    async fn begin_slice(&self) -> bool {
        let SliceOptions { membership, other, is_home, name, .. } = &self.slice;
        let next = SliceState {
            primary: membership.me(),
            epoch: 0,
            in_step: false,
            loss: 1,
            recovering: false,
            page_cache: PageCacheId::SYNCED,
        };
        let gone = (!is_home).then_some(*other);
        let change = SliceChange { seen: None, gone, next };
        matches!(membership.change(name, change).await, Ok(true))
    }

    /// The other server serves it: takes over if that is gone, and this one has all that it had. True:
    /// this server is the primary now.
    async fn follow(&self, state: SliceState, revision: Revision) -> bool {
        let SliceOptions { membership, name, .. } = &self.slice;
        self.lock().began = true; // what this machine lost is lost; the primary's journal counts
        self.replica.open_from(state.epoch, state.in_step);
        if !state.in_step || membership.is_member(state.primary) {
            return false;
        }
        self.replica.close();
        // Whether anything was lost is found when it is served: by where that is which was not synced.
        let next = SliceState {
            primary: membership.me(),
            epoch: state.epoch + 1,
            in_step: false,
            ..state
        };
        let change = SliceChange { seen: Some(revision), gone: Some(state.primary), next };
        let taken_over = matches!(membership.change(name, change).await, Ok(true));
        if taken_over {
            log::warn!("slice {name}: its server is gone; taking over");
        }
        taken_over
    }

    /// Serves the slice until another server does, or the lease ends.
    async fn lead(&self, state: SliceState, revision: Revision) {
        let lease = self.slice.membership.lease();
        let era = lease.era();
        let Some(leading) = self.enter(state, revision).await else { return };
        // Not given up half way: it calls the file system. It ends by itself when the lease does.
        let held = self.slice.membership.quiesced().is_some();
        let opened = match held {
            true => {
                self.hold(&leading);
                Ok(())
            }
            false => self.open(&leading).await,
        };
        let deposed = match opened {
            Ok(()) if self.is_broken(Sabotage::ServingLease) => {
                Some(self.serve(&leading, held).await)
            }
            Ok(()) => race(lease.lapsed(era), self.serve(&leading, held)).await,
            Err(ExportLost) => None,
        };
        if deposed.is_none() {
            log::error!("slice {}: cut off from the membership; it is not served", self.slice.name);
        }
        self.leave(&leading);
    }

    /// Raises the epoch, so that no other process goes on with this one's. None: somebody else was
    /// faster, or has to serve it instead.
    async fn enter(&self, state: SliceState, revision: Revision) -> Option<Leading> {
        let SliceOptions { membership, name, other, page_cache, .. } = &self.slice;
        let journal_lost = !self.lock().began && self.slice.loss != StateLoss::Nothing;
        // What was written elsewhere and not synced is not here, and perhaps nowhere.
        let is_here = [*page_cache, PageCacheId::SYNCED].contains(&state.page_cache);
        // A recovery that another server had begun may have ended without a note of that. Then clients have
        // done new work since. Older changes that are sent again would replace it, unless it is sent again
        // itself: so it counts as one more loss.
        let goes_on = state.recovering && !self.is_broken(Sabotage::RepeatedRecovery);
        let lost = journal_lost || !is_here || goes_on;
        let epoch = state.epoch + 1;
        let hands_over = journal_lost && state.in_step && membership.is_member(*other);
        let next = match hands_over {
            true => SliceState { primary: *other, epoch, in_step: false, ..state },
            false => SliceState {
                epoch,
                in_step: false,
                loss: state.loss + u64::from(lost),
                recovering: state.recovering || lost,
                page_cache: *page_cache,
                ..state
            },
        };
        let change = SliceChange { seen: Some(revision), gone: None, next };
        if !matches!(membership.change(name, change).await, Ok(true)) || hands_over {
            return None;
        }
        self.replica.close_before(epoch + 1);
        self.lock().began = true;
        self.wait_for_withdrawn().await;
        let stream = Arc::new(JournalStream::default());
        let journal = Arc::new(ReplicatedJournal::new(self.slice.journal.clone(), stream.clone()));
        let options = ServerOptions { boot: u128::from(next.loss), ..self.slice.options.clone() };
        let server = Server::awaiting(options, &[name], journal.clone());
        let knows_none = journal_lost && self.slice.loss == StateLoss::SessionsToo;
        let sessions_lost = knows_none && state.epoch > 0; // else nobody has served it
        let fs = Mutex::default();
        Some(Leading { state: next, sessions_lost, stream, journal, server, fs })
    }

    /// Calls of this process from before it was deposed have to be out of the file system.
    async fn wait_for_withdrawn(&self) {
        while self.is_withdrawn_in_use() {
            sleep(LOOK_EVERY).await;
        }
    }

    /// Takes over the sessions that the journal has, and lets clients in.
    async fn open(&self, leading: &Leading) -> Result<(), ExportLost> {
        let loss = if leading.state.recovering { StateLoss::Written } else { StateLoss::Nothing };
        let mut export = (self.slice.export)();
        export.leased_to_anybody = leading.sessions_lost;
        if !self.is_broken(Sabotage::ServingLease) {
            export = export.that_is_leased(self.slice.membership.lease());
        }
        *leading.fs.lock().unwrap_or_else(PoisonError::into_inner) = Some(export.fs.clone());
        leading.server.open(export, loss).await?;
        let mut state = self.lock();
        (state.server, state.serves) = (leading.server.clone(), true);
        Ok(())
    }

    /// Keeps the backup in step until another server is the primary, or this one has to begin anew. `held`:
    /// it lets no client in.
    async fn serve(&self, leading: &Leading, held: bool) -> Deposed {
        let expires = async {
            let _ = race(leading.server.expire_leases(), self.tell_of_departures(leading)).await;
        };
        let notes = race(self.note_recovered(leading), self.keep_in_step(leading));
        let notes = race(self.quiesce_when_asked(leading, held), notes);
        let work = race(self.hand_over_when_asked(leading), notes);
        match race(expires, work).await {
            Some(Some(Some(Some(deposed)))) => deposed,
            Some(Some(Some(None) | None) | None) | None => Deposed,
        }
    }

    /// Tells the clients of this slice of each server that is gone. Those that are idle would else find out late
    /// that other sessions of theirs are to go on elsewhere, and everybody waits for them there.
    /// Runs for ever.
    async fn tell_of_departures(&self, leading: &Leading) {
        let mut known = self.slice.membership.members();
        loop {
            sleep(LOOK_EVERY).await;
            let members = self.slice.membership.members();
            if !known.is_subset(&members) {
                leading.server.notify_server_gone();
            }
            known = members;
        }
    }

    /// Ends only if another server is the primary.
    async fn note_recovered(&self, leading: &Leading) {
        leading.server.recovered().await;
        let noted = self.update(leading, |state| state.recovering = false).await;
        if let Err(Deposed) = noted {
            return;
        }
        self.lock().recovered_since = Some(dray_rt::now());
        std::future::pending().await
    }

    /// Copies the journal to the backup and ships notes, over and over.
    async fn keep_in_step(&self, leading: &Leading) -> Deposed {
        let mut number = 0;
        loop {
            if self.slice.membership.is_member(self.slice.other) {
                let failed = self.replicate(leading, &mut number).await;
                self.not_in_step.say(|more| {
                    let name = &self.slice.name;
                    log::warn!("slice {name}: its backup is not in step: {failed}{more}");
                });
                self.lock().in_step_since = None;
                // Before anything goes on without it.
                if self.update(leading, |state| state.in_step = false).await.is_err() {
                    return Deposed;
                }
                leading.stream.go_on_alone();
            } else if self.update(leading, |_| {}).await.is_err() {
                return Deposed;
            }
            sleep(COPY_AGAIN_AFTER).await;
        }
    }

    /// Copies, gets in step, and ships notes until that fails, and says why.
    async fn replicate(&self, leading: &Leading, number: &mut u64) -> ReplicaRefusal {
        let Leading { stream, journal, state, .. } = leading;
        stream.begin_copy();
        if self.is_broken(Sabotage::InStep) {
            let _ = self.update(leading, |state| state.in_step = true).await;
        }
        let copy = match journal.copy() {
            Ok(copy) => copy,
            Err(error) => return ReplicaRefusal::Io(error),
        };
        let most = if self.is_broken(Sabotage::Copy) { 1 } else { usize::MAX };
        for bytes in copy.take(most) {
            if let Err(refusal) = self.ship(state.epoch, number, bytes).await {
                return refusal;
            }
        }
        let mut copied_up_to = Some(stream.get_in_step());
        loop {
            if let Some(last) = copied_up_to.filter(|last| stream.has_arrived(*last)) {
                copied_up_to = None;
                log::info!("slice {}: backup has note {last}", self.slice.name);
                if self.update(leading, |state| state.in_step = true).await.is_err() {
                    return ReplicaRefusal::Deposed;
                }
                self.lock().in_step_since = Some(dray_rt::now());
            }
            let Some(batch) = stream.next_batch().await else {
                return ReplicaRefusal::Incomplete;
            };
            if let Err(refusal) = self.ship(state.epoch, number, batch.bytes.clone()).await {
                return refusal;
            }
            stream.acknowledged(&batch);
        }
    }

    async fn ship(
        &self,
        epoch: u64,
        number: &mut u64,
        bytes: Vec<u8>,
    ) -> Result<(), ReplicaRefusal> {
        let this = *number;
        *number += 1; // never twice, whatever becomes of it
        let shipped = timeout(SHIP_MAX, self.slice.link.ship(epoch, this, bytes)).await;
        let late = || io::Error::from_raw_os_error(libc::ETIMEDOUT);
        shipped.unwrap_or_else(|_| Err(ReplicaRefusal::Io(late())))
    }

    /// Changes the state of the slice, of which this server is the primary. Tries until it is known
    /// whether that is so. Errors: it is not.
    pub(super) async fn update(
        &self,
        leading: &Leading,
        change: impl Fn(&mut SliceState),
    ) -> Result<(), Deposed> {
        let SliceOptions { membership, name, .. } = &self.slice;
        loop {
            match membership.slice(name).await {
                Ok(Some((seen, revision)))
                    if seen.primary == membership.me() && seen.epoch == leading.state.epoch =>
                {
                    let mut next = seen;
                    change(&mut next);
                    let change = SliceChange { seen: Some(revision), gone: None, next };
                    if next == seen || matches!(membership.change(name, change).await, Ok(true)) {
                        return Ok(());
                    }
                }
                Ok(_) => return Err(Deposed),
                Err(_) => sleep(LOOK_EVERY).await,
            }
        }
    }

    /// Stops to serve: whatever is under way is answered by nobody.
    fn leave(&self, leading: &Leading) {
        self.stop_serving(leading);
        // Behind it, so that what waits is not answered.
        leading.stream.depose();
        self.hand_overs.fail_all();
    }

    /// Lets no call begin or be answered any more. What is under way ends by itself.
    pub(super) fn stop_serving(&self, leading: &Leading) {
        let left = LeftOpen::default();
        let withdrawn = leading.server.withdraw_leaving(&self.slice.name, &left);
        let mut state = self.lock();
        state.server = refusing(&self.slice);
        state.serves = false;
        (state.in_step_since, state.recovered_since) = (None, None);
        if withdrawn.is_some() {
            state.withdrawn = withdrawn;
            let membership = self.slice.membership.clone();
            dray_rt::spawn(async move {
                sleep(LEFT_OPEN_MAX).await;
                while membership.quiesced().is_some() {
                    sleep(LEFT_OPEN_MAX).await; // clients have nobody to go on at
                }
                left.give_back();
            });
        }
    }

    /// Whether calls from before this server stopped to serve are in the file system.
    pub(super) fn is_withdrawn_in_use(&self) -> bool {
        self.lock().withdrawn.as_ref().is_some_and(WithdrawnExport::is_in_use)
    }
}

/// A server that tells clients of the slice to come again.
fn refusing(slice: &SliceOptions) -> Server {
    let nothing = Arc::new(MemoryJournal::default());
    Server::awaiting(slice.options.clone(), &[&slice.name], nothing)
}

/// Waits for whichever is done first. The other one is dropped: it must do nothing but wait, or what
/// nobody needs any more. None: the first was.
pub(super) async fn race<T>(
    first: impl Future<Output = ()>,
    second: impl Future<Output = T>,
) -> Option<T> {
    let (mut first, mut second) = (pin!(first), pin!(second));
    poll_fn(|task| {
        if first.as_mut().poll(task).is_ready() {
            return Poll::Ready(None);
        }
        second.as_mut().poll(task).map(Some)
    })
    .await
}
