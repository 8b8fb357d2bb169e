//! `FileSystem` at the client end. Every method is one call.

mod opening;

use std::sync::Arc;

use dray_core::{
    Access, Attr, Buf, Context, CreateHow, Entry, Errno, Error, Fate, FileId, FileSystem, FileType,
    FsInfo, Fut, Make, Name, Op, OpenFile, OpenHow, RemoveKind, RenameHow, Result, SetAttr, Statfs,
    Timestamp, Uid, XattrSet, must_fit_one_call, open_named, put_in_steps,
};

use crate::client::channel::{CallAnswer, OutgoingCall, ReplyInfo, error_of};
use crate::client::durability::{ExpectedName, FileChange, NameChange, changes_of};
use crate::client::leased_directory::LeasedDirectory;
use crate::client::leases::OwnChange;
use crate::client::link::Link;
use crate::client::session::ClientSession;
use crate::client::slots::{ReplaySlot, SlotPurpose};
use crate::wire::{Call, Change, Input, Wire};

/// The client's substitute for an operation that a server of an earlier version does not have.
enum Without {
    /// There is no such server.
    Never,
    /// The call fails.
    Fails(Errno),
    /// Other calls do the same; the method that sends the call asks ([`ServerIdentity::has`]).
    ///
    /// [`ServerIdentity::has`]: crate::client::link::ServerIdentity::has
    OtherCalls,
}

/// A new operation is decided upon here, beside the method that sends it.
const fn without(op: Op) -> Without {
    match op {
        Op::Lookup
        | Op::Parent
        | Op::Getattr
        | Op::Setattr
        | Op::Readlink
        | Op::Make
        | Op::Remove
        | Op::Rename
        | Op::Link
        | Op::Open
        | Op::Create
        | Op::Tmpfile
        | Op::Access
        | Op::Statfs
        | Op::Getxattr
        | Op::Setxattr
        | Op::Listxattr
        | Op::Removexattr
        | Op::Read
        | Op::Write
        | Op::Readdir
        | Op::Flush
        | Op::Sync
        | Op::Allocate
        | Op::Seek
        | Op::CopyRange
        | Op::Lock
        | Op::TestLock
        | Op::GetFlags
        | Op::SetFlags
        | Op::Close
        | Op::Put
        | Op::SyncAll
        | Op::Recover
        | Op::Redo => Without::Never,
        Op::GetXflags | Op::SetXflags => Without::Fails(Errno::ENOTTY),
        Op::Learn | Op::Hold | Op::Release => Without::Fails(Errno::ENOTSUP),
        Op::Reopen | Op::Declare | Op::LookupOpen | Op::OpenNamed | Op::WriteBack => {
            Without::OtherCalls
        }
    }
}

impl Link {
    /// Errors: the server does not have the operation, and there is no other way.
    pub(super) fn must_have(&self, op: Op) -> Result<()> {
        match without(op) {
            Without::Never | Without::OtherCalls => Ok(()),
            Without::Fails(_) if self.server().has(op) => Ok(()),
            Without::Fails(errno) => Err(Error::new(errno).during(op)),
        }
    }
}

/// A file system that a server serves.
#[derive(Clone)]
pub struct RemoteFs {
    pub(crate) session: Arc<ClientSession>,
}

impl RemoteFs {
    /// Over an established session.
    pub fn new(session: Arc<ClientSession>) -> RemoteFs {
        RemoteFs { session }
    }

    /// The session under it.
    pub fn session(&self) -> &Arc<ClientSession> {
        &self.session
    }

    /// As [`Link::must_have`], once it is known what the server has: a session that begins with its use has met none
    /// before its first call. Errors: as there, and those of that call.
    pub(super) async fn must_have(&self, cx: &Context, op: Op) -> Result<()> {
        match self.session.link.must_have(op) {
            Err(_) if self.session.begins_with_use() => {
                Box::pin(self.meet(cx)).await?; // so that other calls are no larger
                self.session.link.must_have(op)
            }
            outcome => outcome,
        }
    }

