//! How often a system call on a real mount asks the server. These numbers are promises
//! (docs/PERFORMANCE.md) and do not depend on how fast or busy the machine is.

use std::ffi::CString;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::common::{Rig, on_transports, wait_for};

/// Repetitions of what is counted.
const TIMES: u64 = 50;
/// What others on the machine ask of a mount point is a round trip or two. The kernel may go on
/// with the answer, which is as many fewer.
const ASKING: u64 = 2;
/// How often it is tried to be let alone.
const TRIES: u64 = 20;
/// Openings of which nearly all are done by the lookup, unless the machine is busy with others' work.
const OPENINGS: u64 = 20;
/// Names in the large directory, and the bytes that a kernel gets of each: `fuse_direntplus`
/// (128 + 24 bytes) and a name of 13 bytes, rounded up to 8.
const NAMES: u64 = 10_000;
const LISTED_BYTES: u64 = 168;

/// A mount whose round trips are counted.
struct Counted<'a> {
    rig: &'a Rig,
    at: PathBuf,
}

impl Counted<'_> {
    fn status(&self) -> serde_json::Value {
        let status = self.rig.demand(&["status", self.at.to_str().unwrap(), "--json"]);
        serde_json::from_str(&status).unwrap()
    }

    fn so_far(&self) -> u64 {
        self.status()["server"]["calls"].as_u64().unwrap()
    }

    /// Files opened at their lookup so far: made, used and given up.
    fn opened_at_lookup(&self) -> [u64; 3] {
        let status = self.status();
        let opened = &status["server"]["opened_at_lookup"];
        ["made", "used", "given_up"].map(|which| opened[which].as_u64().unwrap())
    }

    /// As [`Self::each`], of what asks less because the kernel keeps earlier answers. These are
    /// dropped when memory is short or somebody says so (drop_caches), and asked for again. So it
    /// is counted until the kernel was let alone.
    fn each_kept(&self, work: impl Fn(&Path)) -> u64 {
        for _ in 1..TRIES {
            let most = self.of(&work) + ASKING;
            if most % TIMES <= 2 * ASKING {
                return most / TIMES;
            }
        }
        self.each(work)
    }

    /// Round trips of `work`, which does what is counted [`TIMES`] times, for each.
    #[track_caller]
    fn each(&self, work: impl FnOnce(&Path)) -> u64 {
        let made = self.of(work);
        let most = made + ASKING;
        assert!(most % TIMES <= 2 * ASKING, "{made} round trips for {TIMES} times the same");
        most / TIMES
    }

    /// Round trips of `work`, and up to [`ASKING`] more.
    fn of(&self, work: impl FnOnce(&Path)) -> u64 {
        let before = self.so_far();
        work(&self.at);
        self.so_far() - before
    }
}

