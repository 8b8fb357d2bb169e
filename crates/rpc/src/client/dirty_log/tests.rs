use std::fs;
use std::path::Path;

use dray_core::{FileId, FsUuid, NodeId};
use dray_rt::{DriverKind, Executor};

use super::record::tests::write;
use super::*;
use crate::wire::WriteBase;

const NODE: NodeId = NodeId(5);

fn options(dir: &Path) -> WriteBackOptions {
    let (dir, age_max) = (dir.to_owned(), Duration::from_secs(30));
    let disk = Arc::new(LocalLogDisk);
    WriteBackOptions { dir, disk, bytes_max: 64 << 20, age_max, supervisor: None }
}

/// The disk of the machine. It notes which directories are brought to media.
#[derive(Debug, Default)]
struct NotingDisk(Mutex<Vec<PathBuf>>);

impl LogDisk for NotingDisk {
    fn make_dir(&self, dir: &Path) -> io::Result<()> {
        LocalLogDisk.make_dir(dir)
    }
    fn list(&self, dir: &Path) -> io::Result<Vec<PathBuf>> {
        LocalLogDisk.list(dir)
    }
    fn read(&self, path: &Path, max_bytes: u64) -> io::Result<Vec<u8>> {
        LocalLogDisk.read(path, max_bytes)
    }
    fn write(&self, path: &Path, bytes: &[u8]) -> io::Result<()> {
        LocalLogDisk.write(path, bytes)
    }
    fn create(&self, path: &Path) -> io::Result<Arc<dyn LogFile>> {
        LocalLogDisk.create(path)
    }
    fn open(&self, path: &Path) -> io::Result<Arc<dyn LogFile>> {
        LocalLogDisk.open(path)
    }
    fn remove_file(&self, path: &Path) -> io::Result<()> {
        LocalLogDisk.remove_file(path)
    }
    fn remove_dir(&self, dir: &Path) -> io::Result<()> {
        LocalLogDisk.remove_dir(dir)
    }
    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.0.lock().unwrap().push(dir.to_owned());
        LocalLogDisk.sync_dir(dir)
    }
    fn lock(&self, dir: &Path) -> io::Result<Option<LogLock>> {
        LocalLogDisk.lock(dir)
    }
}

/// Else a loss of power takes a new directory above with all that programs have synced.
// proves: P322
#[test]
fn a_sync_brings_the_names_of_all_directories_above_to_media_once() {
    simulated(async {
        let above = tempfile::tempdir().unwrap();
        let (dir, disk) = (above.path().join("cache/dirty"), Arc::new(NotingDisk::default()));
        let options = WriteBackOptions { disk: disk.clone(), ..options(&dir) };
        let log = DirtyLog::new(&options, NODE);
        note(&log, 1, 0, b"one");
        log.sync().await.unwrap();
        let synced = std::mem::take(&mut *disk.0.lock().unwrap());
        assert!(synced.iter().map(PathBuf::as_path).eq(log.dir().ancestors()), "{synced:?}");
        log.lock().segments.begin_anew();
        note(&log, 1, 3, b"two");
        log.sync().await.unwrap();
        assert_eq!(*disk.0.lock().unwrap(), [log.dir()], "the name of the segment is new alone");
    });
}

// proves: P322
#[test]
fn names_that_cannot_be_brought_to_media_are_an_error_where_they_may_be_new() {
    let fails_with = |errno: i32| {
        sync_above(Path::new("cache/dirty"), |dir| match dir == Path::new(".") {
            true => Err(io::Error::from_raw_os_error(errno)),
            false => Ok(()),
        })
    };
    for errno in [libc::EACCES, libc::EROFS, libc::EINVAL] {
        fails_with(errno).unwrap();
    }
    for errno in [libc::EIO, libc::ENOSPC, libc::ENOENT] {
        assert_eq!(fails_with(errno).unwrap_err().raw_os_error(), Some(errno));
    }
}

fn log_dir(dir: &Path, node: NodeId) -> LogDir {
    options(dir).log_of(node)
}

fn identity() -> DirtyLogIdentity {
    DirtyLogIdentity {
        uuid: FsUuid(3),
        root: FileId { ino: 1, generation: 0 },
        export: "data".into(),
    }
}

fn note(log: &DirtyLog, ino: u64, at: u64, data: &[u8]) -> LoggedRange {
    let id = FileId { ino, generation: 1 };
    let (number, place) =
        log.note(&identity(), WriteRecord { id, at, request: at + 1, ..write(0) }, data).unwrap();
    let mut range = LoggedRange::default();
    range.add(number, place);
    range
}