    /// Whatever a server answers, it has welcomed us by then.
    async fn meet(&self, cx: &Context) -> Result<()> {
        let call = Call::Getattr { id: self.session.info().root, handle: None };
        match self.ask::<Attr>(&cx.without_request(), call).await {
            Err(error) if error.fate() != Fate::Final => Err(error),
            Ok(_) | Err(_) => Ok(()),
        }
    }

    /// A call that changes nothing: asking twice does no harm.
    pub(super) async fn ask<T: for<'b> Wire<'b>>(&self, cx: &Context, call: Call<'_>) -> Result<T> {
        self.send(cx, &call, None, None).await.map(|(value, _)| value)
    }

    /// A call that changes something: in a replay slot, so that it is applied once.
    async fn change<T: for<'b> Wire<'b>>(
        &self,
        cx: &Context,
        call: Call<'_>,
    ) -> Result<(T, ReplyInfo)> {
        self.change_leased(cx, call).await.map(|(value, made, _)| (value, made))
    }

    /// The same, with what is to be kept until the answer is remembered, which leases what was changed.
    async fn change_leased<T: for<'b> Wire<'b>>(
        &self,
        cx: &Context,
        call: Call<'_>,
    ) -> Result<(T, ReplyInfo, Option<Box<OwnChange>>)> {
        let slot = self.session.take_slot(cx, SlotPurpose::Names).await?;
        let outcome = self.answer(cx, &call, Some(&slot), None).await;
        cx.keep(slot);
        outcome.map(|answer| (answer.value, answer.made, answer.change))
    }

    async fn send<T: for<'b> Wire<'b>>(
        &self,
        cx: &Context,
        call: &Call<'_>,
        slot: Option<&ReplaySlot>,
        data: Option<Buf>,
    ) -> Result<(T, ReplyInfo)> {
        let answer = self.answer(cx, call, slot, data).await?;
        Ok((answer.value, answer.made))
    }

    async fn answer<T: for<'b> Wire<'b>>(
        &self,
        cx: &Context,
        call: &Call<'_>,
        slot: Option<&ReplaySlot>,
        data: Option<Buf>,
    ) -> Result<CallAnswer<T>> {
        self.must_have(cx, call.op()).await?;
        let request = self.session.link.request_of(cx);
        let mut ask = OutgoingCall { request, data, ..OutgoingCall::of(cx, call) }.in_slot(slot);
        let channel = self.session.channel()?;
        let outcome = channel.call(&mut ask, |bytes| Input::whole(bytes)).await;
        outcome.map_err(|failure| error_of(failure).during(call.op()))
    }

    /// Looks a name up at the server, and opens nothing.
    async fn lookup_alone(&self, cx: &Context, dir: FileId, name: &Name) -> Result<Entry> {
        let (leases, kept) = (&self.session.link.leases, &self.session.link.kept);
        let shown = kept.before_lookup().await;
        let asked = leases.asking();
        let answer: Result<Entry> = self.ask(cx, Call::Lookup { dir, name: name.as_bytes() }).await;
        if let Ok(entry) = answer
            && !kept.is_shown(shown, entry.id)
        {
            // If it is gone meanwhile, it was there when the call began.
            let attr = FileSystem::getattr(self, cx, entry.id).await;
            return Ok(attr.map_or(entry, |attr| Entry { attr, ..entry }));
        }
        leases.looked_up(asked, (cx, dir, name), answer)
    }

    /// A lookup was answered without the server: nothing was opened ahead for the thread.
    fn found_here(&self, cx: &Context, dir: FileId, found: Option<&Entry>) {
        let link = &self.session.link;
        if cx.pid.0 != 0 && link.opens_ahead() {
            self.close_surplus(link.open_ahead.found_here(cx, dir, found));
        }
    }

    /// An answer that is not remembered.
    fn without_lease(&self, entry: Entry) -> Entry {
        Entry { attr: self.session.link.leases.not_remembered(entry.attr), ..entry }
    }

