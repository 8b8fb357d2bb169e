//! The calls that wait for a thread of a pool, and which client is next.
//!
//! Clients alternate, each with one call at a time. No client has more threads than its share, and
//! no thing (a file, for one) more than is of use for it. Where calls block, the calls of one
//! client or about one thing leave threads to the rest.

use std::collections::{BTreeMap, VecDeque};

/// The client for whom a call is made, and the thing that the call is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    /// Clients are served in turn.
    pub client: u64,
    /// Calls about one thing are begun in the order of their arrival; none: about nothing
    /// that others could hold up.
    pub thing: Option<u64>,
}

/// Calls that wait for a thread. The callers that put calls into it bound their number.
pub(crate) struct ClientQueue<J> {
    clients: BTreeMap<u64, Client<J>>,
    things: BTreeMap<u64, Thing<J>>,
    /// Clients that may begin a call, each once.
    ready_clients: VecDeque<u64>,
    waiting: usize,
    client_max: usize,
    thing_max: usize,
}

struct Client<J> {
    /// Calls that wait for a thread alone.
    ready: VecDeque<(Share, J)>,
    /// The number of these calls and of those that wait for the thing that they are about.
    waiting: usize,
    running: usize,
    is_queued: bool,
}

struct Thing<J> {
    /// Calls about it that run, or wait for a thread alone.
    taken: usize,
    behind: VecDeque<(Share, J)>,
}

impl<J> ClientQueue<J> {
    /// A queue whose clients have at most `client_max` calls running, of which `thing_max` are
    /// about one thing.
    pub(crate) fn new(client_max: usize, thing_max: usize) -> ClientQueue<J> {
        ClientQueue {
            clients: BTreeMap::new(),
            things: BTreeMap::new(),
            ready_clients: VecDeque::new(),
            waiting: 0,
            client_max,
            thing_max,
        }
    }

    /// Puts a call behind the others of its client. Answers whether it could begin now.
    pub(crate) fn push(&mut self, share: Share, job: J) -> bool {
        let client = self.clients.entry(share.client).or_insert_with(|| Client {
            ready: VecDeque::new(),
            waiting: 0,
            running: 0,
            is_queued: false,
        });
        client.waiting += 1;
        self.waiting += 1;
        if let Some(thing) = share.thing {
            let thing = self
                .things
                .entry(thing)
                .or_insert_with(|| Thing { taken: 0, behind: VecDeque::new() });
            if thing.taken >= self.thing_max {
                thing.behind.push_back((share, job));
                return false;
            }
            thing.taken += 1;
        }
        client.ready.push_back((share, job));
        self.enqueue_client(share.client)
    }

    /// Queues a client behind the others, if it may begin a call. Answers whether it may.
    fn enqueue_client(&mut self, number: u64) -> bool {
        let Some(client) = self.clients.get_mut(&number) else { return false };
        let may = !client.ready.is_empty() && client.running < self.client_max;
        if may && !std::mem::replace(&mut client.is_queued, true) {
            self.ready_clients.push_back(number);
        }
        may
    }

    /// The next call to begin.
    pub(crate) fn pop(&mut self) -> Option<(Share, J)> {
        while let Some(number) = self.ready_clients.pop_front() {
            let Some(client) = self.clients.get_mut(&number) else { continue };
            client.is_queued = false;
            let Some(next) = client.ready.pop_front() else { continue };
            client.running += 1;
            client.waiting -= 1;
            self.waiting -= 1;
            self.enqueue_client(number);
            return Some(next);
        }
        None
    }

    /// Whether a call could begin.
    pub(crate) fn has_next(&self) -> bool {
        !self.ready_clients.is_empty()
    }

    /// A call that was begun is over.
    pub(crate) fn done(&mut self, share: Share) {
        if let Some(number) = share.thing {
            self.leave(number);
        }
        if let Some(client) = self.clients.get_mut(&share.client) {
            client.running -= 1;
        }
        self.settle(share.client);
    }

    /// Takes back what was pushed last for a client, which nobody can run.
    pub(crate) fn take_back(&mut self, share: Share) {
        let Some(client) = self.clients.get_mut(&share.client) else { return };
        if client.ready.pop_back().is_some() {
            client.waiting -= 1;
            self.waiting -= 1;
            if let Some(number) = share.thing {
                self.leave(number);
            }
        }
        self.settle(share.client);
    }

