//! Pages that the kernel keeps under leases, and that it never reads what was changed.
//!
//! Each change here leaves size and time of change as they were, as one within the same tick of a coarse
//! clock does. So the kernel cannot see it from attributes.

use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::common::{TestMount, mounted_with};
use dray_core::{
    Attr, Context, FileId, FileSystem, LeaseKinds, RecallItem, SetAttr, TimeSet, Timestamp, Ttl,
    Validity,
};
use dray_fuse::{Options, Transport};

const LEASED: Validity =
    Validity { name: Some(Ttl::FOREVER), attributes: Some(Ttl::FOREVER), pages: None };
/// A recall waits for 200 ms for pages, and for 20 ms for answers on their way.
const SOON: Duration = Duration::from_secs(1);
const FILE_BYTES: usize = 1 << 20;

fn on_both(test: impl Fn(&TestMount)) {
    for transport in [Transport::Classic, Transport::Uring] {
        let options = Options { leases: true, ..Options::default() };
        if let Some(mount) = mounted_with(transport, options) {
            mount.fs.set_validity(mount.fs_root(), LEASED).unwrap();
            test(&mount);
        }
    }
}

/// A file of these bytes that nobody has written for long, and that is leased.
fn make(mount: &TestMount, name: &str, byte: u8) -> FileId {
    let id = mount.made_behind_the_kernel_s_back(name, &vec![byte; FILE_BYTES]);
    lease(mount, id);
    id
}

/// Sets the time of change to what it always is here, and answers the attributes.
fn age(mount: &TestMount, id: FileId) -> Attr {
    let fs = mount.fs.clone();
    let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
    executor.block_on(async move {
        let mtime = Some(TimeSet::At(Timestamp { sec: 1000, nsec: 5 }));
        let set = SetAttr { mtime, ..SetAttr::default() };
        fs.setattr(&Context::system(), id, set).await.unwrap()
    })
}

fn lease(mount: &TestMount, id: FileId) {
    let attr = age(mount, id);
    mount.fs.set_validity(id, LEASED).unwrap();
    mount.session.lease(id, attr);
}

/// What a server does before another client changes a file.
fn recall(mount: &TestMount, id: FileId) {
    mount.fs.set_validity(id, Validity::UNSAID).unwrap();
    let item = RecallItem { id, kinds: LeaseKinds::ATTRIBUTES, name: None };
    let took = mount.session.recall(vec![item]);
    assert!(took < SOON, "{took:?}");
}

fn change(mount: &TestMount, id: FileId, name: &str, byte: u8) {
    mount.behind_the_kernel_s_back(name, &vec![byte; FILE_BYTES]);
    age(mount, id);
}

/// The first byte, and the last one.
fn read(file: &File) -> [u8; 2] {
    [0, FILE_BYTES as u64 - 1].map(|at| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        byte[0]
    })
}

fn open(mount: &TestMount, name: &str) -> File {
    File::open(mount.path(name)).unwrap()
}

/// All requests of the kernel but those at an open and a close.
fn requests(mount: &TestMount) -> u64 {
    let at_open = ["lookup", "open", "flush", "release", "forget", "batch_forget"];
    let counts = mount.reporter.stats().counts;
    counts.iter().filter(|(name, _)| !at_open.contains(name)).map(|(_, count)| count).sum()
}

fn read_whole(file: &File) -> Vec<u8> {
    let mut content = vec![0; FILE_BYTES];
    file.read_exact_at(&mut content, 0).unwrap();
    content
}

