//! What is recorded, what comes back, and what is found of logs that somebody has been at.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use dray_backends::memory::{MemoryFs, MemoryOptions};
use dray_core::{
    Buf, BufMut, Context, CreateHow, Errno, Error, FileId, FileSystem, Gid, GrantedAdmit, Identity,
    Make, Name, NodeId, ObservedCall, Op, OpenHow, Peer, Pid, RemoveKind, RenameHow, RequestId,
    SessionId, SetAttr, Uid, Via, Write, XattrSet,
};
use dray_rt::{DriverKind, Executor};

use super::codec::Codec;
use super::segment::SegmentWriter;
use super::varint::RecordInput;
use super::*;
use crate::{Observed, Observer, Outcome, observe_export};

mod damage;

const NEW: CreateHow = CreateHow { open: OpenHow::READ_WRITE, mode: 0o600, exclusive: true };
const ENOUGH: Duration = Duration::from_secs(60);

fn options(dir: &Path) -> AuditOptions {
    AuditOptions {
        export: "home".into(),
        dir: dir.to_owned(),
        kinds: KindSet::all(),
        full: FullPolicy::Block,
        spill: None,
        max_bytes: 1 << 30,
        segment_bytes: 64 << 20,
    }
}

fn caller(uid: u32) -> Context {
    let who = Identity {
        uid: Uid(uid),
        gid: Gid(uid + 1),
        groups: [Gid(7), Gid(8)].into(),
        job: "4711".into(),
    };
    let cx = Context::new(NodeId(99), RequestId(1), Arc::new(who), Pid(1));
    let peer = Peer::Ip("10.0.0.7:1000".parse().unwrap());
    Context { via: Some(Via { session: SessionId(3), peer }), ..cx }
}

fn memory() -> MemoryFs {
    MemoryFs::new(MemoryOptions { root_mode: 0o777, ..MemoryOptions::default() })
}

fn all_of(dirs: &[&Path]) -> Vec<AuditRecord> {
    let mut reader = LogReader::new(dirs.iter().map(|dir| dir.to_path_buf()).collect(), 1);
    let mut all = Vec::new();
    while reader.advance(&mut |record| all.push(record)).unwrap() {}
    all
}

fn no_paths() -> FindPath {
    Box::new(|_| None)
}

fn root_only(fs: &MemoryFs) -> FindPath {
    let root = fs.info().root;
    Box::new(move |id| (id == root).then(|| b"/".to_vec()))
}

/// Records as one word and what it is about.
fn shown(record: &AuditRecord) -> String {
    let text = |text: &Option<Text>| {
        text.as_ref().map_or("-".into(), |text| String::from_utf8_lossy(text).into_owned())
    };
    let error = record.error.map_or("", |error| error.name());
    format!("{} {} {} {error}", record.kind, text(&record.path), text(&record.to_path))
}

