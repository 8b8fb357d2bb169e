//! How what is kept of a file travels, and what becomes of it if it cannot be written.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{Context, Errno, Error, Fate, Op, RequestId, Result};
use dray_rt::now_with_sleeps;

use super::aside::{self, LostWrites};
use super::file::{KeptFile, State};
use super::unsent::{UnsentBatch, UnsentWrites};
use crate::client::file::RemoteFile;
use crate::wire::WriteBase;

/// Through which file a batch goes, and who wrote it.
type Writer = (Arc<RemoteFile>, Context);

impl KeptFile {
    /// Sends what is kept. Nobody is there whom an error could be reported: the next who writes or closes hears it.
    pub(crate) async fn settle(self: &Arc<Self>) {
        self.settle_while(|_| true).await;
    }

    /// The same while `more` says so.
    pub(super) async fn settle_while(self: &Arc<Self>, more: impl Fn(&UnsentWrites) -> bool) {
        let _in_order = self.sending.acquire().await; // nobody closes it
        if let Err(error) = self.send_while(false, more).await
            && !self.is_sent_again(&error)
        {
            // Before anybody goes on who waited for this. Nobody hears of a file that all have closed, but in the log.
            let mut state = self.state();
            if !state.local.is_closed {
                state.failure.get_or_insert(error);
            }
        }
    }

    /// Sends what is kept, and waits for what is being sent. With `ends`, the lease goes back with it. Errors: it is
    /// lost, or the server is away and it is still kept.
    pub(crate) async fn write_back(self: &Arc<Self>, ends: bool) -> Result<()> {
        let _in_order = self.sending.acquire().await; // nobody closes it
        self.send_while(ends, |_| true).await
    }

    /// What is added meanwhile is left, so that this ends.
    async fn send_while(
        self: &Arc<Self>,
        ends: bool,
        more: impl Fn(&UnsentWrites) -> bool,
    ) -> Result<()> {
        let count = self.state().unsent.count();
        for _ in 0..count {
            if !more(&self.state().unsent) {
                return Ok(());
            }
            self.send_one(ends).await?;
        }
        if ends {
            // The server asks it back when somebody wants the file.
            self.state().lease = None;
        }
        Ok(())
    }

    /// Whether what was not sent stays here. In a log it does also if nobody knows whether it was written. Under the
    /// lease it may be written again. Without the lease the server looks whether the file is still the same.
    fn is_sent_again(&self, error: &Error) -> bool {
        match error.fate() {
            Fate::Retry => true,
            Fate::Unknown => self.store.log().is_some(),
            Fate::Final => false,
        }
    }

    async fn send_one(self: &Arc<Self>, ends: bool) -> Result<()> {
        let (message, (file, cx)) = {
            let mut guard = self.state();
            let state = &mut *guard;
            let Some(writer) = state.writer.clone() else { return Ok(()) };
            let ends = (ends || state.local.is_closed) && state.unsent.count() == 1;
            state.lease.take_if(|_| ends);
            let stamp = (state.number, state.base);
            let Some(first) = state.unsent.first() else { return Ok(()) };
            // One that was being sent when its sender died is sent again as it was.
            let request = match first.request {
                Some(request) => request,
                None => {
                    let request = RequestId(writer.0.session.link.own_handle());
                    self.store.is_sending(state.place, (self.id, first), request);
                    request
                }
            };
            first.request = Some(request);
            (first.message(stamp, (request, ends)), writer)
        };
        let sent = file.write_back(&cx, message).await;
        let sent = self.sync_at_server((&file, &cx), sent).await;
        let ended = match sent {
            Ok(base) => self.is_sent(base),
            Err(error) if self.is_sent_again(&error) => return self.is_not_sent(&file, error),
            Err(error) => return self.is_refused(error, &(file, cx)),
        };
        // Outside of the lock: it may close the file.
        drop(ended);
        file.session.link.kept.forget_ended(self);
        Ok(())
    }

    /// What a program has synced is on media at the server before it leaves the log. Answers the state of the file, and
    /// whether it is on media there.
    async fn sync_at_server(
        &self,
        (file, cx): (&RemoteFile, &Context),
        sent: Result<WriteBase>,
    ) -> Result<WriteBase> {
        let base = sent?;
        if self.store.log().is_none() {
            return Ok(base);
        }
        if !self.state().local.is_synced {
            // A program that syncs from now on asks the server.
            let mut state = self.state();
            if !state.local.is_synced {
                state.local.is_unsynced_at_server = true;
                return Ok(base);
            }
        }
        file.sync_written(cx).await.map(|()| base)
    }

