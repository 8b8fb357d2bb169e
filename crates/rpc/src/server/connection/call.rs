//! A call in hand: whether it is carried out, once, and what that takes.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;

use dray_core::{Buf, Context, Entry, Errno, Error, FileId, Op};

use super::Shared;
use crate::server::ahead::Changing;
use crate::server::call_admission;
use crate::server::exactly_once::plan::{self, Plan, Standing};
use crate::server::exactly_once::settle::Amend;
use crate::server::exactly_once::slots::{self, Again, Route, Verdict};
use crate::server::exactly_once::{bytes, needs};
use crate::server::execute::{self, Files};
use crate::server::ranges::{RangeGrant, Span, bytes_changed};
use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;
use crate::server::service::Inner;
use crate::server::session::{Session, Slotted, Unslotted};
use crate::server::status::Running;
use crate::wire::{Call, CallHead, Input, NO_SLOT, Named, ReplyHead, Stamp};

/// A call from its arrival to its answer.
pub(super) struct CallInHand {
    pub(super) server: Arc<Inner>,
    pub(super) session: Arc<Session>,
    pub(super) shared: Arc<Shared>,
    pub(super) route: Route,
    pub(super) connection: u64,
    pub(super) head: CallHead,
    pub(super) cx: Context,
}

/// A call that may be carried out.
struct Entered<'a> {
    call: Call<'a>,
    again: Option<Again>,
    /// Until it is answered.
    _slotted: Option<Slotted<'a>>,
}

/// The connection that a call came by has gone.
struct Gone;

/// What came of a call. It keeps its grants until the answer has been noted.
struct Executed {
    reply: Reply,
    plan: Option<Plan>,
    again: Option<Again>,
    /// Of the bytes that it writes, where it has none of the file besides.
    lone: Option<RangeGrant>,
}

impl Executed {
    fn only(reply: Reply) -> Executed {
        Executed { reply, plan: None, again: None, lone: None }
    }
}

fn malformed(why: &'static str) -> Refused {
    Refused::With(Reply::failure(&Error::new(Errno::EPROTO).because(why)))
}

/// The number of the file that a change in a slot opens.
fn opens(call: &Call<'_>) -> Option<u64> {
    match call {
        Call::Create { handle, .. }
        | Call::Tmpfile { handle, .. }
        | Call::Open { handle, .. }
        | Call::OpenNamed { handle, .. } => Some(*handle),
        _ => None,
    }
}

/// Why a call is not carried out.
enum Refused {
    /// This is its answer.
    With(Reply),
    /// It is answered elsewhere, or nobody waits for it.
    Unheard,
}

impl CallInHand {
    pub(super) async fn carry_out(self, body: Arc<[u8]>, data: Option<Buf>) {
        // Noted before any wait: what its client asks for later is not opened ahead of it.
        let changing = self.changing(&body);
        let entered = match self.enter(&body).await {
            Ok(entered) => entered,
            Err(Refused::With(reply)) => return self.answer(&self.route, reply),
            Err(Refused::Unheard) => return self.over(),
        };
        let Entered { call, again, _slotted } = entered;
        let Executed { reply, plan, again, lone } =
            self.execute(&body, &call, data, again, changing.as_ref()).await;
        if self.session.export.is_lost() {
            // As if the server had died now: whether it was made is found out at the next opening.
            return self.over();
        }
        let CallHead { slot, sequence, .. } = self.head;
        let route = match slot {
            NO_SLOT => Some(self.route.clone()),
            _ => self.session.slots.done(slot, sequence, &reply.message),
        };
        drop((plan, again, lone, changing));
        match route {
            Some(route) => self.answer(&route, reply),
            // Its client has given up on it, and waits for the tag alone.
            None => self.answer(&self.route, reply),
        }
    }