// proves: P223
#[test]
fn a_file_that_is_leased_is_read_once() {
    on_both(|mount| {
        make(mount, "file", b'a');
        assert_eq!(read_whole(&open(mount, "file")), vec![b'a'; FILE_BYTES]);
        let before = requests(mount);
        for _ in 0..3 {
            let file = open(mount, "file");
            assert_eq!(read_whole(&file), vec![b'a'; FILE_BYTES]);
        }
        assert_eq!(requests(mount), before, "pages outlive an open, and need no attributes");
        // Opening it to write, or directly, asks for each read, and leaves the pages alone.
        for flags in [0, libc::O_DIRECT] {
            let (write, read) = (flags == 0, true);
            let file = OpenOptions::new()
                .read(read)
                .write(write)
                .custom_flags(flags)
                .open(mount.path("file"));
            let before = mount.count("read");
            let mut page = Page([0; 4096]);
            file.unwrap().read_exact_at(&mut page.0, 0).unwrap();
            assert_eq!((mount.count("read") - before, page.0[0]), (1, b'a'));
        }
        // SAFETY: no memory is passed. Many programs ask so whether it is a terminal.
        unsafe { libc::isatty(open(mount, "file").as_raw_fd()) };
        let before = requests(mount);
        read_whole(&open(mount, "file"));
        assert_eq!(requests(mount), before);
    });
}

#[repr(align(4096))]
struct Page([u8; 4096]);

#[test]
fn a_file_that_is_not_leased_or_was_just_written_is_read_each_time() {
    on_both(|mount| {
        let id = make(mount, "file", b'a');
        let reads = || {
            let before = mount.count("read");
            (0..2).for_each(|_| assert_eq!(read(&open(mount, "file"))[0], b'a'));
            mount.count("read") - before
        };
        recall(mount, id);
        assert_eq!(reads(), 4);
        let attr = age(mount, id);
        let now = dray_rt::wall_clock();
        let mtime = Timestamp { sec: now.as_secs() as i64, nsec: 0 };
        mount.session.lease(id, Attr { mtime, ..attr });
        assert_eq!(reads(), 4);
    });
}

// proves: P224
#[test]
fn what_others_change_is_read_through_files_that_were_open_before() {
    on_both(|mount| {
        let id = make(mount, "file", b'a');
        let file = open(mount, "file");
        assert_eq!(read(&file), [b'a'; 2]);
        for byte in b'b'..b'h' {
            recall(mount, id);
            if byte % 2 == 0 {
                // Somebody reads between the recall and the change.
                read(&file);
            }
            change(mount, id, "file", byte);
            assert_eq!(read(&file), [byte; 2]);
            if byte % 3 == 0 {
                lease(mount, id);
            }
            assert_eq!((read(&file), read(&open(mount, "file"))), ([byte; 2], [byte; 2]));
        }
        // Peace comes back: nothing is asked for any more.
        lease(mount, id);
        let settled = (0..100).any(|_| {
            thread::sleep(Duration::from_millis(20));
            let before = requests(mount);
            assert_eq!(read(&file), [b'g'; 2]);
            requests(mount) == before
        });
        assert!(settled);
    });
}

/// A read under way has got the old data, and gives them to the kernel after the change.
// proves: P224
#[test]
fn a_read_under_way_leaves_no_old_pages() {
    on_both(|mount| {
        for (round, recalled_first) in [false, true, false, true].into_iter().enumerate() {
            let name = &format!("file{round}");
            let id = make(mount, name, b'a');
            let file = open(mount, name);
            let held = &mount.locks.reads_late;
            if recalled_first {
                recall(mount, id);
            }
            held.store(true, Ordering::SeqCst);
            thread::scope(|scope| {
                let before = mount.count("read");
                let reader = scope.spawn(|| read(&file));
                while mount.count("read") == before {
                    thread::sleep(Duration::from_millis(1));
                }
                thread::sleep(Duration::from_millis(30)); // the data are there
                if !recalled_first {
                    recall(mount, id);
                }
                change(mount, id, name, b'b');
                if round > 1 {
                    lease(mount, id);
                }
                held.store(false, Ordering::SeqCst);
                let seen = reader.join().unwrap();
                assert!(seen.iter().all(|byte| b"ab".contains(byte)), "{seen:?}");
            });
            assert_eq!(read(&file), [b'b'; 2], "{round}");
            assert_eq!(read(&open(mount, name)), [b'b'; 2], "{round}");
        }
    });
}

/// Ends readers, also where a check before their end fails.
struct ReadersEnd<'a>(&'a AtomicBool);

impl Drop for ReadersEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

