//! How files are opened: by a call of their own, ahead by the lookup before, or by the call that makes them.

use std::sync::Arc;

use dray_core::{
    AtOpen, Attr, Context, CreateHow, Entry, Errno, Fate, FileId, Name, Op, OpenFile, OpenHow,
    Result, SetAttr,
};

use super::RemoteFs;
use crate::client::channel::ReplyInfo;
use crate::client::durability::ExpectedName;
use crate::client::file::RemoteFile;
use crate::client::link::SessionState;
use crate::client::open_ahead::{Guess, Surplus};
use crate::wire::{Call, Change, Ticket, WriteBase};

impl RemoteFs {
    /// An open file, with what its opening answered.
    pub(in crate::client) fn file(
        &self,
        id: FileId,
        handle: u64,
        how: OpenHow,
        opened: (Option<AtOpen>, Option<Ticket>),
    ) -> RemoteFile {
        RemoteFile::new(self.session.clone(), id, handle, how, opened)
    }

    /// A creation, in one call.
    pub(super) async fn create_as_asked(
        &self,
        cx: &Context,
        (dir, name): (FileId, &Name),
        (how, handle): (CreateHow, u64),
    ) -> Result<(Entry, Arc<dyn OpenFile>)> {
        let asked = self.session.link.kept.asking();
        let call = Call::Create { dir, name: name.as_bytes(), how, handle };
        let ((entry, no_capability), made, change): ((Entry, bool), _, _) =
            self.change_leased(cx, call).await?;
        self.may_keep(asked, (entry.id, how.exclusive), made, Some(&entry.attr));
        self.name_changed((dir, name.as_bytes()), made, ExpectedName::File(entry.id));
        let entry = self.session.link.leases.named(change, (cx, dir, name), entry);
        self.made(cx, (entry, no_capability), (handle, how.open), made).await
    }

    /// A creation that may find the file there, by a session that may have kept writes to it. They would have to be sent
    /// before, and it is not known of which file they are. So a name that is known to be absent is made first as one
    /// that must be new. What was kept is of other files then, and stays.
    pub(super) async fn create_beside_kept(
        &self,
        cx: &Context,
        place: (FileId, &Name),
        (how, handle): (CreateHow, u64),
    ) -> Result<(Entry, Arc<dyn OpenFile>)> {
        let link = &self.session.link;
        let known = link.leases.lookup(cx, place.0, place.1);
        let is_absent =
            known.is_some_and(|found| found.is_err_and(|error| error.errno() == Errno::ENOENT));
        if !is_absent {
            link.kept.settle_all().await;
        }
        let first = CreateHow { exclusive: is_absent, ..how };
        match self.create_as_asked(cx, place, (first, handle)).await {
            // Another client was faster, now or when a process before this one asked. The second change has
            // another number, so that a process after this one does not take one's answer for the other's.
            Err(error) if error.errno() == Errno::EEXIST => {
                link.kept.settle_all().await;
                self.create_as_asked(&cx.part(1), place, (how, handle)).await
            }
            made => made,
        }
    }

    /// A file that the call just answered has made.
    pub(super) async fn made(
        &self,
        cx: &Context,
        (entry, no_capability): (Entry, bool),
        (handle, how): (u64, OpenHow),
        made: ReplyInfo,
    ) -> Result<(Entry, Arc<dyn OpenFile>)> {
        let at_open = how.with_attr.then_some(AtOpen {
            attr: entry.attr,
            no_capability,
            times_past: made.times_past,
        });
        let file = self.changed_file(cx, entry.id, (handle, how), at_open, made);
        Ok((entry, file.confirmed(cx, made.session_state).await?.shared()))
    }

    /// A file that the call just answered opened, and cut or made.
    fn changed_file(
        &self,
        cx: &Context,
        id: FileId,
        (handle, how): (u64, OpenHow),
        at_open: Option<AtOpen>,
        made: ReplyInfo,
    ) -> RemoteFile {
        let file = self.file(id, handle, how, (at_open, made.ticket));
        let cut = how.truncates().then_some(Change::Size { size: 0 });
        file.changed(cx, made, cut.or(Some(Change::Attr(SetAttr::default()))), &[]);
        file
    }

