//! Open-ahead: opening a file at its lookup. open(2) of a name is a lookup and then an open. Where
//! a program has opened what it looked up before, the client asks for both in one call
//! ([`Call::LookupOpen`](crate::wire::Call::LookupOpen)). The open that follows is answered here.
//! ADR 0018 says why no program can see a difference.
//!
//! A file that was opened and not used is closed. The next call of the same thread closes it if the
//! call shows that the file is not wanted. Otherwise a task does, which looks at intervals while
//! there is any such file.

mod habits;
mod rights;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dray_core::{Context, Entry, FileId, FileType, Identity, OpenHow, Pid};
use dray_rt::{Instant, now};

use self::habits::LookupHabits;
use self::rights::RightsSnapshot;
pub(crate) use self::rights::{RightsChange, RightsChanges};
use crate::client::channel::ReplyInfo;
use crate::client::link::SessionState;
use crate::client::memory::{OPEN_AHEAD_MAX, SessionMemory};
use crate::wire::{OPEN_AHEAD_USED_MAX, Ticket};

/// How often the task looks for open files that are not wanted.
pub(crate) const LOOK_TIME: Duration = Duration::from_millis(5);

/// Counters of openings at the lookup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenAheadStats {
    /// Files that a lookup opened.
    pub made: u64,
    /// Of these, how many an opening that followed has used: a round trip spared each.
    pub used: u64,
    /// Of these, how many were closed unused.
    pub given_up: u64,
}

/// The last lookup of each thread, and the files that are open for it.
pub(crate) struct OpenAhead {
    memory: Arc<SessionMemory>,
    rights: Arc<RightsChanges>,
    used: AtomicU64,
    state: Mutex<State>,
}

struct State {
    threads: Vec<Thread>,
    habits: LookupHabits,
    late: AnswerDelays,
    made: u64,
    given_up: u64,
    /// Files that are open and not used.
    open: usize,
    /// A task looks after those.
    watched: bool,
}

/// The subject of the last lookup of a thread. Threads share places by chance, and then learn
/// nothing of each other but what costs them a round trip.
#[derive(Default)]
struct Thread {
    pid: Pid,
    /// The directory in which the thread looked.
    dir: Option<FileId>,
    /// A lookup that shall open is under way.
    asks: bool,
    /// The regular file that was found.
    found: Option<FileId>,
    open: Option<OpenAheadFile>,
}

/// A file that a lookup has opened.
pub(crate) struct OpenAheadFile {
    pub(crate) handle: u64,
    pub(crate) ticket: Option<Ticket>,
    /// The session in which the file was opened.
    pub(crate) session_state: SessionState,
    guess: Guess,
}

/// How a lookup opens what it finds.
#[derive(Clone)]
pub(crate) struct Guess {
    pub(crate) how: OpenHow,
    who: Arc<Identity>,
    place: usize,
    /// The time at which the file was asked for.
    sent: Instant,
    rights: RightsSnapshot,
}

impl Guess {
    /// Whether an opening by `cx` at this moment is what was asked for, and must come to the
    /// same as it did then. That the server has died since need not be known: no other one is
    /// met so soon, and it is shown what is open here.
    fn stands(&self, cx: &Context, how: OpenHow, rights: Option<RightsSnapshot>) -> bool {
        self.how == how
            && (Arc::ptr_eq(&self.who, &cx.who) || self.who == cx.who)
            && rights == Some(self.rights)
            && !self.is_late()
    }

    fn is_late(&self) -> bool {
        self.sent.elapsed() > OPEN_AHEAD_USED_MAX
    }
}

impl OpenAheadFile {
    fn surplus(&self) -> Surplus {
        Surplus { handle: self.handle, place: self.guess.place }
    }
}

/// Whether answers come in time: where they do not, opening ahead is tried rarely.
#[derive(Default)]
struct AnswerDelays {
    /// Answers in a row that were late, up to [`AnswerDelays::MOST`].
    times: u32,
    /// Lookups to let pass.
    pause: u32,
}

