//! The workloads, each defined in one place.
//!
//! | name | what one operation is | caches |
//! |---|---|---|
//! | `stream_write`, `stream_read` | 1 MiB at the next offset of the job's own existing file, `O_DIRECT`, from the beginning again at the end | none used |
//! | `rand4k` | pread of 4 KiB at a random aligned offset of the job's own existing file, `O_DIRECT` | none used |
//! | `stream_sync`, `sync4k` | as `stream_write`; pwrite of 4 KiB at a random aligned offset; both with `O_SYNC` | none used |
//! | `file_write_SIZE`, `file_read_SIZE` | the job's own file from its beginning to its end, buffered, in requests of SIZE (`4k`, `1m`); a write ends with fsync(2) | all dropped before |
//! | `warm_read` | pread of 1 MiB at the next offset, buffered | the file was read once through another descriptor, closed, and opened again |
//! | `zeros` | fills 1 MiB of its own memory with zeros, as the null file system does for a read | none |
//! | `create` | open(`O_CREAT\|O_EXCL\|O_WRONLY`) of a new name in the root, close | directory known |
//! | `create_write_close` | as `create`, with a write of 4 KiB between | directory known |
//! | `stat_cold` | stat of a name that exists | dentries and inodes dropped before |
//! | `stat` | stat of the same name again and again | it was stat'ed once |
//! | `open_close` | open(`O_RDONLY`) of a name that exists, close | none |
//! | `open` | open(`O_RDONLY`) of the same name, closed when the process ends | it was opened, closed and stat'ed once |
//! | `open_deep` | as `open`, of a file three directories deep | as `open` |
//! | `unlink` | unlink of a name that exists | none |
//! | `readdir` | whole listing of the directory `many` of 10,000 names | none |
//! | `readdir_stat` | as `readdir`, with a stat(2) of each name | what the listing brought |
//!
//! Jobs are threads of one process. Files are made by `fill`, 1 MiB buffers are aligned
//! to 4 KiB and filled with bytes that are not zero.

use std::ffi::CString;
use std::fs;
use std::path::Path;

use crate::at_home::AtHome;
use crate::load::{Daemons, Prepare, RunLength, RunSample, run};
use crate::target::{FileCalls, FileLocation, OpenKind};
use crate::{CommandResult, context};

/// One request of a stream.
pub const BLOCK_BYTES: usize = 1 << 20;
/// One request of `rand4k`, and what `create_write_close` writes.
pub const PAGE_BYTES: usize = 4096;
/// Names in the directory that `readdir` lists.
pub const MANY_NAMES: usize = 10_000;

const NAME_PREFIX: &str = "bench-name";

/// What a run needs to know.
pub struct Run<'a> {
    /// Where.
    pub place: &'a FileLocation,
    /// Threads.
    pub jobs: usize,
    /// How long.
    pub until: RunLength,
    /// Size of each job's file, bytes; whole MiB.
    pub file_bytes: u64,
    /// Files of the metadata workloads.
    pub names: u64,
    /// The daemons whose CPU time counts.
    pub daemons: &'a Daemons,
    /// Where `create` makes files that stay on one server of a projection; none: anywhere.
    pub at_home: Option<&'a AtHome>,
}

/// Memory aligned as `O_DIRECT` wants it.
struct Aligned {
    memory: Vec<u8>,
    offset: usize,
}

impl Aligned {
    fn new(bytes: usize) -> Aligned {
        let memory = vec![0xd5; bytes + PAGE_BYTES];
        let offset = memory.as_ptr().align_offset(PAGE_BYTES);
        Aligned { memory, offset }
    }

    fn bytes(&mut self, bytes: usize) -> &mut [u8] {
        &mut self.memory[self.offset..self.offset + bytes]
    }
}

fn short() -> std::io::Error {
    std::io::Error::new(std::io::ErrorKind::UnexpectedEof, "fewer bytes than asked for")
}

fn whole(moved: usize, asked: usize) -> std::io::Result<usize> {
    if moved == asked { Ok(moved) } else { Err(short()) }
}