async fn work(fs: &dyn FileSystem) {
    let cx = caller(1000);
    let (root, name) = (fs.info().root, |name: &'static str| Name::new(name.as_bytes()).unwrap());
    let dir = fs.make(&cx, root, name("d"), Make::Directory { mode: 0o755 }).await.unwrap().id;
    let (entry, file) = fs.create(&cx, dir, name("f"), NEW).await.unwrap();
    file.write(&cx, Write::at(0), Buf::from(vec![1; 100])).await.unwrap();
    file.write(&cx, Write::at(100), Buf::from(vec![1; 50])).await.unwrap();
    file.read(&cx, 0, BufMut::heap(4096)).await.map_err(|(error, _)| error).unwrap();
    file.close(&caller(0)).await.unwrap(); // a kernel closes as root
    let set = SetAttr { mode: Some(0o640), ..SetAttr::default() };
    fs.setattr(&cx, entry.id, set).await.unwrap();
    fs.setxattr(&cx, entry.id, b"user.a", b"1", XattrSet::Any).await.unwrap();
    fs.rename(&cx, (dir, name("f")), (root, name("g")), RenameHow::Replace).await.unwrap();
    fs.link(&cx, entry.id, dir, name("h")).await.unwrap();
    let other = caller(2000);
    // What is tried ahead of an open is denied when it is opened.
    for other in [other.counted_if_done(), other] {
        let denied = fs.open(&other, entry.id, OpenHow::READ_WRITE).await.err().unwrap();
        assert_eq!(denied.errno(), Errno::EACCES);
    }
    fs.remove(&cx, root, name("g"), RemoveKind::File).await.unwrap();
    drop(fs.open(&cx, entry.id, OpenHow::READ).await.unwrap()); // its client goes
}

// proves: P177
#[test]
fn every_change_open_close_and_denied_access_has_its_record() {
    let dir = tempfile::tempdir().unwrap();
    let below = Arc::new(memory());
    let audit = Audit::open(options(dir.path()), root_only(&below)).unwrap();
    let fs = Observed::new(below, audit.clone());
    Executor::new(DriverKind::Epoll).unwrap().block_on(work(&fs));
    assert!(audit.finish(ENOUGH));
    let all = all_of(&[dir.path()]);
    let expected = [
        "start - - ",
        "mkdir /d - ",
        "create /d/f - ",
        "close /d/f - ",
        "chmod /d/f - ",
        "setxattr /d/f - ",
        "rename /d/f /g ",
        "link /d/h /d/h ",
        "open /g - EACCES",
        "unlink /g - ",
        "open - - ",
        "close - - ",
    ];
    let all_shown: Vec<String> = all.iter().map(shown).collect();
    assert_eq!(all_shown, expected);
    assert!(all.iter().zip(1..).all(|(record, index)| record.index == index));
    let totals = AuditTotals { read_bytes: 150, reads: 1, written_bytes: 150, writes: 2 };
    assert_eq!(all[3].totals, Some(totals));
    assert_eq!(all[4].set.unwrap().mode, Some(0o640));
    assert_eq!(all[5].xattr.as_deref(), Some(&b"user.a"[..]));
    let (user, client) = (&all[2].user, all[2].client);
    assert_eq!(
        (user.uid, user.gid, &user.groups[..], &*user.job),
        (1000, 1001, &[7, 8][..], "4711")
    );
    assert!(all.iter().filter(|one| one.kind == AuditKind::Close).all(|one| one.user == *user));
    assert_eq!((client.node, client.session), (NodeId(99), SessionId(3)));
    assert_eq!(client.peer, AuditPeer::Ip("10.0.0.7".parse().unwrap()));
    assert_eq!((all[8].user.uid, all[8].open_flags), (2000, Some(libc::O_RDWR as u32)));
    let found = verify(&[dir.path().to_owned()], None, |_| {}).unwrap();
    assert_eq!((found.problems.len(), found.records, found.next_index), (0, 12, 13));
}

#[test]
fn what_is_not_chosen_is_not_recorded_but_where_it_is_denied() {
    let dir = tempfile::tempdir().unwrap();
    let below = Arc::new(memory());
    let kinds = "unlink".parse().unwrap();
    let audit = Audit::open(AuditOptions { kinds, ..options(dir.path()) }, no_paths()).unwrap();
    let fs = Observed::new(below, audit.clone());
    Executor::new(DriverKind::Epoll).unwrap().block_on(work(&fs));
    assert!(audit.finish(ENOUGH));
    let kinds: Vec<_> = all_of(&[dir.path()]).iter().map(|record| record.kind.name()).collect();
    assert_eq!(kinds, ["start", "open", "unlink"]);
}

/// A record of a file in one of some directories.
fn sample(number: u64) -> (AuditRecord, [Option<Text>; 2]) {
    let dir: Text = Arc::from(format!("/projects/p{}/run", number % 5).into_bytes());
    let user = AuditUser { uid: 1000 + (number % 3) as u32, ..AuditUser::default() };
    let kind = if number.is_multiple_of(2) { AuditKind::Create } else { AuditKind::Close };
    let name: Text = Arc::from(format!("file-{:06}", number / 2).into_bytes());
    let path = record::joined(&dir, &name);
    let id = FileId { ino: 5000 + number / 2, generation: 0x1234_5678 + number / 2 };
    let mut one = AuditRecord {
        id: Some(id),
        path: Some(path),
        user: Arc::new(user),
        client: AuditClient { node: NodeId(77), session: SessionId(1), peer: AuditPeer::Local },
        ..AuditRecord::new(kind, 1_700_000_000_000_000 + number * 37)
    };
    if kind == AuditKind::Create {
        one.parent = Some(FileId { ino: number % 5, generation: 9 });
        one.name = Some(name);
        one.open_flags = Some(0x8042);
        (one, [Some(dir), None])
    } else {
        let totals = AuditTotals { written_bytes: 3901, writes: 1, ..AuditTotals::default() };
        one.totals = Some(totals);
        (one, [None, None])
    }
}

#[test]
fn records_come_back_as_they_were_and_take_few_bytes() {
    let (mut encoder, mut bytes) = (Codec::new(), Vec::new());
    let samples: Vec<_> = (0..20_000).map(sample).collect();
    for (record, [parent, to]) in &samples {
        encoder.put(record, (parent.as_ref(), to.as_ref()), &mut bytes);
    }
    let each = bytes.len() / samples.len();
    assert!(each <= 64, "{each} bytes a record");
    let (mut decoder, mut input) = (Codec::new(), RecordInput(&bytes));
    for (record, _) in &samples {
        assert_eq!(&decoder.get(0, &mut input).unwrap(), record);
    }
    assert!(input.0.is_empty());
}

/// Three segments of records, 2 batches each.
fn made(dir: &Path) {
    let (mut index, mut before) = (1, [0; HASH_BYTES]);
    for _ in 0..3 {
        let (made_us, export) = (0, "home".to_owned());
        let header = SegmentHeader { log: 7, first_index: index, made_us, before, export };
        let mut segment = SegmentWriter::create(dir, &header).unwrap();
        for _ in 0..2 {
            let mut bytes = Vec::new();
            for number in index..index + 10 {
                let (record, [parent, to]) = sample(number);
                segment.next_codec().put(&record, (parent.as_ref(), to.as_ref()), &mut bytes);
            }
            segment.append((10, index, index + 10), &bytes).unwrap();
            index += 10;
        }
        before = segment.chain;
    }
}

/// What somebody does to a log in a directory.
type Tamper = fn(&Path, &[SegmentFile]);

fn problems(dir: &Path) -> Vec<String> {
    verify(&[dir.to_owned()], None, |_| {}).unwrap().problems
}

// proves: P179
#[test]
fn a_changed_cut_exchanged_or_removed_record_is_found() {
    let files = |dir: &Path| segments(&[dir.to_owned()]).unwrap();
    let first = |dir: &Path| files(dir)[0].path.clone();
    let tampers: [(&str, Tamper); 6] = [
        ("changed", |_, files| {
            let file = OpenOptions::new().write(true).open(&files[0].path).unwrap();
            file.write_all_at(b"!", files[0].bytes / 2).unwrap();
        }),
        ("cut", |_, files| {
            let file = OpenOptions::new().write(true).open(&files[1].path).unwrap();
            file.set_len(files[1].bytes - 100).unwrap();
        }),
        ("header", |_, files| {
            let file = OpenOptions::new().write(true).open(&files[1].path).unwrap();
            file.write_all_at(b"!", 20).unwrap();
        }),
        ("exchanged", |dir, files| {
            fs::rename(&files[0].path, dir.join("x")).unwrap();
            fs::rename(&files[1].path, &files[0].path).unwrap();
            fs::rename(dir.join("x"), &files[1].path).unwrap();
        }),
        ("removed", |_, files| fs::remove_file(&files[1].path).unwrap()),
        ("batch removed", |_, files| {
            // The first segment without its last batch, in whole batches.
            let mut reader = SegmentReader::open(&files[0].path).unwrap();
            reader.step().unwrap();
            let file = OpenOptions::new().write(true).open(&files[0].path).unwrap();
            file.set_len(reader.at_bytes()).unwrap();
        }),
    ];
    for (what, tamper) in tampers {
        let dir = tempfile::tempdir().unwrap();
        made(dir.path());
        assert_eq!(problems(dir.path()), [""; 0]);
        tamper(dir.path(), &files(dir.path()));
        assert!(!problems(dir.path()).is_empty(), "{what}");
    }
    // What nothing follows shows by a hash that was kept elsewhere.
    let dir = tempfile::tempdir().unwrap();
    made(dir.path());
    let whole = verify(&[dir.path().to_owned()], None, |_| {}).unwrap();
    let anchor = Some((whole.next_index, whole.hash));
    let again = |anchor| verify(&[dir.path().to_owned()], anchor, |_| {}).unwrap().problems;
    assert!(again(anchor).is_empty() && !again(Some((whole.next_index, [1; 32]))).is_empty());
    fs::remove_file(&files(dir.path())[2].path).unwrap();
    assert!(again(None).is_empty() && !again(anchor).is_empty());
    assert!(first(dir.path()).exists());
}

// proves: P180
#[test]
fn every_torn_end_is_cut_off_and_named_and_the_log_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    made(dir.path());
    let last = segments(&[dir.path().to_owned()]).unwrap().pop().unwrap();
    let whole = fs::read(&last.path).unwrap();
    let mut reader = SegmentReader::open(&last.path).unwrap();
    reader.step().unwrap();
    let middle = reader.at_bytes();
    for len_bytes in 0..whole.len() as u64 {
        fs::write(&last.path, &whole[..len_bytes as usize]).unwrap();
        let end = log::find_end(&[dir.path().to_owned()]).unwrap();
        let (next, torn) = match len_bytes {
            len if len < 116 => (41, true), // no header
            116 => (41, false),
            len if len < middle => (41, true),
            len if len == middle => (51, false),
            _ => (51, true),
        };
        assert_eq!((end.next_index, end.torn.is_some()), (next, torn), "{len_bytes}");
        assert_eq!(end.ring_end, next);
    }
    // A loss of power leaves zeros, too.
    let mut zeros = whole.clone();
    zeros[middle as usize..].fill(0);
    fs::write(&last.path, &zeros).unwrap();
    let audit = Audit::open(options(dir.path()), no_paths()).unwrap();
    assert!(audit.finish(ENOUGH));
    let all = all_of(&[dir.path()]);
    let (start, gap) = (&all[all.len() - 2], &all[all.len() - 1]);
    assert_eq!((start.kind, start.index, gap.kind), (AuditKind::Start, 51, AuditKind::Gap));
    assert!(gap.gap.as_ref().unwrap().why.contains("bytes of"), "{gap:?}");
    assert_eq!(problems(dir.path()), [""; 0]);
}