    /// Whether it may be carried out now: not before a recovery is over, not with files that the
    /// server does not know, and not twice.
    async fn enter<'a>(&'a self, body: &'a [u8]) -> Result<Entered<'a>, Refused> {
        let in_slot = self.head.slot != NO_SLOT;
        let call = Call::get(self.head.op, &mut Input(body));
        let call = call.map_err(|_| malformed("malformed call"))?;
        if let Some(objection) = needs::objection(&call, in_slot) {
            return Err(malformed(objection));
        }
        let recovery = &self.session.export.recovery;
        if recovery.running() && self.waits_for_recovery(body) {
            recovery.wait(&self.cx).await.map_err(|error| Refused::With(Reply::failure(&error)))?;
            // It has been asked for again on a later connection, where the answer must go.
            if !self.session.has_connection(self.connection) {
                return Err(Refused::Unheard);
            }
        }
        // Nothing was applied then, so the slot stays as it was: the client opens the file
        // again and repeats the call under the same number.
        execute::check_handles(&self.session, &call).map_err(Refused::With)?;
        if !in_slot {
            return Ok(Entered { call, again: None, _slotted: None });
        }
        let slotted = self.session.slotted(self.connection, opens(&call));
        let slotted = slotted.ok_or(Refused::Unheard)?;
        let again = self.enter_slot(body).await?;
        Ok(Entered { call, again, _slotted: Some(slotted) })
    }

    /// What the server before us left of the change, if it was begun there.
    async fn enter_slot(&self, body: &[u8]) -> Result<Option<Again>, Refused> {
        let verdict = self.session.slots.begin(self.head.slot, self.head.sequence, &self.route);
        if verdict.is_repeated() {
            self.server.repeated.fetch_add(1, Ordering::Relaxed);
        }
        let sabotage = self.server.options.sabotage;
        match verdict {
            Verdict::Fresh => Ok(None),
            Verdict::Again(cut) => Ok(Some(cut)),
            Verdict::Replay(_) if Sabotage::forgets_answers(sabotage, self.head.op) => Ok(None),
            Verdict::Replay(message) => {
                self.open_replayed(body, &message).await;
                Err(Refused::With(Reply::replayed(message)))
            }
            Verdict::Running | Verdict::Stale => Err(Refused::Unheard),
            Verdict::Unknown => Err(malformed("no such replay slot")),
        }
    }

    /// Before an opening is answered again.
    async fn open_replayed(&self, body: &[u8], answer: &[u8]) {
        if !matches!(self.head.op, Op::Create | Op::Tmpfile | Op::Open | Op::OpenNamed) {
            return;
        }
        // Its connection may go: the file must not be opened once it has been closed.
        let unslotted = self.session.unslotted(self.connection, None).await;
        let Some(_unslotted) = unslotted else { return };
        execute::open_replayed(&self.session, &self.cx, self.head.op, body, answer).await;
    }

    /// Calls that end at once, nearly all, are not worth a note; the others show in the
    /// status while they last.
    async fn execute(
        &self,
        body: &Arc<[u8]>,
        call: &Call<'_>,
        data: Option<Buf>,
        again: Option<Again>,
        changing: Option<&Changing<'_>>,
    ) -> Executed {
        let executed = self.execute_noted(body, call, data, again, changing);
        let mut executed = std::pin::pin!(executed);
        let first = std::future::poll_fn(|task| Poll::Ready(executed.as_mut().poll(task))).await;
        if let Poll::Ready(executed) = first {
            return executed;
        }
        let number = self.server.running(Running {
            op: self.head.op,
            session: self.session.id,
            cx: self.cx.clone(),
            since: dray_rt::now(),
            body: body.clone(),
        });
        let executed = executed.await;
        self.server.finished(number);
        executed
    }

