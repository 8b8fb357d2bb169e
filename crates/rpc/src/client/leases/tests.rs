//! The memory without a server: what is answered from it, and when no more.

use std::sync::Mutex;

use dray_core::{
    Gid, LeaseKinds, NameBuf, OpenHow, Recall, RecallDone, RecallItem, RemoveKind, SetAttr, Uid,
    Validity,
};
use dray_rt::{DriverKind, Executor, sleep};

use super::*;
use crate::client::link::SessionState;
use crate::wire::AbsentXattrs;

const TERM: Duration = Duration::from_secs(5);
const DIR: FileId = FileId { ino: 1, generation: 1 };
const FILE: FileId = FileId { ino: 2, generation: 1 };

fn simulate(test: impl Future<Output = ()>) {
    Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(test);
}

/// A file that shares no row of a table with the others.
fn other() -> FileId {
    let row = |id: FileId| AnswerKey::of_attributes(id).0 % 256;
    let known = [row(DIR), row(FILE), AnswerKey::of_name(DIR, b"f").0 % 256];
    let ids = (3..).map(|ino| FileId { ino, generation: 1 });
    ids.into_iter().find(|id| !known.contains(&row(*id))).unwrap()
}

fn name(text: &str) -> &Name {
    Name::new(text.as_bytes()).unwrap()
}

fn caller(uid: u32) -> Context {
    let who = Identity { uid: Uid(uid), gid: Gid(uid), ..Identity::default() };
    Context { who: Arc::new(who), ..Context::system() }
}

/// The memory of a session that was just in contact.
fn in_contact(callers_are_checked: bool) -> LeasedAnswers {
    let wish = LeaseWish::Yes { callers_are_checked, keeps_writes: false };
    let leases = LeasedAnswers::new(wish, false, None);
    leases.welcomed(SessionState { session: 1, instance: 1 }, 0, TERM);
    leases.answered(leases.sent().unwrap());
    leases
}

fn leased(id: FileId) -> Entry {
    let validity =
        Validity { name: Some(Ttl::of(TERM)), attributes: Some(Ttl::of(TERM)), pages: None };
    Entry { id, attr: Attr { ino: id.ino, validity, ..Attr::default() } }
}

fn look_up(leases: &LeasedAnswers, cx: &Context, text: &str, found: FileId) -> Entry {
    leases.looked_up(leases.asking(), (cx, DIR, name(text)), Ok(leased(found))).unwrap()
}

/// What is answered without the server: the name "f", and the attributes of `FILE`.
fn known(leases: &LeasedAnswers) -> (bool, bool) {
    let cx = Context::system();
    (leases.lookup(&cx, DIR, name("f")).is_some(), leases.getattr(FILE).is_some())
}

fn take_recall(leases: &LeasedAnswers, items: Vec<RecallItem>, done: RecallDone) {
    leases.recalled(&items);
    leases.pass_on(items, done);
}

fn item(id: FileId, kinds: LeaseKinds, text: Option<&str>) -> RecallItem {
    RecallItem { id, kinds, name: text.map(|text| NameBuf::new(text.as_bytes()).unwrap()) }
}

#[test]
fn leased_answers_are_given_for_the_rest_of_the_term() {
    simulate(async {
        let (leases, cx) = (in_contact(true), Context::system());
        assert_eq!(known(&leases), (false, false));
        sleep(TERM / 5).await;
        let rest = Some(Ttl::of(TERM / 5 * 4));
        let entry = look_up(&leases, &cx, "f", FILE);
        assert_eq!([entry.attr.validity.name, entry.attr.validity.attributes], [rest; 2]);
        sleep(TERM / 5).await;
        let rest = Some(Ttl::of(TERM / 5 * 3));
        let found = leases.lookup(&cx, DIR, name("f")).unwrap().unwrap();
        let Validity { name: of_name, attributes, .. } = found.attr.validity;
        assert_eq!((found.id, of_name, attributes), (FILE, rest, rest));
        let absent = Err(Error::new(Errno::ENOENT).absent_for(Some(Ttl::of(TERM))));
        let absent = leases.looked_up(leases.asking(), (&cx, DIR, name("gone")), absent);
        assert_eq!(absent.unwrap_err().absence(), rest);
        let absent = leases.lookup(&cx, DIR, name("gone")).unwrap().unwrap_err();
        assert_eq!((absent.errno(), absent.absence()), (Errno::ENOENT, rest));
        assert_eq!(leases.status().unwrap().hits, 2);
        sleep(TERM).await;
        assert_eq!(known(&leases), (false, false), "no contact for a term");
        leases.answered(leases.sent().unwrap());
        assert_eq!(known(&leases), (true, true), "the first call after a rest");
    });
}

