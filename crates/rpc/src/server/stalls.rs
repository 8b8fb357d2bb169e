//! Clients that stopped in the middle: they do not read their answers, or sent half a frame.
//!
//! The memory of the server that such a client holds would be gone as long as it likes. So the
//! server looks every now and then how far each connection has got. A connection that stands still
//! from one look to the next is ended. A live client makes a new one.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use dray_fabric::{Connection, Progress, Unfinished};

/// Time between two looks: a connection is ended after one to two of it.
pub(crate) const LOOK_TIME: Duration = Duration::from_secs(15);
/// A frame that moved by less than this from one look to the next stands still, bytes. A trickle
/// would keep memory as well as silence does.
const MOVED_MIN_BYTES: u64 = 64 << 10;

/// How far the connections had got at the last look, by number; only those with anything
/// unfinished.
#[derive(Default)]
pub(crate) struct Stalls {
    last: HashMap<u64, Unfinished>,
}

/// Which way a connection stands still.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stalled {
    /// The client does not read.
    Reading,
    /// The client began a frame and does not go on.
    Writing,
}

impl Stalls {
    /// Looks at all connections; ends those that stand still, and says which.
    pub(crate) fn look(
        &mut self,
        connections: impl Iterator<Item = (u64, Arc<dyn Connection>)>,
    ) -> Vec<(Arc<dyn Connection>, Stalled)> {
        let last = std::mem::take(&mut self.last);
        let mut stalled = Vec::new();
        for (number, connection) in connections {
            let now = connection.unfinished();
            match last.get(&number).and_then(|last| stalled_since(*last, now)) {
                Some(way) => stalled.push((connection, way)),
                None if now != Unfinished::default() => _ = self.last.insert(number, now),
                None => {}
            }
        }
        stalled.iter().for_each(|(connection, _)| connection.close());
        stalled
    }
}

fn stalled_since(last: Unfinished, now: Unfinished) -> Option<Stalled> {
    if stands_still(last.outgoing, now.outgoing) {
        return Some(Stalled::Reading);
    }
    stands_still(last.incoming, now.incoming).then_some(Stalled::Writing)
}

fn stands_still(last: Option<Progress>, now: Option<Progress>) -> bool {
    let (Some(last), Some(now)) = (last, now) else { return false };
    last.frame == now.frame && now.bytes.saturating_sub(last.bytes) < MOVED_MIN_BYTES
}

#[cfg(test)]
mod tests {
    use super::*;

    // proves: P128
    #[test]
    fn only_one_and_the_same_frame_that_hardly_moves_stands_still() {
        let at = |frame, bytes| Some(Progress { frame, bytes });
        assert!(stands_still(at(3, 100), at(3, 100)));
        assert!(stands_still(at(3, 100), at(3, 200)), "a trickle");
        assert!(!stands_still(at(3, 100), at(3, 100 + MOVED_MIN_BYTES)));
        assert!(!stands_still(at(3, 100), at(4, 200)), "another frame");
        assert!(!stands_still(at(3, 100), None) && !stands_still(None, at(3, 100)));
    }
}