impl AnswerDelays {
    const MOST: u32 = 6;

    fn note(&mut self, late: bool) {
        self.times = if late { (self.times + 1).min(AnswerDelays::MOST) } else { 0 };
        self.pause = if late { 1 << self.times } else { 0 };
    }

    /// One try after each pause: what comes of it is known only later.
    fn has_rested(&mut self) -> bool {
        self.pause = self.pause.saturating_sub(1);
        let rested = self.pause == 0;
        if rested && self.times > 0 {
            self.pause = 1 << self.times;
        }
        rested
    }
}

/// A file that is open and not wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Surplus {
    pub(crate) handle: u64,
    place: usize,
}

impl OpenAhead {
    pub(crate) fn new(memory: Arc<SessionMemory>) -> OpenAhead {
        let state = State {
            threads: (0..OPEN_AHEAD_MAX).map(|_| Thread::default()).collect(),
            habits: LookupHabits::new(),
            late: AnswerDelays::default(),
            made: 0,
            given_up: 0,
            open: 0,
            watched: false,
        };
        let (rights, used) = (Arc::default(), AtomicU64::new(0));
        OpenAhead { memory, rights, used, state: Mutex::new(state) }
    }

    /// Where changes of rights are noted.
    pub(crate) fn rights(&self) -> &Arc<RightsChanges> {
        &self.rights
    }