#[test]
fn what_is_not_leased_is_not_remembered_and_says_what_the_server_says() {
    simulate(async {
        let (leases, cx) = (in_contact(true), Context::system());
        for said in [None, Some(Ttl::ZERO)] {
            let mut entry = leased(FILE);
            entry.attr.validity = Validity { name: said, attributes: said, pages: None };
            let found = leases.looked_up(leases.asking(), (&cx, DIR, name("f")), Ok(entry));
            assert_eq!(found.unwrap(), entry);
        }
        assert_eq!(known(&leases), (false, false));
        let none = LeasedAnswers::new(LeaseWish::No, false, None);
        assert_eq!(look_up(&none, &cx, "f", FILE), leased(FILE));
        assert!(none.sent().is_none() && none.status().is_none() && known(&none) == (false, false));
    });
}

/// The kernel of such a mount checks no permissions: the server has to see who asks.
#[test]
fn a_name_answers_its_asker_alone_where_callers_are_not_checked() {
    simulate(async {
        for checked in [true, false] {
            let leases = in_contact(checked);
            look_up(&leases, &caller(7), "f", FILE);
            let answers = |uid| leases.lookup(&caller(uid), DIR, name("f")).is_some();
            assert_eq!((answers(7), answers(8)), (true, checked));
            // Rights that the session itself takes away.
            let set = SetAttr { mode: Some(0o700), ..SetAttr::default() };
            drop(leases.own_change(&Call::Setattr { id: DIR, handle: None, set }, [None; 2]));
            assert_eq!(answers(7), checked);
        }
    });
}

#[test]
fn a_recall_reaches_what_is_remembered_and_what_is_on_its_way() {
    let (names, attributes) = (LeaseKinds::NAMES, LeaseKinds::ATTRIBUTES);
    simulate(async move {
        for (recalled, left) in [
            (item(FILE, attributes, None), (false, false)),
            (item(DIR, names, Some("f")), (false, true)),
            (item(DIR, names, None), (false, true)),
            (item(DIR, names, Some("g")), (true, true)),
            (item(other(), names | attributes, None), (true, true)),
        ] {
            let (leases, cx) = (in_contact(true), Context::system());
            let asked = leases.asking();
            look_up(&leases, &cx, "f", FILE);
            take_recall(&leases, vec![recalled], RecallDone::unawaited());
            assert_eq!(known(&leases), left);
            // The answer was on its way.
            let late = leases.looked_up(asked, (&cx, DIR, name("f")), Ok(leased(FILE))).unwrap();
            assert_eq!(known(&leases), left);
            assert!(left.1 || late.attr.validity.attributes == Some(Ttl::ZERO));
            // It is leased again.
            look_up(&leases, &cx, "f", FILE);
            assert_eq!((known(&leases), leases.status().unwrap().recalled), ((true, true), 1));
        }
    });
}