    /// A put in one call, if the server knows it: create, write and close in one round trip.
    async fn put_whole(
        &self,
        cx: &Context,
        (dir, name): (FileId, &Name),
        mode: u32,
        data: Buf,
    ) -> Result<()> {
        let slot = self.session.take_slot(cx, SlotPurpose::Names).await?;
        let call = Call::Put { dir, name: name.as_bytes(), mode };
        let (id, made): (FileId, _) = self.send(cx, &call, Some(&slot), Some(data.clone())).await?;
        self.name_changed((dir, name.as_bytes()), made, ExpectedName::File(id));
        let who = &cx.who;
        for (change, data) in
            [(Change::Size { size: 0 }, &[][..]), (Change::Write { at: 0 }, &data[..])]
        {
            let (file, confirmation, change) = (id, made.confirmation(), Some(change));
            let new = FileChange { file, confirmation, change, data, who, is_durable: false };
            self.session.link.unsynced.change_answered(new, None);
        }
        Ok(())
    }

    /// Notes a change of what has no content, or none that can be made again.
    fn changed(&self, cx: &Context, file: FileId, made: ReplyInfo, change: Option<Change>) {
        let (confirmation, who) = (made.confirmation(), &cx.who);
        let new = FileChange { file, confirmation, change, data: &[], who, is_durable: false };
        self.session.link.unsynced.change_answered(new, None);
    }

    /// Notes a change of a name.
    fn name_changed(&self, (dir, name): (FileId, &[u8]), made: ReplyInfo, expected: ExpectedName) {
        let stamp = made.change_stamp();
        self.session.link.unsynced.name_answered(NameChange { dir, name, stamp, expected });
    }
}

impl FileSystem for RemoteFs {
    fn info(&self) -> &FsInfo {
        self.session.info()
    }

    fn path(&self, _: FileId) -> Option<Vec<u8>> {
        None
    }

    fn clock(&self) -> Option<Timestamp> {
        None
    }

    fn user_of(&self, cx: &Context) -> Uid {
        cx.who.uid // who else it may be the server knows
    }