    pub(crate) fn stats(&self) -> OpenAheadStats {
        let state = self.lock();
        let used = self.used.load(Ordering::Relaxed);
        OpenAheadStats { made: state.made, used, given_up: state.given_up }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A thread is about to look up a name in `dir`. Returns how the thread is expected to open the
    /// file. `handle`: the number that the file will have.
    pub(crate) fn expect(
        &self,
        cx: &Context,
        dir: FileId,
        handle: u64,
    ) -> (Option<Guess>, Option<Surplus>) {
        let mut state = self.lock();
        let Some(place) = state.place(cx) else { return (None, None) };
        let surplus = state.unwanted(place, cx.pid);
        let how = state.habits.expected(dir);
        let how = how.filter(|_| state.late.has_rested());
        let thread = &mut state.threads[place];
        (thread.pid, thread.dir, thread.found) = (cx.pid, Some(dir), None);
        let (Some(how), Some(rights)) = (how, self.rights.at_rest()) else {
            return (None, surplus);
        };
        thread.asks = true;
        self.memory.set_open_ahead(place as u32, handle);
        let guess = Guess { how, who: cx.who.clone(), place, sent: now(), rights };
        (Some(guess), surplus)
    }

    /// The entry that a lookup without an expectation has found.
    pub(crate) fn found(&self, cx: &Context, dir: FileId, entry: &Entry) {
        let mut state = self.lock();
        let Some(place) = state.place(cx) else { return };
        let thread = &mut state.threads[place];
        if thread.pid == cx.pid && thread.dir == Some(dir) {
            thread.found = regular(entry);
        }
    }

    /// As [`OpenAhead::found`], of a lookup that was answered without the server.
    pub(crate) fn found_here(
        &self,
        cx: &Context,
        dir: FileId,
        found: Option<&Entry>,
    ) -> Option<Surplus> {
        let mut state = self.lock();
        let place = state.place(cx)?;
        let surplus = state.unwanted(place, cx.pid);
        let thread = &mut state.threads[place];
        (thread.pid, thread.dir, thread.found) = (cx.pid, Some(dir), found.and_then(regular));
        surplus
    }

    /// Takes the answer to a lookup with an expectation: the entry found, and whether it is open
    /// under the guessed number. True if a task has to look after it from now on.
    pub(crate) fn answered(
        &self,
        (guess, handle): (Guess, u64),
        entry: Option<&Entry>,
        (open, made): (bool, ReplyInfo),
    ) -> bool {
        let mut state = self.lock();
        let place = guess.place;
        let thread = &mut state.threads[place];
        thread.asks = false;
        thread.found = entry.and_then(regular);
        if !open {
            self.memory.forget_open_ahead(place as u32, handle);
            return false;
        }
        let ReplyInfo { ticket, session_state, .. } = made;
        thread.open = Some(OpenAheadFile { handle, ticket, session_state, guess });
        state.made += 1;
        state.open += 1;
        !std::mem::replace(&mut state.watched, true)
    }

    /// The caller of a lookup has left without an answer. A file that the lookup opens is closed
    /// when the answer comes. Should this process die before, the next one closes it: it finds the
    /// number noted, unless another lookup has taken the place.
    pub(crate) fn left(&self, guess: &Guess) {
        let mut state = self.lock();
        let thread = &mut state.threads[guess.place];
        (thread.asks, thread.found) = (false, None);
    }

    /// A thread opens a file. Returns the file that its lookup opened, if that is the wanted one.
    pub(crate) fn take(
        &self,
        cx: &Context,
        id: FileId,
        how: OpenHow,
    ) -> (Option<OpenAheadFile>, Option<Surplus>) {
        let mut state = self.lock();
        let Some(place) = state.place(cx) else { return (None, None) };
        let thread = &mut state.threads[place];
        if thread.pid != cx.pid || thread.found != Some(id) {
            return (None, None);
        }
        thread.found = None;
        let (dir, open) = (thread.dir, thread.open.take());
        let wanted = (how.is_harmless() && !how.with_attr).then_some(how);
        state.learn(dir, wanted);
        let Some(open) = open else { return (None, None) };
        state.open -= 1;
        state.late.note(open.guess.is_late());
        if open.guess.stands(cx, how, self.rights.at_rest()) {
            return (Some(open), None);
        }
        state.given_up += 1;
        (None, Some(open.surplus()))
    }

    /// A file that was taken is an open file like any other now.
    pub(crate) fn used(&self, opened: &OpenAheadFile) {
        self.used.fetch_add(1, Ordering::Relaxed);
        self.forget(opened.surplus());
    }

    /// A file that was taken cannot be used.
    pub(crate) fn unused(&self, opened: &OpenAheadFile) -> Surplus {
        self.lock().given_up += 1;
        opened.surplus()
    }

    /// A thread goes on with something else than opening what it looked up.
    pub(crate) fn passed_over(&self, cx: &Context) -> Option<Surplus> {
        let mut state = self.lock();
        let place = state.place(cx)?;
        state.unwanted(place, cx.pid)
    }

    /// All that is open unused, for whatever thread.
    pub(crate) fn give_up(&self) -> Vec<Surplus> {
        let mut state = self.lock();
        if state.open == 0 {
            return Vec::new(); // as good as always
        }
        (0..OPEN_AHEAD_MAX).filter_map(|place| state.take_out(place)).collect()
    }

    /// The files that are open and can no longer be used. None if nothing is open any more: then no
    /// task has to look again before [`OpenAhead::answered`] says so.
    pub(crate) fn give_up_late(&self) -> Option<Vec<Surplus>> {
        let mut state = self.lock();
        state.watched = state.open > 0;
        if !state.watched {
            return None;
        }
        let mut late = Vec::new();
        for place in 0..OPEN_AHEAD_MAX {
            let Thread { pid, open, .. } = &state.threads[place];
            if open.as_ref().is_some_and(|open| open.guess.is_late()) {
                let pid = *pid;
                state.late.note(true); // nobody has used it in time
                late.extend(state.unwanted(place, pid));
            }
        }
        Some(late)
    }

    /// The numbers of what a process before us had open and not used.
    pub(crate) fn inherited(&self) -> Vec<Surplus> {
        let noted = |place| Surplus { handle: self.memory.open_ahead_handle(place as u32), place };
        (0..OPEN_AHEAD_MAX).map(noted).filter(|one| one.handle != 0).collect()
    }

    /// The file is being closed, or used.
    pub(crate) fn forget(&self, Surplus { handle, place }: Surplus) {
        self.memory.forget_open_ahead(place as u32, handle);
    }
}

impl State {
    /// Where a thread's last lookup is noted. None for one that has no number here, as those
    /// of other containers, and while another thread's lookup is under way there.
    fn place(&self, cx: &Context) -> Option<usize> {
        let place = cx.pid.0 as usize % OPEN_AHEAD_MAX;
        (cx.pid.0 != 0 && !self.threads[place].asks).then_some(place)
    }