#[test]
fn a_listener_hears_of_recalls_and_says_when_they_are_done() {
    simulate(async {
        for inherited in [false, true] {
            let wish = LeaseWish::Yes { callers_are_checked: true, keeps_writes: false };
            let leases = LeasedAnswers::new(wish, inherited, None);
            let (done, heard) = (Arc::new(AtomicU64::new(0)), Arc::new(Mutex::new(Vec::new())));
            let recall = || {
                let counts = done.clone();
                let done = RecallDone::new(move || {
                    counts.fetch_add(1, Ordering::Relaxed);
                });
                take_recall(&leases, vec![item(FILE, LeaseKinds::ATTRIBUTES, None)], done);
            };
            let count = || done.load(Ordering::Relaxed);
            recall();
            // The kernel may have got it from the process before this one.
            assert_eq!(count(), u64::from(!inherited));
            let hears = heard.clone();
            let tell = leases.hear_recalls_by(Arc::new(move |recall, done| {
                hears.lock().unwrap().push((recall, done));
            }));
            tell.unwrap()();
            recall();
            assert_eq!(count(), u64::from(!inherited), "not before the listener says so");
            let all = std::mem::take(&mut *heard.lock().unwrap());
            assert_eq!(all.len(), 1 + usize::from(inherited));
            drop(all);
            assert_eq!(count(), 2);
        }
    });
}

#[test]
fn another_epoch_or_another_server_takes_everything() {
    simulate(async {
        let (first, next) =
            (SessionState { session: 1, instance: 1 }, SessionState { session: 1, instance: 2 });
        for (state, epoch, forgets) in [(first, 0, false), (first, 1, true), (next, 0, true)] {
            let (leases, cx) = (in_contact(true), Context::system());
            let heard = Arc::new(Mutex::new(Vec::new()));
            let hears = heard.clone();
            let hear = Arc::new(move |recall: Recall, _: RecallDone| {
                hears.lock().unwrap().push(recall);
            });
            let _ = leases.hear_recalls_by(hear);
            let asked = leases.asking();
            look_up(&leases, &cx, "f", FILE);
            leases.welcomed(state, epoch, TERM);
            assert_eq!(known(&leases), (!forgets, !forgets));
            assert_eq!(*heard.lock().unwrap(), vec![Recall::All; usize::from(forgets)]);
            // An answer of the time before is worth nothing.
            let _ = leases.looked_up(asked, (&cx, DIR, name("f")), Ok(leased(FILE)));
            assert_eq!(known(&leases), (!forgets, !forgets));
            leases.end();
            look_up(&leases, &cx, "f", FILE);
            assert_eq!(known(&leases), (false, false), "the session has ended");
        }
    });
}

/// Another client may see the change before its answer is here.
#[test]
fn a_change_of_our_own_takes_what_it_touches_until_it_is_answered() {
    simulate(async {
        let (text, set) = (&b"f"[..], SetAttr { size: Some(0), ..SetAttr::default() });
        let cut = OpenHow::new(libc::O_RDWR | libc::O_TRUNC);
        let remove = |name| Call::Remove { dir: DIR, name, kind: RemoveKind::File };
        for (call, file, left) in [
            (Call::Setattr { id: FILE, handle: None, set }, None, (false, false)),
            (Call::Setattr { id: other(), handle: None, set }, None, (true, true)),
            (Call::Write { handle: 9, how: dray_core::Write::at(0) }, Some(FILE), (false, false)),
            (Call::Open { id: FILE, how: cut, handle: 9, again: false }, None, (false, false)),
            (Call::Getattr { id: FILE, handle: None }, None, (true, true)),
            (remove(text), None, (false, false)),
            // Which file that is is not known: it may be another name of this one.
            (remove(b"unknown"), None, (false, false)),
            (Call::Link { id: other(), dir: DIR, name: text }, None, (false, true)),
            (Call::Link { id: FILE, dir: DIR, name: b"new" }, None, (false, false)),
        ] {
            let (leases, cx) = (in_contact(true), Context::system());
            look_up(&leases, &cx, "f", FILE);
            let asked = leases.asking();
            let change = leases.own_change(&call, [file, None]);
            assert_eq!(change.is_some(), !matches!(call, Call::Getattr { .. }));
            assert_eq!(known(&leases), left, "{call:?}");
            // What is asked beside it is not remembered, whichever is answered first.
            let beside = leases.asking();
            look_up(&leases, &cx, "f", FILE);
            assert_eq!(known(&leases), left, "{call:?}");
            drop(change);
            for moment in [asked, beside] {
                let _ = leases.looked_up(moment, (&cx, DIR, name("f")), Ok(leased(FILE)));
                assert_eq!(known(&leases), left, "{call:?}");
            }
            look_up(&leases, &cx, "f", FILE);
            assert_eq!(known(&leases), (true, true), "{call:?}");
        }
    });
}