fn file_name(job: usize) -> String {
    format!("bench-data-{job}")
}

fn names(target: &dyn FileCalls, prefix: &str, count: u64) -> Vec<CString> {
    (0..count).map(|index| target.path(&format!("{prefix}-{index:06}"))).collect()
}

/// Makes the jobs' files, where they are not there in this size, and the small ones.
pub fn fill(
    place: &FileLocation,
    jobs: usize,
    file_bytes: u64,
    at_home: Option<&AtHome>,
) -> CommandResult {
    let (target, mut numbers) = (place.target()?, at_home.map(AtHome::numbers));
    let mut block = Aligned::new(BLOCK_BYTES);
    for job in 0..jobs {
        let path = target.path(&file_name(job));
        if target.stat(&path).ok() == Some(file_bytes) {
            continue;
        }
        if let Some(numbers) = &mut numbers {
            numbers.pass_over().map_err(context("fill"))?;
        }
        let file = target.open(&path, OpenKind::Fill).map_err(context("fill"))?;
        for at in (0..file_bytes).step_by(BLOCK_BYTES) {
            let moved = file.write_at(block.bytes(BLOCK_BYTES), at).map_err(context("fill"))?;
            whole(moved, BLOCK_BYTES).map_err(context("fill"))?;
        }
    }
    Ok(())
}

/// Makes sure that the names that `workload` works on are there, or are not.
pub fn prepare_names(
    place: &FileLocation,
    workload: &str,
    count: u64,
    at_home: Option<&AtHome>,
) -> CommandResult {
    let (target, mut numbers) = (place.target()?, at_home.map(AtHome::numbers));
    for path in names(&*target, NAME_PREFIX, count) {
        match workload {
            "create" | "create_write_close" => {
                let _ = target.unlink(&path); // most are not there
            }
            "stat_cold" | "open_close" | "unlink" => {
                if let Some(numbers) = &mut numbers
                    && target.stat(&path).is_err()
                {
                    numbers.pass_over().map_err(context("prepare"))?;
                }
                target.open(&path, OpenKind::Fill).map(drop).map_err(context("prepare"))?;
            }
            _ => return Ok(()),
        }
    }
    Ok(())
}

/// Makes the directories that `readdir` and `open_deep` use.
pub fn fill_names(dir: &Path) -> CommandResult {
    fs::create_dir_all(dir.join("many")).map_err(context("many"))?;
    fs::create_dir_all(dir.join("a/b/c")).map_err(context("a/b/c"))?;
    fs::write(dir.join("a/b/c/file"), b"deep").map_err(context("a/b/c/file"))?;
    fs::write(dir.join("known"), b"known").map_err(context("known"))?;
    for index in 0..MANY_NAMES {
        fs::write(dir.join(many_name(index)), b"").map_err(context("many"))?;
    }
    Ok(())
}

fn many_name(index: usize) -> String {
    format!("many/name-{index:08}")
}

/// Drops what the kernel has of files' pages; false where that is not allowed.
fn drop_pages() -> bool {
    fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}

/// Bytes of a request of a size such as `4k` or `1m`, a power of two of 1 MiB at most.
fn request_bytes(size: &str) -> Option<usize> {
    let unit = match size.chars().last()? {
        'k' => 1 << 10,
        'm' => 1 << 20,
        _ => return None,
    };
    let count: usize = size[..size.len() - 1].parse().ok()?;
    let bytes = count.checked_mul(unit)?;
    (bytes.is_power_of_two() && bytes <= BLOCK_BYTES).then_some(bytes)
}

/// Drops what the kernel remembers of names and attributes; false where that is not allowed.
pub fn drop_names() -> bool {
    fs::write("/proc/sys/vm/drop_caches", "2").is_ok()
}

