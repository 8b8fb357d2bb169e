//! The two ends of a connection within this process.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use dray_core::{Buf, Fut};
use dray_rt::now;

use super::inbox::{Frame, FrameInbox, InboxItem};
use crate::connection::{TICK_MAX, check_bounds};
use crate::{Connection, Peer, Sink, Unfinished};

/// One end of a connection within the process.
pub(super) struct LocalConnection {
    /// Of this end, and of the other one.
    here: Arc<Mutex<FrameInbox>>,
    there: Arc<Mutex<FrameInbox>>,
}

fn lock(inbox: &Mutex<FrameInbox>) -> MutexGuard<'_, FrameInbox> {
    inbox.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LocalConnection {
    /// Both ends of a new one.
    pub(super) fn pair() -> [LocalConnection; 2] {
        let [here, there]: [Arc<Mutex<FrameInbox>>; 2] = Default::default();
        let other = LocalConnection { here: there.clone(), there: here.clone() };
        [LocalConnection { here, there }, other]
    }

    fn put(&self, head: &[u8], data: Option<Buf>, is_notice: bool) -> io::Result<()> {
        check_bounds(head, data.as_ref().map_or(0, Buf::len))?;
        // Pages are taken once. What is sent can be sent again: by then it has to be in memory.
        data.iter().for_each(Buf::fetch);
        let mut there = lock(&self.there);
        there.put(head, data, is_notice)?;
        let waker = there.waker.take();
        drop(there);
        waker.into_iter().for_each(Waker::wake);
        Ok(())
    }

    /// What `look` finds at this end; none: the caller is woken later.
    pub(super) fn poll_here<T>(
        &self,
        cx: &Context<'_>,
        look: impl FnOnce(&FrameInbox) -> Option<T>,
    ) -> Poll<T> {
        let mut here = lock(&self.here);
        match look(&here) {
            Some(found) => Poll::Ready(found),
            None => {
                here.waker = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    /// Receives what is there, for a while. Ready: the connection has ended.
    fn poll_frames(&self, cx: &mut Context<'_>, sink: &mut dyn Sink) -> Poll<io::Error> {
        let until = now() + TICK_MAX;
        loop {
            let mut here = lock(&self.here);
            let frame = match here.lend() {
                InboxItem::Frame(frame) => frame,
                InboxItem::Nothing => {
                    here.waker = Some(cx.waker().clone());
                    return Poll::Pending;
                }
                InboxItem::Over => {
                    return Poll::Ready(io::Error::from_raw_os_error(libc::ENOTCONN));
                }
                InboxItem::Cut => {
                    let what = "the other end closed the connection";
                    return Poll::Ready(io::Error::new(io::ErrorKind::UnexpectedEof, what));
                }
            };
            drop(here);
            let delivered = poll_deliver(cx, sink, &frame);
            let mut here = lock(&self.here);
            match delivered {
                Poll::Ready(Ok(bytes)) => here.take(frame, bytes),
                Poll::Ready(Err(error)) => return Poll::Ready(error),
                Poll::Pending => {
                    here.give_back(frame);
                    here.waker = Some(cx.waker().clone()); // for the end
                    return Poll::Pending;
                }
            }
            drop(here);
            if now() >= until {
                cx.waker().wake_by_ref(); // more may be there: after the others' tick
                return Poll::Pending;
            }
        }
    }
}

/// Gives the sink a frame; answers its bytes. Pending: there is no memory for it.
fn poll_deliver(
    cx: &mut Context<'_>,
    sink: &mut dyn Sink,
    frame: &Frame,
) -> Poll<io::Result<usize>> {
    let Frame { head, data, .. } = frame;
    let delivered = match data {
        Some(data) => sink.poll_shared(cx, head, data),
        None => sink.poll_head(cx, head).map(|beside| sink.frame(head, beside?)),
    };
    let bytes = head.len() + data.as_ref().map_or(0, Buf::len);
    delivered.map(|delivered| delivered.map(|()| bytes))
}

impl Connection for LocalConnection {
    fn send(&self, head: &[u8], data: Option<Buf>) -> io::Result<()> {
        self.put(head, data, false)
    }

    fn notify(&self, head: &[u8]) -> io::Result<()> {
        self.put(head, None, true)
    }

    /// The receiver may share `data` already: then it holds them until it is done with them.
    fn let_go(&self, data: &Buf) {
        lock(&self.there).let_go(data);
    }

    fn run<'a>(&'a self, sink: &'a mut dyn Sink) -> Fut<'a, io::Error> {
        Box::pin(async move {
            let error = std::future::poll_fn(|cx| self.poll_frames(cx, sink)).await;
            self.close(); // senders get their memory back, even if others hold the connection
            error
        })
    }

    fn close(&self) {
        let woken = [lock(&self.there).cut(), lock(&self.here).end()];
        woken.into_iter().flatten().for_each(Waker::wake);
    }

    fn queued_frames(&self) -> usize {
        lock(&self.there).queued()
    }

    /// Nothing comes in parts: a frame is here, or it is not.
    fn unfinished(&self) -> Unfinished {
        Unfinished { incoming: None, outgoing: lock(&self.there).progress() }
    }

    fn peer(&self) -> Peer {
        Peer::Local
    }
}

impl Drop for LocalConnection {
    fn drop(&mut self) {
        self.close();
    }
}
