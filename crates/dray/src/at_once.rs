//! Runs work for many file systems at the same time, since a file system may hang. The work is given up
//! once no more of it ends in time.

use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::time::Duration;

/// Threads that do it.
const THREADS_MAX: usize = 64;

/// What `work` makes of each input, in their order; none where it was not done while nothing at
/// all was for as long as `patience`. A thread that is stuck then ends with this process.
pub fn each<I, O>(
    patience: Duration,
    inputs: Vec<I>,
    work: impl Fn(I) -> O + Send + Sync + 'static,
) -> Vec<Option<O>>
where
    I: Send + 'static,
    O: Send + 'static,
{
    let mut done: Vec<Option<O>> = inputs.iter().map(|_| None).collect();
    let threads = inputs.len().min(THREADS_MAX);
    let waiting = Arc::new(Mutex::new(inputs.into_iter().enumerate()));
    let (sender, receiver) = mpsc::channel();
    let work = Arc::new(move || {
        let next = || waiting.lock().unwrap_or_else(PoisonError::into_inner).next();
        while let Some((at, input)) = next() {
            if sender.send((at, work(input))).is_err() {
                break; // nobody waits any more
            }
        }
    });
    for _ in 0..threads {
        let ours = work.clone();
        let _ = std::thread::Builder::new().spawn(move || ours()); // else fewer do it
    }
    drop(work);
    while let Ok((at, output)) = receiver.recv_timeout(patience) {
        done[at] = Some(output);
    }
    done
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_are_done_and_who_is_stuck_is_left() {
        let inputs: Vec<usize> = (0..3 * THREADS_MAX).collect();
        let done = each(Duration::from_secs(10), inputs, |input| {
            if input == 1 {
                std::thread::sleep(Duration::MAX);
            }
            2 * input
        });
        let expected = |input| (input != 1).then_some(2 * input);
        assert_eq!(done, (0..3 * THREADS_MAX).map(expected).collect::<Vec<_>>());
        assert_eq!(each(Duration::from_secs(30), Vec::<u8>::new(), |input| input), []);
    }
}
