//! Applications at work in a mount, which complain about anything that is not as it should be.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Applications at work; whatever one of them complains about is the test's failure.
pub struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<io::Result<u64>>>,
    /// Turns of all together.
    pub steps: Arc<AtomicU64>,
    /// Longest turn of any of them, nanoseconds.
    longest_ns: Arc<AtomicU64>,
}

impl Load {
    pub fn new() -> Load {
        Load {
            stop: Arc::default(),
            threads: Vec::new(),
            steps: Arc::default(),
            longest_ns: Arc::default(),
        }
    }

    /// Runs `step` over and over, with the number of the round.
    pub fn add(&mut self, mut step: impl FnMut(u64) -> io::Result<()> + Send + 'static) {
        let (stop, steps) = (self.stop.clone(), self.steps.clone());
        let longest_ns = self.longest_ns.clone();
        self.threads.push(std::thread::spawn(move || {
            let mut round = 0;
            while !stop.load(Ordering::Relaxed) {
                let begun = Instant::now();
                step(round)?;
                let took_ns = begun.elapsed().as_nanos() as u64;
                longest_ns.fetch_max(took_ns, Ordering::Relaxed);
                round += 1;
                steps.fetch_add(1, Ordering::Relaxed);
            }
            Ok(round)
        }));
    }

    /// The longest turn of any of them since this was asked before. One that has not ended does not count.
    pub fn take_longest(&self) -> Duration {
        Duration::from_nanos(self.longest_ns.swap(0, Ordering::Relaxed))
    }

    /// Turns of each.
    pub fn end(self) -> Vec<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let results = self.threads.into_iter().map(|thread| thread.join().unwrap());
        results.map(|rounds| rounds.expect("an application saw an error")).collect()
    }
}

pub fn append(path: PathBuf) -> io::Result<impl FnMut(u64) -> io::Result<()>> {
    let mut file = OpenOptions::new().create(true).append(true).open(path)?;
    Ok(move |round| {
        let written = file.write(format!("{round:015}\n").as_bytes())?;
        if written == 16 { Ok(()) } else { Err(io::Error::other("a short write")) }
    })
}

/// Makes, renames and removes; each would fail if it were applied twice.
pub fn names(dir: PathBuf) -> impl FnMut(u64) -> io::Result<()> {
    move |round| {
        let (from, to) = (dir.join(format!("{round}.a")), dir.join(format!("{round}.b")));
        let said = |what: &str, done: io::Result<()>| {
            done.map_err(|error| io::Error::other(format!("{what} in round {round}: {error}")))
        };
        said("mkdir", fs::create_dir(&from))?;
        said("rename", fs::rename(&from, &to))?;
        said("rmdir", fs::remove_dir(&to))?;
        let file = OpenOptions::new().write(true).create_new(true).open(&from);
        said("create", file.map(drop))?;
        said("link", fs::hard_link(&from, &to))?;
        said("unlink of the first name", fs::remove_file(&from))?;
        said("unlink of the second name", fs::remove_file(&to))
    }
}

pub fn read_back(path: PathBuf, content: Vec<u8>) -> impl FnMut(u64) -> io::Result<()> {
    move |round| {
        let mut file = File::open(&path)
            .map_err(|error| io::Error::other(format!("open to read back: {error}")))?;
        let mut read = vec![0; 4096];
        let at = round * 4096 % (content.len() as u64 - 4096);
        file.read_exact_at(&mut read, at)?;
        if read != content[at as usize..][..4096] {
            return Err(io::Error::other("read something else"));
        }
        read.clear();
        if round % 16 == 0 {
            file.read_to_end(&mut read)?;
            if read != content {
                return Err(io::Error::other("read something else"));
            }
        }
        Ok(())
    }
}

/// Requests as large as they may be, which take the kernel a while to copy.
pub fn overwrite(path: PathBuf) -> io::Result<impl FnMut(u64) -> io::Result<()>> {
    let file = OpenOptions::new().create(true).truncate(true).write(true).open(path)?;
    let mut block = vec![0; 1 << 20];
    Ok(move |round| {
        block.fill(round as u8);
        let written = file.write_at(&block, 0)?;
        if written == block.len() { Ok(()) } else { Err(io::Error::other("a short write")) }
    })
}

