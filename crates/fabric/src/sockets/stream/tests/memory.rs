//! Memory that is sent from or received into, and that somebody wants back.

use super::*;

/// Memory that tells when nobody has it any more.
struct Lent(Arc<std::sync::atomic::AtomicBool>);

impl dray_core::Memory for Lent {}

impl Drop for Lent {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

fn lent(bytes: &'static mut [u8]) -> (Buf, Arc<std::sync::atomic::AtomicBool>) {
    let in_use = Arc::new(std::sync::atomic::AtomicBool::new(true));
    let start = std::ptr::NonNull::from(&mut *bytes).cast();
    // SAFETY: the memory lasts for ever, and nobody writes to it.
    (unsafe { Buf::over(start, bytes.len(), Arc::new(Lent(in_use.clone()))) }, in_use)
}

/// Of a process that was killed while the other end does not read: what it wrote would
/// keep it from ending.
// proves: P67
#[test]
fn what_a_sender_needs_again_is_copied_and_arrives_whole() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (connection, mut theirs) = pair();
        run(&connection);
        yield_now().await;
        const BYTES: usize = 1 << 20;
        let content: Vec<u8> = (0..BYTES as u32).map(|n| (n * 7) as u8).collect();
        let (data, in_use) = lent(content.clone().leak());
        connection.send(b"head", Some(data.clone())).unwrap();
        assert!(connection.queued_frames() > 0, "the socket took all of it");
        let mut came = arrived(&mut theirs); // a part
        yield_now().await;
        connection.let_go(&data);
        drop(data);
        assert!(!in_use.load(Ordering::SeqCst));
        let prefix = Prefix { head_bytes: 4, data_bytes: BYTES };
        while came.len() < prefix.encode().len() + prefix.body_at() + BYTES {
            let more = arrived(&mut theirs);
            if more.is_empty() && connection.queued_frames() == 0 {
                break;
            }
            came.extend(more);
            dray_rt::sleep(std::time::Duration::from_millis(1)).await;
        }
        assert!(came.ends_with(&content));
    });
}

/// Receives into memory of a caller who may give up meanwhile.
struct GivenUp {
    into: Option<BufMut>,
    awaited: Arc<AtomicBool>,
    runner: Arc<Mutex<Option<Waker>>>,
    /// Bytes of data of each frame.
    came: Arc<Mutex<Vec<usize>>>,
}

impl Sink for GivenUp {
    fn poll_place(
        &mut self,
        cx: &mut Context<'_>,
        _: &[u8],
        bytes: usize,
    ) -> Poll<io::Result<BufMut>> {
        *self.runner.lock().unwrap() = Some(cx.waker().clone());
        Poll::Ready(Ok(self.into.take().unwrap_or_else(|| BufMut::heap(bytes))))
    }

    fn is_awaited(&self, _: &[u8]) -> bool {
        self.awaited.load(Ordering::SeqCst)
    }

    fn frame(&mut self, _: &[u8], data: Option<BufMut>) -> io::Result<()> {
        self.came.lock().unwrap().push(data.map_or(0, |data| data.len()));
        Ok(())
    }
}

/// Of a process that was killed while the other end has stopped in the middle of its answer. The
/// memory for that kept it from ending.
#[test]
fn what_nobody_waits_for_any_more_goes_nowhere() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        const BYTES: usize = 100_000;
        let (connection, mut theirs) = pair();
        let in_use = Arc::new(AtomicBool::new(true));
        let memory = std::ptr::NonNull::from(vec![0u8; BYTES].leak()).cast();
        // SAFETY: the memory lasts for ever, and nobody else uses it.
        let into = unsafe { BufMut::over(memory, BYTES, Arc::new(Lent(in_use.clone()))) };
        let (awaited, runner) = (Arc::new(AtomicBool::new(true)), Arc::default());
        let came = Arc::new(Mutex::new(Vec::new()));
        let mut sink = GivenUp {
            into: Some(into),
            awaited: awaited.clone(),
            runner: Arc::clone(&runner),
            came: came.clone(),
        };
        let running = connection.clone();
        spawn(async move { drop(running.run(&mut sink).await) });
        let prefix = Prefix { head_bytes: 4, data_bytes: BYTES };
        let mut frame = [&prefix.encode()[..], b"head"].concat();
        frame.resize(prefix.body_at() + BYTES, 7);
        let (begin, rest) = frame.split_at(BYTES / 2);
        std::io::Write::write_all(&mut theirs, begin).unwrap();
        while runner.lock().unwrap().is_none() {
            dray_rt::sleep(std::time::Duration::from_millis(1)).await;
        }
        yield_now().await;
        assert!(in_use.load(Ordering::SeqCst), "somebody waits for it");
        awaited.store(false, Ordering::SeqCst);
        runner.lock().unwrap().take().unwrap().wake();
        yield_now().await;
        assert!(!in_use.load(Ordering::SeqCst));
        std::io::Write::write_all(&mut theirs, rest).unwrap();
        std::io::Write::write_all(&mut theirs, &self::frame(b"next")).unwrap();
        while came.lock().unwrap().len() < 2 {
            dray_rt::sleep(std::time::Duration::from_millis(1)).await;
        }
        assert_eq!(*came.lock().unwrap(), [BYTES, 0]);
    });
}

/// A front end answers a write once nobody has its data any more.
// proves: P67
#[test]
fn a_broken_connection_holds_nothing_that_was_sent_on_it() {
    Executor::new(DriverKind::Epoll).unwrap().block_on(async {
        let (connection, theirs) = pair();
        let mut sink = Refusing(connection.clone());
        let (data, in_use) = lent(vec![7; 1 << 20].leak());
        connection.send(b"head", Some(data)).unwrap();
        assert!(in_use.load(Ordering::SeqCst));
        drop(theirs);
        connection.run(&mut sink).await;
        assert!(!in_use.load(Ordering::SeqCst));
    });
}