/// A consumer that had seen records which are gone got none of those that were given their numbers.
// proves: P254
#[test]
fn numbers_of_records_that_are_lost_are_not_given_again() {
    let dir = tempfile::tempdir().unwrap();
    made(dir.path());
    // The log ends before record 51, and not within a batch: nothing shows that there was more.
    let last = segments(&[dir.path().to_owned()]).unwrap().pop().unwrap();
    let mut reader = SegmentReader::open(&last.path).unwrap();
    reader.step().unwrap();
    let file = OpenOptions::new().write(true).open(&last.path).unwrap();
    file.set_len(reader.at_bytes()).unwrap();
    consumer(dir.path(), 55);
    let begin = || Audit::open(options(dir.path()), no_paths()).unwrap();
    assert!(begin().finish(ENOUGH));
    let all = all_of(&[dir.path()]);
    let indexes: Vec<u64> = all.iter().map(|record| record.index).collect();
    assert_eq!(indexes, (1..=50).chain([55, 56]).collect::<Vec<_>>());
    assert_eq!((all[50].kind, all[51].gap.as_ref().unwrap().records), (AuditKind::Start, 4));
    // What no consumer has seen, the ring has counted.
    let audit = begin();
    (0..10).for_each(|number| unlink(&audit, number));
    wait_until(|| audit.status().records == 11);
    (0..7).for_each(|number| unlink(&audit, number));
    assert!(audit.finish(ENOUGH));
    let last = segments(&[dir.path().to_owned()]).unwrap().pop().unwrap();
    let (mut reader, mut lost) = (SegmentReader::open(&last.path).unwrap(), 0);
    while let ReadStep::Batch(batch) = reader.step().unwrap() {
        lost = u64::from(batch.count);
    }
    let file = OpenOptions::new().write(true).open(&last.path).unwrap();
    file.set_len(last.bytes - 1).unwrap();
    drop(audit);
    let audit = begin();
    unlink(&audit, 0);
    assert!(audit.finish(ENOUGH));
    let all = all_of(&[dir.path()]);
    let gaps: Vec<u64> = all.iter().filter_map(|one| Some(one.gap.as_ref()?.records)).collect();
    assert_eq!((gaps, all.last().unwrap().index), (vec![4, lost], 57 + 11 + 7 + 2));
    let found = verify(&[dir.path().to_owned()], None, |_| {}).unwrap();
    assert_eq!((found.lost, found.problems), (4 + lost, vec![]));
}