impl Run<'_> {
    /// Runs one workload by name.
    pub fn workload(&self, name: &str) -> CommandResult<RunSample> {
        match name {
            "stream_write" => self.stream(OpenKind::WriteDirect),
            "stream_read" => self.stream(OpenKind::ReadDirect),
            "warm_read" => self.warm().and_then(|()| self.stream(OpenKind::Read)),
            "stream_sync" => self.stream(OpenKind::WriteSync),
            "rand4k" => self.random_pages(OpenKind::ReadDirect),
            "sync4k" => self.random_pages(OpenKind::WriteSync),
            "zeros" => self.zeros(),
            name if name.starts_with("file_write_") => self.whole_file(name, OpenKind::Fill),
            name if name.starts_with("file_read_") => self.whole_file(name, OpenKind::Read),
            "create" => self.create(0),
            "create_write_close" => self.create(PAGE_BYTES),
            "stat_cold" => self.each_name(&|target, path| target.stat(path).map(drop)),
            "open_close" => {
                self.each_name(&|target, path| target.open(path, OpenKind::Read).map(drop))
            }
            "unlink" => self.each_name(&|target, path| target.unlink(path)),
            "stat" => self.again("known", false),
            "open" => self.again("known", true),
            "open_deep" => self.again("a/b/c/file", true),
            "readdir" => self.readdir(false),
            "readdir_stat" => self.readdir(true),
            _ => Err(format!("no workload is called {name}")),
        }
    }

    fn stream(&self, how: OpenKind) -> CommandResult<RunSample> {
        let blocks = (self.file_bytes / BLOCK_BYTES as u64).max(1);
        run(self.place, self.jobs, self.until, self.daemons, &|target, job| {
            let path = target.path(&file_name(job));
            let file = target.open(&path, how).map_err(context("open"))?;
            let mut block = Aligned::new(BLOCK_BYTES);
            Ok(Box::new(move |op| {
                let (block, at) = (block.bytes(BLOCK_BYTES), op % blocks * BLOCK_BYTES as u64);
                let moved = match how {
                    OpenKind::WriteDirect | OpenKind::WriteSync => file.write_at(block, at)?,
                    _ => file.read_at(block, at)?,
                };
                whole(moved, BLOCK_BYTES)
            }))
        })
    }

    /// Each job's whole file, once.
    fn whole_file(&self, name: &str, how: OpenKind) -> CommandResult<RunSample> {
        let size = name.rsplit('_').next().unwrap_or_default();
        let size = request_bytes(size).ok_or_else(|| format!("{name}: no size such as 4k"))?;
        if !drop_pages() {
            eprintln!("dray-bench: may not drop caches: pages may be known");
        }
        run(self.place, self.jobs, RunLength::Count(1), self.daemons, &|target, job| {
            let file = target.open(&target.path(&file_name(job)), how).map_err(context("open"))?;
            let mut block = Aligned::new(size);
            Ok(Box::new(move |_| {
                for at in (0..self.file_bytes).step_by(size) {
                    let moved = match how {
                        OpenKind::Fill => file.write_at(block.bytes(size), at)?,
                        _ => file.read_at(block.bytes(size), at)?,
                    };
                    whole(moved, size)?;
                }
                if how == OpenKind::Fill {
                    file.sync()?;
                }
                Ok(self.file_bytes as usize)
            }))
        })
    }

    fn warm(&self) -> CommandResult {
        let target = self.place.target()?;
        let mut block = Aligned::new(BLOCK_BYTES);
        for job in 0..self.jobs {
            let file = target
                .open(&target.path(&file_name(job)), OpenKind::Read)
                .map_err(context("warm"))?;
            for at in (0..self.file_bytes).step_by(BLOCK_BYTES) {
                file.read_at(block.bytes(BLOCK_BYTES), at).map_err(context("warm"))?;
            }
        }
        Ok(())
    }

    fn random_pages(&self, how: OpenKind) -> CommandResult<RunSample> {
        let pages = (self.file_bytes / PAGE_BYTES as u64).max(1);
        run(self.place, self.jobs, self.until, self.daemons, &|target, job| {
            let path = target.path(&file_name(job));
            let file = target.open(&path, how).map_err(context("open"))?;
            let mut page = Aligned::new(PAGE_BYTES);
            let mut state = 0x9e37_79b9_7f4a_7c15u64.wrapping_mul(job as u64 + 1);
            Ok(Box::new(move |_| {
                // xorshift64: cheap, and the same offsets in every arm.
                state ^= state << 13;
                state ^= state >> 7;
                state ^= state << 17;
                let (page, at) = (page.bytes(PAGE_BYTES), state % pages * PAGE_BYTES as u64);
                let moved = match how {
                    OpenKind::WriteSync => file.write_at(page, at)?,
                    _ => file.read_at(page, at)?,
                };
                whole(moved, PAGE_BYTES)
            }))
        })
    }

    fn zeros(&self) -> CommandResult<RunSample> {
        run(self.place, self.jobs, self.until, self.daemons, &|_, _| {
            let mut block = Aligned::new(BLOCK_BYTES);
            Ok(Box::new(move |_| {
                std::hint::black_box(block.bytes(BLOCK_BYTES)).fill(0);
                Ok(BLOCK_BYTES)
            }))
        })
    }

    fn create(&self, write_bytes: usize) -> CommandResult<RunSample> {
        let sample = self.counted(&|target, _| {
            let paths = names(&*target, NAME_PREFIX, self.names);
            let mut numbers = self.at_home.map(AtHome::numbers);
            let mut page = Aligned::new(PAGE_BYTES);
            target.stat(&target.path("")).map_err(context("root"))?;
            Ok(Box::new(move |op| {
                if let Some(numbers) = &mut numbers {
                    numbers.pass_over()?;
                }
                let file = target.open(&paths[op as usize], OpenKind::Create)?;
                match write_bytes {
                    0 => Ok(0),
                    bytes => whole(file.write_at(page.bytes(bytes), 0)?, bytes),
                }
            }))
        })?;
        self.at_home.map_or(Ok(()), AtHome::check)?;
        Ok(sample)
    }

    /// Does the same with one name after the other, none of which the kernel remembers. What it
    /// keeps for a second after the preparation would make some arms look like no network.
    fn each_name(
        &self,
        act: &(dyn Fn(&dyn FileCalls, &std::ffi::CStr) -> std::io::Result<()> + Sync),
    ) -> CommandResult<RunSample> {
        if matches!(self.place, FileLocation::Directory(_)) && !drop_names() {
            eprintln!("dray-bench: may not drop caches: names may be known");
        }
        self.counted(&|target, _| {
            let paths = names(&*target, NAME_PREFIX, self.names);
            Ok(Box::new(move |op| act(&*target, &paths[op as usize]).map(|()| 0)))
        })
    }

    /// Stats or opens the same name again and again.
    fn again(&self, name: &str, open: bool) -> CommandResult<RunSample> {
        self.counted(&|target, _| {
            let path = target.path(name);
            drop(target.open(&path, OpenKind::Read).map_err(context(name))?);
            target.stat(&path).map_err(context(name))?;
            Ok(Box::new(move |_| match open {
                // Left open, so that no close falls into what is counted.
                true => target.open(&path, OpenKind::Read).map(std::mem::forget).map(|()| 0),
                false => target.stat(&path).map(|_| 0),
            }))
        })
    }

    fn readdir(&self, stat: bool) -> CommandResult<RunSample> {
        let FileLocation::Directory(dir) = self.place else {
            return Err("readdir is for directories".into());
        };
        let many = dir.join("many");
        let list = |target: &dyn FileCalls| {
            let mut names = 0;
            for entry in fs::read_dir(&many)? {
                let name = entry?.file_name();
                if stat {
                    // As ls(1) does. The metadata of Rust have the time of birth, which no listing brings.
                    target.stat(&target.path(&format!("many/{}", name.display())))?;
                }
                names += 1;
            }
            whole(names, MANY_NAMES).map(|_| 0)
        };
        run(self.place, 1, RunLength::Count(1), self.daemons, &|target, _| {
            Ok(Box::new(move |_| list(&*target)))
        })
    }

    /// One thread, `names` operations.
    fn counted<'e>(&self, prepare: Prepare<'_, 'e>) -> CommandResult<RunSample> {
        run(self.place, 1, RunLength::Count(self.names), self.daemons, prepare)
    }
}
