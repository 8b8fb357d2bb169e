//! The slices of a projection while they are served, or ready to be.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use dray_cluster::EtcdMembership;
use dray_fabric::{Address, Connect, ConnectFrom, Connection, connector};
use dray_rpc::server::{
    Admission, Membership, PageCacheId, ReplicaPort, ReplicaTerms, ServerNumber, ServerOptions,
    SliceOptions, SliceServer, StateLoss, WireLink,
};
use dray_rt::sync::oneshot;
use dray_rt::{DriverKind, Executor, ExecutorHandle, Scope, sleep, timeout};

use super::{ExportMaker, ProjectionSlices, STATE_NAME, SlicePair};
use crate::error::{ErrorContext, Failure};
use crate::paths::make_private;
use crate::serve::journal::{Boot, ServerJournal};

/// A home that has been in step for so long gets its slice back: it will not fail at once again.
const GIVE_BACK_AFTER: Duration = Duration::from_secs(3);
/// How often a server looks whether it can give a slice back.
const GIVE_BACK_LOOK: Duration = Duration::from_millis(500);
/// After a slice could not be handed over, until it is tried again.
const GIVE_BACK_AGAIN: Duration = Duration::from_secs(10);
/// How often a server looks whether it is drained.
const DRAIN_LOOK: Duration = Duration::from_millis(250);
/// After a slice could not be handed over to drain this server, until it is tried again.
const DRAIN_AGAIN: Duration = Duration::from_secs(1);
/// How often a server looks whether it is quiesced, and quiet.
const QUIESCE_LOOK: Duration = Duration::from_millis(100);
/// How long a server that ends hands over its slices. Those that are left are taken over.
const HAND_OVER_MAX: Duration = Duration::from_secs(4);
/// How long slices may take to notice that they are served no more.
const END_MAX: Duration = Duration::from_secs(5);
/// Between looks whether they have.
const END_LOOK: Duration = Duration::from_millis(20);

/// A slice at this server.
pub struct ServedSlice {
    pub slice: SliceServer,
    port: ReplicaPort,
    other: ServerNumber,
}

impl ServedSlice {
    /// Serves a connection by which the other server brings notes.
    pub async fn take_notes(&self, connection: Arc<dyn Connection>, admission: Admission) {
        self.port.serve(self.slice.replica(), connection, admission).await;
    }
}

/// All of them, and the thread that drives them. It calls the file system below, and nothing waits for it.
pub struct RunningSlices {
    pub membership: Arc<EtcdMembership>,
    pub(super) slices: BTreeMap<String, Arc<ServedSlice>>,
    stop: std::sync::Mutex<Option<(oneshot::Sender<()>, Receiver<()>)>>,
}

impl RunningSlices {
    /// Errors: the state directory cannot be used, or there can be no more threads.
    pub(super) fn begin(
        of: &ProjectionSlices,
        membership: Arc<EtcdMembership>,
        (maker, page_cache): (ExportMaker, PageCacheId),
    ) -> Result<Arc<RunningSlices>, Failure> {
        let maker = Arc::new(maker);
        let definition = &of.projection.definition;
        let me = of.projection.position;
        let (mut slices, mut boots) = (BTreeMap::new(), Vec::new());
        for pair in SlicePair::all_of(me, definition.servers.len()) {
            let name = format!("{}/{}", definition.name, pair.short_name());
            let begun = begin_slice(of, &membership, (pair, &name), (&maker, page_cache))?;
            let (served, boot) = begun;
            boots.push((served.clone(), boot));
            slices.insert(name, served);
        }
        let (stop, stopped) = oneshot::channel();
        let (ended, end) = channel();
        let stop = std::sync::Mutex::new(Some((stop, end)));
        let running = Arc::new(RunningSlices { membership, slices, stop });
        let driven = running.clone();
        let drive = move || {
            driven.drive(boots, stopped);
            drop(ended);
        };
        let thread = std::thread::Builder::new().name("dray-slices".into()).spawn(drive);
        thread
            .doing(|| format!("cannot start the thread of the slices of `{}`", definition.name))?;
        Ok(running)
    }

