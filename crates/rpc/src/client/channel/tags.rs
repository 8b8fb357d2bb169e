//! The tags of a channel's calls: how many there are, for which calls some are reserved, and which
//! calls wait for one.

use std::collections::BTreeMap;
use std::task::Waker;

use dray_core::Uid;

/// The class of a call that wants a tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagClass {
    /// Other callers may wait for the call ([`super::OutgoingCall::class`]).
    Needed,
    /// A plain call of nobody in particular.
    Plain,
    /// A plain call of a user. A server may hold up all calls of one user, so that a part of the tags
    /// is for users who have few (ADR 0048).
    PlainOf(Uid),
    /// A read of a user. More tags are left for others than by other plain calls: a kernel makes some of
    /// those with a directory locked.
    ReadOf(Uid),
}

impl TagClass {
    fn user(self) -> Option<Uid> {
        match self {
            TagClass::Needed | TagClass::Plain => None,
            TagClass::PlainOf(uid) | TagClass::ReadOf(uid) => Some(uid),
        }
    }

    fn is_plain(self) -> bool {
        self != TagClass::Needed
    }
}

/// One plain tag in so many is for users who have few.
const OF_OTHERS_PART: usize = 8;
/// One in so many is for them, and for calls that are no reads.
const NOT_OF_READS_PART: usize = 4;
/// Few are one plain tag in so many.
const FEW_PART: usize = 16;

/// The tags of one channel.
pub(super) struct Tags {
    max: usize,
    /// Of these, how many are for needed calls alone.
    reserved: usize,
    /// Tags from 0 on that there are so far.
    made: u32,
    free: Vec<u32>,
    /// Plain calls under way.
    plain: usize,
    /// Of these, how many each user has. Users without any are not in it.
    users: Vec<(Uid, usize)>,
    /// Of these, locks that are waited for at the server.
    lock_waits: usize,
    needed_queue: Queue,
    plain_queue: Queue,
}

/// Calls that wait for a tag, first come first served. Each stays here until it has one or gives
/// up, woken or not, so that no wake-up is lost with a caller that gave up.
#[derive(Default)]
struct Queue {
    waiting: BTreeMap<u64, (Waker, TagClass)>,
    next: u64,
}

impl Tags {
    /// A channel has one tag, until a server allows more.
    pub(super) fn new() -> Tags {
        Tags {
            max: 1,
            reserved: 0,
            made: 0,
            free: Vec::new(),
            plain: 0,
            users: Vec::new(),
            lock_waits: 0,
            needed_queue: Queue::default(),
            plain_queue: Queue::default(),
        }
    }

    /// The number of calls at a time that the server allows. As many of them as there are replay
    /// slots (half at most) are kept for calls that others may wait for.
    pub(super) fn grant(&mut self, calls_max: u32, slots: u32) {
        self.max = calls_max.max(1) as usize;
        self.reserved = (slots as usize).min(self.max / 2);
    }

    /// How many there may be.
    pub(super) fn max(&self) -> usize {
        self.max
    }

    /// Whether no call has one.
    pub(super) fn are_all_free(&self) -> bool {
        self.free.len() == self.made as usize
    }

    fn queue(&mut self, class: TagClass) -> &mut Queue {
        match class {
            TagClass::Needed => &mut self.needed_queue,
            TagClass::Plain | TagClass::PlainOf(_) | TagClass::ReadOf(_) => &mut self.plain_queue,
        }
    }

    fn has_room_for(&self, class: TagClass) -> bool {
        let free = !self.free.is_empty() || (self.made as usize) < self.max;
        let plain = || self.plain < self.plain_max();
        free && match class {
            TagClass::Needed => true,
            TagClass::Plain => plain(),
            TagClass::PlainOf(uid) => plain() && self.may_have_another(uid, OF_OTHERS_PART),
            TagClass::ReadOf(uid) => plain() && self.may_have_another(uid, NOT_OF_READS_PART),
        }
    }

    /// Whether this user leaves enough for others: one plain tag in `part`.
    fn may_have_another(&self, uid: Uid, part: usize) -> bool {
        let max = self.plain_max();
        let held = || self.users.iter().find(|(user, _)| *user == uid).map_or(0, |(_, held)| *held);
        max - self.plain > max / part || held() < (max / FEW_PART).max(1)
    }

    fn count(&mut self, class: TagClass, change: impl Fn(usize) -> usize) {
        if !class.is_plain() {
            return;
        }
        self.plain = change(self.plain);
        let Some(uid) = class.user() else { return };
        match self.users.iter().position(|(user, _)| *user == uid) {
            Some(place) => {
                let held = change(self.users[place].1);
                self.users[place].1 = held;
                if held == 0 {
                    self.users.swap_remove(place);
                }
            }
            None => self.users.push((uid, change(0))),
        }
    }