/// Serves, mounts over each transport, and lets `check` look at it.
fn on_each_transport(consistency: &str, check: impl Fn(&Counted<'_>)) {
    on_transports(|transport| {
        let mut rig = Rig::new();
        let export = rig.path("export");
        fs::create_dir_all(export.join("a/b/c")).unwrap();
        fs::write(export.join("a/b/c/deep"), "deep").unwrap();
        fs::write(export.join("known"), "known").unwrap();
        rig.serve(&[]);
        let at =
            rig.mount("mnt", &format!("consistency={consistency},{transport},attr_timeout=3600"));
        check(&Counted { rig: &rig, at: at.clone() });
        rig.umount(&at);
    });
}

fn create_write_close(dir: &Path) {
    for number in 0..TIMES {
        let path = dir.join(format!("new{number}"));
        let mut file = OpenOptions::new().write(true).create_new(true).open(path).unwrap();
        file.write_all(&[7; 4096]).unwrap();
    }
}

fn open_close(path: &Path, times: u64) {
    (0..times).for_each(|_| drop(File::open(path).unwrap()));
}

/// stat(2) as the C library has it: without the time of birth.
fn stat(path: &Path) {
    let path = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: an all-zero stat is valid.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: a C string and a stat that outlive the call.
    assert_eq!(unsafe { libc::stat(path.as_ptr(), &mut stat) }, 0);
}

// proves: P11
#[test]
fn strict_create_write_and_close_are_three_round_trips() {
    on_each_transport("strict", |mount| {
        stat(&mount.at);
        assert_eq!(mount.each(create_write_close), 3, "lookup, create, write");
    });
}

/// The first opening in a directory is a lookup a component and the opening. From then on the last
/// lookup opens, too, and each time that this is used spares a round trip. What is opened and too
/// old when the program comes to it, because the machine is busy, is opened again. So program,
/// mount and server go before others' work, and are looked at until they were let alone.
// proves: P11
#[test]
fn strict_open_is_one_lookup_a_component_and_the_first_one_an_opening() {
    go_before_others();
    on_each_transport("strict", |mount| {
        for (path, lookups) in [("known", 1), ("a/b/c/deep", 4)] {
            let path = mount.at.join(path);
            let first = mount.of(|_| drop(File::open(&path).unwrap()));
            assert!((lookups + 1..=lookups + 1 + ASKING).contains(&first), "{first} at first");
            wait_for("openings to be done by the lookup", || {
                opened_at_lookup(mount, &path, lookups) >= OPENINGS * 9 / 10
            });
        }
    });
}

/// For this thread, and what it starts. Niceness counts within a session only (sched(7),
/// "The autogroup feature"), and mounts and servers are sessions of their own.
fn go_before_others() {
    let least = libc::sched_param { sched_priority: 1 };
    // SAFETY: the struct outlives the call. Without the right to do so it stays as it is.
    unsafe { libc::sched_setscheduler(0, libc::SCHED_RR, &least) };
}

/// Opens [`OPENINGS`] times; how often that was done by the lookup.
fn opened_at_lookup(mount: &Counted<'_>, path: &Path, lookups: u64) -> u64 {
    let [_, before, _] = mount.opened_at_lookup();
    let made = mount.of(|_| open_close(path, OPENINGS));
    let [_, after, _] = mount.opened_at_lookup();
    let spared = OPENINGS * (lookups + 1) - (after - before);
    assert!((spared..=spared + ASKING).contains(&made), "{made} round trips, not {spared}");
    after - before
}

/// A program that looks at names and opens nothing must not have the server open files.
// proves: P15
#[test]
fn strict_looks_open_nothing() {
    on_each_transport("strict", |mount| {
        let known = mount.at.join("known");
        open_close(&known, TIMES);
        let [before, ..] = mount.opened_at_lookup();
        (0..TIMES).for_each(|_| stat(&known));
        let [after, ..] = mount.opened_at_lookup();
        assert!(after - before <= 3, "{} files were opened for {TIMES} looks", after - before);
        wait_for("all to be closed", || {
            let [made, used, given_up] = mount.opened_at_lookup();
            made == used + given_up
        });
    });
}

/// After this a file with the same times is the same file: what is cached of it is kept from the next
/// open on.
const TIMES_GO_ON: Duration = Duration::from_millis(150);

// proves: P12
#[test]
fn close_to_open_stats_cached_names_for_nothing_and_opens_them_in_one_round_trip() {
    on_each_transport("close-to-open", |mount| {
        let known = mount.at.join("known");
        stat(&known);
        assert_eq!(mount.each_kept(|_| (0..TIMES).for_each(|_| stat(&known))), 0);
        std::thread::sleep(TIMES_GO_ON);
        open_close(&known, 1);
        assert_eq!(mount.each_kept(|_| open_close(&known, TIMES)), 1);
        let deep = mount.at.join("a/b/c/deep");
        open_close(&deep, 1);
        assert_eq!(mount.each_kept(|_| open_close(&deep, TIMES)), 1);
    });
}

/// The server learns by which name the kernel has come to the file: this mount knows what it has renamed.
// proves: P12
#[test]
fn close_to_open_opens_what_was_renamed_here_in_one_round_trip() {
    on_each_transport("close-to-open", |mount| {
        let names = ["first", "second"].map(|name| mount.at.join(name));
        fs::write(&names[0], "file").unwrap();
        std::thread::sleep(TIMES_GO_ON);
        open_close(&names[0], 1);
        let kept = mount.each_kept(|_| {
            for times in 0..TIMES as usize {
                let [from, to] = [&names[times % 2], &names[(times + 1) % 2]];
                fs::rename(from, to).unwrap();
                open_close(to, 1);
            }
        });
        assert_eq!(kept, 5, "getattr of the directory, lookup, rename, getattr, open");
    });
}

#[test]
fn close_to_open_create_write_and_close_are_four_round_trips() {
    on_each_transport("close-to-open", |mount| {
        // The kernel checks permissions and forgets a directory's attributes at each change, also
        // at the one before the first that is counted.
        fs::write(mount.at.join("before"), "").unwrap();
        assert_eq!(mount.each(create_write_close), 4, "getattr, lookup, create, write");
    });
}

// proves: P12
#[test]
fn close_to_open_reads_what_was_read_for_nothing() {
    on_each_transport("close-to-open", |mount| {
        let path = mount.at.join("pages");
        fs::write(&path, vec![3; 1 << 20]).unwrap();
        let read = |file: &File| file.read_exact_at(&mut vec![0; 1 << 20], 0).unwrap();
        read(&File::open(&path).unwrap()); // sees the last write, and fills the cache
        let file = File::open(&path).unwrap();
        assert_eq!(mount.each_kept(|_| (0..TIMES).for_each(|_| read(&file))), 0);
    });
}

/// For a minute after each change it was read from the server at its first two openings.
// proves: P7
#[test]
fn close_to_open_reads_a_young_file_from_the_server_once() {
    const MIB: usize = 16;
    on_each_transport("close-to-open", |mount| {
        let path = mount.at.join("young");
        let read = |_: &Path| drop(fs::read(&path).unwrap());
        let reads = || {
            fs::write(&path, vec![3; MIB << 20]).unwrap();
            std::thread::sleep(TIMES_GO_ON);
            let first = mount.of(read);
            assert!(first >= MIB as u64, "{first} round trips brought {MIB} MiB");
            mount.of(read)
        };
        let again = (0..TRIES).map(|_| reads()).find(|again| *again <= 2 + ASKING);
        assert!(again.is_some(), "getattr, open, and the rest from memory");
    });
}

/// Whatever `attr_timeout` says: here that nothing is believed at all.
// proves: P13
#[test]
fn immutable_asks_for_names_attributes_listings_and_pages_once() {
    on_transports(|transport| {
        let mut rig = Rig::new();
        let export = rig.path("export");
        fs::create_dir(export.join("dir")).unwrap();
        fs::write(export.join("dir/file"), vec![3; 1 << 20]).unwrap();
        symlink("file", export.join("dir/link")).unwrap();
        rig.serve(&[]);
        let options = format!("consistency=immutable,{transport},attr_timeout=0");
        let at = rig.mount("mnt", &options);
        let mount = Counted { rig: &rig, at: at.clone() };
        let dir = at.join("dir");
        let look = || {
            stat(&dir.join("file"));
            assert_eq!(fs::read_link(dir.join("link")).unwrap(), Path::new("file"));
            assert!(!dir.join("missing").exists());
        };
        let list = || assert_eq!(fs::read_dir(&dir).unwrap().count(), 2);
        let file = File::open(dir.join("file")).unwrap();
        let read = || file.read_exact_at(&mut vec![0; 1 << 20], 0).unwrap();
        // The kernel keeps a listing that it has read to the end.
        look();
        list();
        list();
        read();
        assert_eq!(mount.each_kept(|_| (0..TIMES).for_each(|_| look())), 0);
        assert_eq!(mount.each_kept(|_| (0..TIMES).for_each(|_| read())), 0);
        assert_eq!(mount.each_kept(|_| open_close(&dir.join("file"), TIMES)), 1);
        assert_eq!(mount.each_kept(|_| (0..TIMES).for_each(|_| list())), 1, "the opening");
        drop(file);
        rig.umount(&at);
    });
}

// proves: P12
#[test]
fn a_listing_is_at_most_one_round_trip_for_64_kib_and_brings_the_attributes() {
    for consistency in ["strict", "close-to-open"] {
        on_each_transport(consistency, |mount| {
            let many = mount.rig.path("export").join("many");
            fs::create_dir(&many).unwrap();
            for number in 0..NAMES {
                fs::write(many.join(format!("name-{number:08}")), "").unwrap();
            }
            let many = mount.at.join("many");
            stat(&many);
            let mut names = Vec::new();
            let listed = mount.of(|_| {
                let paths = fs::read_dir(&many).unwrap().map(|entry| entry.unwrap().path());
                names.extend(paths);
            });
            assert_eq!(names.len() as u64, NAMES);
            let limit = (NAMES * LISTED_BYTES).div_ceil(64 << 10);
            assert!(listed <= limit, "{consistency}: {listed} round trips, not {limit}");
            if consistency == "close-to-open" {
                let ask = || mount.of(|_| names.iter().for_each(|name| stat(name)));
                let mut asked = ask();
                // What the kernel drops is asked for again: then it is listed anew.
                for _ in 1..TRIES {
                    if asked > ASKING {
                        assert_eq!(fs::read_dir(&many).unwrap().count() as u64, NAMES);
                        asked = ask();
                    }
                }
                assert!(asked <= ASKING, "{asked} round trips for names just listed");
            }
        });
    }
}

/// Where memory began in the middle of a page, and nearly all does, 1 MiB was two requests of the
/// kernel's. Others came between them, so it was not atomic.
// proves: P18
#[test]
fn a_call_of_1_mib_is_one_request_wherever_its_memory_begins() {
    const MIB: usize = 1 << 20;
    for consistency in ["strict", "close-to-open"] {
        on_each_transport(consistency, |mount| {
            let limit = fs::read_to_string("/proc/sys/fs/fuse/max_pages_limit");
            if limit.is_ok_and(|pages| pages.trim().parse::<usize>().unwrap() * 4096 <= MIB)
                || !fs::exists("/proc/sys/fs/fuse/max_pages_limit").unwrap()
            {
                return eprintln!("left out: this kernel allows no more than 256 pages a request");
            }
            let requests = |what: &str| mount.status()["ops"][what].as_u64().unwrap_or(0);
            let mut open = OpenOptions::new();
            let open = open.read(true).append(true).create(true);
            let file = open.open(mount.at.join("large")).unwrap();
            let mut memory = vec![7; MIB + 1];
            let odd = usize::from((memory.as_ptr() as usize).is_multiple_of(4096));
            let before = ["write", "read"].map(requests);
            assert_eq!(file.write_at(&memory[odd..][..MIB], 0).unwrap(), MIB);
            assert_eq!(file.read_at(&mut memory[odd..][..MIB], 0).unwrap(), MIB);
            let made = ["write", "read"].map(requests);
            assert_eq!([made[0] - before[0], made[1] - before[1]], [1, 1], "{consistency}");
        });
    }
}