pub fn lock(file: &File, kind: i32, command: i32) -> io::Result<()> {
    // SAFETY: an all-zero flock is valid, and outlives the call.
    let done = unsafe {
        let mut lock: libc::flock = std::mem::zeroed();
        lock.l_type = kind as _;
        libc::fcntl(file.as_raw_fd(), command, &mut lock)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Two open file descriptions take turns; the holder checks that it is alone.
pub fn locking(path: PathBuf, inside: Arc<AtomicU64>) -> impl FnMut(u64) -> io::Result<()> {
    let file = OpenOptions::new().create(true).truncate(false).write(true).open(path).unwrap();
    move |_| {
        lock(&file, libc::F_WRLCK, libc::F_OFD_SETLKW)?;
        let alone = inside.fetch_add(1, Ordering::SeqCst) == 0;
        std::thread::sleep(Duration::from_micros(300));
        inside.fetch_sub(1, Ordering::SeqCst);
        lock(&file, libc::F_UNLCK, libc::F_OFD_SETLK)?;
        if alone { Ok(()) } else { Err(io::Error::other("two had the lock")) }
    }
}

pub fn check_records(path: &Path, rounds: u64) {
    let text = fs::read_to_string(path).unwrap();
    let records: Vec<u64> = text.lines().map(|line| line.parse().unwrap()).collect();
    let expected: Vec<u64> = (0..rounds).collect();
    let wrong = records.iter().zip(&expected).find(|(found, expected)| found != expected);
    assert!(records == expected, "{} first differs at {wrong:?}", path.display());
}

/// Open before the deaths, and used behind them.
pub struct KeptFiles {
    file: File,
    deleted: File,
    locked: File,
}

impl KeptFiles {
    pub fn new(at: &Path) -> KeptFiles {
        let open = |name: &str| {
            let mut options = OpenOptions::new();
            options.read(true).write(true).create_new(true).open(at.join(name)).unwrap()
        };
        let kept =
            KeptFiles { file: open("kept"), deleted: open("deleted"), locked: open("locked") };
        kept.deleted.write_all_at(b"still here", 0).unwrap();
        fs::remove_file(at.join("deleted")).unwrap();
        // What is open for writing stays so, whatever the mode says by then.
        fs::set_permissions(at.join("kept"), std::os::unix::fs::PermissionsExt::from_mode(0o444))
            .unwrap();
        lock(&kept.locked, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
        kept
    }

    pub fn check(&self, at: &Path) {
        self.file.write_all_at(b"written later", 0).unwrap();
        assert_eq!(fs::read(at.join("kept")).unwrap(), b"written later");
        let mut text = String::new();
        (&self.deleted).read_to_string(&mut text).unwrap();
        assert_eq!(text, "still here");
        let other = OpenOptions::new().write(true).open(at.join("locked")).unwrap();
        let refused = lock(&other, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EAGAIN));
        lock(&self.locked, libc::F_UNLCK, libc::F_OFD_SETLK).unwrap();
        lock(&other, libc::F_WRLCK, libc::F_OFD_SETLK).unwrap();
    }
}

pub fn load(at: &Path) -> Load {
    let mut load = Load::new();
    for name in ["one", "two", "three"] {
        load.add(append(at.join(name)).unwrap());
    }
    for name in ["names1", "names2"] {
        fs::create_dir(at.join(name)).unwrap();
        load.add(names(at.join(name)));
    }
    let content: Vec<u8> = (0..300_000u32).flat_map(u32::to_le_bytes).collect();
    fs::write(at.join("content"), &content).unwrap();
    load.add(read_back(at.join("content"), content));
    let inside = Arc::new(AtomicU64::new(0));
    for _ in 0..2 {
        load.add(locking(at.join("lock"), inside.clone()));
    }
    load
}

pub fn check_load(at: &Path, rounds: &[u64]) {
    for (name, rounds) in ["one", "two", "three"].iter().zip(rounds) {
        check_records(&at.join(name), *rounds);
    }
    for name in ["names1", "names2"] {
        assert_eq!(fs::read_dir(at.join(name)).unwrap().count(), 0);
    }
}