    /// The first that waits of those who may have a tag now.
    fn first(&self, queue: &Queue) -> Option<u64> {
        let mut waiting = queue.waiting.iter();
        let first = waiting.find(|(_, (_, class))| self.has_room_for(*class));
        first.map(|(place, _)| *place)
    }

    fn wake_first(&self, queue: &Queue) -> bool {
        let first = self.first(queue).and_then(|place| queue.waiting.get(&place));
        first.inspect(|(waker, _)| waker.wake_by_ref()).is_some()
    }

    fn plain_max(&self) -> usize {
        self.max - self.reserved
    }

    /// A tag; none while too many calls are under way, or others have waited for longer than
    /// the caller, whose `place` is that of [`Tags::wait`]. It leaves the queue with it.
    pub(super) fn take(&mut self, class: TagClass, place: &mut Option<u64>) -> Option<u32> {
        let queue = if class.is_plain() { &self.plain_queue } else { &self.needed_queue };
        let first = self.first(queue);
        if first.is_some() && first != *place || !self.has_room_for(class) {
            return None;
        }
        let tag = self.free.pop().unwrap_or_else(|| {
            self.made += 1;
            self.made - 1
        });
        self.count(class, |held| held + 1);
        self.leave(class, place);
        Some(tag)
    }

    /// The call with this tag is over.
    pub(super) fn give_back(&mut self, tag: u32, class: TagClass) {
        self.count(class, |held| held - 1);
        self.free.push(tag);
        self.wake_next();
    }

    /// Wakes `waker` when a tag is free for it, at its `place` in the queue or, if it has none yet,
    /// behind all others.
    pub(super) fn wait(&mut self, class: TagClass, place: &mut Option<u64>, waker: &Waker) {
        let queue = self.queue(class);
        let place = *place.get_or_insert_with(|| {
            queue.next += 1;
            queue.next
        });
        queue.waiting.insert(place, (waker.clone(), class));
    }

    /// The waiter at this place gives up: it may have been woken instead of another one.
    pub(super) fn leave(&mut self, class: TagClass, place: &mut Option<u64>) {
        if let Some(place) = place.take() {
            self.queue(class).waiting.remove(&place);
            self.wake_next();
        }
    }

    /// Wakes who is next if there is a tag for it, needed calls first. A caller that takes a tag or
    /// gives up wakes the next.
    fn wake_next(&self) {
        if !self.wake_first(&self.needed_queue) {
            self.wake_first(&self.plain_queue);
        }
    }

    /// Wakes all, to look what has changed.
    pub(super) fn wake_all(&self) {
        let queues = [&self.needed_queue, &self.plain_queue];
        let waiting = queues.iter().flat_map(|queue| queue.waiting.values());
        waiting.for_each(|(waker, _)| waker.wake_by_ref());
    }

    /// Whether another lock may be waited for at the server; ends with
    /// [`Tags::lock_wait_ends`]. Half of the plain calls at most: who holds the lock needs the
    /// rest before it gives it back.
    pub(super) fn lock_wait_begins(&mut self) -> bool {
        let begins = self.lock_waits < self.plain_max() / 2;
        self.lock_waits += usize::from(begins);
        begins
    }