/// Readers stream through files that read from pages while others change the file.
// proves: P225
#[test]
fn recalls_end_soon_while_readers_stream() {
    on_both(|mount| {
        let id = make(mount, "file", b'a');
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let file = open(mount, "file");
                    while !stop.load(Ordering::SeqCst) {
                        read_whole(&file);
                    }
                });
            }
            let _end = ReadersEnd(&stop);
            let file = open(mount, "file");
            for byte in b'b'..b'z' {
                recall(mount, id);
                change(mount, id, "file", byte);
                // A reader that asks at the same time may take this one's news from it (ADR 0051, Limits).
                let changed = Instant::now();
                while read(&file) != [byte; 2] {
                    assert!(changed.elapsed() < SOON, "{byte} is not seen");
                }
                lease(mount, id);
            }
        });
    });
}

// proves: P226
#[test]
fn own_writes_are_read_from_pages_at_once() {
    on_both(|mount| {
        let id = make(mount, "file", b'a');
        let (reads, path) = (open(mount, "file"), mount.path("file"));
        let writes = OpenOptions::new().write(true).open(&path).unwrap();
        assert_eq!(read(&reads), [b'a'; 2]);
        for byte in b'b'..b'f' {
            writes.write_all_at(&[byte], 0).unwrap();
            lease(mount, id);
            assert_eq!(read(&reads)[0], byte);
        }
        // A page that is read while a write is under way may have what was there before.
        mount.locks.writes_held.store(true, Ordering::SeqCst);
        thread::scope(|scope| {
            let before = mount.count("write");
            let writer = scope.spawn(|| writes.write_all_at(b"z", 0).unwrap());
            while mount.count("write") == before {
                thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(read(&reads)[0], b'e');
            mount.locks.writes_held.store(false, Ordering::SeqCst);
            writer.join().unwrap();
        });
        lease(mount, id);
        assert_eq!(read(&reads)[0], b'z');
        // What the kernel changes of the pages by itself.
        writes.set_len(4096).unwrap();
        writes.set_len(FILE_BYTES as u64).unwrap();
        lease(mount, id);
        assert_eq!(read(&reads), [b'z', 0]);
        // SAFETY: no memory is passed.
        let punched = unsafe {
            let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
            libc::fallocate(writes.as_raw_fd(), mode, 0, 4096)
        };
        if punched == 0 {
            assert_eq!(read(&reads)[0], 0);
        }
        let all = [b'c'; FILE_BYTES];
        OpenOptions::new()
            .write(true)
            .truncate(true)
            .open(&path)
            .unwrap()
            .write_all_at(&all, 0)
            .unwrap();
        lease(mount, id);
        assert_eq!(read(&reads), [b'c'; 2]);
    });
}

/// sendfile(2) asks for no attributes. What was dropped is read again.
// proves: P227
#[test]
fn what_is_sent_from_pages_is_new_after_a_recall() {
    on_both(|mount| {
        let id = make(mount, "file", b'a');
        let file = open(mount, "file");
        let out = tempfile();
        let sent = |out: &File| {
            let mut at = 0;
            // SAFETY: the offset outlives the call.
            let count = unsafe { libc::sendfile(out.as_raw_fd(), file.as_raw_fd(), &mut at, 1) };
            assert_eq!(count, 1);
            let (mut byte, end) = ([0], out.metadata().unwrap().len());
            out.read_exact_at(&mut byte, end - 1).unwrap();
            byte[0]
        };
        assert_eq!(sent(&out), b'a');
        for byte in b'b'..b'f' {
            recall(mount, id);
            change(mount, id, "file", byte);
            assert_eq!(sent(&out), byte);
        }
        // Read between a recall and the change: dropped a second later.
        recall(mount, id);
        assert_eq!(sent(&out), b'e');
        change(mount, id, "file", b'f');
        let seen = (0..400).any(|_| {
            thread::sleep(Duration::from_millis(10));
            sent(&out) == b'f'
        });
        assert!(seen);
    });
}

fn tempfile() -> File {
    let path = std::env::temp_dir();
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_TMPFILE).open(path).unwrap()
}