fn simulated(test: impl Future<Output = ()>) {
    Executor::new(DriverKind::Simulated { seed: 1 }).unwrap().block_on(test);
}

/// The writes that a process behind this one finds: inode, offset and data.
fn found(dir: &Path) -> Vec<(u64, u64, Vec<u8>)> {
    let found = scan(&log_dir(dir, NODE)).unwrap();
    let writes = found.files.iter().flat_map(|file| &file.writes);
    writes.map(|one| (one.record.id.ino, one.record.at, one.data.clone())).collect()
}

// proves: P311
#[test]
fn the_next_process_finds_what_is_not_sent() {
    simulated(async {
        let dir = tempfile::tempdir().unwrap();
        let log = DirtyLog::new(&options(dir.path()), NODE);
        assert!(
            log.inherit().files.is_empty() && !log.dir().exists(),
            "nothing is made for nothing"
        );
        let first = note(&log, 1, 0, b"one");
        note(&log, 2, 0, b"other");
        let id = FileId { ino: 1, generation: 1 };
        log.sending(SendingRecord { id, last: first.last, request: 1 << 63 });
        note(&log, 1, 3, b"two");
        log.sync().await.unwrap();
        drop(log);
        let log = DirtyLog::new(&options(dir.path()), NODE);
        let before = log.inherit();
        assert_eq!(before.requests, [1, 4].into());
        assert_eq!((before.files.len(), before.torn_bytes), (2, 0));
        let under_way = before.files[0].under_way.unwrap();
        assert_eq!((under_way.request, under_way.last), (1 << 63, first.last));
        let base = WriteBase { size: 3, ..write(0).base };
        log.sent(SentRecord { id, last: first.last, base }, &first);
        assert_eq!(found(dir.path()), [(1, 3, b"two".to_vec()), (2, 0, b"other".to_vec())]);
        let again = scan(&log_dir(dir.path(), NODE)).unwrap();
        assert_eq!((again.files[0].base, again.files[0].under_way), (base, None));
        let last = note(&log, 1, 9, b"three");
        assert!(last.last > under_way.last + 1, "numbers go on");
        drop(log);
        assert_eq!(found(dir.path()).len(), 3);
    });
}

/// What is noted behind a torn end is found by the process after that.
#[test]
fn a_log_with_a_torn_end_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let log = DirtyLog::new(&options(dir.path()), NODE);
    let (first, id) = (note(&log, 1, 0, b"one"), FileId { ino: 1, generation: 1 });
    note(&log, 2, 0, b"two");
    let path = log_dir(dir.path(), NODE).segment(0);
    drop(log);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, [&bytes[..], &[7; 100]].concat()).unwrap();
    let log = DirtyLog::new(&options(dir.path()), NODE);
    assert_eq!(log.inherit().torn_bytes, 100);
    log.sent(SentRecord { id, last: first.last, base: write(0).base }, &first);
    note(&log, 3, 0, b"three");
    let expected = [(2, 0, b"two".to_vec()), (3, 0, b"three".to_vec())];
    assert_eq!(found(dir.path()), expected);
}

/// A file is another one behind what was sent, and behind what others have changed since.
#[test]
fn a_write_is_upon_the_state_that_its_writer_knew_last() {
    let dir = tempfile::tempdir().unwrap();
    let log = DirtyLog::new(&options(dir.path()), NODE);
    let (first, id) = (note(&log, 1, 0, b"one"), FileId { ino: 1, generation: 1 });
    note(&log, 1, 3, b"two");
    let base = WriteBase { size: 3, ..write(0).base };
    log.sent(SentRecord { id, last: first.last, base }, &first);
    assert_eq!(
        scan(&log_dir(dir.path(), NODE)).unwrap().files[0].base,
        base,
        "noted before that was known"
    );
    log.sent(SentRecord { id, last: first.last + 1, base }, &LoggedRange::default());
    note(&log, 1, 6, b"three");
    assert_eq!(
        scan(&log_dir(dir.path(), NODE)).unwrap().files[0].base,
        write(0).base,
        "it says so itself"
    );
}

// proves: P312
#[test]
fn segments_go_in_their_order_when_nothing_in_them_is_left() {
    let dir = tempfile::tempdir().unwrap();
    let log = DirtyLog::new(&options(dir.path()), NODE);
    let data = vec![1; RECORD_MAX_BYTES];
    let id = FileId { ino: 1, generation: 1 };
    let ranges: Vec<_> = (0..40).map(|at| note(&log, 1, at << 20, &data)).collect();
    let segments = || scan::segment_numbers(&log_dir(dir.path(), NODE)).unwrap().len();
    assert_eq!(segments(), 3);
    let sent = |range: &LoggedRange| {
        log.sent(SentRecord { id, last: range.last, base: write(0).base }, range);
    };
    ranges[..35].iter().for_each(&sent);
    assert_eq!((segments(), log.is_clean()), (1, false));
    ranges[35..].iter().for_each(&sent);
    assert!(log.is_clean() && found(dir.path()).is_empty());
    log.remove();
    assert!(!log.dir().exists());
}