/// While a removal was on its way, another client put another file under the name.
#[test]
fn a_recall_beside_a_removal_takes_all_attributes() {
    simulate(async {
        let (leases, cx) = (in_contact(true), Context::system());
        look_up(&leases, &cx, "f", FILE);
        let call = Call::Remove { dir: DIR, name: b"f", kind: RemoveKind::File };
        let change = leases.own_change(&call, [None; 2]);
        take_recall(
            &leases,
            vec![item(DIR, LeaseKinds::NAMES, Some("f"))],
            RecallDone::unawaited(),
        );
        leases.attributes(leases.asking(), other(), leased(other()).attr);
        assert!(leases.getattr(other()).is_some());
        drop(change);
        assert!(leases.getattr(other()).is_none());
    });
}

#[test]
fn a_time_of_access_that_reading_may_set_is_asked_for_again() {
    let second = |sec| dray_core::Timestamp { sec, nsec: 0 };
    simulate(async move {
        for (atime, mtime, left) in [(5, 5, false), (4, 5, false), (6, 5, true)] {
            let leases = in_contact(true);
            let [atime, mtime] = [atime, mtime].map(second);
            let attr = Attr { atime, mtime, ctime: second(5), ..leased(FILE).attr };
            leases.attributes(leases.asking(), FILE, attr);
            leases.was_read(FILE);
            assert_eq!(leases.getattr(FILE).is_some(), left);
            assert!(leases.leased_attributes(FILE).is_some(), "nobody else has changed it");
            leases.attributes(leases.asking(), FILE, attr);
            assert!(leases.getattr(FILE).is_some());
        }
    });
}

/// What they say costs the server something.
#[test]
fn listings_say_nothing_of_extended_attributes_while_nobody_asks_for_any() {
    simulate(async {
        let leases = in_contact(true);
        let mut page = DirPage::default();
        for ino in 0..10_000 {
            page.push(b"name", FileId { ino, generation: 0 }, None, ino, None);
        }
        let absent = vec![AbsentXattrs::UNKNOWN; page.len()];
        let list = || leases.listed_absences(leases.asking(), (&page, &absent));
        list();
        assert!(leases.wants_absences());
        list();
        assert!(!leases.wants_absences());
        assert!(leases.xattr(FILE, b"security.capability").is_none());
        assert!(leases.wants_absences(), "somebody asked");
        // Of a file whose attributes did not come with the page nothing is remembered.
        let mut page = DirPage::default();
        page.push(b"f", FILE, None, 1, Some(leased(FILE).attr));
        let absent = [AbsentXattrs::of(b"security.capability").unwrap()];
        let known = || leases.xattr(FILE, b"security.capability").is_some();
        let asked = leases.asking();
        leases.listed_absences(asked, (&page, &absent));
        assert!(!known());
        take_recall(
            &leases,
            vec![item(FILE, LeaseKinds::ATTRIBUTES, None)],
            RecallDone::unawaited(),
        );
        leases.listed(asked, (&Context::system(), DIR), &mut page);
        leases.listed_absences(asked, (&page, &absent));
        assert!(!known(), "it was recalled meanwhile");
        // The page does not lease the attributes, and another answer does: the page may be the older one.
        let asked = leases.asking();
        leases.attributes(asked, FILE, leased(FILE).attr);
        page.set_attr(0, Some(Attr { validity: Validity::UNSAID, ..leased(FILE).attr }));
        leases.listed(asked, (&Context::system(), DIR), &mut page);
        leases.listed_absences(asked, (&page, &absent));
        assert!(!known());
        page.set_attr(0, Some(leased(FILE).attr));
        leases.listed(asked, (&Context::system(), DIR), &mut page);
        leases.listed_absences(asked, (&page, &absent));
        assert!(known() && leases.xattr(FILE, b"security.selinux").is_none());
    });
}