    /// Looks a name up and has the file opened for the opening that is expected next.
    pub(super) async fn lookup_open(
        &self,
        cx: &Context,
        (dir, name): (FileId, &Name),
        (guess, handle): (Guess, u64),
    ) -> Result<Entry> {
        let link = &self.session.link;
        let ahead = &link.open_ahead;
        let call = Call::LookupOpen { dir, name: name.as_bytes(), how: guess.how, handle };
        let asked = link.leases.asking();
        match self.send::<(Entry, bool)>(cx, &call, None, None).await {
            Ok(((entry, open), made)) => {
                if ahead.answered((guess, handle), Some(&entry), (open, made)) {
                    link.watch_ahead(&self.session);
                }
                link.leases.looked_up(asked, (cx, dir, name), Ok(entry))
            }
            Err(error) => {
                // The channel closes a file that was opened for nothing, when the channel hears of
                // it.
                match error.fate() {
                    Fate::Unknown => ahead.left(&guess),
                    _ => _ = ahead.answered((guess, handle), None, (false, ReplyInfo::default())),
                }
                if error.errno() != Errno::ENOTSUP {
                    let error = error.during(Op::Lookup);
                    return link.leases.looked_up(asked, (cx, dir, name), Err(error));
                }
                // The call came to a server of an earlier version that took this one's place.
                self.lookup_alone(cx, dir, name).await
            }
        }
    }

    /// The file, if the lookup before has opened it for this.
    fn opened_ahead(
        &self,
        cx: &Context,
        id: FileId,
        how: OpenHow,
    ) -> Option<(RemoteFile, SessionState)> {
        let link = &self.session.link;
        let (opened, surplus) = link.open_ahead.take(cx, id, how);
        self.close_surplus(surplus);
        let opened = opened?;
        if !link.files.aliases.note(link.own_request_of(cx), opened.handle) {
            self.close_surplus(Some(link.open_ahead.unused(&opened)));
            return None;
        }
        let file = self.file(id, opened.handle, how, (None, opened.ticket));
        link.open_ahead.used(&opened);
        Some((file, opened.session_state))
    }

    /// Opens a file that is to be called so, or just that file.
    pub(in crate::client) async fn open_at(
        &self,
        cx: &Context,
        place: Option<(FileId, &Name)>,
        id: FileId,
        how: OpenHow,
    ) -> Result<Arc<dyn OpenFile>> {
        let how = self.session.link.kept.opening(how);
        // A file that a lookup has opened had its name then, and may have lost it since.
        if place.is_some() {
            self.close_surplus(self.session.link.open_ahead.passed_over(cx));
        } else if let Some((file, session_state)) = self.opened_ahead(cx, id, how) {
            return Ok(Arc::new(file.confirmed(cx, session_state).await?));
        }
        let kept = &self.session.link.kept;
        if how.truncates() {
            kept.changes_past(id).await;
        } else {
            kept.settle(id).await;
        }
        let (handle, may_keep) = (self.session.link.handle_of(cx), kept.asking());
        let call = match place {
            Some((dir, name)) => Call::OpenNamed { dir, name: name.as_bytes(), id, how, handle },
            None => Call::Open { id, how, handle, again: false },
        };
        // Cutting a file twice could cut what was written in between.
        let leases = &self.session.link.leases;
        let asked = leases.asking();
        let with_times = |at_open: Option<AtOpen>, made: ReplyInfo| {
            at_open.map(|seen| {
                let attr = leases.attributes(asked, id, seen.attr);
                AtOpen { attr, times_past: made.times_past, ..seen }
            })
        };
        let (file, made) = if how.truncates() {
            let (at_open, made) = self.change(cx, call).await?;
            (self.changed_file(cx, id, (handle, how), with_times(at_open, made), made), made)
        } else {
            let (at_open, made) = self.send(cx, &call, None, None).await?;
            (self.file(id, handle, how, (with_times(at_open, made), made.ticket)), made)
        };
        let seen = file.at_open().map(|seen| seen.attr);
        self.may_keep(may_keep, (id, false), made, seen.as_ref());
        Ok(file.confirmed(cx, made.session_state).await?.shared())
    }

    /// An answer to an opening that was asked for at `asked` may give a write lease. `attr`: the file as it was then.
    /// With `is_new` the call has made it.
    pub(super) fn may_keep(
        &self,
        asked: u64,
        (id, is_new): (FileId, bool),
        made: ReplyInfo,
        attr: Option<&Attr>,
    ) {
        if let Some((number, attr)) = made.write_lease.zip(attr) {
            let stamp = (number, WriteBase::of(attr));
            self.session.link.kept.granted(asked, (id, is_new), stamp);
        }
    }

    pub(super) fn close_surplus(&self, surplus: Option<Surplus>) {
        if let Some(surplus) = surplus {
            self.session.link.close_surplus(&self.session, surplus);
        }
    }
}