    /// A file that the thread `pid` found is not going to be opened. A file that another thread
    /// found may be.
    fn unwanted(&mut self, place: usize, pid: Pid) -> Option<Surplus> {
        let thread = &mut self.threads[place];
        let (own, dir) = (thread.pid == pid, thread.dir);
        if thread.found.take().is_some() && own {
            self.learn(dir, None);
        }
        let open = self.take_out(place);
        if open.is_some() && !own {
            self.late.note(true); // more threads than places: it could not be used in time
        }
        open
    }

    fn learn(&mut self, dir: Option<FileId>, opened: Option<OpenHow>) {
        if let Some(dir) = dir {
            self.habits.learn(dir, opened);
        }
    }

    fn take_out(&mut self, place: usize) -> Option<Surplus> {
        let open = self.threads[place].open.take()?;
        self.open -= 1;
        self.given_up += 1;
        Some(open.surplus())
    }
}

fn regular(entry: &Entry) -> Option<FileId> {
    (entry.attr.file_type() == FileType::Regular).then_some(entry.id)
}

#[cfg(test)]
mod tests {
    use dray_rt::{DriverKind, Executor};

    use super::*;

    const DIR: FileId = FileId { ino: 5, generation: 1 };

    /// Hundreds of processes that start together wait so long for a CPU that a file opened ahead is no more to be
    /// used. Each was opened twice and closed twice.
    #[test]
    fn where_openings_come_too_late_few_files_are_opened_ahead() {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let ahead = OpenAhead::new(Arc::new(SessionMemory::create_memfd().unwrap()));
            let id = FileId { ino: 6, generation: 1 };
            let attr = dray_core::Attr { mode: libc::S_IFREG, ..dray_core::Attr::default() };
            let mut tried = 0;
            for number in 0..2000 {
                ahead.lock().habits.learn(DIR, Some(OpenHow::READ)); // it is opened in the end
                let cx = Context { pid: Pid(1 + number % 512), ..Context::system() };
                let handle = u64::from(number) + 1;
                if let (Some(guess), _) = ahead.expect(&cx, DIR, handle) {
                    tried += 1;
                    let open = (true, ReplyInfo::default());
                    ahead.answered((guess, handle), Some(&Entry { id, attr }), open);
                }
                dray_rt::sleep(Duration::from_micros(100)).await;
                if number % 50 == 0 {
                    ahead.give_up_late();
                }
            }
            assert!((2000 / 64..2000 / 8).contains(&tried), "{tried} of 2000");
        });
    }

    /// The server opened it after its caller had left and this process had died.
    #[test]
    fn what_a_lookup_that_was_left_may_open_is_noted_for_a_successor() {
        Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(async {
            let memory = Arc::new(SessionMemory::create_memfd().unwrap());
            let ahead = OpenAhead::new(memory.clone());
            (0..2).for_each(|_| ahead.lock().habits.learn(DIR, Some(OpenHow::READ)));
            let cx = Context { pid: Pid(7), ..Context::system() };
            let expect = |handle| ahead.expect(&cx, DIR, handle).0.expect("it was learned");
            let noted = || -> Vec<u64> {
                OpenAhead::new(memory.clone()).inherited().iter().map(|one| one.handle).collect()
            };
            ahead.left(&expect(42));
            assert_eq!(noted(), [42]);
            ahead.answered((expect(43), 43), None, (false, ReplyInfo::default()));
            assert!(noted().is_empty(), "the place is another's by then");
        });
    }
}