#[test]
fn a_broken_segment_is_left_out_by_readers_and_a_record_says_so() {
    let dir = tempfile::tempdir().unwrap();
    made(dir.path());
    let all = segments(&[dir.path().to_owned()]).unwrap();
    let file = OpenOptions::new().write(true).open(&all[1].path).unwrap();
    file.write_all_at(b"!", all[1].bytes - 50).unwrap();
    let read = all_of(&[dir.path()]);
    let indexes: Vec<u64> = read.iter().map(|record| record.index).collect();
    let expected: Vec<u64> = (1..=31).chain(41..=60).collect();
    assert_eq!(indexes, expected);
    assert_eq!(read[30].gap.as_ref().unwrap().records, 10);
    // From the middle on, and what has been removed.
    fs::remove_file(&all[0].path).unwrap();
    let mut reader = LogReader::new(vec![dir.path().to_owned()], 15);
    let mut some = Vec::new();
    reader.advance(&mut |record| some.push(record)).unwrap();
    assert_eq!((some[0].kind, some[0].gap.as_ref().unwrap().records), (AuditKind::Gap, 6));
    let mut reader = LogReader::new(vec![dir.path().to_owned()], 25);
    let mut some = Vec::new();
    while some.is_empty() && reader.advance(&mut |record| some.push(record.index)).unwrap() {}
    assert_eq!(some[0], 25);
}