    fn lookup<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        Box::pin(async move {
            let link = &self.session.link;
            if let Some(outcome) = link.leases.lookup(cx, dir, name) {
                self.found_here(cx, dir, outcome.as_ref().ok());
                return outcome;
            }
            if cx.pid.0 == 0 || cx.only_looks || !link.opens_ahead() || link.kept.has_any() {
                return self.lookup_alone(cx, dir, name).await;
            }
            let handle = link.handle_of(cx);
            let (guess, surplus) = link.open_ahead.expect(cx, dir, handle);
            self.close_surplus(surplus);
            if let Some(guess) = guess {
                return self.lookup_open(cx, (dir, name), (guess, handle)).await;
            }
            let entry = self.lookup_alone(cx, dir, name).await?;
            link.open_ahead.found(cx, dir, &entry);
            Ok(entry)
        })
    }

    fn parent<'a>(&'a self, cx: &'a Context, dir: FileId) -> Fut<'a, Result<Entry>> {
        Box::pin(async move {
            let leases = &self.session.link.leases;
            if let Some(parent) = leases.parent(dir) {
                return Ok(parent);
            }
            let held = leases.held(dir);
            let entry: Entry = self.ask(cx, Call::Parent { dir }).await?;
            leases.got_parent(held, entry.id);
            Ok(self.without_lease(entry))
        })
    }

    fn getattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            // A thread that looks at a file that it looked up does not open it now.
            let link = &self.session.link;
            self.close_surplus(link.open_ahead.passed_over(cx));
            link.kept.settle(id).await;
            if let Some(attr) = link.leases.getattr(id) {
                return Ok(attr);
            }
            let asked = link.leases.asking();
            let attr = self.ask(cx, Call::Getattr { id, handle: None }).await?;
            Ok(link.leases.attributes(asked, id, attr))
        })
    }

    fn setattr<'a>(&'a self, cx: &'a Context, id: FileId, set: SetAttr) -> Fut<'a, Result<Attr>> {
        Box::pin(async move {
            self.session.link.kept.changes_past(id).await;
            let call = Call::Setattr { id, handle: None, set };
            let (attr, made, own): (Attr, _, _) = self.change_leased(cx, call).await?;
            for change in changes_of(set, &attr) {
                // A directory or link is not opened for it.
                let again = attr.file_type() == FileType::Regular;
                self.changed(cx, id, made, again.then_some(change));
            }
            Ok(self.session.link.leases.set(own, (id, attr)))
        })
    }

    fn readlink<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            let leases = &self.session.link.leases;
            if let Some(target) = leases.target(id) {
                return Ok(target);
            }
            let held = leases.held(id);
            let target: Vec<u8> = self.ask(cx, Call::Readlink { id }).await?;
            leases.got_target(held, &target);
            Ok(target)
        })
    }

    fn make<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        what: Make<'a>,
    ) -> Fut<'a, Result<Entry>> {
        let (kind, mode, rdev, target) = match what {
            Make::Directory { mode } => (0, mode, 0, &[][..]),
            Make::Node { mode, rdev } => (1, mode, rdev, &[][..]),
            Make::Symlink { target } => (2, 0, 0, target),
        };
        Box::pin(async move {
            let call = Call::Make { dir, name: name.as_bytes(), kind, mode, rdev, target };
            let (entry, made, change): (Entry, _, _) = self.change_leased(cx, call).await?;
            self.name_changed((dir, name.as_bytes()), made, ExpectedName::File(entry.id));
            Ok(self.session.link.leases.named(change, (cx, dir, name), entry))
        })
    }

    fn remove<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        kind: RemoveKind,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let name = name.as_bytes();
            self.session.link.kept.names_change().await;
            self.session.close_all_ahead();
            self.session.send_closes();
            let ((), made) = self.change(cx, Call::Remove { dir, name, kind }).await?;
            self.name_changed((dir, name), made, ExpectedName::Absent);
            Ok(())
        })
    }

    fn rename<'a>(
        &'a self,
        cx: &'a Context,
        from: (FileId, &'a Name),
        to: (FileId, &'a Name),
        how: RenameHow,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            let ((from, from_name), (to, to_name)) =
                ((from.0, from.1.as_bytes()), (to.0, to.1.as_bytes()));
            self.session.link.kept.names_change().await;
            self.session.close_all_ahead();
            self.session.send_closes();
            let moved = self.session.link.unsynced.expected_name(from, from_name);
            let call = Call::Rename { from, from_name, to, to_name, how };
            let ((), made) = self.change(cx, call).await?;
            let [before, after] = match how {
                RenameHow::Exchange => [ExpectedName::Unknown; 2],
                _ => [ExpectedName::Absent, moved.unwrap_or(ExpectedName::AnyFile)],
            };
            self.name_changed((from, from_name), made, before);
            self.name_changed((to, to_name), made, after);
            Ok(())
        })
    }

    fn link<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        dir: FileId,
        name: &'a Name,
    ) -> Fut<'a, Result<Entry>> {
        Box::pin(async move {
            self.session.link.kept.changes_past(id).await;
            let call = Call::Link { id, dir, name: name.as_bytes() };
            let (entry, made, change): (Entry, _, _) = self.change_leased(cx, call).await?;
            self.name_changed((dir, name.as_bytes()), made, ExpectedName::File(entry.id));
            Ok(self.session.link.leases.named(change, (cx, dir, name), entry))
        })
    }

    fn open<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            if how.directory() && self.session.link.leases.has_listing(id) {
                self.close_surplus(self.session.link.open_ahead.passed_over(cx));
                return Ok(LeasedDirectory::open(self.clone(), cx, (id, how)));
            }
            self.open_at(cx, None, id, how).await
        })
    }

    fn learn<'a>(
        &'a self,
        cx: &'a Context,
        (dir, name): (FileId, &'a Name),
        id: FileId,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            self.must_have(cx, Op::Learn).await?;
            self.ask(cx, Call::Learn { dir, name: name.as_bytes(), id }).await
        })
    }

    fn open_named<'a>(
        &'a self,
        cx: &'a Context,
        place: (FileId, &'a Name),
        id: FileId,
        how: OpenHow,
    ) -> Fut<'a, Result<Arc<dyn OpenFile>>> {
        Box::pin(async move {
            if self.session.link.server().has(Op::OpenNamed) {
                match self.open_at(cx, Some(place), id, how).await {
                    // The call came to a server of an earlier version that took this one's place.
                    Err(error) if error.errno() == Errno::ENOTSUP => {}
                    opened => return opened,
                }
            }
            open_named(self, cx, place, id, how).await
        })
    }

    fn create<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let handle = self.session.link.handle_of(cx);
            if how.exclusive || !self.session.link.kept.is_wanted() {
                return self.create_as_asked(cx, (dir, name), (how, handle)).await;
            }
            Box::pin(self.create_beside_kept(cx, (dir, name), (how, handle))).await
        })
    }

    fn tmpfile<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        how: CreateHow,
    ) -> Fut<'a, Result<(Entry, Arc<dyn OpenFile>)>> {
        Box::pin(async move {
            let link = &self.session.link;
            let (handle, asked) = (link.handle_of(cx), link.kept.asking());
            let call = Call::Tmpfile { dir, how, handle };
            let ((entry, no_capability), made): ((Entry, bool), _) = self.change(cx, call).await?;
            self.may_keep(asked, (entry.id, true), made, Some(&entry.attr));
            let answer = (self.without_lease(entry), no_capability);
            self.made(cx, answer, (handle, how.open), made).await
        })
    }

    fn put<'a>(
        &'a self,
        cx: &'a Context,
        dir: FileId,
        name: &'a Name,
        mode: u32,
        data: Buf,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            must_fit_one_call(&data)?;
            self.session.link.kept.settle_all().await; // the file may be there
            match self.put_whole(cx, (dir, name), mode, data.clone()).await {
                // A server of an earlier version does not know the call.
                Err(error) if error.errno() == Errno::ENOTSUP => {
                    put_in_steps(self, cx, (dir, name), mode, data).await
                }
                done => done,
            }
        })
    }

    fn access<'a>(&'a self, cx: &'a Context, id: FileId, want: Access) -> Fut<'a, Result<()>> {
        Box::pin(self.ask(cx, Call::Access { id, want }))
    }

    fn statfs<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<Statfs>> {
        Box::pin(self.ask(cx, Call::Statfs {}))
    }

    fn sync_all<'a>(&'a self, cx: &'a Context) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            self.session.link.kept.settle_all().await;
            self.session.sync_all(cx).await
        })
    }

    fn getxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            let leases = &self.session.link.leases;
            if let Some(known) = leases.xattr(id, name) {
                return known;
            }
            let held = leases.held(id);
            let got = self.ask(cx, Call::Getxattr { id, name }).await;
            leases.got_xattr(held, name, &got);
            got
        })
    }

    fn setxattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
        value: &'a [u8],
        how: XattrSet,
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            self.session.link.kept.changes_past(id).await;
            let ((), made) = self.change(cx, Call::Setxattr { id, name, value, how }).await?;
            self.changed(cx, id, made, None);
            Ok(())
        })
    }

    fn listxattr<'a>(&'a self, cx: &'a Context, id: FileId) -> Fut<'a, Result<Vec<u8>>> {
        Box::pin(async move {
            let leases = &self.session.link.leases;
            if let Some(list) = leases.xattr_list(cx, id) {
                return Ok(list);
            }
            let held = leases.held(id);
            let list: Vec<u8> = self.ask(cx, Call::Listxattr { id }).await?;
            leases.listed_xattrs(held, cx, &list);
            Ok(list)
        })
    }

    fn removexattr<'a>(
        &'a self,
        cx: &'a Context,
        id: FileId,
        name: &'a [u8],
    ) -> Fut<'a, Result<()>> {
        Box::pin(async move {
            self.session.link.kept.changes_past(id).await;
            let ((), made) = self.change(cx, Call::Removexattr { id, name }).await?;
            self.changed(cx, id, made, None);
            Ok(())
        })
    }
}