    pub(super) fn slice(&self, export: &str) -> Option<Arc<ServedSlice>> {
        self.slices.get(export).cloned()
    }

    pub(super) fn slices(&self) -> impl Iterator<Item = &Arc<ServedSlice>> {
        self.slices.values()
    }

    fn drive(&self, boots: Vec<(Arc<ServedSlice>, Boot)>, stopped: oneshot::Receiver<()>) {
        let mut executor = match Executor::new(DriverKind::Epoll) {
            Ok(executor) => executor,
            Err(error) => return log::error!("cannot drive slices: {error}"),
        };
        let scope = Scope::new();
        let _ = executor.block_on(async {
            let here = ExecutorHandle::current();
            let all = self.slices.values().cloned().collect();
            scope.spawn_on(&here, quiesce(all, self.membership.clone()));
            for (served, boot) in boots {
                let (running, noting) = (served.clone(), served.clone());
                scope.spawn_on(&here, async move { running.slice.run().await });
                scope.spawn_on(&here, note_boot(noting, boot));
                scope.spawn_on(&here, drain_away(served.clone(), self.membership.clone()));
                if !served.slice.is_home() {
                    scope.spawn_on(&here, give_back(served, self.membership.clone()));
                }
            }
            stopped.await // an error, too, means that it is over
        });
        scope.kill();
    }

    pub(super) async fn leave(&self) {
        let hand_over = |served: &Arc<ServedSlice>| {
            let served = served.clone();
            Box::pin(async move {
                if served.slice.is_primary() {
                    let _ = served.slice.hand_over().await; // else it is taken over
                }
            }) as dray_core::Fut<'static, ()>
        };
        let all = self.slices.values().map(hand_over).collect();
        let _ = timeout(HAND_OVER_MAX, dray_rt::join_all(all)).await;
        self.give_up().await;
    }

    /// This server answers no more, and is no member.
    async fn give_up(&self) {
        if let Err(error) = self.membership.leave().await {
            log::warn!(
                "etcd does not hear that this server leaves ({error}): others take over later"
            );
        }
    }

    pub(super) fn end(&self) {
        if let Ok(mut executor) = Executor::new(DriverKind::Epoll) {
            executor.block_on(async {
                self.give_up().await;
                let begun = dray_rt::now();
                let is_served = || self.slices.values().any(|served| served.slice.is_primary());
                while is_served() && begun.elapsed() < END_MAX {
                    sleep(END_LOOK).await;
                }
            });
        }
        let stop = self.stop.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take();
        if let Some((stop, ended)) = stop {
            let _ = stop.send(()); // or it has ended by itself
            let _ = ended.recv_timeout(END_MAX); // one that hangs is left behind
        }
    }
}

fn begin_slice(
    of: &ProjectionSlices,
    membership: &Arc<EtcdMembership>,
    (pair, name): (SlicePair, &str),
    (maker, page_cache): (&Arc<ExportMaker>, PageCacheId),
) -> Result<(Arc<ServedSlice>, Boot), Failure> {
    let definition = &of.projection.definition;
    let me = of.projection.position;
    let state = state_of(of, pair);
    make_private(&state)?;
    let sessions_lost = !ServerJournal::is_there(&state);
    let journal = ServerJournal::open(&state)?;
    let boot = Boot::begin(&state, of.boot)?;
    let loss = match (sessions_lost, boot.machine_lost) {
        (true, _) => StateLoss::SessionsToo,
        (false, true) => StateLoss::Unsynced,
        (false, false) => StateLoss::Nothing,
    };
    let terms = ReplicaTerms {
        key: of.options.key.clone(),
        allow: of.allow.clone(),
        definition: definition.fingerprint(),
    };
    let other = pair.other(me);
    let way = way_to(&definition.servers[other], &of.options)?;
    let (maker, export) = (maker.clone(), name.to_owned());
    let other = ServerNumber(other as u16);
    let slice = SliceServer::new(SliceOptions {
        name: name.to_owned(),
        other,
        is_home: pair.home == me,
        options: of.options.clone(),
        export: Box::new(move || maker(&export)),
        journal: Arc::new(journal),
        loss,
        page_cache,
        membership: membership.clone(),
        link: Arc::new(WireLink::new(name, way, terms.clone())),
    });
    let port = ReplicaPort::new(name, terms);
    Ok((Arc::new(ServedSlice { slice, port, other }), boot))
}