fn unlink(audit: &Audit, number: u64) {
    let (cx, name) = (caller(1), format!("name-{number}"));
    let name = Name::new(name.as_bytes()).unwrap();
    let root = FileId { ino: 1, generation: 0 };
    let call = ObservedCall { name: Some(name), ..ObservedCall::new(Op::Remove, root) };
    audit.done(&cx, &call, Outcome::default(), Duration::ZERO);
}

fn wait_until(what: impl Fn() -> bool) {
    let begun = dray_rt::now();
    while !what() {
        assert!(begun.elapsed() < ENOUGH);
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn consumer(dir: &Path, bookmark: u64) {
    let one = Consumer { name: "one".into(), bookmark, ..Consumer::default() };
    Consumers::of(dir).save(&one).unwrap();
}

/// A log of small segments that one consumer has not read, after 2000 records.
fn filled(dir: &Path, full: FullPolicy, spill: Option<PathBuf>) -> Arc<Audit> {
    consumer(dir, 1);
    let (max_bytes, segment_bytes) = (20_000, 4096);
    let options = AuditOptions { full, spill, max_bytes, segment_bytes, ..options(dir) };
    let audit = Audit::open(options, no_paths()).unwrap();
    for number in 0..2000 {
        unlink(&audit, number);
        if number % 50 == 0 {
            wait_until(|| audit.shared.ring.used_bytes() == 0);
        }
    }
    audit
}

#[test]
fn the_slowest_consumer_of_a_full_log_is_named_and_so_is_one_that_cannot_be_read() {
    let dir = tempfile::tempdir().unwrap();
    let log_dir = dir.path().join("home");
    made(dir.path());
    let mut limits =
        retention::Retention::new(&AuditOptions { max_bytes: 1, ..options(dir.path()) });
    consumer(dir.path(), 1);
    let two = Consumer { name: "two".into(), bookmark: 9, ..Consumer::default() };
    Consumers::of(dir.path()).save(&two).unwrap();
    assert_eq!(limits.make_room(None, 61).unwrap(), retention::Room::None);
    assert_eq!(limits.slowest(), "consumer `one`");
    // A file that makes no sense: what to do is said, and can be done.
    consumer(&log_dir, 1);
    fs::write(log_dir.join("consumers/one.toml"), "\0").unwrap();
    let said = Consumers::of(&log_dir).all().unwrap_err().to_string();
    assert!(said.contains("`dray audit deregister home one`") && !said.contains('\n'), "{said}");
    assert!(Consumers::of(&log_dir).remove("one").unwrap());
    assert!(Consumers::of(&log_dir).all().unwrap().is_empty());
}

// proves: P182
#[test]
fn a_log_without_room_blocks_spills_or_drops_as_configured() {
    let dir = tempfile::tempdir().unwrap();
    let audit = filled(dir.path(), FullPolicy::Block, None);
    wait_until(|| audit.status().blocked);
    let call = ObservedCall::new(Op::Remove, FileId { ino: 1, generation: 0 });
    let cx = caller(1);
    // What a server asks: where the answer is not to be had at once, the call takes a task.
    let export = observe_export(Arc::new(memory()), vec![audit.clone()]);
    let server = export.admission.unwrap();
    let passes = |call| server.admit_at_once(&cx, call).is_some();
    assert!(matches!(server.admit(&cx, &call), GrantedAdmit::After(_)) && !passes(&call));
    assert_eq!(audit.status().held, 1, "a call that is asked for twice is held once");
    let read = ObservedCall { op: Op::Read, ..call };
    assert!(passes(&read), "reads go on");
    wait_until(|| all_of(&[dir.path()]).len() == 2001); // nothing is lost
    consumer(dir.path(), 2001);
    wait_until(|| !audit.status().blocked);
    assert!(passes(&call));
    assert!(audit.finish(ENOUGH));

    let (dir, spill) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let audit = filled(dir.path(), FullPolicy::Spill, Some(spill.path().to_owned()));
    wait_until(|| !segments(&[spill.path().to_owned()]).unwrap().is_empty());
    assert!(audit.finish(ENOUGH));
    let dirs = [dir.path().to_owned(), spill.path().to_owned()];
    assert_eq!(all_of(&[dir.path(), spill.path()]).len(), 2001);
    assert_eq!(verify(&dirs, None, |_| {}).unwrap().problems, [""; 0]);

    let dir = tempfile::tempdir().unwrap();
    let audit = filled(dir.path(), FullPolicy::Drop, None);
    let first = || segments(&[dir.path().to_owned()]).unwrap()[0].first_index;
    wait_until(|| first() > 1);
    assert!(audit.finish(ENOUGH));
    let all = all_of(&[dir.path()]);
    let gap = all[0].gap.as_ref().unwrap();
    assert_eq!((all[0].kind, gap.records + all.len() as u64), (AuditKind::Gap, 2002));
}

/// A disk that takes nothing for a while.
// proves: P182
#[test]
fn a_log_that_cannot_be_written_blocks_or_drops_and_says_how_many() {
    for full in [FullPolicy::Block, FullPolicy::Drop] {
        let base = tempfile::tempdir().unwrap();
        let (dir, away) = (base.path().join("log"), base.path().join("away"));
        let options = AuditOptions { full, segment_bytes: 4096, ..options(&dir) };
        let audit = Audit::open(options, no_paths()).unwrap();
        (0..10).for_each(|number| unlink(&audit, number));
        wait_until(|| audit.status().records == 11);
        // New segments cannot be made; the present one goes on until it is full.
        fs::rename(&dir, &away).unwrap();
        fs::write(&dir, "").unwrap();
        let mut made = 10;
        while audit.status().trouble.is_empty() {
            assert!(made < 20_000);
            unlink(&audit, made);
            made += 1;
            std::thread::sleep(Duration::from_millis(1));
        }
        let call = ObservedCall::new(Op::Remove, FileId { ino: 1, generation: 0 });
        let cx = caller(1);
        let held = matches!(audit.admit(&cx, &call), Admit::After(_));
        assert_eq!(held, full == FullPolicy::Block);
        if full == FullPolicy::Drop {
            assert!(!audit.status().blocked, "nobody waits");
            wait_until(|| audit.shared.ring.used_bytes() == 0);
            unlink(&audit, made); // dropped with a gap that counts the others already
            made += 1;
            wait_until(|| audit.shared.ring.used_bytes() == 0);
        }
        fs::remove_file(&dir).unwrap();
        fs::rename(&away, &dir).unwrap();
        (made..made + 10).for_each(|number| unlink(&audit, number));
        wait_until(|| audit.status().trouble.is_empty());
        assert!(audit.finish(ENOUGH));
        let all = all_of(&[&dir]);
        let missing: u64 = all.iter().filter_map(|one| Some(one.gap.as_ref()?.records)).sum();
        let there = all.iter().filter(|one| one.kind == AuditKind::Unlink).count() as u64;
        assert_eq!(audit.status().dropped, missing, "{full:?}");
        assert_eq!(
            (there + missing, missing > 0),
            (made + 10, full == FullPolicy::Drop),
            "{full:?}"
        );
        assert_eq!(problems(&dir), [""; 0]);
    }
}

// proves: P178
#[test]
fn what_a_killed_server_left_in_the_ring_comes_into_the_log_once() {
    let dir = tempfile::tempdir().unwrap();
    let audit = Audit::open(options(dir.path()), no_paths()).unwrap();
    (0..10).for_each(|number| unlink(&audit, number));
    assert!(audit.finish(ENOUGH));
    // No thread moves these.
    (10..20).for_each(|number| unlink(&audit, number));
    drop(audit);
    for _ in 0..2 {
        let audit = Audit::open(options(dir.path()), no_paths()).unwrap();
        assert!(audit.finish(ENOUGH));
        drop(audit);
    }
    let all = all_of(&[dir.path()]);
    let names: Vec<_> = all.iter().filter_map(|one| one.name.as_deref()).collect();
    let expected: Vec<Vec<u8>> = (0..20).map(|one| format!("name-{one}").into_bytes()).collect();
    assert_eq!(names, expected);
    assert_eq!(problems(dir.path()), [""; 0]);
}

#[test]
fn a_filter_wants_what_it_says() {
    let (mut record, _) = sample(2);
    let wants = |filter: AuditFilter, record: &AuditRecord| filter.wants(record);
    let path = |path: &str| AuditFilter { path: Some(path.into()), ..AuditFilter::default() };
    assert!(wants(path("/projects"), &record) && wants(path("/projects/p2/run/"), &record));
    assert!(!wants(path("/projects/p"), &record));
    let kinds = Some("unlink".parse().unwrap());
    let only = AuditFilter { kinds, ..AuditFilter::default() };
    assert!(!wants(only.clone(), &record));
    record.error = Some(Errno::EACCES);
    assert!(wants(only, &record), "denied accesses always are");
    assert!(wants(AuditFilter { denied: true, ..AuditFilter::default() }, &record));
    let uid = AuditFilter { uid: Some(1), ..AuditFilter::default() };
    assert!(!wants(uid.clone(), &record) && wants(uid, &AuditRecord::gap(0, 1, "why")));
}

#[test]
fn consumers_outlive_the_server_and_have_sound_names() {
    let dir = tempfile::tempdir().unwrap();
    let consumers = Consumers::of(dir.path());
    let one = Consumer {
        name: "siem-1".into(),
        kinds: vec!["create".into()],
        bookmark: 7,
        idle_max_s: Some(60),
        ..Consumer::default()
    };
    consumers.save(&one).unwrap();
    assert_eq!(consumers.all().unwrap(), std::slice::from_ref(&one));
    assert_eq!(consumers.find("siem-1").unwrap(), Some(one.clone()));
    assert!(one.is_idle(60_000_000) && !one.is_idle(59_999_999));
    for name in ["", "../x", "a/b", ".x", "a b"] {
        assert!(Consumer::check_name(name).is_err(), "{name}");
        assert_eq!(consumers.find(name).unwrap(), None);
    }
    assert!(consumers.remove("siem-1").unwrap() && !consumers.remove("siem-1").unwrap());
}

#[test]
fn a_record_may_have_all_that_there_is_at_most() {
    let long = [b'n'; 255];
    let name = Name::new(&long).unwrap();
    let groups: Box<[Gid]> = (0..1000).map(Gid).collect();
    let job: Box<str> = "j".repeat(300).into();
    let who = Identity { groups, job, ..Identity::default() };
    let cx = Context::new(NodeId(u64::MAX), RequestId(0), Arc::new(who), Pid(0));
    let id = FileId { ino: u64::MAX, generation: u64::MAX };
    let error = Error::new(Errno::EACCES);
    let detail = dray_core::CallDetail::Xattr(&long);
    let call = ObservedCall {
        name: Some(name),
        to: Some((id, name)),
        open: Some(OpenHow::READ),
        detail,
        ..ObservedCall::new(Op::Rename, id)
    };
    let outcome = Outcome { error: Some(&error), ..Outcome::about(id) };
    let raw = raw::RawCall {
        cx: &cx,
        call: &call,
        outcome,
        kind: AuditKind::Rename,
        time_us: 1,
        repeated: true,
    };
    let record = raw::encoded(&raw, |bytes| {
        assert!(bytes.len() <= raw::RAW_MAX_BYTES);
        raw::decode(bytes, &mut raw::LastUser::default()).unwrap()
    });
    assert_eq!(record.name.as_deref(), Some(&long[..]));
    assert_eq!((record.user.groups.len(), record.user.groups_left_out), (GROUPS_MAX, 936));
    assert!(record.repeated && record.is_denied());
}