    pub(super) fn lock_wait_ends(&mut self) {
        self.lock_waits -= 1;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Counted(AtomicU32);

    impl Wake for Counted {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    impl Counted {
        /// Whether it was woken since it was asked last.
        fn was_woken(&self) -> bool {
            self.0.swap(0, Ordering::Relaxed) > 0
        }
    }

    fn granted(calls_max: u32, slots: u32) -> Tags {
        let mut tags = Tags::new();
        tags.grant(calls_max, slots);
        tags
    }

    fn take(tags: &mut Tags, class: TagClass) -> Option<u32> {
        tags.take(class, &mut None)
    }

    fn take_all(tags: &mut Tags, class: TagClass) -> Vec<u32> {
        std::iter::from_fn(|| take(tags, class)).collect()
    }

    /// Reads that the server holds until a change comes left no tag to send that change with.
    // proves: P86
    #[test]
    fn reads_leave_tags_for_the_changes_that_they_wait_for() {
        let mut tags = granted(8, 64);
        let reads = take_all(&mut tags, TagClass::Plain);
        assert_eq!(reads.len(), 4, "half of the tags are kept");
        let changes = take_all(&mut tags, TagClass::Needed);
        assert_eq!(changes.len(), 4);
        let (read, change) = (Arc::new(Counted::default()), Arc::new(Counted::default()));
        let (mut of_read, mut of_change) = (None, None);
        tags.wait(TagClass::Plain, &mut of_read, &read.clone().into());
        tags.wait(TagClass::Needed, &mut of_change, &change.clone().into());
        tags.give_back(changes[0], TagClass::Needed);
        assert!(change.was_woken() && !read.was_woken());
        assert!(tags.take(TagClass::Needed, &mut of_change).is_some());
        tags.give_back(changes[1], TagClass::Needed);
        assert!(!change.was_woken() && !read.was_woken(), "a read may not have a change's tag");
        assert_eq!(tags.take(TagClass::Plain, &mut of_read), None);
        tags.give_back(reads[0], TagClass::Plain);
        assert!(read.was_woken());
        assert!(tags.take(TagClass::Plain, &mut of_read).is_some());
        assert_eq!(take(&mut tags, TagClass::Plain), None);
    }

    #[test]
    fn few_tags_are_shared_fairly_and_one_is_never_refused() {
        for (calls_max, slots, plain) in [(0, 64, 1), (1, 64, 1), (2, 64, 1), (128, 8, 120)] {
            assert_eq!(take_all(&mut granted(calls_max, slots), TagClass::Plain).len(), plain);
        }
    }

    // proves: P86
    #[test]
    fn requests_are_served_in_order_of_arrival() {
        let mut tags = granted(1, 0);
        let tag = take(&mut tags, TagClass::Plain).unwrap();
        let waiters = [(); 3].map(|()| Arc::new(Counted::default()));
        let mut places = [None; 3];
        for (place, waiter) in places.iter_mut().zip(&waiters) {
            tags.wait(TagClass::Plain, place, &waiter.clone().into());
        }
        tags.give_back(tag, TagClass::Plain);
        assert_eq!([0, 1, 2].map(|one: usize| waiters[one].was_woken()), [true, false, false]);
        assert_eq!(take(&mut tags, TagClass::Plain), None, "nobody gets in before it");
        tags.wait(TagClass::Plain, &mut places[0], &waiters[0].clone().into());
        assert!(tags.take(TagClass::Plain, &mut places[0]).is_some(), "it has kept its place");
    }

    /// A server that holds up the reads of one user left no tag for those of another.
    // proves: P195
    #[test]
    fn one_user_leaves_tags_for_others() {
        let mut tags = granted(128, 64);
        let [greedy, other] = [1000, 1001].map(|uid| TagClass::ReadOf(Uid(uid)));
        let taken = take_all(&mut tags, greedy);
        assert_eq!(taken.len(), 48, "three quarters of the plain ones");
        let (first, second) = (Arc::new(Counted::default()), Arc::new(Counted::default()));
        let (mut of_greedy, mut of_other) = (None, None);
        tags.wait(greedy, &mut of_greedy, &first.clone().into());
        let looked_up = take_all(&mut tags, TagClass::PlainOf(Uid(1000)));
        assert_eq!(looked_up.len(), 8, "its lookups do not wait for its reads");
        let of_others = take_all(&mut tags, other);
        assert_eq!(of_others.len(), 4, "nobody waits for the greedy one");
        tags.wait(other, &mut of_other, &second.clone().into());
        tags.give_back(of_others[0], other);
        assert!(second.was_woken() && !first.was_woken());
        assert!(tags.take(other, &mut of_other).is_some());
        looked_up.iter().for_each(|tag| tags.give_back(*tag, TagClass::PlainOf(Uid(1000))));
        taken.iter().for_each(|tag| tags.give_back(*tag, greedy));
        assert!(first.was_woken());
        assert!(tags.take(greedy, &mut of_greedy).is_some());
    }

    /// The wake-up was spent on somebody who had given up, and the next one slept on.
    // proves: P86
    #[test]
    fn a_caller_that_gives_up_passes_its_wake_up_on() {
        let mut tags = granted(1, 0);
        let tag = take(&mut tags, TagClass::Plain).unwrap();
        let (gone, next) = (Arc::new(Counted::default()), Arc::new(Counted::default()));
        let (mut of_gone, mut of_next) = (None, None);
        tags.wait(TagClass::Plain, &mut of_gone, &gone.clone().into());
        tags.wait(TagClass::Plain, &mut of_next, &next.clone().into());
        tags.give_back(tag, TagClass::Plain);
        assert!(gone.was_woken() && !next.was_woken());
        tags.leave(TagClass::Plain, &mut of_gone);
        assert!(next.was_woken());
        assert!(tags.take(TagClass::Plain, &mut of_next).is_some());
    }

    // proves: P58
    #[test]
    fn waiting_locks_leave_half_of_the_plain_tags() {
        for (calls_max, slots, most) in [(1, 1, 0), (8, 64, 2), (128, 64, 32)] {
            let mut tags = granted(calls_max, slots);
            let begun = (0..calls_max).filter(|_| tags.lock_wait_begins()).count();
            assert_eq!(begun, most);
            (0..most).for_each(|_| tags.lock_wait_ends());
            assert_eq!(tags.lock_wait_begins(), most > 0);
        }
    }
}