    /// A call about this thing is over: the next one waits for a thread alone.
    fn leave(&mut self, number: u64) {
        let Some(thing) = self.things.get_mut(&number) else { return };
        let Some((share, job)) = thing.behind.pop_front() else {
            thing.taken -= 1;
            if thing.taken == 0 {
                self.things.remove(&number);
            }
            return;
        };
        if let Some(client) = self.clients.get_mut(&share.client) {
            client.ready.push_back((share, job));
        }
        self.enqueue_client(share.client);
    }

    fn settle(&mut self, number: u64) {
        if self.enqueue_client(number) {
            return;
        }
        if self.clients.get(&number).is_some_and(|one| one.waiting == 0 && one.running == 0) {
            self.clients.remove(&number);
        }
    }

    /// Calls that wait.
    pub(crate) fn len(&self) -> usize {
        self.waiting
    }

    /// Calls of this client that wait.
    pub(crate) fn len_of(&self, client: u64) -> usize {
        self.clients.get(&client).map_or(0, |client| client.waiting)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(client: u64, thing: u64) -> Share {
        Share { client, thing: Some(thing) }
    }

    #[test]
    fn clients_alternate() {
        let mut queue = ClientQueue::new(10, 10);
        for number in 0..3 {
            queue.push(of(1, number), number);
        }
        queue.push(of(2, 9), 9);
        let order: Vec<_> = std::iter::from_fn(|| queue.pop()).map(|(_, job)| job).collect();
        assert_eq!(order, [0, 9, 1, 2]);
    }

    #[test]
    fn nobody_has_more_than_a_share_and_nothing_more_than_is_of_use() {
        let mut queue = ClientQueue::new(3, 2);
        assert!(queue.push(of(1, 7), 0) && queue.push(of(1, 7), 1));
        assert!(!queue.push(of(1, 7), 2), "two of one file are under way");
        assert!(queue.push(of(1, 8), 3) && queue.push(of(1, 9), 4));
        let begun: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(begun.iter().map(|(_, job)| *job).collect::<Vec<_>>(), [0, 1, 3]);
        assert!(!queue.push(of(1, 6), 5), "three of the client are under way");
        assert!(queue.push(of(2, 5), 6), "of another one there are none");
        assert_eq!(queue.pop(), Some((of(2, 5), 6)));
        assert_eq!((queue.pop(), queue.len(), queue.len_of(1)), (None, 3, 3));
        queue.done(of(1, 7));
        assert_eq!(queue.pop(), Some((of(1, 9), 4)), "who came first, as of its client");
        queue.done(of(1, 8));
        assert_eq!(queue.pop(), Some((of(1, 6), 5)));
        queue.done(of(1, 7));
        assert_eq!(queue.pop(), Some((of(1, 7), 2)));
        for share in [of(1, 7), of(1, 9), of(1, 6), of(2, 5)] {
            queue.done(share);
        }
        assert!(
            queue.clients.is_empty() && queue.things.is_empty() && queue.ready_clients.is_empty()
        );
    }

    #[test]
    fn what_waits_for_another_clients_call_about_the_same_thing_begins_after_it() {
        let mut queue = ClientQueue::new(2, 1);
        assert!(queue.push(of(1, 7), 0));
        assert_eq!(queue.pop(), Some((of(1, 7), 0)));
        assert!(!queue.push(of(2, 7), 1));
        assert_eq!(queue.pop(), None);
        queue.done(of(1, 7));
        assert!(queue.has_next());
        assert_eq!(queue.pop(), Some((of(2, 7), 1)));
        queue.done(of(2, 7));
        assert!(queue.clients.is_empty() && queue.things.is_empty());
    }

    #[test]
    fn what_nobody_can_run_leaves_nothing_behind() {
        let mut queue = ClientQueue::new(2, 1);
        queue.push(of(1, 7), 0);
        queue.take_back(of(1, 7));
        assert!(queue.clients.is_empty() && queue.things.is_empty());
        assert_eq!((queue.pop(), queue.len()), (None, 0));
    }
}