    /// With the intent noted where the change must not be applied twice.
    async fn execute_noted(
        &self,
        body: &[u8],
        call: &Call<'_>,
        data: Option<Buf>,
        again: Option<Again>,
        changing: Option<&Changing<'_>>,
    ) -> Executed {
        let op = self.head.op;
        let data_bytes = data.as_ref().map_or(0, Buf::len);
        let refused = self.admitted(call, data_bytes, again.is_some()).await.err();
        if let Some(error) = refused.as_ref().filter(|_| op != Op::Close) {
            return Executed::only(Reply::failure(error));
        }
        let Ok(_unslotted) = self.unslotted(call).await else {
            // Its connection has gone: it has been asked for again.
            return Executed::only(Reply::failure(&self.cx.cancelled()));
        };
        let in_slot = self.head.slot != NO_SLOT;
        let files = match in_slot {
            true => Files::of(&self.session, call),
            false => Ok(Files::default()),
        };
        let files = match files {
            Ok(files) => files,
            Err(error) => return Executed::only(Reply::failure(&error)),
        };
        // Who asks for something else than was cut short has a new change.
        let mut again = again.filter(|again| again.is_of(op, execute::changed(call, &files)));
        let amend = again.as_ref().and_then(|again| again.amend);
        if execute::is_to_be_made(&self.session, &self.cx, amend).await {
            again = None;
        }
        let sabotaged = self.server.options.sabotage == Some(Sabotage::Named);
        if again.is_none()
            && !sabotaged
            && let Err(error) = execute::check_name(&self.session, &self.cx, call).await
        {
            return Executed::only(Reply::failure(&error));
        }
        let amend = again.as_ref().and_then(|again| again.amend);
        let mut plan = None;
        if in_slot && again.is_none() {
            plan = match self.intend((call, &files), data_bytes).await {
                Ok(plan) => plan,
                Err(error) => return Executed::only(Reply::failure(&error)),
            };
        }
        let (server, session) = (&self.server, &self.session);
        if let Some(changing) = changing {
            changing.wait(session.id).await;
        }
        let plans = (plan.as_ref(), amend);
        let written = bytes::written(session, &self.cx, (call, &files), data_bytes, plans).await;
        let lone = match written {
            // Behind all else that it waits for: whoever reads the same waits from now on.
            Some(written) => bytes::take(session, written, plan.as_mut(), again.as_mut()).await,
            None => None,
        };
        let version = self.version_of_half(call);
        let standing = Standing { files: &files, plan: plan.as_mut(), amend };
        let changes = op.writes() && !matches!(op, Op::Lock | Op::Close) || written.is_some();
        // Behind all waits: what its client had may be somebody else's by now.
        let carried = if changes { session.carry() } else { None };
        if changes && carried.is_none() {
            return Executed::only(Reply::failure(&self.cx.cancelled()));
        }
        let reply = execute::execute(server, session, &self.cx, op, body, data, standing);
        let mut reply = reply.await;
        drop(carried);
        let amended_at = match amend {
            Some(Amend::AppendAt(at)) => Some(at),
            _ => None,
        };
        let at = amended_at.or(plan.as_ref().and_then(|plan| plan.append_at));
        if changes && op != Op::Redo {
            let stamp = bytes::stamp(plan.as_ref(), again.as_ref(), lone.as_ref());
            self.stamp(&mut reply, stamp, body, at);
        }
        if let Some(version) = version {
            let unchanged = self.version_of_half(call) == Some(version);
            if unchanged || server.options.sabotage == Some(Sabotage::Halves) {
                reply.stamp(Stamp { number: version, at: Stamp::NOWHERE });
            }
        }
        if let Some(error) = refused {
            reply = Reply::failure(&error); // of a file that is closed nevertheless
        }
        dray_rt::step().await;
        Executed { reply, plan, again, lone }
    }

    /// Waits until whoever admits calls to the export lets this one begin. `cut_short`: the server before
    /// us began it, and others wait for it. Errors: it is refused.
    async fn admitted(
        &self,
        call: &Call<'_>,
        data_bytes: usize,
        cut_short: bool,
    ) -> dray_core::Result<()> {
        let restores = cut_short || self.head.flags & CallHead::RECOVERY != 0;
        if restores || self.session.export.admission.is_none() {
            return Ok(());
        }
        // In a box, so that calls to exports without admission are no larger.
        Box::pin(call_admission::ask(&self.session, &self.cx, call, data_bytes)).await
    }

