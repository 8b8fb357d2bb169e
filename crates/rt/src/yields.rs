//! Giving way to other tasks.

use std::task::Poll;

use crate::executor::current;

/// Lets run first what is ready, and what has something to do because of what has arrived by now: the executor looks for
/// it. For the parts of long work. Outside of an executor it does not wait.
pub async fn yield_to_io() {
    let Some(shared) = current() else { return };
    let looks = shared.looks();
    std::future::poll_fn(|cx| {
        if shared.looks() != looks {
            return Poll::Ready(());
        }
        shared.wake_after_look(cx.waker().clone());
        Poll::Pending
    })
    .await
}

/// Lets every other task that is ready run first.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|cx| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::sync::oneshot;
    use crate::{
        DriverKind, Executor, Interest, Source, poll_once_then_spawn, spawn, spawn_join, timeout,
    };

    /// What had arrived waited until 64 parts of another task were done, or all of them.
    #[test]
    fn who_yields_to_io_goes_on_after_what_has_arrived() {
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        executor.block_on(async {
            let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().unwrap();
            ours.set_nonblocking(true).unwrap();
            let mut reader = ours.try_clone().unwrap();
            let source = Source::new(ours.into()).unwrap();
            let read = Arc::new(AtomicU64::new(0));
            let seen = read.clone();
            spawn(async move {
                let mut byte = [0];
                loop {
                    let taken = source.io(Interest::Read, |_| reader.read(&mut byte)).await;
                    seen.fetch_add(taken.unwrap() as u64, Ordering::SeqCst);
                }
            });
            let work = spawn_join(async move {
                yield_to_io().await; // the other one waits now
                for part in 1..=10 {
                    theirs.write_all(b"x").unwrap();
                    yield_to_io().await;
                    assert_eq!(read.load(Ordering::SeqCst), part);
                }
                theirs
            });
            work.await.unwrap();
        });
    }

    /// A call that is polled once before it is a task has noted no waker that leads anywhere.
    #[test]
    fn who_yields_to_io_comes_back() {
        let kinds = [DriverKind::Epoll, DriverKind::Uring, DriverKind::Simulated { seed: 7 }];
        for mut executor in kinds.into_iter().filter_map(|kind| Executor::new(kind).ok()) {
            let (done, waits) = oneshot::channel();
            executor.block_on(async {
                poll_once_then_spawn(async {
                    yield_to_io().await;
                    let _ = done.send(());
                });
                timeout(Duration::from_secs(60), waits).await.expect("it hangs").unwrap();
            });
        }
    }
}
