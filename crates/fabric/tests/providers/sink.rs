//! Receives for a test, and keeps what came.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::{Context, Poll, Waker};

use dray_core::{Buf, BufMut};
use dray_fabric::{Connection, PoolShare, Sink};

/// Head and data of a frame.
pub type Frame = (Vec<u8>, Option<Buf>);

/// What one end has received, for a test to look at.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<State>>);

#[derive(Default)]
pub struct State {
    pub frames: Vec<Frame>,
    /// Why `run` returned.
    pub ended: Option<io::ErrorKind>,
    /// There is no memory for data.
    pub held_up: bool,
    /// Times that memory was asked for in vain.
    pub in_vain: usize,
    waiting: Option<Waker>,
}

impl Log {
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    pub fn count(&self) -> usize {
        self.lock().frames.len()
    }

    pub fn heads(&self) -> Vec<Vec<u8>> {
        self.lock().frames.iter().map(|(head, _)| head.clone()).collect()
    }

    pub fn has_ended(&self) -> bool {
        self.lock().ended.is_some()
    }

    /// There is memory for data, or not.
    pub fn hold_up(&self, held_up: bool) {
        let mut state = self.lock();
        state.held_up = held_up;
        let waiting = state.waiting.take().filter(|_| !held_up);
        drop(state);
        waiting.into_iter().for_each(Waker::wake);
    }

    fn is_held_up(&self, cx: &Context<'_>) -> bool {
        let mut state = self.lock();
        if state.held_up {
            state.in_vain += 1;
            state.waiting = Some(cx.waker().clone());
        }
        state.held_up
    }

    /// Receives into this log until the connection ends.
    pub async fn run(self, connection: Arc<dyn Connection>, memory: Option<PoolShare>) {
        let mut sink = Keeping { log: self.clone(), memory };
        let error = connection.run(&mut sink).await;
        self.lock().ended = Some(error.kind());
    }
}

/// Keeps what comes, in memory of its share if it has one.
struct Keeping {
    log: Log,
    memory: Option<PoolShare>,
}

impl Sink for Keeping {
    fn poll_place(
        &mut self,
        cx: &mut Context<'_>,
        _: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        if self.log.is_held_up(cx) {
            return Poll::Pending;
        }
        match &self.memory {
            Some(memory) => memory.poll_get(cx, data_bytes).map(Ok),
            None => Poll::Ready(Ok(BufMut::heap(data_bytes))),
        }
    }

    fn poll_head(&mut self, cx: &mut Context<'_>, head: &[u8]) -> Poll<io::Result<Option<BufMut>>> {
        match &self.memory {
            Some(memory) => {
                memory.poll_charge(cx, head.len()).map(|charge| Ok(Some(charge.beside())))
            }
            None => Poll::Ready(Ok(None)),
        }
    }

    /// Takes them as they are.
    fn poll_shared(
        &mut self,
        cx: &mut Context<'_>,
        head: &[u8],
        data: &Buf,
    ) -> Poll<io::Result<()>> {
        if self.log.is_held_up(cx) {
            return Poll::Pending;
        }
        let mut data = data.clone();
        if let Some(memory) = &self.memory {
            let Poll::Ready(charge) = memory.poll_charge(cx, data.len()) else {
                return Poll::Pending;
            };
            data = data.kept_with(charge);
        }
        self.log.lock().frames.push((head.to_vec(), Some(data)));
        Poll::Ready(Ok(()))
    }

    fn frame(&mut self, head: &[u8], data: Option<BufMut>) -> io::Result<()> {
        self.log.lock().frames.push((head.to_vec(), data.map(BufMut::freeze)));
        Ok(())
    }
}

/// Refuses whatever comes, with a last word.
pub struct RefusingSink(pub Arc<dyn Connection>);

impl Sink for RefusingSink {
    fn poll_place(
        &mut self,
        _: &mut Context<'_>,
        _: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(data_bytes)))
    }

    fn frame(&mut self, _: &[u8], _: Option<BufMut>) -> io::Result<()> {
        self.0.send(b"refused", None)?;
        Err(io::ErrorKind::PermissionDenied.into())
    }
}

/// Takes its time for each frame.
pub struct Slow(pub Arc<Mutex<Vec<&'static str>>>);

impl Sink for Slow {
    fn poll_place(
        &mut self,
        _: &mut Context<'_>,
        _: &[u8],
        data_bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        Poll::Ready(Ok(BufMut::heap(data_bytes)))
    }

    fn frame(&mut self, _: &[u8], _: Option<BufMut>) -> io::Result<()> {
        std::thread::sleep(std::time::Duration::from_millis(2));
        self.0.lock().unwrap().push("frame");
        Ok(())
    }
}