    /// Answers through which file it went, if nothing more is kept.
    fn is_sent(&self, base: WriteBase) -> Option<Writer> {
        let mut guard = self.state();
        let state = &mut *guard;
        let batch = state.unsent.remove_first()?;
        self.sum.sent.fetch_add(1, Ordering::SeqCst);
        self.sum.bytes.fetch_sub(batch.extents.bytes(), Ordering::SeqCst);
        (state.base, state.base_is_old) = (base, false);
        if state.until.is_some_and(|until| until < now_with_sleeps()) {
            self.sum.late.fetch_add(1, Ordering::SeqCst);
        }
        let stamp = (state.number, base);
        self.store.is_sent(&mut state.place, (self.id, &batch.logged, false), stamp);
        state.writer.take_if(|_| state.unsent.is_empty())
    }

    fn is_not_sent(self: &Arc<Self>, file: &RemoteFile, error: Error) -> Result<()> {
        let mut guard = self.state();
        let state = &mut *guard;
        if self.store.log().is_some() {
            state.unsent.is_not_sent();
        } else {
            // In memory all that is noted is one batch.
            let before = state.unsent.bytes();
            let all = state.unsent.join();
            state.unsent.put_first(all);
            self.sum.bytes.fetch_sub(before - state.unsent.bytes(), Ordering::SeqCst);
            self.store.is_not_sent(state.place);
        }
        if !std::mem::replace(&mut state.has_timer, true) {
            self.send_later(file);
        }
        Err(error)
    }

    /// What cannot be written is kept aside.
    fn is_refused(&self, error: Error, (file, cx): &Writer) -> Result<()> {
        let mut guard = self.state();
        let state = &mut *guard;
        let before = state.unsent.bytes();
        // Newer writes may find room, and are not upon what is lost.
        let is_alone = has_no_room(&error) && self.store.log().is_none() && state.lease.is_some();
        let lost = match is_alone {
            true => state.unsent.remove_first().unwrap_or_default(),
            false => state.unsent.join(),
        };
        self.sum.bytes.fetch_sub(before - state.unsent.bytes(), Ordering::SeqCst);
        self.sum.lost.fetch_add(1, Ordering::SeqCst);
        state.lease = None;
        let (error, is_kept) = self.lost(error, (file, cx), &lost);
        self.forget_lost(state, &lost, (is_alone, is_kept));
        let writer = state.writer.take_if(|_| state.unsent.is_empty());
        drop(guard);
        drop(writer);
        Err(error)
    }

    fn forget_lost(&self, state: &mut State, lost: &UnsentBatch, (alone, kept): (bool, bool)) {
        // A log has what could be kept nowhere else, and the next mount tries again.
        if kept || self.store.log().is_none() {
            let stamp = (state.number, state.base);
            self.store.is_sent(&mut state.place, (self.id, &lost.logged, !alone), stamp);
        }
    }

    /// What cannot be written any more is kept aside, if there is a directory for that. Answers what programs hear, and
    /// whether it is there.
    fn lost(
        &self,
        error: Error,
        (file, cx): (&RemoteFile, &Context),
        lost: &UnsentBatch,
    ) -> (Error, bool) {
        // The file system has no room: a program hears of that at any time. Not one that has closed the file.
        if has_no_room(&error) && self.store.log().is_none() {
            return (error.during(Op::Write), false);
        }
        let writes = LostWrites { id: self.id, who: &cx.who, extents: &lost.extents, why: &error };
        let kept = aside::keep(file.session.link.options.aside.as_deref(), &writes).is_some();
        self.sum.aside.fetch_add(u64::from(kept), Ordering::SeqCst);
        if error.errno() != Errno::EREMCHG {
            return (error.during(Op::Write), kept);
        }
        let what = "others have changed the file since, and what was written is not in it";
        (Error::new(Errno::EIO).because(what).during(Op::Write), kept)
    }
}

fn has_no_room(error: &Error) -> bool {
    [Errno::ENOSPC, Errno::EDQUOT, Errno::EFBIG].contains(&error.errno())
}