/// Whatever is in the files of a log, reading it ends, and gives nothing that was not written.
// proves: P312
#[test]
fn a_log_that_is_torn_or_hostile_gives_what_is_whole() {
    let dir = tempfile::tempdir().unwrap();
    let log = DirtyLog::new(&options(dir.path()), NODE);
    let all: Vec<_> = (0..20).map(|at| (1 + at % 3, at * 10, vec![at as u8; 30])).collect();
    all.iter().for_each(|(ino, at, data)| _ = note(&log, *ino, *at, data));
    let path = log_dir(dir.path(), NODE).segment(0);
    let bytes = fs::read(&path).unwrap();
    let mut random = 1u64;
    let mut draw = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (random >> 33) as usize % below
    };
    for round in 0..300 {
        let mut torn = bytes[..draw(bytes.len() + 1)].to_vec();
        match round % 3 {
            0 => {}
            1 => torn.resize(bytes.len(), 0), // as a file system may leave it
            _ => (0..4).for_each(|_| {
                let at = draw(torn.len().max(1));
                torn.iter_mut().skip(at).take(3).for_each(|byte| *byte = draw(256) as u8);
            }),
        }
        fs::write(&path, &torn).unwrap();
        let mut found = found(dir.path());
        found.sort_by_key(|(_, at, _)| *at);
        assert!(all.starts_with(&found), "round {round}: {} writes", found.len());
    }
}

/// As the fuzz target does, with bytes by chance.
// proves: P340
#[test]
fn hostile_logs_are_read_to_their_end_and_written_ones_come_back() {
    let mut random = 1u64;
    for round in 0..300 {
        let mut bytes: Vec<u8> = Vec::new();
        for _ in 0..round % 100 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            bytes.extend_from_slice(&random.to_le_bytes()[3..]);
        }
        read_any_log(&bytes);
        read_written_log(&bytes);
    }
    // A body that is sound in itself, with numbers that no log has.
    let mut bytes = Vec::new();
    let sent = SentRecord { last: u64::MAX, ..sent_of(1) };
    for record in [LogRecord::Write(write(u64::MAX)), LogRecord::Sent(sent)] {
        let mut frame = Vec::new();
        assert!(record::put(1, &record, &[], &mut frame));
        bytes.push(u8::try_from(frame.len() - 16).unwrap());
        bytes.extend_from_slice(&frame[16..]);
    }
    read_any_log(&bytes);
}

fn sent_of(last: u64) -> SentRecord {
    SentRecord { id: FileId { ino: 7, generation: 8 }, last, base: write(0).base }
}

// proves: P313, P342
#[test]
fn a_log_is_left_to_others_when_its_processes_have_ended() {
    let dir = tempfile::tempdir().unwrap();
    let log = DirtyLog::new(&options(dir.path()), NODE);
    note(&log, 1, 0, b"data");
    let left_bytes = || left_dirty_bytes(dir.path()).unwrap();
    let left = |own| left_logs(&options(dir.path()).logs(), own).unwrap().len();
    let summary = dirty_log_summaries(dir.path()).unwrap();
    assert_eq!((summary[0].bytes, summary[0].files, summary[0].is_in_use), (4, 1, true));
    assert_eq!((left(NodeId(6)), left(NODE)), (0, 0), "its process lives");
    drop(log);
    assert_eq!((left(NodeId(6)), left(NODE)), (1, 0));
    let supervised =
        WriteBackOptions { supervisor: Some(std::process::id()), ..options(dir.path()) };
    let log = DirtyLog::new(&supervised, NodeId(7));
    note(&log, 1, 0, b"data");
    drop(log);
    assert_eq!(left(NodeId(6)), 1, "somebody is about to go on with the other one");
    assert_eq!(left_bytes(), 4);
    fs::write(log_dir(dir.path(), NodeId(7)).supervisor(), "1 0 boot").unwrap();
    assert_eq!(left(NodeId(6)), 2, "of another start of the machine");
    assert!(!dirty_log_summaries(dir.path()).unwrap()[0].is_in_use);
    assert_eq!(left_bytes(), 8);
}
