//! Several futures at once, in one task.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

/// Polls all of `calls` to their ends, and answers what they answered, in their order. Each begins
/// before any is waited for.
pub async fn join_all<T>(mut calls: Vec<Pin<Box<dyn Future<Output = T> + Send + '_>>>) -> Vec<T> {
    let mut answers: Vec<Option<T>> = calls.iter().map(|_| None).collect();
    poll_fn(|task| {
        for (call, answer) in calls.iter_mut().zip(&mut answers) {
            if answer.is_none()
                && let Poll::Ready(value) = call.as_mut().poll(task)
            {
                *answer = Some(value);
            }
        }
        match answers.iter().all(Option::is_some) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    answers.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use std::pin::Pin;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::join_all;
    use crate::{DriverKind, Executor, sleep};

    #[test]
    fn all_begin_before_any_ends_and_answers_keep_their_order() {
        let mut executor = Executor::new(DriverKind::Epoll).unwrap();
        let begun = Arc::new(AtomicUsize::new(0));
        let calls = (0..3_u64).map(|number| {
            let begun = begun.clone();
            Box::pin(async move {
                begun.fetch_add(1, Ordering::Relaxed);
                sleep(Duration::from_millis(9 - 3 * number)).await; // the last one ends first
                (number, begun.load(Ordering::Relaxed))
            }) as Pin<Box<dyn Future<Output = _> + Send>>
        });
        let answers = executor.block_on(join_all(calls.collect()));
        assert_eq!(answers, [(0_u64, 3_usize), (1, 3), (2, 3)]);
        assert_eq!(executor.block_on(join_all::<u8>(Vec::new())), Vec::<u8>::new());
    }
}
