//! Files that the kernel reads from a copy on the local disk.

use std::fs::{self, File, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crate::common::{TestMount, mounted_around};
use dray_cache::{CacheOptions, CacheRules, CachedFs, LocalCache, VersionSource};
use dray_core::{FileId, Stack};
use dray_fuse::{Consistency, Options, Transport};

/// Longest wait for anything here.
const LONG: Duration = Duration::from_secs(60);
/// Several blocks of the cache, and a part of one.
const FILE_BYTES: usize = 300_000;

struct Site {
    mount: TestMount,
    cache: Arc<LocalCache>,
}

fn until(what: &str, check: impl Fn() -> bool) {
    let begin = Instant::now();
    while !check() {
        assert!(begin.elapsed() < LONG, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn stack_with(cache: &Arc<LocalCache>, stack: Stack) -> Stack {
    let fs = CachedFs::new(stack.fs, VersionSource::Openings, cache.clone());
    let session = Arc::new(fs.session(stack.session));
    Stack { fs: Arc::new(fs), session }
}

fn cache_at(dir: &Path) -> Arc<LocalCache> {
    let rules = CacheRules::default();
    LocalCache::open(CacheOptions { dir: dir.to_owned(), size_bytes: 1 << 30, rules }).unwrap()
}

/// Both transports, where this machine can do it.
fn on_both(consistency: Consistency, test: impl Fn(&Site)) {
    for transport in [Transport::Classic, Transport::Uring] {
        let dir = tempdir(transport);
        let cache = cache_at(&dir.0);
        let options = Options { consistency, passthrough: true, ..Options::default() };
        let mount = mounted_around(transport, options, |stack| stack_with(&cache, stack));
        let Some(mount) = mount else { continue };
        let site = Site { mount, cache };
        if !site.mount.reporter.stats().passthrough.agreed {
            eprintln!("skipped: this kernel has no passthrough");
            continue;
        }
        test(&site);
    }
}

/// A directory that is taken away in the end.
struct TempDir(std::path::PathBuf);

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn tempdir(transport: Transport) -> TempDir {
    let name = format!(
        "dray-through-{}-{transport:?}-{:?}",
        std::process::id(),
        std::thread::current().id()
    );
    TempDir(std::env::temp_dir().join(name))
}

impl Site {
    /// A file all of which is in the cache.
    fn resident(&self, name: &str, byte: u8) -> FileId {
        let id = self.mount.made_behind_the_kernel_s_back(name, &vec![byte; FILE_BYTES]);
        self.fetch(name, byte);
        // What is stored is whole a moment later.
        let before = self.files();
        until("an open file is read from the copy", || {
            let _reader = self.open(name);
            self.files() > before
        });
        until("it is closed", || self.files() == before);
        id
    }

    fn fetch(&self, name: &str, byte: u8) {
        std::thread::sleep(Duration::from_millis(150)); // its times are past
        let stored = || self.cache.counts.stored_bytes.load(Ordering::SeqCst);
        let before = stored();
        assert!(self.content(name) == vec![byte; FILE_BYTES]);
        until("it is stored", || stored() >= before + FILE_BYTES as u64);
        until("it is closed", || self.mount.reporter.stats().handles == 0);
    }

    fn open(&self, name: &str) -> File {
        File::open(self.mount.path(name)).unwrap()
    }

    fn content(&self, name: &str) -> Vec<u8> {
        fs::read(self.mount.path(name)).unwrap()
    }

    /// Copies that the kernel has.
    fn files(&self) -> usize {
        self.mount.reporter.stats().passthrough.files
    }

    /// How many requests of that kind come while `run` runs.
    fn requests(&self, op: &str, run: impl FnOnce()) -> u64 {
        let before = self.mount.count(op);
        run();
        self.mount.count(op) - before
    }

    /// Another mount changes a file, and the server says so.
    fn others_write(&self, id: FileId, name: &str, byte: u8) {
        self.mount.behind_the_kernel_s_back(name, &vec![byte; FILE_BYTES]);
        let session = self.mount.session.clone();
        // On an executor, as a connection's; what begins there goes on for a while.
        std::thread::spawn(move || {
            let mut executor = dray_rt::Executor::new(dray_rt::DriverKind::Epoll).unwrap();
            executor.block_on(async move {
                session.changed(id);
                dray_rt::sleep(LONG).await;
            });
        });
    }
}

fn read(file: &File) -> Vec<u8> {
    let mut content = vec![0; FILE_BYTES + 1];
    let count = file.read_at(&mut content, 0).unwrap();
    content.truncate(count);
    content
}

/// A mapping of a file.
struct Mapping(*mut u8);

impl Mapping {
    fn of(file: &File, writes: bool) -> Mapping {
        let prot = if writes { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_READ };
        // SAFETY: a new mapping, wherever there is room.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                FILE_BYTES,
                prot,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(at, libc::MAP_FAILED, "{}", std::io::Error::last_os_error());
        Mapping(at.cast())
    }

    fn byte(&self, at: usize) -> u8 {
        assert!(at < FILE_BYTES);
        // SAFETY: it is within the mapping. Others may write it.
        unsafe { self.0.add(at).read_volatile() }
    }

    fn set(&self, at: usize, byte: u8) {
        assert!(at < FILE_BYTES);
        // SAFETY: it is within the mapping, which was made to be written.
        unsafe { self.0.add(at).write_volatile(byte) };
        // SAFETY: the mapping is whole pages long.
        assert_eq!(unsafe { libc::msync(self.0.cast(), FILE_BYTES, libc::MS_SYNC) }, 0);
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: nothing refers to it any more.
        unsafe { libc::munmap(self.0.cast(), FILE_BYTES) };
    }
}

// proves: P267
#[test]
fn a_whole_resident_file_is_read_and_mapped_without_a_request() {
    for consistency in [Consistency::Immutable, Consistency::CloseToOpen] {
        on_both(consistency, |site| {
            site.resident("file", b'a');
            let opens = || site.mount.reporter.stats().passthrough.opens;
            let before = opens();
            let requests = site.requests("read", || {
                let [one, other] = [site.open("file"), site.open("file")];
                assert_eq!(site.files(), 1, "{:?}", site.mount.reporter.stats().passthrough);
                assert!(read(&one) == vec![b'a'; FILE_BYTES] && read(&other) == read(&one));
                let mapping = Mapping::of(&one, false);
                assert_eq!((mapping.byte(0), mapping.byte(FILE_BYTES - 1)), (b'a', b'a'));
                assert_eq!(one.metadata().unwrap().len(), FILE_BYTES as u64);
                drop(one);
                assert_eq!(mapping.byte(5), b'a');
            });
            assert_eq!(requests, 0);
            until("copies are given back", || site.files() == 0);
            assert_eq!(opens() - before, 2);
        });
    }
}

/// The kernel refuses to have an inode open in both ways.
// proves: P268
#[test]
fn a_file_that_is_read_from_a_copy_can_be_written() {
    on_both(Consistency::CloseToOpen, |site| {
        site.resident("file", b'a');
        let reader = site.open("file");
        assert_eq!(site.files(), 1);
        let path = site.mount.path("file");
        let writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        writer.write_all_at(b"written", 5).unwrap();
        until("the open file shows it", || &read(&reader)[5..12] == b"written");
        // A store into a mapping reaches the server, too.
        Mapping::of(&writer, true).set(100, b'm');
        assert_eq!(site.content("file")[100], b'm');
        for flags in [libc::O_APPEND, libc::O_DIRECT, libc::O_TRUNC] {
            let open = OpenOptions::new().write(true).custom(flags).open(&path);
            drop(open.unwrap());
        }
        assert_eq!(site.content("file"), b"");
        drop(writer);
        until("the open file shows its end", || read(&reader).is_empty());
        drop(reader);
        until("copies are given back", || site.files() == 0);
        site.mount.behind_the_kernel_s_back("file", &vec![b'b'; FILE_BYTES]);
        site.fetch("file", b'b');
        // The kernel says later that the writers have closed it.
        until("the file is read from the copy again", || {
            let reader = site.open("file");
            site.files() == 1 && read(&reader) == vec![b'b'; FILE_BYTES]
        });
    });
}

/// An open file that is read by requests, first: then others are, too.
#[test]
fn a_file_that_is_open_otherwise_is_read_by_requests() {
    on_both(Consistency::Immutable, |site| {
        site.resident("file", b'a');
        let path = site.mount.path("file");
        let writer = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let reader = site.open("file");
        assert_eq!((site.files(), read(&reader)), (0, vec![b'a'; FILE_BYTES]));
        drop((writer, reader));
        until("both are closed", || site.mount.reporter.stats().handles == 0);
        let reader = site.open("file");
        assert_eq!((site.files(), read(&reader)), (1, vec![b'a'; FILE_BYTES]));
    });
}

// proves: P268
#[test]
fn what_others_change_shows_at_the_next_open_and_soon_in_open_files() {
    on_both(Consistency::CloseToOpen, |site| {
        let id = site.resident("file", b'a');
        let reader = site.open("file");
        let mapping = Mapping::of(&reader, false);
        assert_eq!((site.files(), mapping.byte(7)), (1, b'a'));
        // The server's word is late.
        site.mount.behind_the_kernel_s_back("file", &vec![b'b'; FILE_BYTES]);
        assert!(site.content("file") == vec![b'b'; FILE_BYTES]);
        site.others_write(id, "file", b'c');
        until("the mapping shows it", || mapping.byte(7) == b'c');
        until("all of it", || read(&reader) == vec![b'c'; FILE_BYTES]);
        // Another mount of the machine must not take the copy for the former version.
        site.mount.behind_the_kernel_s_back("file", &vec![b'd'; FILE_BYTES]);
        assert!(site.content("file") == vec![b'd'; FILE_BYTES]);
        assert_eq!(site.mount.reporter.stats().passthrough.left_behind, 0);
    });
}

/// Who opens by a descriptor names no path, and comes back to the same inode.
// proves: P268
#[test]
fn a_file_is_opened_by_a_descriptor_that_reads_a_copy() {
    on_both(Consistency::CloseToOpen, |site| {
        site.resident("file", b'a');
        let reader = site.open("file");
        let path = format!("/proc/self/fd/{}", reader.as_raw_fd());
        assert!(read(&File::open(&path).unwrap()) == vec![b'a'; FILE_BYTES]);
        let open = OpenOptions::new().write(true).open(&path).unwrap();
        open.write_all_at(b"written", 5).unwrap();
        drop(open);
        let both = OpenOptions::new().read(true).write(true).open(&path);
        assert_eq!(both.unwrap_err().raw_os_error(), Some(libc::ETXTBSY));
        assert_eq!(&read(&File::open(&path).unwrap())[5..12], b"written");
        assert_eq!(&site.content("file")[5..12], b"written");
        drop(reader);
        until("copies are given back", || site.files() == 0);
    });
}

/// P55 for files that are read from a copy.
// proves: P268
#[test]
fn who_is_granted_a_lock_reads_what_was_written_under_the_one_before() {
    on_both(Consistency::CloseToOpen, |site| {
        site.resident("file", b'a');
        let reader = site.open("file");
        assert_eq!((site.files(), read(&reader)[0]), (1, b'a'));
        site.mount.behind_the_kernel_s_back("file", b"others");
        // SAFETY: no memory is passed.
        assert_eq!(unsafe { libc::flock(reader.as_raw_fd(), libc::LOCK_SH) }, 0);
        assert_eq!(&read(&reader)[..6], b"others");
    });
}

trait Custom {
    fn custom(&mut self, flags: i32) -> &mut Self;
}

impl Custom for OpenOptions {
    fn custom(&mut self, flags: i32) -> &mut OpenOptions {
        use std::os::unix::fs::OpenOptionsExt;
        self.custom_flags(flags)
    }
}
