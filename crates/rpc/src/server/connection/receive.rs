//! Messages of a client that has shaken hands: calls are begun, the others heeded.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use dray_core::{Buf, Cancel, Class, Context, Counted, Errno, Error, GROUPS_MAX, SessionId, Via};

use super::ServerSink;
use super::call::{CallBody, CallInHand};
use crate::server::exactly_once::slots::Route;
use crate::server::identities::KnownCaller;
use crate::server::reply::Reply;
use crate::server::sabotage::Sabotage;
use crate::server::session::ServerSession;
use crate::wire::{
    CallHead, Input, Kind, Malformed, NotifyHead, OpRow, get_jobs, peek_kind, peek_unknown_op,
};

impl ServerSink {
    pub(super) fn message(
        &mut self,
        session: &Arc<ServerSession>,
        head: &[u8],
        data: Option<Buf>,
    ) -> io::Result<()> {
        if session.is_ended() {
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, "the session has ended"));
        }
        let mut input = Input(head);
        match peek_kind(head)? {
            Kind::Call => {
                if let Some(tag) = peek_unknown_op(head) {
                    return self.refuse_call(session, tag, &Error::new(Errno::ENOTSUP));
                }
                let call = CallHead::get_message(&mut input)?;
                self.call(session, call, input.0, data)
            }
            Kind::Identity => {
                input.get::<Kind>()?;
                Ok(self.identities.define(input, &session.buffers)?)
            }
            Kind::Notify => {
                let head = NotifyHead::get_message(&mut input)?;
                self.notified(session, head, input)
            }
            _ => Err(Malformed("a client does not send that").into()),
        }
    }

    fn notified(
        &mut self,
        session: &Arc<ServerSession>,
        head: NotifyHead,
        mut input: Input<'_>,
    ) -> io::Result<()> {
        match head.what {
            NotifyHead::CANCEL => {
                let cancel = self.shared.lock().cancels.get(&head.tag).cloned();
                if let Some(cancel) = cancel {
                    cancel.set();
                }
            }
            NotifyHead::RECLAIM_COMPLETE => {
                session.finish_reclaim();
                session.export.grace.finish(session.id);
            }
            NotifyHead::WRITTEN_BACK => session.export.kept_writes.finish(session.id),
            NotifyHead::IDLE => {
                for _ in 0..head.tag.min(session.slots.count()) {
                    session.slots.idle(input.get()?);
                }
            }
            NotifyHead::JOBS => session.questions.answered(head.tag, get_jobs(&mut input)?),
            NotifyHead::MAPPED => session.export.mappings.stored(session, input.get()?),
            NotifyHead::RELEASED => {
                let (from, to) = input.get()?;
                dray_rt::spawn(session.clone().release(self.number, from..to));
            }
            NotifyHead::PROBE => {
                let mut answer = Vec::new();
                NotifyHead { what: NotifyHead::PRESENT, flags: 0, tag: 0 }.put_message(&mut answer);
                let _ = self.connection.notify(&answer); // a client that does not read gets no more
            }
            NotifyHead::RECOVERY_COMPLETE => session.export.recovery_window.returned(session.id),
            NotifyHead::GOODBYE if self.server.options.broken().is(Sabotage::Goodbyes) => {}
            NotifyHead::RECALLED => {
                if let Some(holder) = session.lease_holder() {
                    holder.acknowledged(input.get()?);
                }
            }
            NotifyHead::GOODBYE => {
                if let Some(holder) = session.lease_holder() {
                    holder.end(true);
                }
                drop(self.server.end(session.clone())); // nobody waits for it
            }
            _ => {} // from a newer version: advice, not a request
        }
        Ok(())
    }

    /// Whether a client that has so many calls under way may make another. Answers that it
    /// has not read count: to the client those calls are under way.
    fn room_for_answers(&self, under_way: u32) -> io::Result<()> {
        let unread = self.connection.queued_frames();
        match under_way as usize + unread >= self.server.options.calls_max as usize {
            true => Err(Malformed("more calls at once than were allowed").into()),
            false => Ok(()),
        }
    }

    /// Answers a call that is not begun.
    fn refuse_call(&self, session: &ServerSession, tag: u32, error: &Error) -> io::Result<()> {
        let mut reply = Reply::failure(error);
        let Some(table) = session.believes_from_above().cloned() else {
            let _ = reply.send(&*self.connection, tag, false); // a broken one ends `run`
            return self.room_for_answers(0);
        };
        let (connection, under_way) = (Arc::downgrade(&self.connection), self.shared.clone());
        let calls = under_way.counter(false).fetch_add(1, Ordering::SeqCst);
        dray_rt::spawn(async move {
            table.contact_above(|| connection.strong_count() > 0).await;
            if let Some(connection) = connection.upgrade() {
                let _ = reply.send(&*connection, tag, false); // as above
            }
            under_way.counter(false).fetch_sub(1, Ordering::SeqCst);
        });
        self.room_for_answers(calls)
    }

    fn call(
        &mut self,
        session: &Arc<ServerSession>,
        head: CallHead,
        body: &[u8],
        data: Option<Buf>,
    ) -> io::Result<()> {
        let who = self.identities.get(head.identity);
        let KnownCaller { who, node, too_many_groups } =
            who.ok_or(Malformed("an identity that was not defined"))?;
        let row = OpRow::of(head.op);
        let one_way = head.flags & CallHead::ONE_WAY != 0;
        if one_way && !row.may_be_one_way {
            return Err(Malformed("a call that must be answered and is not to be").into());
        }
        if too_many_groups && !row.ignores_groups {
            let (host, id, uid) = (&session.host, session.id, who.uid);
            session.export.refused_callers.say(|more| {
                log::warn!(
                    "client {host} (session {id:x}): user {uid} is in more groups than the {GROUPS_MAX} \
                     that are taken, and is refused{more}"
                )
            });
            let error = Error::new(Errno::E2BIG).because("more groups than the server takes");
            return self.refuse_call(session, head.tag, &error);
        }
        let under_way = self.shared.counter(one_way).fetch_add(1, Ordering::SeqCst);
        match one_way {
            true if under_way >= CallHead::ONE_WAY_MAX as u32 => {
                return Err(Malformed("more one-way calls at once than were allowed").into());
            }
            true => {}
            false => self.room_for_answers(under_way)?,
        }
        let route = Route { connection: Arc::downgrade(&self.connection), tag: head.tag };
        let node = node.unwrap_or(session.node);
        let mut cx = Context::new(node, head.request, who, head.pid);
        cx.holder = session.holder();
        cx.umask = head.umask;
        if head.flags & CallHead::BACKGROUND != 0 {
            cx.class = Class::Background;
        }
        cx.address = session.address();
        cx.fence = session.export.fence();
        cx.via = Some(Via { session: SessionId(session.id), peer: self.peer });
        if row.can_be_cancelled {
            let cancel = Arc::new(Cancel::default());
            self.shared.lock().cancels.insert(head.tag, cancel.clone());
            cx.cancel = Some(cancel);
        }
        if row.may_be_split && head.flags & CallHead::REST != 0 {
            cx.counted = Counted::Bytes;
        } else {
            session.calls.fetch_add(1, Ordering::Relaxed);
        }
        if let Some(holder) = session.lease_holder() {
            holder.heard();
        }
        let call = CallInHand {
            server: self.server.clone(),
            session: session.clone(),
            shared: self.shared.clone(),
            route,
            connection: self.number,
            head,
            cx,
        };
        dray_rt::poll_once_then_spawn(call.carry_out(CallBody::from(body), data));
        Ok(())
    }
}