/// Where a slice keeps its sessions.
fn state_of(of: &ProjectionSlices, pair: SlicePair) -> PathBuf {
    of.state.join(STATE_NAME).join(&of.projection.definition.name).join(pair.short_name())
}

/// A server without a key shows that its machine vouches for it, as a client does.
pub(in crate::serve) fn way_to(
    server: &str,
    options: &ServerOptions,
) -> Result<Arc<dyn Connect>, Failure> {
    let address: Address = server.parse().map_err(Failure::usage)?;
    let from = match options.key {
        Some(_) => ConnectFrom::Any,
        None => ConnectFrom::ReservedPort,
    };
    Ok(connector(&address, from))
}

/// What the machine had lost counts until the membership knows of it.
async fn note_boot(served: Arc<ServedSlice>, boot: Boot) {
    while !served.slice.has_begun() {
        sleep(GIVE_BACK_LOOK).await;
    }
    if let Err(failure) = boot.note() {
        log::error!("{}; the next start counts as one after a loss of power", failure.message);
    }
}

/// Gives the slice back to its home, each time that this server has taken it over.
async fn give_back(served: Arc<ServedSlice>, membership: Arc<EtcdMembership>) {
    loop {
        sleep(GIVE_BACK_LOOK).await;
        let ready = served.slice.ready_to_hand_over();
        let is_due = ready.is_some_and(|ready| ready >= GIVE_BACK_AFTER);
        if is_due && !membership.is_drained(served.other) && served.slice.hand_over().await.is_err()
        {
            sleep(GIVE_BACK_AGAIN).await;
        }
    }
}

/// Tells the others when no call is under way at this server while the projection is quiesced.
async fn quiesce(slices: Vec<Arc<ServedSlice>>, membership: Arc<EtcdMembership>) {
    let mut said = None;
    loop {
        sleep(QUIESCE_LOOK).await;
        let asked = membership.quiesced();
        if asked != said {
            said = asked;
            say_quiesced(&membership);
        }
        let Some(asked) = asked else { continue };
        let is_quiet = || slices.iter().all(|served| served.slice.quiet() == Some(asked));
        let is_known = || membership.view().quiet.get(&membership.me()) == Some(&asked);
        if is_quiet()
            && !is_known()
            && let Err(error) = membership.note_quiet(asked).await
        {
            log::debug!("etcd does not hear that this server is quiet: {error}"); // this server says it again
        }
    }
}

fn say_quiesced(membership: &EtcdMembership) {
    let name = membership.projection();
    match membership.view().quiesced {
        Some((mark, _)) => log::warn!(
            "projection {name}: quiesced at {}: clients wait until `dray quiesce --undo {name}`",
            mark.by
        ),
        None => log::warn!("projection {name}: serving again after `dray quiesce`"),
    }
}

/// Gives the slice to the other server while an administrator drains this one.
async fn drain_away(served: Arc<ServedSlice>, membership: Arc<EtcdMembership>) {
    loop {
        sleep(DRAIN_LOOK).await;
        let moves = served.slice.is_primary()
            && membership.is_drained(membership.me())
            && !membership.is_drained(served.other);
        if moves && served.slice.hand_over().await.is_err() {
            sleep(DRAIN_AGAIN).await; // it has said why
        }
    }
}