    /// Has what changes a session, and is in no slot, come behind what its former connections
    /// brought. Errors: this connection has gone, too.
    async fn unslotted(&self, call: &Call<'_>) -> Result<Option<Unslotted<'_>>, Gone> {
        let op = self.head.op;
        let changes = matches!(
            op,
            Op::Lock
                | Op::Flush
                | Op::Open
                | Op::OpenNamed
                | Op::Reopen
                | Op::LookupOpen
                | Op::Close
        );
        if !changes || self.head.slot != NO_SLOT {
            return Ok(None);
        }
        let closes = match *call {
            Call::Close { handle } => Some(handle),
            _ => None,
        };
        let unslotted = self.session.unslotted(self.connection, closes).await.ok_or(Gone)?;
        if op == Op::Lock && self.cx.check().is_err() {
            return Err(Gone);
        }
        Ok(Some(unslotted))
    }

    /// Waits until no other change of the same is under way, and notes what this one is going to do.
    async fn intend(
        &self,
        change: (&Call<'_>, &Files),
        data_bytes: usize,
    ) -> dray_core::Result<Option<Plan>> {
        let CallHead { slot, sequence, op, .. } = self.head;
        let plan = plan::plan(&self.session, &self.cx, change, data_bytes).await?;
        if let Some(plan) = &plan {
            self.session.slots.intend(slot, sequence, slots::noted(op), &plan.intent);
            dray_rt::step().await;
        }
        Ok(plan)
    }

    /// The note of a change of rights.
    fn changing(&self, body: &[u8]) -> Option<Changing<'_>> {
        use Op::*;
        let may = matches!(self.head.op, Setattr | Setxattr | Removexattr | SetFlags | SetXflags);
        if !may || self.server.options.sabotage == Some(Sabotage::Ahead) {
            return None;
        }
        let file = match Call::get(self.head.op, &mut Input(body)).ok()?.changes_rights()? {
            Named::Id(id) => id,
            Named::Handle(handle) => self.session.file(handle)?.id(),
        };
        Some(self.server.ahead.changes(file))
    }

    /// New work does; what belongs to the recovery does not, nor does giving back.
    fn waits_for_recovery(&self, body: &[u8]) -> bool {
        let belongs = match self.head.op {
            // The last for what is opened again.
            Op::Close | Op::Lock | Op::Reopen => true,
            op @ Op::Open => {
                matches!(Call::get(op, &mut Input(body)), Ok(Call::Open { again: true, .. }))
            }
            _ => self.head.flags & CallHead::RECOVERY != 0,
        };
        !belongs && self.server.options.sabotage != Some(Sabotage::RedoGate)
    }

    /// Which version of the file half of a read is of, as long as nobody changes it.
    fn version_of_half(&self, call: &Call<'_>) -> Option<u64> {
        if self.head.flags & CallHead::HALF == 0 {
            return None; // nearly always: before anything is looked for
        }
        let Call::Read { handle, at, len_bytes } = *call else { return None };
        let file = self.session.file(handle)?;
        let span = Span::bytes(at, u64::from(len_bytes));
        match self.server.options.sabotage {
            Some(Sabotage::Halves) => Some(1),
            _ => self.session.export.ranges.version(file.id(), span),
        }
    }

    /// The file whose data or attributes this has changed, if somebody watches any.
    fn watched_file(&self, body: &[u8], reply: &Reply) -> Option<FileId> {
        if self.session.export.watchers.is_empty() {
            return None;
        }
        // What was changed by its name the answer tells; if it is new, nobody has it open.
        let mut named = ReplyHead::results(&reply.message).map(Input);
        match Call::get(self.head.op, &mut Input(body)).ok()? {
            Call::Setattr { id, .. }
            | Call::Setxattr { id, .. }
            | Call::Removexattr { id, .. }
            | Call::Link { id, .. } => Some(id),
            Call::SetFlags { handle, .. } | Call::SetXflags { handle, .. } => {
                self.session.file(handle).map(|file| file.id())
            }
            Call::Create { how, .. } if how.open.truncates() => {
                named.as_mut()?.get::<Entry>().ok().map(|entry| entry.id)
            }
            Call::Put { .. } => named.as_mut()?.get().ok(),
            call => {
                let of = |handle| Some(self.session.file(handle)?.id());
                bytes_changed(&call, 0, of).map(|(file, _)| file)
            }
        }
    }

    /// Puts the stamp of a change that was made into its answer.
    fn stamp(&self, reply: &mut Reply, stamp: Option<u64>, body: &[u8], at: Option<u64>) {
        if !reply.is_success() {
            return;
        }
        let number = stamp.unwrap_or_else(|| self.session.export.ranges.stamps.next());
        self.session.changed(number);
        if let Some(file) = self.watched_file(body, reply) {
            self.server.tell_change(&self.session, file);
        }
        if !self.session.stamps() {
            return;
        }
        let at = at.or_else(|| match Call::get(self.head.op, &mut Input(body)) {
            Ok(Call::Write { how, .. }) if !how.append => Some(how.at),
            _ => None,
        });
        reply.stamp(Stamp { number, at: at.unwrap_or(Stamp::NOWHERE) });
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Mutex;
    use std::task::Waker;

    use dray_backends::memory::{MemoryFs, MemoryOptions};
    use dray_core::{CreateHow, FileId, FileSystem, Make, Name, OpenHow, RemoveKind, Write};
    use dray_fabric::sim::Network;

    use super::*;
    use crate::client::{ClientOptions, RemoteFs, Session as Mount, SessionMemory};
    use crate::server::journal::watched::{Watch, WatchedJournal};
    use crate::server::ranges::RangeTable;
    use crate::server::{Export, Server, ServerOptions};

    /// What the changes are about, and what is seen of its grant when an answer is noted.
    #[derive(Default)]
    struct Seen {
        about: Option<(Arc<RangeTable>, FileId)>,
        held: Vec<bool>,
    }

    impl Watch for Mutex<Seen> {
        fn answers(&self) {
            let mut seen = self.lock().unwrap();
            if let Some((ranges, file)) = seen.about.clone() {
                let mut task = std::task::Context::from_waker(Waker::noop());
                let other = pin!(ranges.change(file, Span::ALL)).poll(&mut task);
                seen.held.push(other.is_pending());
            }
        }
    }

    async fn mount(network: &Network, server: &Server) -> RemoteFs {
        let (mut incoming, server) = (network.listen("s"), server.clone());
        dray_rt::spawn(async move {
            while let Some(connection) = incoming.recv().await {
                let server = server.clone();
                dray_rt::spawn(async move { server.serve(Arc::new(connection)).await });
            }
        });
        let options = ClientOptions {
            export: "data".into(),
            key: None,
            timeout: None,
            host: "host".into(),
            replay_bytes: 0,
            split_min_bytes: ClientOptions::SPLIT_MIN_BYTES,
            caches: false,
            counts_on_one_user: false,
        };
        let mounted = Mount::connect(network.connector("s"), options, SessionMemory::heap()).await;
        RemoteFs::new(mounted.unwrap())
    }

    /// Whoever changed the same in between would be taken for this change, or its work undone by
    /// it, if the server died before the answer is noted.
    #[test]
    fn a_grant_lasts_until_the_answer_is_noted() {
        let driver = dray_rt::DriverKind::Simulated { seed: 1 };
        dray_rt::Executor::new(driver).unwrap().block_on(async {
            let network = Network::new();
            let below = Arc::new(MemoryFs::new(MemoryOptions::default()));
            let journal = Arc::new(WatchedJournal::<Mutex<Seen>>::default());
            let seen = journal.1.clone();
            let export = Export::new("data", below, Vec::new());
            let server = Server::new(ServerOptions::default(), vec![export], journal);
            let fs = mount(&network, &server).await;
            let ranges = server.inner.exports.get("data").ok().unwrap().ranges.clone();
            let watch = |file| seen.lock().unwrap().about = Some((ranges.clone(), file));
            let (cx, root) = (Context::system(), fs.info().root);
            let [file, dir] = [b"f", b"d"].map(|name| Name::new(name).unwrap());
            watch(root);
            let (how, mode) = (OpenHow::READ_WRITE, 0o644);
            let new = CreateHow { open: how, mode, exclusive: true };
            let (entry, open) = fs.create(&cx, root, file, new).await.unwrap();
            fs.make(&cx, root, dir, Make::Directory { mode: 0o755 }).await.unwrap();
            fs.remove(&cx, root, dir, RemoveKind::Directory).await.unwrap();
            watch(entry.id);
            let append = Write { append: true, ..Write::at(0) };
            for how in [append, Write::at(0)] {
                open.write(&cx, how, Buf::from(&b"data"[..])).await.unwrap();
            }
            assert_eq!(seen.lock().unwrap().held, [true; 5]);
        });
    }
}
